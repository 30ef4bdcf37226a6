"""Fresh groups under several contexts for one step, as rows as they were rolled and as bare rows.

What the objectives share that draw their own rollouts (`distill_nudge`, `distill_icpo`).
Does not know what they minimise, libraries or verifiers. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tfgrpo.canonical import derive_seed, digest
from tfgrpo.context import Context
from tfgrpo.protocols import Sampling
from tfgrpo.rl.batch import Floats, RewardBatch
from tfgrpo.rl.distill_objectives import PassSettings
from tfgrpo.rl.multi_turn import row_of
from tfgrpo.rl.packing import Row
from tfgrpo.rl.rollouts import RolloutMaker
from tfgrpo.rl.update import UpdateSettings
from tfgrpo.rollout import RolloutGroup, Task

Wanted = tuple[Task, Context, int]
"""A task, the context it is drawn under, and how many rollouts."""

Draw = Callable[[Sequence[Wanted], int], list[RolloutGroup]]
"""(what is wanted, seed) to one group each, in order, drawn from the weights as they are."""

ContextsOf = Callable[[Task], Sequence[Context]]


def drawer(maker: RolloutMaker, sampling: Sampling | None = None) -> Draw:
    """Return a `Draw` over a rollout maker; tasks that share a context are drawn together."""

    def draw(wanted: Sequence[Wanted], seed: int) -> list[RolloutGroup]:
        found: dict[int, RolloutGroup] = {}
        batches: dict[tuple[str, int], list[int]] = {}
        for i, (_, context, n) in enumerate(wanted):
            batches.setdefault((context.context_hash, n), []).append(i)
        for (name, n), members in batches.items():
            groups = maker.make(
                [wanted[i][0] for i in members],
                n,
                seed=derive_seed(seed, name),
                context=wanted[members[0]][1],
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
    groups: Sequence[RolloutGroup], tasks: Sequence[int], contexts: Sequence[int], bare_ids: Ids
) -> list[Drawn]:
    """Return the graded rollouts of groups, given each group's task and context number."""
    found: list[Drawn] = []
    for group, task, context in zip(groups, tasks, contexts, strict=True):
        for rollout in group.graded:
            if rollout.score is None or not any(s.token_ids for s in rollout.steps):
                continue
            row = row_of(rollout, index=len(found))
            bare = replace(row, prompt_ids=bare_ids(group.task))
            found.append(Drawn(row, bare, task, context, rollout.score.reward))
    return found


Ids = Callable[[Task], tuple[int, ...]]
"""A task's bare prompt as token ids."""


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


def identity_of(
    kind: str,
    tasks: Sequence[Task],
    contexts_of: ContextsOf,
    size: int,
    seed: int,
    settings: Any,
    passes: PassSettings,
) -> str:
    """Return the identity of an objective that draws its own rollouts."""
    rows = [[t.to_dict(), [c.context_hash for c in contexts_of(t)]] for t in tasks]
    return digest([kind, size, seed, asdict(settings), asdict(passes), rows], 16)
