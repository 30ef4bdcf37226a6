"""Fresh groups under several contexts for one step, as rows as they were rolled and as bare rows.

What the objectives share that draw their own rollouts (`distill_nudge`, `distill_icpo`).
Does not know what they minimise, libraries or verifiers. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tfgrpo.context import Context
from tfgrpo.protocols import Sampling
from tfgrpo.rl.distillation.objectives import (
    DEFAULT_PASSES,
    PassSettings,
    batch_of,
    steps_per_epoch,
)
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.update.accumulate import UpdateSettings
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed, digest


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rollouts of one task under one context."""

    task: Task
    context: Context
    n: int
    place: int = 0
    """Of the task, among those of the step."""
    number: int = -1
    """Of the context, among the task's; −1 for the bare prompt."""


Draw = Callable[[Sequence[Wanted], int], list[RolloutGroup]]
"""(what is wanted, seed) to one group each, in order, drawn from the weights as they are."""

ContextsOf = Callable[[Task], Sequence[Context]]

Ids = Callable[[Task], tuple[int, ...]]
"""A task's bare prompt as token ids."""


def drawer(maker: SingleTurnMaker, sampling: Sampling | None = None) -> Draw:
    """Return a `Draw` over a rollout maker; tasks that share a context are drawn together."""

    def draw(wanted: Sequence[Wanted], seed: int) -> list[RolloutGroup]:
        found: dict[int, RolloutGroup] = {}
        batches: dict[tuple[str, int], list[int]] = {}
        for i, one in enumerate(wanted):
            batches.setdefault((one.context.context_hash, one.n), []).append(i)
        for (name, n), members in batches.items():
            groups = maker.make(
                [wanted[i].task for i in members],
                n,
                seed=derive_seed(seed, name),
                context=wanted[members[0]].context,
                sampling=sampling,
            )
            found |= dict(zip(members, groups, strict=True))
        return [found[i] for i in range(len(wanted))]

    return draw


@dataclass(frozen=True, slots=True)
class Drawn:
    """One graded rollout of a step."""

    as_rolled: Row
    bare: Row
    """The same tokens under the bare prompt."""
    task: int
    context: int
    """Number of its context, −1 for the bare prompt."""
    reward: float


def drawn_rows(
    groups: Sequence[RolloutGroup], wanted: Sequence[Wanted], bare_ids: Ids
) -> list[Drawn]:
    """Return the graded rollouts of groups, given what each was drawn for."""
    found: list[Drawn] = []
    for group, one in zip(groups, wanted, strict=True):
        for rollout in group.graded:
            if rollout.score is None or not any(s.token_ids for s in rollout.steps):
                continue
            row = row_of(rollout, index=len(found))
            bare = replace(row, prompt_ids=bare_ids(group.task))
            found.append(Drawn(row, bare, one.place, one.number, rollout.score.reward))
    return found


@dataclass(frozen=True, slots=True)
class FreshGroups:
    """Where an objective's steps get their rollouts from."""

    draw: Draw
    """Makes groups from the current weights."""
    tasks: Sequence[Task]
    """To train on."""
    contexts_of: ContextsOf
    bare_ids: Ids
    tasks_per_step: int = 8
    seed: int = 0
    """Of order and draws."""
    passes: PassSettings = DEFAULT_PASSES
    """How rows are cut; the temperature must be the draws'."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every task once."""
        return steps_per_epoch(len(self.tasks), self.tasks_per_step)

    def tasks_of(self, step: int) -> list[Task]:
        """The tasks of a step."""
        return batch_of(list(self.tasks), step, self.tasks_per_step, self.seed)

    def rows(self, kind: str, step: int, wanted: Sequence[Wanted]) -> list[Drawn]:
        """Draw what a step wants; `kind` names the objective, whose draws are its own."""
        groups = self.draw(wanted, derive_seed(self.seed, kind, step))
        return drawn_rows(groups, wanted, self.bare_ids)

    def identity(self, kind: str, settings: Any) -> str:
        """Return the identity of an objective with these settings."""
        rows = [[t.to_dict(), [c.context_hash for c in self.contexts_of(t)]] for t in self.tasks]
        made_of = [
            kind,
            self.tasks_per_step,
            self.seed,
            asdict(settings),
            asdict(self.passes),
            rows,
        ]
        return digest(made_of, 16)


def reward_batch(drawn: Sequence[Drawn], rewards: Sequence[float]) -> RewardBatch:
    """Return what advantage estimators take; the group of a rollout is its task."""
    reward_R: Floats = np.array(rewards, dtype=np.float64)
    return RewardBatch(
        reward_R=reward_R,
        group_R=np.array([d.task for d in drawn], dtype=np.int64),
        length_R=np.array([d.as_rolled.n_loss for d in drawn], dtype=np.int64),
    )


def update_settings(passes: PassSettings, loss: str, aggregation: str) -> UpdateSettings:
    """Return the settings of one pass over rows."""
    return UpdateSettings(
        loss=loss,
        aggregation=aggregation,
        temperature=passes.temperature,
        micro_batch_tokens=passes.micro_batch_tokens,
        chunk=passes.chunk,
    )


def reward_figures(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Mean reward with and without a context."""
    found = {}
    for name, is_bare in (("reward_bare", True), ("reward_context", False)):
        rewards = [d.reward for d in drawn if (d.context < 0) == is_bare]
        if rewards:
            found[name] = sum(rewards) / len(rewards)
    return found
