"""Which practice tasks a step draws: all of them once, then those that the library gets wrong.

The first pass takes every task in a seeded order. Later passes of the flow `reflect` draw where
practice pays: tasks that the library gets wrong, first those that speak against an entry or stand
behind one on trial or an open question, and a stated share of the others by chance. How many a
drawn task is rolled out stays with the allocator (V_0's predictions come through it). Pure. Does
not know rollouts' making. Source: own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.experience import Library
from tfgrpo.group_figures import GroupFigures, figures_of
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed

_EXTRA = 0.5
"""What counter-evidence, thin support or an open question adds to a failure of 0 to 1."""


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
    """Return the batches of a later pass: all tasks in need, and some of the others by chance.

    Args:
        tasks: the practice split.
        needs: by task; tasks without need are left out.
        random_share: of all practice tasks, drawn by chance among those without need, in [0, 1).
    """
    rng = random.Random(derive_seed("focus", seed, epoch))
    order = list(tasks)
    rng.shuffle(order)
    wanted = [t for t in order if needs.get(t.task_id, 0.0) > 0]
    wanted.sort(key=lambda t: -needs[t.task_id])
    rest = [t for t in order if needs.get(t.task_id, 0.0) <= 0]
    drawn = [*wanted, *rest[: math.ceil(random_share * len(order))]]
    names = frozenset(t.task_id for t in wanted)
    return [Batch(epoch, drawn[i : i + size], names) for i in range(0, len(drawn), size)]


def task_needs(
    tasks: Iterable[Task],
    history: Iterable[RolloutGroup | GroupFigures],
    library: Library,
    full: float | None,
) -> dict[str, float]:
    """Return how much each task still asks for practice; tasks without need are left out.

    What the library gets wrong: a task whose best rollout of two or more under any entries stayed
    below full marks in its latest group, a task that speaks against an entry, a task that failed
    and that no entry cites. Entries on trial and open questions add to the tasks that they rest
    on. One slip of the policy is no need: the best rollout of a group counts, not the mean.

    Args:
        history: practised groups and replays, in order.
        full: full marks; None takes the best reward seen.
    """
    latest = {g.task_id: g for g in figures_of(history) if g.rewards_G}
    rewards = [r for g in latest.values() for r in g.rewards_G]
    best = max(rewards, default=0.0) if full is None else full
    spread = max(best - min(rewards, default=0.0), 1e-9)
    lessons = [e for e in library.shown if e.kind == "lesson"]
    against = {t for e in lessons for t in e.claim.against}
    cited = against | {t for e in lessons for t in e.claim.support}
    thin = {
        t
        for e in lessons
        if e.claim.state == "provisional" or e.claim.question
        for t in (*e.claim.support, *e.claim.against)
    }
    needs: dict[str, float] = {}
    for task in tasks:
        key, group = task.task_id, latest.get(task.task_id)
        failure = 1.0 if group is None else max(0.0, best - max(group.rewards_G)) / spread
        informed = group is None or (not group.is_bare and len(group.rewards_G) > 1)
        open_case = informed or key in against or key in thin or key not in cited
        if failure > 1e-9 and open_case:
            needs[key] = failure + (_EXTRA if key in thin or key in against else 0.0)
    return needs
