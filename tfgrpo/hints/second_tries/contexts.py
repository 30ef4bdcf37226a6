"""Groups whose rollouts stand under several contexts: strategies, or examples beside the bare task.

NudgeRL shares a group out over strategies, some rollouts dropping theirs; ICPO draws a part of it
with solved examples in context; XRPO's seeding does so only where all failed. Does not know tokens.

Sources: NudgeRL, released code tally0818/NudgeRL (trainer defaults); ICPO, "Think Outside the
Policy", abstract; XRPO, abstract and summary (both approximations: constants and the choice of
examples by common words are ours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfgrpo.advantage import advantages_G
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.answer_leaks import leaks, solution_of
from tfgrpo.hints.merge import mixed, untrained, with_advantages
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.messages import Message
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.json_text import shown


class NudgeContexts(RecordedScheduler):
    """A `HintScheduler` that shares a group out over strategies (NudgeRL).

    Args:
        strategies: texts for every task; empty reads `metadata.strategies`.
        strategies_key: where they stand.
        contexts: strategies of a visit; later visits go on where earlier ones ended.
        per_context: rollouts of each.
        dropout: chance that a rollout drops its context.
        distil: weight of the term that raises good rollouts under the bare prompt.
        missing_is_error: a task without strategies is an error; False trains it bare.
        seed: fixes which rollouts drop.
        success_above: a rollout with a larger reward is a success, in the figures.
    """

    name = "nudge"

    def __init__(
        self,
        *,
        strategies: Sequence[str] = (),
        strategies_key: str = "strategies",
        contexts: int = 2,
        per_context: int = 4,
        dropout: float = 0.25,
        distil: float = 0.01,
        missing_is_error: bool = True,
        seed: int = 0,
        success_above: float = 0.0,
    ) -> None:
        self._texts = tuple(strategies)
        self._key = strategies_key
        self._contexts = contexts
        self._per_context = per_context
        self._dropout = dropout
        self._distil = distil
        self._missing_is_error = missing_is_error
        self._seed = seed
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return a plan a strategy, and the rollouts that dropped theirs.

        Raises:
            ConfigError: the task has no strategies and that is an error.
        """
        texts = self._of(task)
        if not texts:
            return [BARE]
        visit = self.record.of(task.task_id).visits
        count = min(self._contexts, len(texts))
        chance = np.random.default_rng(derive_seed("drop", self._seed, task.task_id, visit))
        plans, dropped = [], 0
        for k in range(count):
            place = (visit * count + k) % len(texts)
            bare = int(chance.binomial(self._per_context, self._dropout))
            dropped += bare
            if bare < self._per_context:
                plans.append(
                    HintPlan(
                        text=texts[place],
                        kind="strategy",
                        n=self._per_context - bare,
                        level=place + 1,
                        source="given",
                        distil=self._distil,
                    )
                )
        return [*plans, *([HintPlan(n=dropped, distil=self._distil)] if dropped else [])]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return nothing: one round a visit."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return all sets as one group."""
        group = mixed(made)
        self.record.close(made, made[0].plan, group)
        return group

    def _of(self, task: Task) -> tuple[str, ...]:
        found = self._texts or task.metadata.get(self._key, ())
        if not isinstance(found, list | tuple) or not all(isinstance(x, str) for x in found):
            raise ConfigError(
                f"task {task.task_id!r}: metadata.{self._key} is {shown(found)}; it must be a list "
                "of texts"
            )
        if not found and self._missing_is_error:
            raise ConfigError(
                f"task {task.task_id!r} has no metadata.{self._key}: set hints.strategies for all "
                "tasks, give it its own, have hints.writer write them, or set hints.missing = "
                "'plain' to train it bare"
            )
        return tuple(x for x in found if x.strip() and not leaks(x, task))


@dataclass(frozen=True, slots=True)
class Example:
    """A solved task."""

    task_id: str
    text: str
    answer: str

    def turns(self) -> tuple[Message, ...]:
        """The example as chat turns."""
        return Message("user", self.text), Message("assistant", self.answer)


def nearest(task: Task, pool: Sequence[Example], count: int) -> list[Example]:
    """Return the examples that share most words with a task, never its own, nor its answer."""
    words = set(task.text.casefold().split())

    def shared(one: Example) -> float:
        own = set(one.text.casefold().split())
        return len(words & own) / max(1, len(words | own))

    fit = [x for x in pool if x.task_id != task.task_id and not leaks(x.answer, task)]
    return sorted(fit, key=lambda x: (-shared(x), x.task_id))[:count]


def examples_plan(examples: Sequence[Example], **options: Any) -> HintPlan:
    """Return a plan with examples in the prompt."""
    turns = tuple(turn for one in examples for turn in one.turns())
    return HintPlan(turns=turns, kind="exemplar", level=1, **options)


class Icpo(RecordedScheduler):
    """A `HintScheduler` of bare rollouts and some with examples in context (approximation).

    Rollouts with examples leave the group below `bound`; the others get a bonus that falls to 0,
    and train the bare prompt by the ratio r/(r + γ).

    Args:
        expert: rollouts of a group that see examples.
        examples: how many they see.
        bound: smallest reward of one that stays.
        bonus: added to their reward in advantages, at the start.
        bonus_groups: accepted groups over which it falls to 0, in steps of `groups_per_step`.
        groups_per_step: groups with an equal bonus.
        gamma: of the ratio.
        solution_key: where solutions of the pool's tasks stand.
        success_above: a rollout with a larger reward is a success, in the figures.
    """

    name = "icpo"

    def __init__(
        self,
        *,
        expert: int = 4,
        examples: int = 1,
        bound: float = 1.0,
        bonus: float = 0.1,
        bonus_groups: int = 1600,
        groups_per_step: int = 16,
        gamma: float = 0.1,
        solution_key: str = "solution",
        success_above: float = 0.0,
    ) -> None:
        self._expert = expert
        self._examples = examples
        self._bound = bound
        self._bonus = bonus
        self._steps = max(1, bonus_groups // max(1, groups_per_step))
        self._groups_per_step = max(1, groups_per_step)
        self._gamma = gamma
        self._key = solution_key
        self.pool: tuple[Example, ...] = ()
        """Solved tasks, where examples come from."""
        self.record = Record(success_above)

    def take_pool(self, tasks: Sequence[Task]) -> None:
        """Take the tasks that have a solution as examples."""
        self.pool = tuple(
            Example(t.task_id, t.text, s) for t in tasks if (s := solution_of(t, self._key))
        )

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare rollouts and those with examples."""
        found = nearest(task, self.pool, self._examples)
        expert = min(self._expert, group_size) if found else 0
        if not expert:
            return [BARE]
        plan = examples_plan(
            found, n=expert, source="reference", condition="corrected", shaping=self._gamma
        )
        return [*([HintPlan(n=group_size - expert)] if expert < group_size else []), plan]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return nothing: one round a visit."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return what stays as one group, with advantages over rewards and bonus."""
        whole = mixed(made)
        helped = {r.rollout_id for x in made if not x.plan.is_bare for r in x.group.rollouts}
        stays = [
            r
            for r in whole.graded
            if r.rollout_id not in helped or (r.reward is not None and r.reward >= self._bound)
        ]
        group = whole if stays else untrained(whole)
        if stays and helped:
            extra = self.bonus_now()
            rewards = [
                (r.reward or 0.0) + (extra if r.rollout_id in helped else 0.0) for r in stays
            ]
            kept = replace(whole, rollouts=tuple(stays))
            group = with_advantages(kept, advantages_G(rewards, epsilon=1e-4))
        self.record.close(made, made[-1].plan, group)
        return group

    def bonus_now(self) -> float:
        """Return the bonus of the present step."""
        step = sum(self.record.accepted.values()) // self._groups_per_step
        return self._bonus * max(0.0, 1 - step / max(1, self._steps - 1))


class Seeding(RecordedScheduler):
    """A `HintScheduler` that shows solved tasks to one on which all failed (XRPO, approximation).

    Args:
        examples: how many are shown.
        keep: solved tasks remembered.
        success_above: a rollout with a larger reward is a success.
    """

    name = "xrpo"

    def __init__(self, *, examples: int = 1, keep: int = 256, success_above: float = 0.0) -> None:
        self._examples = examples
        self._keep = keep
        self._solved: dict[str, Example] = {}
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task."""
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the group behind solved examples, where all failed and there are some."""
        if len(made) > 1 or not self.record.has_failed(made[0].group):
            return ()
        found = nearest(task, list(self._solved.values()), self._examples)
        return [examples_plan(found, source="self")] if found else ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the last group where it has a success, else the bare one; remember a solution."""
        chosen = made[-1] if self.record.successes(made[-1].group) else made[0]
        self.record.close(made, chosen.plan, chosen.group)
        above = self.record.success_above
        best = max(
            (r for r in made[0].group.graded if r.reward is not None and r.reward > above),
            key=lambda r: (r.reward or 0.0, r.rollout_id),
            default=None,
        )
        if best is not None and best.answer.strip():
            self._solved.pop(task.task_id, None)
            self._solved[task.task_id] = Example(task.task_id, task.text, best.answer.strip())
            for old in list(self._solved)[: -self._keep]:
                del self._solved[old]
        return chosen.group

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        rows = [[x.task_id, x.text, x.answer] for x in self._solved.values()]
        return super().state_dict() | {"solved": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, the solved tasks in their order."""
        super().load_state_dict(state)
        self._solved = {
            str(r[0]): Example(str(r[0]), str(r[1]), str(r[2])) for r in state["solved"]
        }
