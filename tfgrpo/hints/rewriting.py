"""Hints that the policy writes anew at each visit that failed, under its present weights.

One call asks for all levels from the task and its solution; an unreadable reply is asked for again,
then the task's last readable hints serve, then the cut solution. Hints with the answer in them are
dropped and counted. Does not know when a hint is used, or how a text is drawn.

Source: SAGE (arXiv 2602.03143), online self-hinting, and its released code (JSON, three further
tries, last good payload); the leak check is own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tfgrpo.hint_plan import HintPlan, PlannedGroup, Write, WriteResult
from tfgrpo.hints.answer_leaks import leaks, solution_of
from tfgrpo.hints.metadata import PlansOf, numbered_plans
from tfgrpo.hints.writer import parse_levels, reference_text
from tfgrpo.prompts import render
from tfgrpo.rollout import Task

KEY = "hints"


@dataclass(slots=True)
class RewriteState:
    """What came of rewriting, as JSON."""

    last: dict[str, list[str]] = field(default_factory=dict)
    """The last readable hints of each task."""
    asked: int = 0
    """Visits that asked."""
    tries: int = 0
    """Replies, further tries included."""
    read: int = 0
    """Visits whose reply could be read."""
    hints: int = 0
    """Hints in those replies."""
    leaked: int = 0
    """Of them, dropped because the answer stood in them."""
    fallbacks: int = 0
    """Visits that fell back to the cut solution."""


class Rewriter:
    """Asks for a task's hints within a visit and reads them.

    Args:
        plans_of: a task's plans where nothing could ever be read.
        retries: further tries after an unreadable reply, at least 0.
        max_tokens: limit of a reply.
        solution_key: where the solution stands in a task's metadata.
    """

    def __init__(
        self,
        plans_of: PlansOf,
        *,
        retries: int = 3,
        max_tokens: int = 512,
        solution_key: str = "solution",
    ) -> None:
        self._plans_of = plans_of
        self._retries = retries
        self._max_tokens = max_tokens
        self._key = solution_key
        self.state = RewriteState()

    def ask(self, task: Task, made: Sequence[PlannedGroup]) -> Write | None:
        """Return what to ask for; None where this visit has asked, or nothing is to be told."""
        solution = solution_of(task, self._key) or reference_text(task)
        if not solution or _result(made) is not None:
            return None
        prompt = render("hint_write", task=task.text, solution=solution)
        return Write(KEY, prompt, parse_levels, self._retries, self._max_tokens)

    def plans(self, task: Task, made: Sequence[PlannedGroup]) -> tuple[HintPlan, ...]:
        """Return the visit's plans, weakest first."""
        result = _result(made)
        fresh = () if result is None else self._safe(task, result)
        texts = fresh or tuple(self.state.last.get(task.task_id, ()))
        return numbered_plans(texts, "self") if texts else self._plans_of(task)

    def close(self, task: Task, made: Sequence[PlannedGroup]) -> None:
        """Count a visit and keep its hints for one that cannot be read."""
        result, state = _result(made), self.state
        if result is None:
            return
        state.asked += 1
        state.tries += result.tries
        if result.value is not None:
            state.read += 1
            state.hints += len(result.value)
            state.leaked += len(result.value) - len(self._safe(task, result))
        if kept := self._safe(task, result):
            state.last[task.task_id] = list(kept)
        elif task.task_id not in state.last:
            state.fallbacks += 1

    def figures(self) -> dict[str, float]:
        """Return rates over the run so far."""
        s = self.state
        made = {"rewrites": float(s.asked), "rewrite_fallbacks": float(s.fallbacks)}
        if s.tries:
            made["rewrite_parse_rate"] = s.read / s.tries
        if s.hints:
            made["rewrite_leak_rate"] = s.leaked / s.hints
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.state = RewriteState(**{**state, "last": dict(state["last"])})

    def _safe(self, task: Task, result: WriteResult) -> tuple[str, ...]:
        return tuple(h for h in result.value or () if not leaks(h, task))


def _result(made: Sequence[PlannedGroup]) -> WriteResult | None:
    return next((r for one in made if (r := one.said(KEY)) is not None), None)
