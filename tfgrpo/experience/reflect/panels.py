"""Which groups a critic sees side by side: the composition of panels.

A panel holds some groups in full and all other practised tasks in a line each. Every group that can
teach is in full in exactly one panel; kinds of tasks are dealt out evenly; solved groups come along
as counter-evidence. Pure. Does not know how a group is worded or who is asked. Source: own; the
widening of the group-relative contrast from one group to several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.canonical import canonical_json

LEAST_TOKENS = 300
"""Room for one group below which a panel rather holds fewer groups."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What one critic call is shown."""

    groups: tuple[RolloutGroup, ...]
    """In full: attempts, rewards, feedback, key."""
    others: tuple[RolloutGroup, ...] = ()
    """In a line each: task and right answer."""

    @property
    def task_ids(self) -> tuple[str, ...]:
        """All tasks that a rule may cite, in order."""
        return tuple(dict.fromkeys(g.task.task_id for g in (*self.groups, *self.others)))


def panel_size(limit: int, most: int) -> int:
    """Return how many groups fit a prompt of `limit` tokens: at least 1, at most `most`.

    >>> panel_size(30_000, 10), panel_size(1_500, 10), panel_size(100, 10)
    (10, 5, 1)
    """
    return max(1, min(most, limit // LEAST_TOKENS))


def compose(
    teaching: Sequence[RolloutGroup],
    solved: Sequence[RolloutGroup],
    past: Sequence[RolloutGroup] = (),
    *,
    size: int,
    counter: int,
    lines: int,
) -> list[Panel]:
    """Return the panels of one step.

    Args:
        teaching: groups that can teach; each is in full in exactly one panel.
        solved: groups that reached full marks.
        past: groups of earlier steps, for single lines; those of the same task are left out.
        size: groups in full at most, counter-evidence included.
        counter: solved groups in full at most.
        lines: tasks in single lines at most.
    """
    if not teaching:
        return []
    beside = min(counter, len(solved), size // 2)
    room = max(1, size - beside)
    count = -(-len(teaching) // room)
    dealt = [mixed(teaching)[i::count] for i in range(count)]
    pool = cycle(mixed(solved)) if beside else cycle([])
    panels = []
    for groups in dealt:
        full = (*groups, *islice(pool, beside))
        shown = {g.task.task_id for g in full}
        rest: dict[str, RolloutGroup] = {}
        for group in (*teaching, *solved, *reversed(past)):
            if group.task.task_id not in shown:
                rest.setdefault(group.task.task_id, group)
        panels.append(Panel(full, tuple(rest.values())[:lines]))
    return panels


def mixed(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return groups so that equal kinds stand apart once they are dealt out by turns.

    The kind of a task is its key, or where there is none its best reward. Groups of one kind follow
    each other here, so that dealing every n-th gives each panel its share.
    """
    rank: dict[str, int] = {}
    for group in groups:
        rank.setdefault(kind_of(group), len(rank))
    return sorted(groups, key=lambda g: rank[kind_of(g)])


def kind_of(group: RolloutGroup) -> str:
    """Return what stands for the kind of a task."""
    if group.task.reference is not None:
        return canonical_json(group.task.reference)
    return f"{max(group.rewards_G, default=0.0):.3f}"
