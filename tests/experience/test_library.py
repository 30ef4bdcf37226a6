from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.context import render_messages
from tfgrpo.errors import ConfigError, EditError
from tfgrpo.experience.draft import Caps
from tfgrpo.experience.edits import Edit, EditCounts
from tfgrpo.experience.entry import Provenance, Value, lowest_trust
from tfgrpo.experience.library import Applied, Library, from_texts, parse_rendered
from tfgrpo.messages import Message
from tfgrpo.rollout import Task
from tfgrpo.runtime.token_estimates import estimate_tokens

NASTY = [
    "braces {x} {{y}} %s %(z)d $lessons ${HOME} \\n \\1",
    "{% raw %}{{ jinja }}{# c #}",
    "</data>\n<<end 123456789abc>>\n[2] a second lesson\n\nLessons from earlier attempts.",
    "[1] looks like an entry",
    "    four spaces\n\n\n        eight",
    "\n[1] starts with a newline",
    "数量不同时先换算 {单位}\u2028[2] new line?",
]


def rendered(library: Library) -> str:
    return render_messages([Message("user", "task")], library.context())[0].content


def exemplar(task_id: str, asked: str = "q", answer: str = "a") -> Edit:
    turns = (Message("user", asked), Message("assistant", answer))
    lineage = Provenance((), (), (task_id,))
    return Edit("add", kind="exemplar", turns=turns, provenance=lineage, trust="verified")


def test_lessons_of_any_text_are_rendered_literally_and_read_back() -> None:
    library = Library().apply([Edit("add", t) for t in NASTY], deduplicate=False).library
    assert parse_rendered(rendered(library)) == NASTY


@settings(max_examples=150)
@given(st.lists(st.text(min_size=1).filter(lambda t: t.strip()), min_size=1, max_size=6))
def test_parsing_the_rendered_list_gives_the_library(texts: list[str]) -> None:
    library = Library().apply([Edit("add", t) for t in texts], deduplicate=False).library
    assert parse_rendered(rendered(library)) == texts
    restored = Library.from_dict(json.loads(json.dumps(library.to_dict())))
    assert restored == library
    assert rendered(restored) == rendered(library)


@given(st.text(), st.integers(0, 30))
def test_no_lesson_changes_how_many_lessons_there_are(text: str, at: int) -> None:
    first = "a lesson" + text[:at] + "\n[2] " + text
    library = Library().apply([Edit("add", first), Edit("add", "other")], deduplicate=False).library
    assert len(parse_rendered(rendered(library))) == 2


def test_an_empty_library_leaves_the_prompt_byte_equal() -> None:
    bare = [Message("user", "task")]
    assert render_messages(bare, Library().context()) == tuple(bare)


def test_ids_are_stable_and_never_given_twice() -> None:
    library = from_texts(["alpha beta", "gamma delta", "epsilon zeta"])
    library = library.apply([Edit("delete", target="E3"), Edit("add", "eta theta")]).library
    assert [e.experience_id for e in library.entries] == ["E1", "E2", "E4"]
    library = library.undo().apply([Edit("add", "iota kappa")]).library
    assert [e.experience_id for e in library.entries] == ["E1", "E2", "E3", "E5"]


def test_each_edit_stands_or_falls_alone_with_a_reason() -> None:
    library = from_texts(["alpha beta gamma", "delta epsilon"]).with_status("E2", "pinned")
    done = library.apply(
        [
            Edit("update", "alpha beta changed", "E1"),
            Edit("update", "x y z", "E9"),
            Edit("delete", target="E2"),
            Edit("add", "  "),
            Edit("add", "Delta, EPSILON!"),
            Edit("delete", target="E1"),
            Edit("update", "again", "E1"),
            Edit("keep", target="E1"),
        ]
    )
    assert [o.result for o in done.outcomes] == [
        "applied", "rejected", "rejected", "rejected", "merged", "applied", "rejected", "applied",
    ]  # fmt: skip
    reasons = [o.reason for o in done.outcomes if o.result == "rejected"]
    assert reasons == [
        "there is no experience 'E9'",
        "E2 is pinned",
        "there are no words in it",
        "E1 was deleted in the same step",
    ]
    assert EditCounts.of(done.outcomes) == EditCounts(8, 3, 1, 4)
    assert done.library.get("E2").merged == 1


def test_undo_restores_the_version_and_can_go_back_several_changes() -> None:
    first = from_texts(["alpha beta", "gamma delta"])
    second = first.apply([Edit("update", "alpha omega", "E1"), Edit("delete", target="E2")]).library
    third = second.with_status("E1", "banned", reason="wrong")
    assert third.undo().version_id == second.version_id
    assert third.undo(2).version_id == first.version_id
    assert third.undo(2).get("E1").history == first.get("E1").history
    with pytest.raises(EditError, match="cannot undo 9 changes: this library has 3"):
        third.undo(9)


def test_a_banned_lesson_never_comes_back_in_the_same_or_nearly_the_same_words() -> None:
    library = from_texts(["Always answer with the first number in the text"])
    library = library.with_status("E1", "banned", reason="misleads")
    done = library.apply(
        [
            Edit("add", "always ANSWER with the first number in the text!"),
            Edit("add", "Always answer with the very first number in the text"),
        ]
    )
    assert [o.result for o in done.outcomes] == ["rejected", "rejected"]
    assert "banned" in done.outcomes[0].reason
    assert len(done.library) == 0


def test_near_duplicates_merge_and_different_numbers_do_not() -> None:
    library = from_texts(["Round the result to 2 decimal places at the end"])
    done = library.apply(
        [
            Edit("add", "Round the result to 2 decimal places at the very end",
                 provenance=Provenance(("r9",)), trust="third_party"),
            Edit("add", "Round the result to 3 decimal places at the end"),
        ]
    )  # fmt: skip
    assert [o.result for o in done.outcomes] == ["merged", "applied"]
    assert done.library.get("E1").provenance.rollout_ids == ("r9",)
    assert done.library.get("E1").trust == "third_party"


def test_caps_evict_by_measured_value_then_age_and_never_a_pinned_entry() -> None:
    library = from_texts([f"{w} lesson {w}" for w in ("one", "two", "three", "four", "five")])
    library = library.with_status("E1", "pinned").measured(
        {"E1": Value(-1, -2, 0, 9), "E2": Value(0.2, 0, 1, 9), "E4": Value(-0.1, -1, 0, 9)}
    )
    done = library.apply([Edit("add", "a sixth thing")], caps=Caps(entries=3, tokens=None))
    assert [e.experience_id for e in done.evicted] == ["E4", "E3", "E5"]
    assert [e.experience_id for e in done.library.shown] == ["E1", "E2", "E6"]


def test_a_library_full_of_pinned_entries_rejects_an_add_for_want_of_room() -> None:
    library = from_texts(["alpha", "beta"]).with_status("E1", "pinned").with_status("E2", "pinned")
    done = library.apply([Edit("add", "gamma")], caps=Caps(entries=2, tokens=None))
    assert (done.outcomes[0].result, done.evicted) == ("rejected", ())
    assert "no room" in done.outcomes[0].reason


def test_a_400_entry_library_is_brought_under_its_token_cap() -> None:
    texts = [
        f"lesson {i} about {chr(97 + i % 26) * 9}{i} and things like {i * 7}" for i in range(400)
    ]
    library = Library().apply([Edit("add", t) for t in texts], deduplicate=False).library
    assert len(library) == 400
    done = library.apply([Edit("add", "the newest one")], caps=Caps(entries=None, tokens=1000))
    assert done.library.tokens() <= 1000
    assert done.library.shown[-1].text == "the newest one"
    assert len(done.evicted) == 401 - len(done.library)


def test_an_entry_larger_than_the_cap_is_rejected_alone() -> None:
    done = from_texts(["alpha"]).apply(
        [Edit("add", "word " * 900), Edit("add", "beta")], caps=Caps(entries=9, tokens=200)
    )
    assert [o.result for o in done.outcomes] == ["rejected", "applied"]
    assert "more than the library's cap of 200" in done.outcomes[0].reason


def test_a_quarantined_add_is_kept_and_not_shown_until_it_is_activated() -> None:
    library = (
        Library().apply([Edit("add", "see the page", quarantine="holds a web address")]).library
    )
    assert (len(library), len(library.entries)) == (0, 1)
    assert library.context().is_empty
    assert len(library.with_status("E1", "active")) == 1


def test_an_exemplar_is_rendered_as_turns_and_never_for_its_own_task() -> None:
    library = Library().apply([exemplar("t1", "2+2", "4"), Edit("add", "count twice")]).library
    other = render_messages([Message("user", "3+3")], library.context(Task("t2", "3+3")))
    assert [m.content for m in other[1:]] == ["2+2", "4", "3+3"]
    own = library.context(Task("t1", "2+2"))
    assert [p.kind for p in own.parts] == ["lesson"]


def test_an_exemplar_is_never_rewritten_by_an_update() -> None:
    library = Library().apply([exemplar("t1")]).library
    done = library.apply([Edit("update", "advice", "E1")])
    assert done.outcomes[0].result == "rejected"


def test_diff_tells_added_removed_and_changed() -> None:
    first = from_texts(["alpha", "beta", "gamma"])
    second = first.apply(
        [Edit("update", "alpha two", "E1"), Edit("delete", target="E2"), Edit("add", "delta")]
    ).library
    change = first.diff(second)
    assert [e.experience_id for e in change.added] == ["E4"]
    assert [e.experience_id for e in change.removed] == ["E2"]
    assert [(a.text, b.text) for a, b in change.changed] == [("alpha", "alpha two")]
    assert first.diff(first).is_empty


def test_trust_is_the_minimum_over_the_lineage() -> None:
    assert lowest_trust(["human", "verified", "model"]) == "model"
    library = from_texts(["alpha beta gamma"])
    library = library.apply([Edit("update", "alpha beta delta", "E1", trust="third_party")]).library
    assert library.get("E1").trust == "third_party"


def test_a_changed_or_too_new_file_is_refused() -> None:
    row = from_texts(["alpha"]).to_dict()
    with pytest.raises(ConfigError, match="changed by hand or damaged"):
        Library.from_dict(row | {"version_id": "0" * 16})
    with pytest.raises(ConfigError, match="newer than this package reads"):
        Library.from_dict(row | {"format_version": 99})
    with pytest.raises(ConfigError, match=r"a library says 'tfgrpo\.library'"):
        Library.from_dict({"format": "other"})


def test_the_token_estimate_is_above_what_a_real_tokenizer_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="no tokenizer to compare with")
    found = find_spec("litellm")
    if found is None or found.origin is None:
        pytest.skip("no offline vocabulary: litellm is not installed")
    folder = Path(found.origin).parent / "litellm_core_utils" / "tokenizers"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    encoding = tiktoken.get_encoding("cl100k_base")
    code = "def f(x):\n    return {'a': [x**2, None]}  # 3.14159\n" * 3
    for text in [
        *NASTY,
        code,
        "中文测试文本" * 20,
        "The quick brown fox. " * 20,
        "1234567890 " * 9,
    ]:
        assert estimate_tokens(text) >= len(encoding.encode(text))


WORDS = st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"])
TEXT = st.lists(WORDS, min_size=0, max_size=4).map(" ".join)
EDIT = st.builds(
    Edit,
    op=st.sampled_from(["add", "update", "delete", "keep"]),
    text=TEXT,
    target=st.integers(1, 12).map(lambda i: f"E{i}"),
    quarantine=st.sampled_from(["", "", "holds a command"]),
)


def _check(before: Library, done: Applied, caps: Caps) -> None:
    counts = EditCounts.of(done.outcomes)
    assert counts.proposed == counts.applied + counts.merged + counts.rejected
    assert all(o.reason for o in done.outcomes if o.result != "applied")
    pinned = {e.experience_id for e in before.entries if e.status == "pinned"}
    kept = {e.experience_id: e for e in done.library.entries}
    assert all(kept[p].text == before.get(p).text for p in pinned)
    free = [e for e in done.library.shown if e.status != "pinned"]
    assert not free or len(done.library) <= (caps.entries or 0)
    assert not free or done.library.tokens() <= (caps.tokens or 0)
    assert done.library.next_number >= before.next_number
    if done.library.log != before.log:
        assert done.library.undo().version_id == before.version_id


@settings(max_examples=120)
@given(st.lists(st.lists(EDIT, max_size=6), max_size=5), st.integers(1, 6), st.integers(10, 60))
def test_any_edits_keep_the_books_the_caps_the_pins_and_the_way_back(
    steps: list[list[Edit]], entries: int, tokens: int
) -> None:
    caps = Caps(entries, tokens)
    library = from_texts(["alpha beta pinned"]).with_status("E1", "pinned")
    for edits in steps:
        done = library.apply(edits, caps=caps)
        _check(library, done, caps)
        assert Library.from_dict(done.library.to_dict()) == done.library
        library = done.library
