"""The head-to-head's harness on a scripted model: split, accounts, voting, table."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.head_to_head import data, methods, server, table
from tests.benchmarks.head_to_head.__main__ import Row, finish
from tests.benchmarks.head_to_head.families import CONTAINS_REWARD, FAMILIES
from tests.patience import PATIENCE_S
from tfgrpo.errors import ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Request, Sampling
from tfgrpo.rollout import Task

MESSAGES = FAMILIES["messages"]


def test_test_tasks_are_the_same_for_all_seeds_and_never_learnt_from() -> None:
    splits = [data.split(MESSAGES, seed, n_test=24, n_learn=30) for seed in range(3)]
    tests = {tuple(t.task_id for t in s.test) for s in splits}
    assert len(tests) == 1
    kinds = [t.metadata["kind"] for t in splits[0].test]
    assert {kinds.count(k) for k in set(kinds)} == {8}
    for s in splits:
        ids = [t.task_id for t in (*s.train, *s.choose, *s.test)]
        assert len(ids) == len(set(ids)) == 84
    assert {t.task_id for t in splits[0].train} != {t.task_id for t in splits[1].train}


async def test_an_account_counts_tokens_and_refuses_past_its_hard_limit() -> None:
    account = server.Account(limit=8)
    lm = server.MeteredLM(ScriptedLM("two words"), account)
    request = Request((Message("user", "one two three"),))
    for _ in range(2):  # 5 tokens each: 5, 10; refused from 1.25 x 8 on
        await lm.complete(request, 1, [0])
    assert (account.tokens, account.calls) == (10, 2)
    with pytest.raises(ProviderError) as stop:
        await lm.complete(request, 1, [0])
    assert stop.value.kind == "quota"
    assert account.refused == 1


@pytest.mark.real
async def test_labels_are_metered_apart_and_replies_are_graded_alike() -> None:
    task = Task("t1", "?", reference="blue")
    family = replace(MESSAGES, tasks=lambda: [task])
    bench = server.Bench(ScriptedLM("blue"), family)
    async with bench.running():
        one, two = bench.open_account("one", None), bench.open_account("two", 100)
        lm = open_lm(bench.spec("one"))
        reply = await lm.complete(
            Request((Message("user", "hello there"),), sampling=Sampling(max_tokens=5)), 1, [0]
        )
        await lm.aclose()
        assert reply[0].text == "blue"
        assert (one.tokens, two.tokens) == (3, 0)
        body = json.dumps({"task_id": "t1", "reply": "It is blue"}).encode()

        def ask() -> dict[str, object]:
            with urllib.request.urlopen(
                f"{bench.url('two')}/grade", body, timeout=PATIENCE_S
            ) as answer:
                return json.load(answer)

        graded = await asyncio.to_thread(ask)
        assert graded["reward"] == CONTAINS_REWARD
        assert "blue" in str(graded["feedback"])


async def test_the_majority_answer_is_what_voting_scores() -> None:
    replies = {0: "Blue", 1: "red", 2: "blue ", 3: "red", 4: "green", 5: "red"}
    seen: list[int] = []

    def script(request: Request, seed: int | None) -> str:
        seen.append(1)
        return replies[len(seen) - 1]

    opened = ScriptedLM(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "open_lm", lambda spec: opened)
        scores = await methods.voting_scores(
            MESSAGES, "x", [Task("t", "?", reference="blue")], votes=3, answers=2, seed=0
        )
    assert scores == {"t": [1.0, 0.0]}


def test_rows_are_over_seeds_and_losses_stay_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Row("messages", "none", seeds=1, scores=[{f"t{i}": [0.5, 0.5] for i in range(8)}])
    worse = Row("messages", "gepa", seeds=2, tokens=1234)
    worse.scores = [{f"t{i}": [x, x] for i in range(8)} for x in (0.25, 0.35)]
    absent = Row("sums", "ours", note="not installed")
    for row in (none, worse, absent):
        finish(row, none)
    assert worse.score == pytest.approx(0.3)
    assert worse.gain == pytest.approx(-0.2)
    assert absent.score is None
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    table.write_page(
        {
            "rows": [r.to_dict() for r in (absent, worse, none)],
            "model": "m",
            "tests": 8,
            "draws": 2,
            "budget_tokens": 1000,
            "deadline_s": 60.0,
            "learning_tasks": 4,
            "command": "c",
            "wall_seconds": 1.0,
            "processor": "p",
            "date": "d",
            "commit": "x",
        }
    )
    page = (tmp_path / "page.md").read_text()
    assert page.index("Family `sums`") < page.index("Family `messages`")
    lines = [x for x in page.splitlines() if x.startswith("| ") and "---" not in x]
    names = [line.split("|")[1].strip() for line in lines]
    ours = "**tfgrpo** (default preset, worked examples)"
    assert names == ["method", ours, "method", "no library", "GEPA"]
    assert "not installed" in lines[1]
    assert "-0.200" in lines[4] and "1,234" in lines[4]


def test_the_second_family_is_judged_by_its_number_and_votes_by_it() -> None:
    sums = FAMILIES["sums"]
    tasks = sums.tasks()
    assert len(tasks) == len({t.task_id for t in tasks}) == 128
    assert all(str(t.reference) == str(sum(map(int, t.task_id.split("-")[1:]))) for t in tasks)
    (task,) = (t for t in tasks if t.task_id == "story-3-4")
    graded = [asyncio.run(data.grade(sums, task, said)).reward for said in ("Ann has 7.", "34")]
    assert graded == [1.0, 0.0]
    assert sums.vote("3 and 4 make 7") == sums.vote("7") != sums.vote("none")
