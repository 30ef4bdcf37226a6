"""Further forms of writing beforehand: a scaffold of three tiers, and short strategies.

Does not know who is asked. Sources: Scaf-GRPO (arXiv 2510.19807): knowledge, plan and solution in
four parts each; NudgeRL (tally0818/NudgeRL): five strategies a task. Prompts and reading are own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfgrpo.hint_plan import HintSource
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.writer import Form, read_texts
from tfgrpo.prompts import render
from tfgrpo.rollout import Task
from tfgrpo.runtime.lenient_json import ReplyError, json_values

TIERS = ("knowledge", "plan", "solution")
PARTS = 4


def read_scaffold(reply: str) -> list[list[str]] | None:
    """Return the tiers' parts, most abstract tier first; None where one is missing or empty.

    >>> read_scaffold('{"knowledge": ["a"], "plan": ["b", "c"], "solution": ["d"]}')
    [['a'], ['b', 'c'], ['d']]
    """
    try:
        values = json_values(reply)
    except ReplyError:
        return None  # asking again is the caller's
    for row in values:
        tiers = [row.get(name) for name in TIERS] if isinstance(row, dict) else []
        if tiers and all(_is_texts(t) for t in tiers):
            return [[p.strip() for p in t if p.strip()][:PARTS] for t in tiers if t]
    return None


def _is_texts(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
    return is_list and any(x.strip() for x in value)


def _keep_scaffold(task: Task, tiers: list[list[str]], source: HintSource) -> tuple[Task, int]:
    kept = [[p for p in parts if not leaks(p, task)] for parts in tiers]
    dropped = sum(map(len, tiers)) - sum(map(len, kept))
    kept = [parts for parts in kept if parts]
    if not kept:
        return task, dropped
    extra = {"scaffold": kept, "hints_source": source}
    return replace(task, metadata={**task.metadata, **extra}), dropped


SCAFFOLD = Form(
    lambda task, solution: render(
        "scaffold_write", task=task.text, solution=solution, parts=str(PARTS)
    ),
    read_scaffold,
    _keep_scaffold,
)
"""Three tiers of four parts: twelve rungs."""


def strategies_form(count: int, key: str = "strategies") -> Form:
    """Return the form of `count` strategies; nobody is shown a solution."""

    def read(reply: str) -> tuple[str, ...] | None:
        try:
            return read_texts(reply, count)
        except ReplyError:
            return None  # asking again is the caller's

    def keep(task: Task, texts: tuple[str, ...], source: HintSource) -> tuple[Task, int]:
        kept = [t for t in texts if not leaks(t, task)]
        if not kept:
            return task, len(texts)
        extra = {key: kept, "hints_source": source}
        return replace(task, metadata={**task.metadata, **extra}), len(texts) - len(kept)

    def prompt(task: Task, solution: str) -> str:
        return render("nudge_strategies", count=str(count), task=task.text)

    return Form(prompt, read, keep, needs_solution=False)
