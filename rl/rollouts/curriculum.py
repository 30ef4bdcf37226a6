"""Curriculum: which tasks are rolled next and how often (order, bands, rest, budgets).

Without settings every epoch is a fresh permutation and every task has the same group size. A
profiling pass may drop tasks and order them (sGPO's idea), a task outside the band may rest, an
allocator may give sizes (V_0 budgets, VADE and others; any `protocols.Allocator`). State is JSON.

Does not know tokens or weights. Sources: sGPO (abstract; band and shares are ours), difficulty
filters as in DAPO-like recipes (rest by epochs is own); allocators name their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.group_sizes import GroupSizes
from tfgrpo.protocols import Allocator
from tfgrpo.rl.config_sections import CurriculumConfig
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.runtime.canonical import derive_seed

HISTORY_A_TASK = 8
"""Outcomes kept, times the number of tasks; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of one group, without its texts."""

    task_id: str
    rewards: tuple[float, ...]
    epoch: int
    """−1 for the profiling pass."""

    def share(self, above: float) -> float | None:
        """Share of successes; None where nothing was graded."""
        if not self.rewards:
            return None
        return sum(r > above for r in self.rewards) / len(self.rewards)


@dataclass(frozen=True, slots=True)
class Draw:
    """A task with its group size."""

    task: Task
    size: int


class Curriculum:
    """Draws tasks; told what became of them.

    Args:
        config: the section [curriculum].
        tasks: all training tasks.
        tasks_per_step: groups of a step.
        group_size: rollouts of a group, and the mean of what an allocator gives.
        seed: fixes every order.
        allocate: group sizes; None gives every task the same.
        remembers: keep outcomes though nothing here needs them.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        tasks: Sequence[Task],
        *,
        tasks_per_step: int,
        group_size: int,
        seed: int,
        allocate: Allocator | None = None,
        remembers: bool = False,
    ) -> None:
        self.config = config
        self._remembers = remembers or allocate is not None or config.rest_epochs > 0
        self.cursor = 0
        self.history: list[TaskOutcome] = []
        self.shares: dict[str, float] = {}
        """Success shares of the profiling pass, by task id."""
        self._groups: list[RolloutGroup] = []
        """The history as an allocator sees it."""
        self._last: dict[str, TaskOutcome] = {}
        self._ordered: tuple[int, list[Task]] = (-1, [])
        self.is_profiled = not config.profile
        self._all = {t.task_id: t for t in tasks}
        self._pool = list(tasks)
        self._tasks_per_step = tasks_per_step
        self._group_size = group_size
        self._seed = seed
        self._allocate = allocate
        self._candidates: list[Task] = []
        self._sizes: GroupSizes | None = None
        """Of the last draw."""

    @property
    def tasks_per_step(self) -> int:
        """Groups of a step; fewer where there are fewer tasks."""
        return min(self._tasks_per_step, len(self._pool))

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks that are drawn from: all, or those that the profiling pass kept."""
        return self._pool

    @property
    def epoch(self) -> int:
        """Passes over the tasks that are done."""
        return self.cursor // self._epoch_length

    @property
    def _epoch_length(self) -> int:
        n = self.tasks_per_step
        return max(1, len(self._pool) // n) * n

    def draw(self, n: int, taken: Iterable[str] = ()) -> list[Draw]:
        """Return up to n further tasks of a step with their sizes; `taken` has the step's others.

        Fewer come when every task is taken or an allocator gives nothing.
        """
        held = set(taken)
        if self._allocate is not None and self.config.candidates == "all":
            return self._from_all(n, held)
        tasks = self._next(n, held)
        if self._allocate is None:
            return [Draw(t, self._group_size) for t in tasks]
        return self._sized(tasks, n)

    def more(self, outcomes: Iterable[tuple[str, Sequence[float]]]) -> list[Draw]:
        """Return further rollouts of the draws of the last `draw`, given what became of them.

        `outcomes` are all groups of that draw so far, with the rewards of rollouts without help.
        Draws of other tasks are new groups. Empty where the allocator wants no more.
        """
        if self._sizes is None:
            return []
        before = self._sizes.now
        groups = [_light(self._all[t], TaskOutcome(t, tuple(r), 0)) for t, r in outcomes]
        if not self._sizes.grow(groups):
            return []
        pairs = zip(self._candidates, before, self._sizes.now, strict=True)
        return [Draw(task, new - old) for task, old, new in pairs if new > old]

    def _next(self, n: int, held: set[str]) -> list[Task]:
        found: list[Task] = []
        n = min(n, sum(t.task_id not in held for t in self._pool))
        asleep = 0
        while len(found) < n:
            epoch, position = divmod(self.cursor, self._epoch_length)
            task = self._order(epoch)[position]
            self.cursor += 1
            if task.task_id in held:
                continue
            if self._rests(task, epoch) and asleep < 2 * len(self._pool):
                asleep += 1
                continue
            held.add(task.task_id)
            found.append(task)
        return found

    def _from_all(self, n: int, held: set[str]) -> list[Draw]:
        epoch = self.epoch
        free = [t for t in self._order(epoch) if t.task_id not in held]
        awake = [t for t in free if not self._rests(t, epoch)] or free
        self.cursor += n
        return self._sized(awake, n)

    def _sized(self, tasks: Sequence[Task], n: int) -> list[Draw]:
        assert self._allocate is not None
        self._candidates = list(tasks)
        self._sizes = GroupSizes(self._allocate, tasks, self.groups(), n * self._group_size)
        return [Draw(t, k) for t, k in zip(tasks, self._sizes.now, strict=True) if k]

    def _order(self, epoch: int) -> list[Task]:
        if self._ordered[0] != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "order", epoch))
            order = [self._pool[i] for i in rng.permutation(len(self._pool))]
            if self.config.order == "easy_first":
                order.sort(key=lambda t: -self.shares.get(t.task_id, 0.0))
            self._ordered = (epoch, order)
        return self._ordered[1]

    def _rests(self, task: Task, epoch: int) -> bool:
        if not self.config.rest_epochs:
            return False
        last = self._last.get(task.task_id)
        share = None if last is None else last.share(self.config.success_above)
        if last is None or share is None or last.epoch < 0:
            return False
        low, high = self.config.band
        ends = last.epoch + self.config.rest_epochs
        return not low <= share <= high and last.epoch < epoch <= ends

    def note(self, outcomes: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Keep what became of groups, in the order of their draws.

        Rewards are those of rollouts without help; a group that has none of them says nothing of
        how hard its task is: no allocator sees it, and its task does not rest for it.
        """
        if not self._remembers:
            return
        # the cursor stands after the draws, so the epoch of the last one is meant
        epoch = max(0, self.cursor - 1) // self._epoch_length
        self._keep(TaskOutcome(t, tuple(r), epoch) for t, r in outcomes)

    def _keep(self, outcomes: Iterable[TaskOutcome]) -> None:
        """Add to the history, the same in its three forms."""
        for o in outcomes:
            self.history.append(o)
            self._groups.append(_light(self._all[o.task_id], o))
            self._last[o.task_id] = o
        most = HISTORY_A_TASK * len(self._all)
        del self.history[:-most], self._groups[:-most]

    def known(self, tasks: Sequence[Task]) -> list[dict[str, float]]:
        """Return what is known of each task before its group: `past_share`, of successes at its
        last visit, and `predicted`, the success rate that an allocator with `predictions` expects.
        """
        last = [self._last.get(t.task_id) for t in tasks]
        shares = [None if o is None else o.share(self.config.success_above) for o in last]
        found = [{} if s is None else {"past_share": s} for s in shares]
        predictions = getattr(self._allocate, "predictions", None)
        if predictions is not None and tasks:
            told = predictions(tasks, self.groups())
            found = [{**f, "predicted": float(p)} for f, p in zip(found, told, strict=True)]
        return found

    def profiled(self, outcomes: Iterable[tuple[str, Sequence[float]]]) -> dict[str, float]:
        """Take the profiling pass's outcomes, drop tasks outside the band, return figures.

        Raises:
            ConfigError: no task is left.
        """
        seen = [TaskOutcome(t, tuple(r), -1) for t, r in outcomes]
        self._keep(seen)
        self.is_profiled = True
        shares = {o.task_id: o.share(self.config.success_above) for o in seen}
        self.shares = {t: s for t, s in shares.items() if s is not None}
        self._pool = [t for t in self._pool if self._stays(t, self.shares.get(t.task_id))]
        self._ordered = (-1, [])
        found = list(self.shares.values())
        if not self._pool:
            raise ConfigError(
                f"curriculum.band {list(self.config.band)} keeps none of {len(self._all)} tasks: "
                f"{sum(not s for s in found)} had no success and {sum(s == 1 for s in found)} only "
                "successes; widen the band, or set curriculum.unsolved_share and [hints]"
            )
        return {
            "profile_rollouts": float(sum(len(o.rewards) for o in seen)),
            "profile_tasks_kept": float(len(self._pool)),
            "profile_success_share": sum(found) / max(1, len(found)),
            "profile_unsolved_share": sum(not s for s in found) / max(1, len(found)),
        }

    def _stays(self, task: Task, share: float | None) -> bool:
        low, high = self.config.band
        if share is None:
            return False
        if low <= share <= high:
            return True
        chance = derive_seed(self._seed, "unsolved", task.task_id) / 2**31
        return share == 0 and chance < self.config.unsolved_share

    def groups(self) -> list[RolloutGroup]:
        """Return the history as groups, for an allocator."""
        return [g for g in self._groups if g.rollouts]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "cursor": self.cursor,
            "is_profiled": self.is_profiled,
            "shares": dict(self.shares),
            "pool": [t.task_id for t in self._pool],
            "history": [[o.task_id, list(o.rewards), o.epoch] for o in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.cursor = int(state["cursor"])
        self.is_profiled = bool(state["is_profiled"])
        self.shares = dict(state["shares"])
        self._pool = [self._all[t] for t in state["pool"]]
        self.history, self._groups, self._last = [], [], {}
        self._ordered = (-1, [])
        self._keep(TaskOutcome(t, tuple(r), int(e)) for t, r, e in state["history"])


def _light(task: Task, outcome: TaskOutcome) -> RolloutGroup:
    rollouts = tuple(
        Rollout(f"{task.task_id}-{i}", task.task_id, sample_index=i).graded(Score(r))
        for i, r in enumerate(outcome.rewards)
    )
    return RolloutGroup(task.task_id, task, rollouts)
