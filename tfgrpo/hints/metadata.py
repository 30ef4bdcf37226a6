"""Where hint texts come from: written beforehand into a task's metadata, or cut from its solution.

`metadata.hints` is a list of texts, weakest first; `metadata.solution` is a worked solution of
which level k of L shows the first k/(L+1) of the characters, never as far as the answer. A caller
may give another function, such as one that asks the policy at each visit.

Does not know when a hint is used. Idea: cut references (QuestA, GHPO), the stop before the answer
is own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import HintPlan, HintSource
from tfgrpo.hints.answer_leaks import cut_before_leak, leaks
from tfgrpo.hints.answer_leaks import share_of as share_of
from tfgrpo.hints.answer_leaks import solution_of as solution_of
from tfgrpo.rollout import Task
from tfgrpo.runtime.json_text import shown

PlansOf = Callable[[Task], tuple[HintPlan, ...]]
"""Returns a task's plans, weakest first; empty when there is no help for it."""


@dataclass(frozen=True, slots=True)
class MetadataHints:
    """A task's plans from its metadata: written hints first, else the cut solution.

    A hint that contains the answer is dropped; a cut solution ends before it.
    """

    levels: int = 3
    """Most levels."""
    hints_key: str = "hints"
    solution_key: str = "solution"
    missing: Literal["error", "plain"] = "error"
    """A task with neither field is an error, or is never hinted."""

    def __call__(self, task: Task) -> tuple[HintPlan, ...]:
        """Return the plans, levels counted from 1.

        Raises:
            ConfigError: the task has neither field and `missing` is `error`, or one is malformed.
        """
        written = task.metadata.get(self.hints_key)
        if written is not None:
            return self._written(task, written)
        solution = solution_of(task, self.solution_key)
        if not solution:
            return self._nothing(task)
        safe = cut_before_leak(solution, task)
        shares = (k / (self.levels + 1) for k in range(1, self.levels + 1))
        # The share is of the whole solution: a leak early in it must not make level 1 stronger.
        cuts = [share_of(solution, share) for share in shares]
        texts = [cut if len(cut) <= len(safe) else safe for cut in cuts]
        return numbered_plans(texts, "reference")

    def _written(self, task: Task, written: object) -> tuple[HintPlan, ...]:
        if not isinstance(written, list | tuple) or not all(isinstance(h, str) for h in written):
            raise ConfigError(
                f"task {task.task_id!r}: metadata.{self.hints_key} is {shown(written)}; it must be "
                "a list of texts, weakest first"
            )
        writer = task.metadata.get(f"{self.hints_key}_source", "given")
        source: HintSource = writer if writer in _WRITERS else "given"
        return numbered_plans(
            [h for h in written if h.strip() and not leaks(h, task)][: self.levels], source
        )

    def _nothing(self, task: Task) -> tuple[HintPlan, ...]:
        if self.missing == "plain":
            return ()
        raise ConfigError(
            f"task {task.task_id!r} has no help: give it metadata.{self.hints_key} (texts, weakest "
            f"first) or metadata.{self.solution_key} (a worked solution), or set "
            "hints.missing = 'plain' to train such tasks without hints"
        )


def steps_of(
    task: Task, *, steps_key: str = "steps", solution_key: str = "solution", most: int = 4
) -> tuple[str, ...]:
    """Return a solution cut into at most `most` texts whose concatenation it is; empty for none.

    `metadata.steps` names the steps; else the solution is cut after lines, sentences and clauses,
    or after words where it is a single clause.
    Steps from the first one on that states the answer are one, the last: it is never given away.

    Raises:
        ConfigError: `metadata.steps` is no list of texts.

    >>> steps_of(Task("a", "?", 145, {"solution": "46 + 55 = 101, 101 + 44 = 145"}))
    ('46 + 55 = 101, ', '101 + 44 = 145')
    """
    given = task.metadata.get(steps_key)
    if given is None:
        solution = solution_of(task, solution_key)
        clauses = re.findall(r".+?(?:[.;,!?]\s+|\n+|$)", solution, re.DOTALL)
        given = clauses if len(clauses) > 1 else re.findall(r"\S+\s*", solution)
    if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
        raise ConfigError(
            f"task {task.task_id!r}: metadata.{steps_key} is {shown(given)}; it must be a list of "
            "texts, in order"
        )
    steps = [x for x in given if x]
    safe = len(cut_before_leak("".join(steps), task))
    ends = list(accumulate(len(x) for x in steps))
    whole = [
        x for x, end in zip(steps, ends, strict=True) if len(x.rstrip()) + end - len(x) <= safe
    ]
    rest = "".join(steps[len(whole) :])
    groups = len(whole) if len(whole) < most else most - 1
    cuts = [round(i * len(whole) / groups) for i in range(groups + 1)] if groups else [0]
    joined = ["".join(whole[a:b]) for a, b in pairwise(cuts)]
    if not rest and joined:
        return tuple(joined)
    return (*joined, rest) if rest else ()


_WRITERS = ("self", "teacher", "reference", "oracle")


def numbered_plans(texts: Sequence[str], source: HintSource) -> tuple[HintPlan, ...]:
    """Return one plan per distinct text, levels from 1 in the order given."""
    distinct = list(dict.fromkeys(t for t in texts if t))
    return tuple(
        HintPlan(text=t, level=level, source=source) for level, t in enumerate(distinct, 1)
    )
