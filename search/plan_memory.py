"""Plans that solved tasks, kept to make the next search cheaper.

Only verified plans enter; a plan never helps the task that it came from (leave-task-out), so that
a benchmark cannot leak into itself. Plans are kept as sequences of action names by default:
arguments differ from task to task, the order of the calls is what carries over.

Fed from the same `RolloutGroup`s that learning and training store. Does not know scorers' formulas.
Source: long-term memory of ToolChain* (structure from descriptions); rules on length, duplicates
and size: own, after measuring what short plans do to the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.files import write_whole
from tfgrpo.search.node import action_name, call

__all__ = ["Plan", "PlanMemory", "actions_of", "shared_length"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One solved task's actions, as names."""

    names: tuple[str, ...]
    task_ids: tuple[str, ...]
    """Every task that it solved, each once."""


def actions_of(rollout: Rollout) -> list[Any]:
    """Return the actions of a rollout in order: its tool calls; a turn without one gives its text.

    A call whose arguments are no JSON object keeps its name and the raw text.
    """
    actions: list[Any] = []
    for step in rollout.steps:
        for asked in step.action.tool_calls:
            try:
                arguments = json.loads(asked.arguments)
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                arguments = {"raw": asked.arguments}
            actions.append(call(asked.name, **arguments))
        if not step.action.tool_calls and step.action.content:
            actions.append(step.action.content)
    return actions


class PlanMemory:
    """Verified plans, without duplicates, bounded.

    Args:
        min_length: shorter plans are not kept; a plan of one call matches everything.
        max_plans: the oldest plan leaves when there are more.
        name_of: action to the name that plans are compared by.

    >>> memory = PlanMemory()
    >>> memory.add(["open", "read"], task_id="t1"), memory.add(["open"], task_id="t2")
    (True, False)
    >>> [p.names for p in memory.plans_for("t1")], len(memory.plans_for("t3"))
    ([], 1)
    """

    def __init__(
        self,
        *,
        min_length: int = 2,
        max_plans: int = 512,
        name_of: Callable[[Any], str] = action_name,
    ) -> None:
        self.min_length, self.max_plans, self.name_of = min_length, max_plans, name_of
        self._plans: dict[tuple[str, ...], Plan] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._plans.values())

    def add(self, plan: Sequence[Any], *, task_id: str) -> bool:
        """Keep a plan that a verifier has accepted; return whether it is kept.

        Raises:
            ConfigError: no task id, without which the leave-task-out guard cannot work.
        """
        if not task_id:
            raise ConfigError("a plan needs the id of the task that it solved: give task_id")
        names = tuple(self.name_of(action) for action in plan)
        if len(names) < self.min_length:
            return False
        known = self._plans.get(names)
        task_ids = known.task_ids if known is not None else ()
        if task_id not in task_ids:
            task_ids = (*task_ids, task_id)
        self._plans[names] = Plan(names, task_ids)
        while len(self._plans) > self.max_plans:
            del self._plans[next(iter(self._plans))]
        return True

    def add_group(self, group: RolloutGroup, *, min_reward: float = 1.0) -> int:
        """Keep the plans of a group's rollouts that were graded at `min_reward` or more.

        Ungraded and failed rollouts are never kept. Returns how many plans were kept.
        """
        return sum(
            self.add(actions_of(rollout), task_id=group.task.task_id)
            for rollout in group.graded
            if rollout.reward is not None and rollout.reward >= min_reward
        )

    def add_groups(self, groups: Iterable[RolloutGroup], *, min_reward: float = 1.0) -> int:
        """Keep the verified plans of many groups."""
        return sum(self.add_group(g, min_reward=min_reward) for g in groups)

    def plans_for(self, task_id: str) -> list[Plan]:
        """Return the plans that some other task's solution gave."""
        return [p for p in self._plans.values() if any(t != task_id for t in p.task_ids)]

    def save(self, path: str | Path) -> None:
        """Write the plans as JSON."""
        rows = [{"names": list(p.names), "task_ids": list(p.task_ids)} for p in self]
        settings = {"min_length": self.min_length, "max_plans": self.max_plans}
        text = json.dumps({"version": 1, **settings, "plans": rows}, indent=1)
        write_whole(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | Path, *, name_of: Callable[[Any], str] = action_name) -> PlanMemory:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file is no plan memory of a version that is known.
        """
        try:
            row = json.loads(Path(path).read_text(encoding="utf-8"))
            if row["version"] != 1:
                raise ConfigError(f"plan memory {path}: version {row['version']!r}, known: 1")
            memory = cls(min_length=row["min_length"], max_plans=row["max_plans"], name_of=name_of)
            for plan in row["plans"]:
                names = tuple(plan["names"])
                memory._plans[names] = Plan(names, tuple(plan["task_ids"]))
        except (ValueError, KeyError, TypeError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"{path} is no plan memory: {type(exc).__name__}: {exc}") from exc
        return memory


def shared_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, in O(len·len).

    >>> shared_length(["a", "b", "c", "d"], ["b", "x", "d"])
    2
    """
    row = [0] * (len(second) + 1)
    for name in first:
        row = next_row(row, name, second)
    return row[-1]


def next_row(row: Sequence[int], name: str, plan: Sequence[str]) -> list[int]:
    """Return the next row of the subsequence table when one more name is appended: O(len plan)."""
    fresh = [0] * len(row)
    best = 0
    for j, other in enumerate(plan):
        if name == other:
            best = row[j] + 1
        elif row[j + 1] > best:
            best = row[j + 1]
        fresh[j + 1] = best
    return fresh
