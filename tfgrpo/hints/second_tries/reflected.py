"""R3L: the policy says what went wrong and from which step to try again, and does so.

Half of a group attempts; an attempt below full reward is reflected on in JSON, its turns before
the named step are taken again, and the rest is played with the reflection in the prompt. The retry
is trained without it, and neither attempt nor retry bears a loss before that step. Good
reflections, and retries as they were guided, are groups of one with reward 1.

Does not know tokens or environments. Source: R3L, released code shiweijiezero/R3L (workflows of
qwen_math, webshop and scienceworld). Here the reflection stands in the first prompt, also where the
retry starts later, and a guided retry is the retry itself, not a further draw; the release masks
attempts after the step in its step-level workflows, the paper before it, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tfgrpo.hint_plan import Ask, HintPlan, PlannedGroup, Write, WriteResult
from tfgrpo.hints.merge import MIXED, noted
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.prompts import render
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.runtime.lenient_json import ReplyError, json_values


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a policy says of its attempt."""

    outcome: str
    cause: str
    suggestion: str
    step: int
    """Where to try again, 0 and up."""


def read_reflection(n_steps: int, reply: str) -> Reflection | None:
    """Return what a reply says, or None where it is not the JSON that was asked for.

    Args:
        n_steps: turns of the attempt; the step must be one of them.
        reply: text with one JSON object.

    >>> read_reflection(2, '{"outcome": "failure", "cause": "a", "suggestion": "b", \
"retry_from_step": 1}').step
    1
    >>> read_reflection(1, '{"outcome": "failure", "cause": "a", "suggestion": "b", \
"retry_from_step": 1}')
    """
    try:
        values = json_values(reply)
    except ReplyError:
        return None  # asking again or leaving it is the caller's
    for row in values:
        found = _reflection(row)
        if found is not None and 0 <= found.step < n_steps:
            return found
    return None


def _reflection(row: Any) -> Reflection | None:
    names = ("outcome", "cause", "suggestion")
    if not isinstance(row, dict) or not all(isinstance(row.get(n), str) for n in names):
        return None
    step = row.get("retry_from_step")
    if isinstance(step, bool) or not isinstance(step, int) or not row["suggestion"].strip():
        return None
    return Reflection(row["outcome"], row["cause"], row["suggestion"], step)


class R3L(RecordedScheduler):
    """A `HintScheduler` that reflects on attempts and retries them.

    Args:
        full: reward of an attempt that needs no retry.
        retries: further tries after a reflection that cannot be read; the release has none.
        max_tokens: limit of a reflection.
        success_above: a rollout with a larger reward is a success, in the figures.
    """

    name = "r3l"

    def __init__(
        self,
        *,
        full: float = 1.0,
        retries: int = 0,
        max_tokens: int = 512,
        success_above: float = 0.0,
    ) -> None:
        self._full = full
        self._retries = retries
        self._max_tokens = max_tokens
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the attempts: half of the group."""
        return [HintPlan(n=max(1, group_size // 2))]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[Ask]:
        """Return the reflections, then the retries."""
        if len(made) > 1:
            return ()
        attempts = made[0].group.rollouts
        if not made[0].written:
            return [
                self._write(task, str(i), rollout)
                for i, rollout in enumerate(attempts)
                if rollout.reward is not None and rollout.reward < self._full and rollout.steps
            ]
        return [self._plan(attempts[int(w.key)], w) for w in made[0].written if w.value is not None]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return attempts and retries as one group, losses from the retried step on."""
        attempts = made[0].group
        pairs = self._pairs(made)
        first_step = {attempt.rollout_id: w.value.step for attempt, w, _ in pairs}
        rollouts = [
            noted(r, first_step=first_step[r.rollout_id]) if r.rollout_id in first_step else r
            for r in attempts.rollouts
        ]
        rollouts += [noted(retry, first_step=w.value.step) for _, w, retry in pairs]
        group = attempts
        if pairs:
            group = replace(
                attempts,
                rollouts=tuple(replace(r, sample_index=i) for i, r in enumerate(rollouts)),
                metadata={**attempts.metadata, "hint": MIXED},
            )
        self.record.close(made, made[-1].plan, group)
        return group

    def beside(self, task: Task, made: Sequence[PlannedGroup]) -> list[RolloutGroup]:
        """Return the reflections whose retry was full, and these retries as they were guided."""
        found = []
        for attempt, said, retry in self._pairs(made):
            reward, before = retry.reward, attempt.reward or 0.0
            if reward is None or reward < self._full or reward <= before or said.rollout is None:
                continue
            name = f"{attempt.rollout_id}-reflection"
            reflection = replace(said.rollout, rollout_id=name)
            hint = {k: v for k, v in retry.metadata.get("hint", {}).items() if k != "bare_prompt"}
            guided = replace(
                retry,
                rollout_id=f"{retry.rollout_id}-guided",
                metadata={**retry.metadata, "hint": {**hint, "first_step": said.value.step}},
            )
            for one in (reflection, guided):
                alone = noted(one.graded(Score(1.0)), advantage=1.0)
                found.append(RolloutGroup(f"g:{one.rollout_id}", task, (alone,)))
        return found

    def _write(self, task: Task, key: str, rollout: Rollout) -> Write:
        n = len(rollout.steps)
        text = "\n".join(
            f"[step {i}] {step.action.content}"
            + "".join(f"\n{m.content}" for m in step.observations)
            for i, step in enumerate(rollout.steps)
        )
        prompt = render("reflect_retry", task=task.text, attempt=text, last=str(n - 1))
        return Write(key, prompt, partial(read_reflection, n), self._retries, self._max_tokens)

    def _plan(self, attempt: Rollout, said: WriteResult) -> HintPlan:
        value: Reflection = said.value
        return HintPlan(
            text=render("retry_guidance", cause=value.cause, suggestion=value.suggestion),
            n=1,
            level=1,
            source="self",
            condition="original",
            replay=attempt.steps[: value.step],
        )

    def _pairs(self, made: Sequence[PlannedGroup]) -> list[tuple[Rollout, WriteResult, Rollout]]:
        """Attempts with their reflection and their retry, those that were retried."""
        attempts, left = made[0].group.rollouts, list(made[1:])
        found = []
        for said in made[0].written:
            if said.value is None:
                continue
            attempt = attempts[int(said.key)]
            plan = self._plan(attempt, said)
            one = next((x for x in left if x.plan == plan), None)
            if one is not None:  # else its prompt filled the context
                left.remove(one)
                found.append((attempt, said, one.group.rollouts[0]))
        return found
