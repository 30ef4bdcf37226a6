"""Adds rollouts to a step's groups as their rewards come in: one group, one baseline.

All processes see all rewards, so each decides alike. Sample indices go on, so that a group that was
drawn in parts has the rollouts of one drawn at once. Does not know rules. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import TopUp
from tfgrpo.rl import distributed
from tfgrpo.rl.rollouts.visit import GroupSizes
from tfgrpo.rollout import RolloutGroup, Task

Make = Callable[[Sequence[Task], GroupSizes], list[RolloutGroup]]
"""Rolls this process's share."""


@dataclass(slots=True)
class ToppedUp:
    """A step's groups after the top-ups."""

    groups: list[RolloutGroup]
    """This process's."""
    rounds: int = 0
    """Times that rollouts were added."""
    added: int = 0
    """Rollouts added, of all processes."""
    unspent: int = 0
    """Rollouts of the budget that nobody wanted."""


def roll_and_top_up(
    rule: TopUp,
    tasks: Sequence[Task],
    history: Sequence[RolloutGroup],
    budget: int,
    make: Make,
) -> ToppedUp:
    """Roll each task's first rollouts, then what the rule adds until it adds nothing.

    Args:
        rule: decides.
        tasks: of the step, of all processes.
        history: groups of earlier steps, as an allocator sees them.
        budget: rollouts of the step, of all processes.
        make: rolls tasks of this process.

    Raises:
        ConfigError: the rule gave other counts than its contract allows.
    """
    rank, world = distributed.world()
    sizes = _checked(rule.first(tasks, history, budget), len(tasks), budget)
    mine = range(rank, len(tasks), world)
    empty = [i for i, n in enumerate(sizes) if not n]
    if empty:
        raise ConfigError(
            f"the top-up rule gave task {tasks[empty[0]].task_id!r} no first rollout: it can only "
            "be told from rewards whether it needs more"
        )
    drawn = make([tasks[i] for i in mine], [sizes[i] for i in mine])
    found = ToppedUp(_predicted(rule, [tasks[i] for i in mine], history, drawn))
    left = budget - sum(sizes)
    while left > 0:
        own = {i: g.rewards_G for i, g in zip(mine, found.groups, strict=True)}
        everyone = {i: r for part in distributed.gather_objects(own) for i, r in part.items()}
        rewards = [everyone[i] for i in range(len(tasks))]
        added = _checked(rule.more(tasks, history, rewards, left), len(tasks), left)
        if not any(added):
            break
        places = [(place, i) for place, i in enumerate(mine) if added[i]]
        more = make(
            [tasks[i] for _, i in places],
            [range(sizes[i], sizes[i] + added[i]) for _, i in places],
        )
        for (place, _), group in zip(places, more, strict=True):
            whole = found.groups[place]
            found.groups[place] = replace(whole, rollouts=(*whole.rollouts, *group.rollouts))
        sizes = [a + b for a, b in zip(sizes, added, strict=True)]
        left -= sum(added)
        found.rounds += 1
        found.added += sum(added)
    found.unspent = left
    return found


def _predicted(
    rule: TopUp,
    tasks: Sequence[Task],
    history: Sequence[RolloutGroup],
    groups: Sequence[RolloutGroup],
) -> list[RolloutGroup]:
    """Write what a rule expected of each task into its group, for baselines that use it."""
    predictions = getattr(rule, "predictions", None)
    if predictions is None or not tasks:
        return list(groups)
    return [
        replace(g, metadata={**g.metadata, "predicted": float(p)})
        for g, p in zip(groups, predictions(tasks, history), strict=True)
    ]


def _checked(counts: Sequence[int], n_tasks: int, most: int) -> list[int]:
    if len(counts) != n_tasks or sum(counts) > most or min(counts, default=0) < 0:
        raise ConfigError(
            f"the top-up rule gave {list(counts)!r:.120} for {n_tasks} groups and at most {most} "
            "rollouts: one number a group is needed, none negative, at most that many in all"
        )
    return [int(n) for n in counts]
