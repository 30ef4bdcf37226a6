"""What is read of a text: both ends, not what all share; lengths and tags; what is far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.errors import ConfigError
from tfgrpo.routing import ModelInfo, Router, SuccessCount, TradeOff, fit
from tfgrpo.routing.estimator.coverage import far_floor, nonsense
from tfgrpo.routing.estimator.prompt_features import PromptFeatures, shared_ends
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.outcome_files import read_outcomes
from tfgrpo.runtime.embedders import ends, open_embedder

POLICY = "You are a helpful assistant of our shop and follow these rules. " * 38


def solved(prefix="", suffix="", n=30):
    rows = []
    for i in range(n):
        rows.append(SuccessCount(f"{prefix}Translate the word number {i}{suffix}", "m", 1.0))
        rows.append(SuccessCount(f"{prefix}Prove the hard theorem on sets {i}{suffix}", "m", 0.0))
    return rows


def answers(r, prefix="", suffix=""):
    asked = ("Translate the word number 77", "Prove the hard theorem on sets 77")
    return [r.ask(f"{prefix}{q}{suffix}").ranking[0] for q in asked]


@pytest.mark.parametrize(("prefix", "suffix"), [(POLICY, ""), ("", " " + POLICY), (POLICY, POLICY)])
def test_c47_a_policy_around_every_prompt_hides_none_of_them(prefix, suffix):
    plain = answers(fit(solved()))
    framed = answers(fit(solved(prefix, suffix)), prefix, suffix)
    for a, b in zip(plain, framed, strict=True):
        assert b.mean == pytest.approx(a.mean, abs=0.02)
        assert b.coverage == "covered"


def test_c47_without_a_fit_both_ends_of_a_long_prompt_are_read():
    state = ValueModel(open_embedder("hashed")).state(solved(POLICY))
    good, bad = state.predict(
        [f"{POLICY}Translate the word number 77", f"{POLICY}Prove the hard theorem on sets 77"]
    ).mean
    assert good > bad + 0.4
    a, b = open_embedder("hashed").embed([POLICY + "A first", POLICY + "Something else"])
    assert a @ b < 0.999


def test_what_was_not_read_is_said_and_the_question_can_stand_alone():
    r = fit(solved())
    document = "The quick brown fox jumps over dogs and hills. " * 400
    whole = r.ask(f"Prove the hard theorem on sets 5\n{document}")
    assert whole.share_read < 0.5
    assert "of the text was read" in whole.reason
    alone = r.ask(f"{document}\nProve the hard theorem on sets 5\n{document}",
                  question="Prove the hard theorem on sets 5")  # fmt: skip
    assert alone.share_read == 1.0
    assert alone.ranking[0].mean == pytest.approx(
        r.ask("Prove the hard theorem on sets 5").ranking[0].mean, abs=1e-6
    )


@settings(max_examples=50)
@given(st.text(max_size=300), st.integers(2, 50))
def test_ends_are_the_first_and_last_characters(text, limit):
    got = ends(text, limit)
    half = limit // 2
    if len(text) <= limit:
        assert got == text
    else:
        assert got == text[:half] + "\n" + text[-half:]


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=6, unique=True))
def test_what_all_share_is_the_common_start_and_end_of_every_text(texts):
    start, end = shared_ends(texts, least=1)
    assert all(t.startswith(start) and t.endswith(end) for t in texts)
    longer = {t[: len(start) + 1] for t in texts if len(t) > len(start)}
    assert len(longer) > 1 or any(t == start for t in texts)


def test_a_tag_tells_prompts_apart_and_a_prompt_without_one_lies_between():
    rows = []
    for i in range(60):
        kind = ("easy", "hard")[i % 2]
        rows.append(SuccessCount(f"question number {i}", "m", float(kind == "easy"), dataset=kind))
    r = fit(rows)
    p = {
        name: r.ask("question number 900", metadata=meta).ranking[0].mean
        for name, meta in {"easy": {"dataset": "easy"}, "hard": {"dataset": "hard"}, "": {}}.items()
    }
    assert p["easy"] > p[""] > p["hard"]
    assert p["easy"] > p["hard"] + 0.4


def test_features_keep_rows_of_length_one_and_change_the_id():
    base = open_embedder("hashed:64")
    f = PromptFeatures(base, tags={"a=1": 0.5})
    rows = f.embed(["one", "two words", ""], [("a=1",), (), ("b=2",)])
    assert rows.shape == (3, f.width) == (3, 64 + 4 + 1)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    assert len({base.embedder_id, f.embedder_id, PromptFeatures(base).embedder_id}) == 3


@pytest.mark.parametrize("spec", ["hashed", "hashed:2048"])
def test_far_fires_on_other_languages_and_nonsense_and_not_on_unlike_wording(spec):
    templates = ("Write SQL that lists the {} best customers", "Refund order {} to its buyer",
                 "Translate the sentence number {} to French")  # fmt: skip
    rows = [SuccessCount(templates[i % 3].format(i), "m", float(i % 4 > 0)) for i in range(75)]
    r = fit(rows, embedder=spec)
    for near in ("Write SQL that lists the five worst customers", "Refund the order of a buyer"):
        assert r.ask(near).ranking[0].coverage == "covered"
    for far in ("漢字仮名交じり文の例", "qzx wvkj pqlm zzrt", "Докажите теорему о множествах"):
        assert r.ask(far).ranking[0].coverage == "far"


def test_the_floor_of_far_is_never_above_what_known_prompts_have():
    e = open_embedder("hashed")
    known = e.embed([f"a wholly different text {i} {chr(97 + i)}" for i in range(26)])
    cosines = np.sort(known @ known.T, axis=1)[:, -2]
    assert far_floor(e, known) <= np.quantile(cosines, 0.1) + 1e-6
    assert far_floor(e, known[:0]) > 1
    assert len(set(nonsense())) == 48


CSV = "big,prompt,sample_id,eval_name,big|total_cost,small,small|total_cost\n" + "".join(
    f"{i % 2},question {i},id{i},set,0.1,1,0.01\n" for i in range(60)
)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_c42_tables_as_spreadsheets_save_them_keep_models_and_ids(tmp_path, mark, encoding):
    path = tmp_path / "x.csv"
    path.write_text(CSV.replace(",", mark), encoding=encoding)
    rows = read_outcomes(path)
    assert len(rows) == 120
    assert {r.model for r in rows} == {"big", "small"}
    assert rows[0].prompt_id == "id0"


@pytest.mark.parametrize("mark", [",", ";"])
def test_a_table_of_one_outcome_a_line_is_read(tmp_path, mark):
    path = tmp_path / "long.csv"
    path.write_text("prompt,model,reward\nAdd,a,1\nSub,b,0.5\n".replace(",", mark), "utf-8-sig")
    assert [(r.prompt, r.model, r.successes) for r in read_outcomes(path)] == [
        ("Add", "a", 1.0), ("Sub", "b", 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"prompt,model,reward\nAdd,a,1,9\n", "4 cells under a header of 3"),
        (b"prompt,model,reward\nAdd,a\n", "2 cells under a header of 3"),
        ("prompt,model,reward\nGr\u00fc\u00dfe,a,1\n".encode("latin-1"), "is not utf-8: save"),
        (b"question,model,reward\nAdd,a,1\n", "found the columns question, model, reward; wanted"),
        (b"prompt,model,model,reward\nAdd,a,b,1\n", "occur twice"),
        (b"", "found the columns none"),
        (b"prompt,a|total_cost\nAdd,1\n", "without a score column for"),
    ],
)
def test_a_table_that_cannot_be_read_says_what_was_found_and_wanted(tmp_path, raw, words):
    path = tmp_path / "x.csv"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=words):
        read_outcomes(path)


def test_other_shapes_say_what_they_are_and_lines_with_a_mark_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "p", "model": "m", "reward": 1}\n', "utf-8-sig")
    assert len(read_outcomes(path)) == 1
    path.write_text('{"input": "p", "output": "m"}\n')
    with pytest.raises(ConfigError, match=r"fields found are \['input', 'output'\], wanted are"):
        read_outcomes(path)
    prices = tmp_path / "prices.json"
    prices.write_text('[{"name": "m", "output_usd_per_mtok": 1}]')
    with pytest.raises(ConfigError, match="--models"):
        read_outcomes(prices)


def test_an_unread_share_is_not_claimed_of_short_texts():
    r = Router(
        ValueModel(open_embedder("hashed")), [ModelInfo("m")], solved(), rule=TradeOff(),
        fallback="m",
    )  # fmt: skip
    assert r.ask("short").share_read == 1.0


def test_a_router_on_joined_vectors_is_saved_loaded_and_judges_far_by_the_words(tmp_path):
    r = fit(solved(), embedder="hashed:256+hashed:64+length", out=tmp_path)
    assert r.embedder.weights[0] == 0.0
    again = Router.load(tmp_path)
    prompt = "Translate the word number 77"
    assert again.ask(prompt).ranking[0].mean == pytest.approx(
        r.ask(prompt).ranking[0].mean, abs=1e-4
    )
    assert again.ask(prompt).ranking[0].coverage == "covered"
    assert again.ask("qzx wvkj pqlm zzrt").ranking[0].coverage == "far"
