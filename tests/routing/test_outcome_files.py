"""Outcome files on tiny examples, and what is said about bad ones."""

from __future__ import annotations

import gzip
import json

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.routing.outcome_files import read_models, read_outcomes


def lines(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_plain_lines_take_counts_rewards_and_common_spellings(tmp_path):
    path = lines(
        tmp_path / "o.jsonl",
        {"prompt": "a", "model": "m", "successes": 2, "trials": 5},
        {"query": "b", "model_name": "m", "performance": 0.5, "task_name": "mmlu", "cost": 0.01},
        {"prompt": "c", "model": "m", "rewards": [1, 0, True], "id": 7},
    )
    a, b, c = read_outcomes(path)
    assert (a.successes, a.trials) == (2.0, 5.0)
    assert (b.successes, b.trials, b.dataset, b.cost_usd) == (0.5, 1.0, "mmlu", 0.01)
    assert (c.successes, c.trials, c.prompt_id) == (2.0, 3.0, "7")


def test_gzip_is_read_and_a_success_mark_counts(tmp_path):
    path = tmp_path / "o.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"prompt": "a", "model": "m", "rewards": [-1, 3, 5]}))
    (row,) = read_outcomes(path, success_at=3)
    assert (row.successes, row.trials) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "model": "m"}, "neither 'successes'"),
        ({"prompt": "a", "model": "m", "reward": "NaN"}, "finite"),
        ({"prompt": "a", "model": "m", "reward": float("nan")}, "finite"),
        ({"prompt": "a", "model": "m", "reward": 2}, "success_at"),
        ({"prompt": "a", "model": "m", "reward": "good"}, "number"),
        ({"prompt": "a", "model": "m", "rewards": []}, "empty"),
        ({"prompt": "", "model": "m", "reward": 1}, "prompt"),
        ({"prompt": "a", "model": None, "reward": 1}, "model"),
        ({"prompt": ["a"], "model": "m", "reward": 1}, "prompt"),
        ({"prompt": "a", "model": "m", "successes": 3, "trials": 2}, "3.0 successes"),
        ([1, 2], "expected an object"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, words):
    good = {"prompt": "a", "model": "m", "reward": 1}
    path = lines(tmp_path / "o.jsonl", good, row)
    with pytest.raises(ConfigError, match=words) as caught:
        read_outcomes(path, format="jsonl")
    assert "o.jsonl:2" in str(caught.value)


def test_what_is_no_data_is_said(tmp_path):
    (tmp_path / "x.jsonl").write_text("{broken\n")
    with pytest.raises(ConfigError, match=r"x.jsonl:1: not JSON"):
        read_outcomes(tmp_path / "x.jsonl")
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_outcomes(tmp_path / "e.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        read_outcomes(tmp_path / "none")
    (tmp_path / "d.pkl").write_bytes(b"x")
    with pytest.raises(ConfigError, match="pickle"):
        read_outcomes(tmp_path / "d.pkl")
    with pytest.raises(ConfigError, match="format 'xml'"):
        read_outcomes(tmp_path / "e.jsonl", format="xml")  # type: ignore[arg-type]


def test_routerbench_tables_as_csv_and_as_lines(tmp_path):
    csv = tmp_path / "rb.csv"
    csv.write_text(
        "sample_id,prompt,eval_name,m1,m1|model_response,m1|total_cost,m2,m2|total_cost\n"
        'mmlu.1,"[""Say hi"", ""please""]",mmlu,1.0,hello,0.001,0.25,0.1\n'
        "mmlu.2,Add,mmlu,0.0,x,0.002,,0.1\n"
    )
    rows = read_outcomes(csv)
    assert [(r.prompt_id, r.model, r.successes, r.cost_usd) for r in rows] == [
        ("mmlu.1", "m1", 1.0, 0.001),
        ("mmlu.1", "m2", 0.25, 0.1),
        ("mmlu.2", "m1", 0.0, 0.002),
    ]
    assert rows[0].prompt == "Say hi\nplease"
    wide = {"sample_id": "1", "prompt": "p", "eval_name": "e", "m1": 1, "m1|total_cost": 0.5}
    (row,) = read_outcomes(lines(tmp_path / "rb.jsonl", wide))
    assert (row.model, row.dataset, row.cost_usd) == ("m1", "e", 0.5)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="found the columns a, b"):
        read_outcomes(tmp_path / "bad.csv")


def test_llmrouterbench_results_of_a_folder(tmp_path, caplog):
    def result(model, records, **more):
        return {
            "dataset_name": "aime",
            "split": "test",
            "model_name": model,
            "records": records,
            **more,
        }

    record = {"index": 3, "origin_query": "q", "prompt": "long q", "score": 1.0,
              "completion_tokens": 40, "cost": 0.02}  # fmt: skip
    folder = tmp_path / "bench" / "aime"
    folder.mkdir(parents=True)
    (folder / "m.json").write_text(
        json.dumps(result("m", [record, {**record, "index": 4, "score": None}]))
    )
    (folder / "n.json").write_text(json.dumps(result("n", [{**record, "score": 0}])))
    (folder / "demo.json").write_text(json.dumps(result("d", [record], demo=True)))
    rows = read_outcomes(tmp_path / "bench")
    assert [(r.model, r.prompt_id, r.successes, r.output_tokens) for r in rows] == [
        ("m", "aime/test/3", 1.0, 40.0),
        ("n", "aime/test/3", 0.0, 40.0),
    ]
    assert "1 records without a score" in caplog.text
    assert "demo run" in caplog.text
    (folder / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match="list 'records'"):
        read_outcomes(folder / "bad.json")


def _group(index, reward):
    rollout = Rollout(f"r{index}", f"t{index}", outcome="graded", score=Score(reward))
    return RolloutGroup(f"g{index}", Task(f"t{index}", f"task {index}"), (rollout,), policy_id="p")


def test_groups_files_and_run_journals_give_the_same_outcomes(tmp_path):
    from tfgrpo.store import Journal, write_groups

    groups = [_group(i, float(i % 2)) for i in range(4)]
    path = tmp_path / "groups.jsonl"
    write_groups(path, groups)
    from_file = read_outcomes(path)
    assert [o.successes for o in from_file] == [0.0, 1.0, 0.0, 1.0]
    with Journal.open(tmp_path / "run", create=True) as store:
        for group in groups:
            for rollout in group.rollouts:
                store.record_rollout(rollout, group_id=group.group_id, verifier_id="v")
            store.record_group(group)
    from_run = read_outcomes(tmp_path / "run")
    assert sorted(o.prompt for o in from_run) == sorted(o.prompt for o in from_file)
    assert {o.model for o in from_run} == {"p"}


def test_model_files_hold_prices(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps([{"name": "m", "input_usd_per_mtok": 1, "size": "7B"}]))
    (info,) = read_models(path)
    assert (info.name, info.input_usd_per_mtok, info.output_usd_per_mtok) == ("m", 1, None)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="JSON list"):
        read_models(path)


WIDE = "big,prompt,sample_id,eval_name,big|total_cost\n1,q,s1,e,0.5\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("o.tsv", ("\ufeff" + WIDE.replace(",", "\t")).encode("utf-16-le")),
        ("o.csv", ("\ufeff" + WIDE.replace(",", ";")).encode("utf-16-be")),
        ("o.csv", ("\ufeffsep=;\n" + WIDE.replace(",", ";").replace("0.5", "0,5")).encode()),
        ("o.csv", ("\ufeff\ufeff" + WIDE).encode()),
        ("o.csv.gz", gzip.compress(("\ufeff" + WIDE).encode())),
    ],
)
def test_a_table_as_spreadsheets_save_it_is_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (row,) = read_outcomes(tmp_path / name)
    assert (row.model, row.prompt_id, row.cost_usd) == ("big", "s1", 0.5)


def test_a_decimal_comma_counts_in_numbers_beside_semicolons_alone(tmp_path):
    path = tmp_path / "o.csv"
    path.write_text("prompt;model;reward\n1,5;2,5;0,25\n")
    (row,) = read_outcomes(path)
    assert (row.prompt, row.model, row.successes) == ("1,5", "2,5", 0.25)
    path.write_text("sep=;\nprompt;model;reward\na;m;x\n")
    with pytest.raises(ConfigError, match=r"o\.csv:3: reward"):
        read_outcomes(path)


@pytest.mark.parametrize("name", ["o.csv.gz", "o.jsonl.gz"])
def test_a_file_that_unpacks_to_far_more_than_it_holds_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"\n" * (80 << 20)))
    with pytest.raises(ConfigError, match="unpacks to more than 64 MiB"):
        read_outcomes(tmp_path / name)
