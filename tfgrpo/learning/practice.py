"""Which practice tasks a step draws: all of them once, then those that the library gets wrong.

The first pass takes every task in a seeded order. Later passes of the flow `reflect` draw where
practice pays: tasks whose latest rewards are below full marks, first those behind entries on trial
and behind open questions; a stated share is drawn at random over all tasks. How many rollouts a
drawn task gets stays with the allocator (V_0's predictions reach practice through it). Pure. Does
not know rollouts' making. Source: own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.experience import Library
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed

_EXTRA = 0.5
"""What thin support or an open question adds to a task's need, beside a failure of 0 to 1."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step practises."""

    epoch: int
    items: Sequence[Any]
    """Tasks, or saved groups in their place."""
    focused: frozenset[str] = frozenset()
    """Tasks that were drawn for their need; the others were drawn by chance."""


def first_pass(source: Sequence[Any], epoch: int, seed: int, size: int) -> list[Batch]:
    """Return all items in batches, in the seeded order of an epoch."""
    order = list(source)
    random.Random(derive_seed("batches", seed, epoch)).shuffle(order)
    return [Batch(epoch, order[i : i + size]) for i in range(0, len(order), size)]


def focused_pass(
    tasks: Sequence[Task],
    needs: Mapping[str, float],
    epoch: int,
    seed: int,
    *,
    size: int,
    random_share: float,
) -> list[Batch]:
    """Return the batches of a later pass; none where no task is in need.

    Args:
        tasks: the practice split.
        needs: by task, 0 for none.
        random_share: of the draws that are made by chance over all tasks, in [0, 1).
    """
    rng = random.Random(derive_seed("focus", seed, epoch))
    order = list(tasks)
    rng.shuffle(order)
    wanted = [t for t in order if needs.get(t.task_id, 0.0) > 0]
    wanted.sort(key=lambda t: -needs[t.task_id])
    if not wanted:
        return []
    total = min(len(order), math.ceil(len(wanted) / (1 - random_share)))
    count = max(1, round(total * (1 - random_share)))
    chosen = wanted[:count]
    names = {t.task_id for t in chosen}
    rest = [t for t in order if t.task_id not in names]
    drawn = [*chosen, *rng.sample(rest, min(len(rest), total - len(chosen)))]
    return [Batch(epoch, drawn[i : i + size], frozenset(names)) for i in range(0, len(drawn), size)]


def task_needs(
    tasks: Iterable[Task], history: Iterable[RolloutGroup], library: Library, full: float | None
) -> dict[str, float]:
    """Return how much each task still asks for practice.

    The latest group of a task counts, replays among them. A task at full marks has no need, unless
    an entry on trial or an open question rests on it and it is below full marks elsewhere.

    Args:
        full: full marks; None takes the best reward seen.
    """
    latest = {g.task.task_id: g for g in history if g.rewards_G}
    top = max((r for g in latest.values() for r in g.rewards_G), default=0.0)
    worst = min((r for g in latest.values() for r in g.rewards_G), default=0.0)
    best = top if full is None else full
    spread = max(best - worst, 1e-9)
    thin = {
        t
        for e in library.shown
        if e.claim.state == "provisional" or e.claim.question
        for t in (*e.claim.support, *e.claim.against)
    }
    needs: dict[str, float] = {}
    for task in tasks:
        group = latest.get(task.task_id)
        failure = 1.0 if group is None else max(0.0, best - (group.mean_reward or 0.0)) / spread
        if failure > 1e-9:
            needs[task.task_id] = failure + (_EXTRA if task.task_id in thin else 0.0)
    return needs
