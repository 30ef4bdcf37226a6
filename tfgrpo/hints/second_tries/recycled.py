"""SCOPE: a wrong attempt is kept up to its first wrong step and finished by the expert's steps.

The policy itself is asked, beside the worked solution, which step of a wrong attempt is the first
wrong one. The repaired answer takes the place of that attempt; its kept part is the attempt's own
tokens. Does not know tokens.

Source: SCOPE (Recycling Failures), abstract: a process reward model, an expert and a weight on the
new part that are not named. Approximation: the judge is the policy with the solution, the expert
is the rest of the solution from the step of the same number, the weight is a constant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tfgrpo.hint_plan import BARE, Ask, HintPlan, PlannedGroup, Write
from tfgrpo.hints.answer_leaks import solution_of
from tfgrpo.hints.merge import MIXED
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.prompts import render
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.lenient_json import ReplyError, json_values


def text_steps(text: str) -> tuple[str, ...]:
    """Return a text cut after lines, or after sentences where it has one line.

    >>> text_steps("a.\\nb."), text_steps("a. b")
    (('a.\\n', 'b.'), ('a. ', 'b'))
    """
    lines = re.findall(r"[^\n]*\n+|[^\n]+$", text)
    return tuple(lines if len(lines) > 1 else re.findall(r".+?(?:[.;!?]\s+|$)", text, re.DOTALL))


def read_step(n_steps: int, reply: str) -> int | None:
    """Return the first wrong step that a reply names, `n_steps` for none; None where unreadable.

    >>> read_step(3, '{"first_wrong_step": 1}'), read_step(3, '{"first_wrong_step": "none"}')
    (1, 3)
    """
    try:
        values = json_values(reply)
    except ReplyError:
        return None  # asking again is the caller's
    for row in values:
        value = row.get("first_wrong_step") if isinstance(row, dict) else None
        if value == "none":
            return n_steps
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n_steps:
            return value
    return None


class Scope(RecordedScheduler):
    """A `HintScheduler` that repairs wrong attempts (approximation).

    Args:
        weight: loss weight of a repaired answer, above 0; 0 repairs nothing.
        most: attempts of a group that are repaired at most.
        retries: further tries after a judgement that cannot be read.
        max_tokens: limit of a judgement.
        solution_key: where the solution stands.
        missing_is_error: a task without solution is an error; False trains it as it is.
        success_above: a rollout with a larger reward is a success.
    """

    name = "scope"

    def __init__(
        self,
        *,
        weight: float = 0.5,
        most: int = 1,
        retries: int = 1,
        max_tokens: int = 64,
        solution_key: str = "solution",
        missing_is_error: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._weight = weight
        self._most = most
        self._retries = retries
        self._max_tokens = max_tokens
        self._key = solution_key
        self._missing_is_error = missing_is_error
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task."""
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[Ask]:
        """Return the judgements of wrong attempts, then the repaired answers."""
        solution = solution_of(task, self._key)
        if len(made) > 1 or not self._weight or not solution:
            return ()
        group = made[0].group
        if not made[0].written:
            return [self._judge(task, solution, i, group.rollouts[i]) for i in self._wrong(group)]
        plans = (
            self._repair(group.rollouts[int(w.key)], solution, w.value)
            for w in made[0].written
            if w.value is not None
        )
        return [plan for plan in plans if plan is not None]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the group with repaired answers that are right in the place of wrong attempts."""
        group = made[0].group
        right = [r for x in made[1:] for r in x.group.rollouts if (r.reward or 0.0) > self._above]
        rollouts = list(group.rollouts)
        for place, repaired in zip(self._wrong(group), right, strict=False):
            rollouts[place] = replace(repaired, sample_index=rollouts[place].sample_index)
        plan = made[0].plan
        if right:
            plan = made[-1].plan
            metadata = {**group.metadata, "hint": MIXED}
            group = replace(group, rollouts=tuple(rollouts), metadata=metadata)
        self.record.close(made, plan, group)
        return group

    @property
    def _above(self) -> float:
        return self.record.success_above

    def _wrong(self, group: RolloutGroup) -> list[int]:
        """Places of the attempts to repair: wrong ones, as long as something else stays."""
        found = [
            i
            for i, r in enumerate(group.rollouts)
            if r.reward is not None and r.reward <= self._above and len(r.steps) == 1
        ]
        return found[: min(self._most, len(group.graded) - 1)]

    def _judge(self, task: Task, solution: str, place: int, attempt: Rollout) -> Write:
        steps = text_steps(attempt.steps[0].action.content)
        shown = "\n".join(f"[{i}] {s.strip()}" for i, s in enumerate(steps))
        prompt = render("first_wrong_step", task=task.text, solution=solution, attempt=shown)
        read = partial(read_step, len(steps))
        return Write(str(place), prompt, read, self._retries, self._max_tokens)

    def _repair(self, attempt: Rollout, solution: str, first_wrong: int) -> HintPlan | None:
        """Return the plan of the kept part and the expert's rest; None where nothing is wrong."""
        steps, expert = text_steps(attempt.steps[0].action.content), text_steps(solution)
        if first_wrong >= len(steps):
            return None
        at = min(first_wrong, len(expert) - 1)
        return HintPlan(
            response_prefix="".join(expert[at:]),
            prefix_ids=attempt.steps[0].token_ids or (),
            prefix_chars=sum(map(len, steps[:first_wrong])),
            n=1,
            level=1,
            source="reference",
            weight=self._weight,
            is_given=True,
        )
