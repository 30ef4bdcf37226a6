"""The only loop that turns tasks into groups.

A `Sampler` owns concurrency, recording and the verdict "this run cannot work": it gives up early
when a key or model is wrong, or when nothing can be scored. One failed rollout changes nothing for
its siblings. Every finished rollout goes to the recorder before anything is built on it, and what
the recorder already holds is never made again. Attempts and their judging run in an executor: this
process, or workers; what is lost with a worker is done again, a few times at most.

Does not know: where rollouts run, what a policy does, how calls are cached, paid or retried (the
LM's wrappers do), or what groups are for. Source: own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import (
    ConfigError,
    ExecutorError,
    PolicyError,
    ProviderError,
    TfgrpoError,
    UnitLost,
    VerifierError,
)
from tfgrpo.execute.judging import judge, judge_group, refuse_group_verifier
from tfgrpo.execute.local import LocalExecutor
from tfgrpo.execute.protocol import Executor, OnTruncated, Unit, UnitSettings, rollout_id
from tfgrpo.protocols import GroupPolicy, Policy, Recorder, SharedRecorder, Verifier
from tfgrpo.rollout import Rollout, RolloutGroup, Task, group_id_of
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.runtime.canonical import derive_seed

__all__ = [
    "GroupSpec",
    "OnTruncated",
    "Progress",
    "SampleSettings",
    "Sampler",
    "Stop",
    "Stopped",
    "judge",
    "judge_group",
    "sample_group",
    "sample_groups",
]

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""How often a unit may be lost with its worker before its rollouts are given up."""


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """How rollouts are run; none of it changes what a rollout is, except `on_truncated`."""

    concurrency: int = 32
    """Rollouts in flight at most."""
    timeout_s: float = 600.0
    """Wall time of one attempt, seconds."""
    verifier_timeout_s: float = 120.0
    """Wall time of one verification, seconds."""
    on_truncated: OnTruncated = "exclude"
    """What a reply that hit its token limit becomes: outcome `truncated`, or graded and flagged."""
    probe: int = 4
    """Rollouts in flight until the first one has been graded; 0 starts at full width."""
    give_up_after: int = 5
    """Rollouts that fail in the same way, with none graded, before the run stops."""

    @property
    def of_units(self) -> UnitSettings:
        """What executors need of it."""
        return UnitSettings(self.timeout_s, self.verifier_timeout_s, self.on_truncated)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Which groups to make: everything that decides their identity besides the task."""

    group_size: int = 8
    first_index: int = 0
    """Sample index of the first rollout; later epochs continue where earlier ones ended."""
    seed: int = 0
    scope: str = ""
    """Tells apart groups that should be separate draws under equal settings."""
    stage: str = "practice"
    metadata: dict[str, Any] = field(default_factory=dict)
    """Kept with each group: step, arm, library version, …"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a call to `Sampler.groups` is."""

    stage: str
    done: int
    total: int
    failed: int
    in_flight: int


class Stop:
    """A request to stop: set once, seen by every loop that asks."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Ask that nothing new is started; what is in flight finishes."""
        self.requested = True


class Stopped(TfgrpoError):
    """Sampling ended early because a stop was requested; finished rollouts are recorded."""


@runtime_checkable
class _FindsMany(Protocol):
    """A recorder that looks for all rollouts of a group at once."""

    def find_rollouts(self, rollout_ids: Sequence[str], verifier_id: str) -> dict[str, Rollout]: ...


@dataclass(slots=True)
class _OpenGroup:
    """A group in the making."""

    task: Task
    context: Context
    group_id: str
    draws: GroupSpec
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    is_ours: bool | None = None
    """False while another process makes it; None before anybody was asked."""

    @property
    def missing(self) -> list[int]:
        first = self.draws.first_index
        return [i for i in range(first, first + self.draws.group_size) if i not in self.rollouts]

    def unit(self, indices: tuple[int, ...], losses: int = 0) -> Unit:
        """What an executor is given for some of its rollouts."""
        draws = self.draws
        return Unit(
            self.group_id, self.task, self.context, draws.stage, draws.seed, indices, losses
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one worker does at a time: one rollout, or a run of a group's rollouts in one call."""

    group: _OpenGroup
    indices: tuple[int, ...]


class Sampler:
    """Runs rollouts of one policy under one verifier.

    Args:
        policy: what acts.
        verifier: what judges; None leaves every attempt `ungraded`.
        settings: concurrency, deadlines, what to do with cut replies.
        recorder: where finished rollouts are kept and found again.
        on_progress: called after every finished rollout.
        stop: a stop request shared with the caller.
        executor: where rollouts run; None runs them in this process. It must have a policy and a
            verifier of the same identity.
    """

    def __init__(
        self,
        policy: Policy,
        verifier: Verifier | None,
        settings: SampleSettings | None = None,
        *,
        recorder: Recorder | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        stop: Stop | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._policy = policy
        self._verifier = verifier
        self._settings = settings or SampleSettings()
        self._recorder = recorder
        self._finds_many = recorder if isinstance(recorder, _FindsMany) else None
        self._on_progress = on_progress
        self._stop = stop or Stop()
        self._executor = executor or LocalExecutor(policy, verifier, self._settings.of_units)
        self._proven = self._settings.probe <= 0
        self._failures: list[Rollout] = []
        self._width = _width_within_limits(self._settings.concurrency)

    @property
    def policy_id(self) -> str:
        """The id of what acts."""
        return self._policy.policy_id

    @property
    def verifier_id(self) -> str:
        """The verifier's id, or empty where attempts stay ungraded."""
        return "" if self._verifier is None else self._verifier.verifier_id

    @property
    def best_reward(self) -> float | None:
        """The largest reward that the verifier can give, or None where it has no bound."""
        best = math.inf if self._verifier is None else self._verifier.reward_range[1]
        return best if math.isfinite(best) else None

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The least and the largest reward of the verifier, or None where either has no bound."""
        if self._verifier is None:
            return None
        low, high = self._verifier.reward_range
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    async def groups(
        self,
        tasks: Sequence[Task],
        draws: GroupSpec | None = None,
        context: Context | Callable[[Task], Context] = EMPTY_CONTEXT,
        sizes: Sequence[int] | None = None,
    ) -> list[RolloutGroup]:
        """Return one closed group a task, in the order of `tasks`.

        Args:
            tasks: distinct ids; the order fixes the order of the result and nothing else.
            draws: size, indices, seed and stage of the groups.
            context: what the policy is given, the same for all or chosen per task.
            sizes: group sizes a task, in place of `draws.group_size`; 0 leaves a task out.

        Raises:
            ConfigError: no task, a repeated id, a reference that the verifier cannot judge, or a
                verifier of whole groups.
            ProviderError: a wrong key, an unknown model, an exhausted quota.
            PolicyError, VerifierError: every rollout so far failed in the same way.
            BudgetError: a limit was reached; finished rollouts are recorded.
            Stopped: a stop was requested; finished rollouts are recorded.
        """
        draws = draws or GroupSpec()
        self._check(tasks, draws)
        opened = self._open(tasks, draws, context, sizes)
        for group in opened:
            if not group.missing:  # killed between the last rollout and the group's own record
                self._record(group)
        units = self._units(opened)
        total = sum(g.draws.group_size for g in opened)
        with call_scope(CallScope(stage=draws.stage)):
            while True:
                left = sum(len(g.missing) for g in opened)
                await self._run(units, draws.stage, total, total - left)
                theirs = [g for g in opened if g.is_ours is False and g.missing]
                if not theirs:
                    break
                units = self._units(await self._others(theirs))
        return [self._group(g) for g in opened]

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` where a stop was requested; for work between two calls to `groups`."""
        if self._stop.requested:
            raise Stopped("stopped on request: what was finished is kept")

    async def group(
        self, task: Task, draws: GroupSpec | None = None, context: Context = EMPTY_CONTEXT
    ) -> RolloutGroup:
        """Return the group of one task; raises like `groups`."""
        return (await self.groups([task], draws, context))[0]

    def _check(self, tasks: Sequence[Task], draws: GroupSpec) -> None:
        if not tasks:
            raise ConfigError("there are no tasks: give at least one")
        seen: set[str] = set()
        for task in tasks:
            if task.task_id in seen:
                raise ConfigError(
                    f"task id {task.task_id!r} occurs twice: every task needs an id of its own"
                )
            seen.add(task.task_id)
        if draws.group_size < 1:
            raise ConfigError(f"group_size is {draws.group_size}: at least 1 is needed")
        if self._verifier is not None:
            refuse_group_verifier(self._verifier, "sampling")
            for task in tasks:
                self._verifier.check_task(task)
        sampling = getattr(self._policy, "sampling", None)
        if draws.group_size > 1 and getattr(sampling, "temperature", None) == 0:
            log.warning(
                "temperature 0 with group_size %d: the draws of a group cannot differ, so no group "
                "will teach anything; set a temperature above 0",
                draws.group_size,
            )

    def _open(
        self,
        tasks: Sequence[Task],
        draws: GroupSpec,
        context: Context | Callable[[Task], Context],
        sizes: Sequence[int] | None,
    ) -> list[_OpenGroup]:
        if sizes is not None and len(sizes) != len(tasks):
            raise ConfigError(f"{len(sizes)} sizes for {len(tasks)} tasks: give one a task")
        opened: list[_OpenGroup] = []
        for position, task in enumerate(tasks):
            mine = draws if sizes is None else replace(draws, group_size=sizes[position])
            if mine.group_size == 0:
                continue
            given = context if isinstance(context, Context) else context(task)
            group_id = group_id_of(
                task, given, self._policy.policy_id, seed=draws.seed, scope=draws.scope
            )
            opened.append(_OpenGroup(task, given, group_id, mine))
        for start in range(0, len(opened), _FOUND_AT_ONCE):
            self._find(opened[start : start + _FOUND_AT_ONCE])
        return opened

    def _units(self, opened: Iterable[_OpenGroup]) -> list[_Unit]:
        together = isinstance(self._policy, GroupPolicy) and getattr(
            self._policy, "prefers_groups", True
        )
        units: list[_Unit] = []
        for group in opened:
            runs = _runs(group.missing) if together else [(i,) for i in group.missing]
            units.extend(_Unit(group, run) for run in runs)
        return units

    def _is_ours(self, group: _OpenGroup) -> bool:
        """Tell whether a group is to be made here; asks others once it is needed."""
        if group.is_ours:
            return True
        if not isinstance(self._recorder, SharedRecorder):
            group.is_ours = True
        elif self._recorder.lease_group(group.group_id, self.verifier_id):
            group.is_ours = True
            self._take_over(group)  # what another has made before it was ours
        else:
            group.is_ours = False
        return group.is_ours

    def _take_over(self, group: _OpenGroup) -> None:
        """Take what the recorder holds of a group; one that is whole then is closed here, too,
        which costs nothing where it is closed already."""
        was_missing = bool(group.missing)
        self._find([group])
        if was_missing and not group.missing:
            self._record(group)

    async def _others(self, groups: Sequence[_OpenGroup]) -> list[_OpenGroup]:
        """Wait for groups that other processes make; return those to be made here after all.

        Raises:
            Stopped: a stop was requested.
        """
        while True:
            self.raise_if_stopped()
            was_missing = sum(len(g.missing) for g in groups)
            for group in groups:
                self._take_over(group)
            ours = [g for g in groups if g.missing and self._is_ours(g)]
            if ours or sum(len(g.missing) for g in groups) < was_missing:
                return ours
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _find(self, groups: Sequence[_OpenGroup]) -> None:
        """Take over what the recorder holds of groups."""
        places = {rollout_id(g.group_id, i): (g, i) for g in groups for i in g.missing}
        for name, rollout in self._kept(list(places)).items():
            group, index = places[name]
            group.rollouts[index] = rollout

    def _kept(self, rollout_ids: Sequence[str]) -> dict[str, Rollout]:
        """Return the rollouts that the recorder holds, by id."""
        if self._recorder is None:
            return {}
        if self._finds_many is not None:
            return self._finds_many.find_rollouts(rollout_ids, self.verifier_id)
        found = {n: self._recorder.find_rollout(n, self.verifier_id) for n in rollout_ids}
        return {name: rollout for name, rollout in found.items() if rollout is not None}

    async def _run(self, units: list[_Unit], stage: str, total: int, done: int) -> None:
        queue = _Queue(units)
        state = _RunState(stage, total, done, n_tasks=len({u.group.task.task_id for u in units}))
        ready = asyncio.Event()
        if self._proven:
            ready.set()

        async def worker(number: int) -> None:
            if number >= self._settings.probe and not self._proven:
                await ready.wait()
            while (unit := queue.take(in_order=self._proven)) is not None:
                if self._stop.requested or state.ended is not None:
                    break  # those that wait for the first ones are let go below
                if not self._is_ours(unit.group):
                    continue
                state.in_flight += len(unit.indices)
                try:
                    for run in _runs([i for i in unit.indices if i not in unit.group.rollouts]):
                        await self._do(_Unit(unit.group, run), state)
                except TfgrpoError as exc:
                    state.ended = state.ended or exc
                finally:
                    state.in_flight -= len(unit.indices)
                    if self._proven or state.ended is not None:
                        ready.set()
            ready.set()

        largest = max((len(u.indices) for u in units), default=1)
        workers = min(len(units), max(1, self._width // largest))
        async with asyncio.TaskGroup() as tasks:
            for number in range(workers):
                tasks.create_task(worker(number))
                if number % _STARTED_A_TURN == _STARTED_A_TURN - 1:
                    await asyncio.sleep(0)  # the first calls go out while others are made ready
        if state.ended is not None:
            raise state.ended
        if self._stop.requested and any(u.group.missing for u in units):
            raise Stopped(
                f"stopped on request: {state.done} of {total} rollouts of stage {stage!r} are done "
                "and kept"
            )

    async def _do(self, unit: _Unit, state: _RunState) -> None:
        group = unit.group
        lost: UnitLost | None = None
        for losses in range(MOST_LOSSES):
            left = tuple(i for i in unit.indices if i not in group.rollouts)
            try:
                async with aclosing(self._executor.submit(group.unit(left, losses))) as finished:
                    async for rollout in finished:
                        self._take(group, rollout, state)
                break
            except UnitLost as exc:
                log.info("%s; it is done again", exc)
                lost = exc
                if self._stop.requested:
                    return
        else:
            for rollout in _given_up(group, unit.indices, lost):
                self._take(group, rollout, state)
        if not group.missing:
            self._record(group)

    def _take(self, group: _OpenGroup, finished: Rollout, state: _RunState) -> None:
        """Keep a finished rollout."""
        if self._recorder is not None:
            self._recorder.record_rollout(
                finished, group_id=group.group_id, verifier_id=self.verifier_id
            )
        group.rollouts[finished.sample_index] = finished
        state.done += 1
        if finished.outcome not in ("graded", "ungraded"):
            state.failed += 1
        self._watch(finished, state.n_tasks)
        if self._on_progress is not None:
            self._on_progress(
                Progress(state.stage, state.done, state.total, state.failed, state.in_flight)
            )

    def _watch(self, rollout: Rollout, n_tasks: int) -> None:
        """Raise when the run cannot work; one graded rollout proves that it can.

        The first failures must be of several tasks, for one task may be refused for its own sake.
        """
        kind = rollout.metadata.get("provider_kind")
        if kind in ("auth", "not_found", "quota"):
            raise ProviderError(rollout.error, kind=kind)
        if rollout.outcome in ("graded", "ungraded"):
            self._proven = True
            self._failures.clear()
        if self._proven or rollout.outcome not in _HOPELESS:
            return
        self._failures.append(rollout)
        same = [f for f in self._failures if f.outcome == rollout.outcome]
        enough = self._settings.give_up_after
        if len(same) >= enough and len({f.task_id for f in same}) >= min(enough, n_tasks):
            message = f"the first {len(same)} rollouts all failed alike: {same[0].error}"
            if rollout.outcome == "verifier_failed":
                raise VerifierError(message)
            if rollout.outcome == "policy_failed":
                raise PolicyError(message)
            if rollout.outcome == "cancelled":
                raise ExecutorError(message)
            raise ProviderError(message, kind=kind or "connection")

    def _group(self, group: _OpenGroup) -> RolloutGroup:
        metadata = {"stage": group.draws.stage, "verifier_id": self.verifier_id}
        return RolloutGroup(
            group_id=group.group_id,
            task=group.task,
            rollouts=tuple(group.rollouts[i] for i in sorted(group.rollouts)),
            context=group.context,
            policy_id=self._policy.policy_id,
            metadata=metadata | group.draws.metadata,
        )

    def _record(self, group: _OpenGroup) -> None:
        if self._recorder is not None:
            self._recorder.record_group(self._group(group))


_FOUND_AT_ONCE = 100
"""Groups that are looked for in one reading."""
_STARTED_A_TURN = 16
"""Workers that begin in one turn of the event loop."""
_LOOK_AGAIN_S = 0.5
"""Between two looks at groups that other processes make."""
_HOPELESS = ("verifier_failed", "policy_failed", "provider_failed", "cancelled")


@dataclass(slots=True)
class _RunState:
    stage: str
    total: int
    done: int
    failed: int = 0
    in_flight: int = 0
    ended: TfgrpoError | None = None
    n_tasks: int = 1
    """Tasks that have something to do."""


class _Queue:
    """The units of a run: in their order, or, until something was graded, one of each task first
    and the tasks in an order of their own, so that the order of a file decides nothing."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        self._units = units
        seen: Counter[str] = Counter()
        ranks: list[tuple[int, int, int]] = []
        for place, unit in enumerate(units):
            name = unit.group.task.task_id
            ranks.append((seen[name], derive_seed("probe", name), place))
            seen[name] += 1
        self._by_chance = iter([place for *_, place in sorted(ranks)])
        self._in_order = iter(range(len(units)))
        self._taken: set[int] = set()

    def take(self, *, in_order: bool) -> _Unit | None:
        """Return the next unit, or None where none is left."""
        for place in self._in_order if in_order else self._by_chance:
            if place not in self._taken:
                self._taken.add(place)
                return self._units[place]
        return None


def _given_up(
    group: _OpenGroup, indices: Sequence[int], lost: UnitLost | None
) -> Iterator[Rollout]:
    """The rollouts of a unit that was lost too often: `cancelled`, so that a resume tries again."""
    unit = group.unit(tuple(i for i in indices if i not in group.rollouts))
    for index, name, seed in zip(unit.indices, unit.rollout_ids, unit.seeds):
        blank = Rollout(name, group.task.task_id, sample_index=index, seed=seed)
        yield blank.failed("cancelled", f"lost {MOST_LOSSES} times with its worker: {lost}")


def _runs(indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut indices into runs of consecutive numbers.

    >>> _runs([0, 1, 4, 5, 9])
    [(0, 1), (4, 5), (9,)]
    """
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [tuple(run) for run in runs]


def _width_within_limits(asked: int) -> int:
    """Keep the width below the file-descriptor limit: a connection takes up to two."""
    if sys.platform == "win32":
        return max(1, asked)
    import resource  # not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(8, (soft - 64) // 2) if soft > 0 else asked
    if asked > most:
        log.warning("concurrency %d cut to %d: only %d files may be open", asked, most, soft)
    return max(1, min(asked, most))


async def sample_groups(
    tasks: Sequence[Task],
    policy: Policy,
    verifier: Verifier | None,
    *,
    context: Context | Callable[[Task], Context] = EMPTY_CONTEXT,
    draws: GroupSpec | None = None,
    settings: SampleSettings | None = None,
    recorder: Recorder | None = None,
) -> list[RolloutGroup]:
    """Return one group a task, in order; raises like `Sampler.groups`."""
    sampler = Sampler(policy, verifier, settings, recorder=recorder)
    return await sampler.groups(tasks, draws, context)


async def sample_group(
    task: Task,
    policy: Policy,
    verifier: Verifier | None,
    *,
    context: Context = EMPTY_CONTEXT,
    draws: GroupSpec | None = None,
    settings: SampleSettings | None = None,
    recorder: Recorder | None = None,
) -> RolloutGroup:
    """Return the group of one task: G rollouts under one context; raises like `Sampler.groups`."""
    return await Sampler(policy, verifier, settings, recorder=recorder).group(task, draws, context)
