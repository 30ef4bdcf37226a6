"""Hints from a model's reply: lenient reading, retries, leaks, and the fallback."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.hints.groups import SOLUTION, task
from tfgrpo.errors import ProviderError
from tfgrpo.hints.metadata import MetadataHints
from tfgrpo.hints.writer import parse_levels, write_hints
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.rollout import Task

GOOD = "Level 1: add\nLevel 2: tens first\nLevel 3: carry the rest"
THREE = ("add", "tens first", "carry the rest")


@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        "Sure, here they are!\n\n" + GOOD,
        "**Level 1:** add\n\n**Level 2:** tens first\n\n**Level 3:** carry the rest\n",
        "### Hint 1\nadd\n### Hint 2\ntens first\n### Hint 3\ncarry the rest",
        "LEVEL 1 - add\nLEVEL 2 - tens first\nLEVEL 3 - carry the rest",
        "<level_1>add</level_1>\n<level_2>tens first</level_2>\n<level_3>carry the rest</level_3>",
        "1. add\n2. tens first\n3. carry the rest",
        "1) add\n2) tens first\n3) carry the rest",
        json.dumps({"level_3": THREE[2], "level_1": THREE[0], "level_2": THREE[1]}),
        "```json\n" + json.dumps({"hints": list(THREE)}) + "\n```",
        json.dumps(list(THREE)),
        "I think {this} is right: " + json.dumps({"a": THREE[0], "b": THREE[1], "c": THREE[2]}),
    ],
)
def test_three_hints_are_read_from_many_forms(reply: str) -> None:
    assert parse_levels(reply) == THREE


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot help.",
        "Level 1: add\nLevel 2: tens first",
        "Level 1: add\nLevel 2:\nLevel 3: carry",
        "Level 3: a\nLevel 2: b\nLevel 1: c",
        '{"level_1": "a", "level_2": "b"}',
        '{"level_1": 1, "level_2": 2, "level_3": 3}',
        "In 1 hour, 2 trains and 3 cars",
        "{" * 50,
    ],
)
def test_what_does_not_hold_three_hints_is_not_guessed(reply: str) -> None:
    assert parse_levels(reply) is None


async def test_a_written_hint_is_found_by_the_schedulers_source() -> None:
    lm = ScriptedLM(GOOD)
    made = await write_hints([task(solution=SOLUTION)], lm, source="teacher")
    assert (made.replies, made.parsed, made.parse_rate) == (1, 1, 1.0)
    plans = MetadataHints()(made.tasks[0])
    assert [(p.text, p.level, p.source) for p in plans] == [
        (text, level, "teacher") for level, text in enumerate(THREE, 1)
    ]
    asked = lm.requests[0].messages[-1].content
    assert "What is 17 + 25?" in asked
    assert SOLUTION in asked


async def test_unreadable_replies_are_asked_again_with_other_seeds_then_the_solution_is_cut() -> (
    None
):
    seeds: list[int | None] = []

    def reply(request: object, seed: int | None) -> str:
        seeds.append(seed)
        return "no idea"

    made = await write_hints([task(solution=SOLUTION)], ScriptedLM(reply), retries=2)
    assert (made.replies, made.parsed, made.parse_rate) == (3, 0, 0.0)
    assert len(set(seeds)) == 3
    assert made.fallbacks == ("t",)
    assert made.tasks[0].metadata["hints_source"] == "reference"
    assert [p.text for p in MetadataHints()(made.tasks[0])] == [
        p.text for p in MetadataHints()(task(solution=SOLUTION))
    ]


async def test_the_parse_rate_counts_replies_and_not_tasks() -> None:
    lm = ScriptedLM(["what?", GOOD])
    made = await write_hints([task(solution=SOLUTION)], lm)
    assert (made.replies, made.parsed, made.parse_rate) == (2, 1, 0.5)
    assert made.fallbacks == ()


async def test_a_hint_with_the_answer_is_dropped_and_counted() -> None:
    leaky = "Level 1: add\nLevel 2: it is 42\nLevel 3: carry"
    made = await write_hints([task(solution=SOLUTION)], ScriptedLM(leaky))
    assert made.leaked == 1
    assert made.tasks[0].metadata["hints"] == ["add", "carry"]
    all_leak = "Level 1: 42\nLevel 2: it is 42\nLevel 3: 42!"
    made = await write_hints([task(solution=SOLUTION)], ScriptedLM(all_leak))
    assert made.leaked == 3
    assert made.fallbacks == ("t",)


async def test_a_task_without_anything_to_go_by_is_named_and_not_asked() -> None:
    lm = ScriptedLM(GOOD)
    made = await write_hints([Task("empty", "?")], lm)
    assert made.without == ("empty",)
    assert made.parse_rate is None
    assert lm.requests == []


async def test_a_failed_call_leaves_no_other_running() -> None:
    ended: list[str] = []

    class Slow(ScriptedLM):
        async def complete(self, request, n, seeds):
            if "boom" in request.messages[-1].content:
                raise ProviderError("down", kind="overloaded")
            try:
                await asyncio.sleep(30)
            finally:
                ended.append("slow")

    tasks = [task("a", solution=SOLUTION), Task("b", "boom", reference="1")]
    with pytest.raises(ProviderError, match="down"):
        await write_hints(tasks, Slow(GOOD))
    await asyncio.sleep(0)
    assert ended == ["slow"]
