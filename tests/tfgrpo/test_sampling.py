"""The sampler: groups by identity, typed outcomes, early verdicts, and nothing made twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.patience import PATIENCE_S
from tfgrpo.context import Context
from tfgrpo.errors import BudgetError, ConfigError, PolicyError, ProviderError, VerifierError
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings, Stop, Stopped, sample_group


@dataclass
class Echo:
    """Answers with its seed; a mapping from sample index to an exception or an outcome decides."""

    faults: Mapping[int, BaseException | str] = field(default_factory=dict)
    latency_s: float = 0.0
    policy_id: str = "echo"
    attempts: list[tuple[str, int]] = field(default_factory=list)

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        index = current_scope().sample_index
        self.attempts.append((task.task_id, index))
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        fault = self.faults.get(index)
        if isinstance(fault, BaseException):
            raise fault
        rollout = Rollout("", task.task_id, steps=(Step(Message("assistant", str(index))),))
        if fault == "truncated":
            return Rollout("", task.task_id, steps=rollout.steps, is_truncated=True)
        if fault == "auth":
            return Rollout(
                "",
                task.task_id,
                outcome="provider_failed",
                error="401 wrong key",
                metadata={"provider_kind": "auth"},
            )
        if fault is not None:
            return rollout.failed(fault, "as told")  # type: ignore[arg-type]
        return rollout


@dataclass
class Parity:
    """Reward 1 for even answers."""

    error: Exception | None = None
    verifier_id: str = "parity"
    reward_range: tuple[float, float] = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        if task.reference == "unreadable":
            raise ConfigError(f"task {task.task_id!r}: reference 'unreadable' is not a number")

    async def score(self, rollout: Rollout, task: Task) -> Score:
        if self.error is not None:
            raise self.error
        return Score(float(int(rollout.answer) % 2 == 0))


class Memory:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.rollouts: dict[tuple[str, str], Rollout] = {}
        self.groups: list[RolloutGroup] = []

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        return self.rollouts.get((rollout_id, verifier_id))

    def record_rollout(self, rollout: Rollout, *, group_id: str, verifier_id: str) -> None:
        assert (rollout.rollout_id, verifier_id) not in self.rollouts, "recorded twice"
        self.rollouts[(rollout.rollout_id, verifier_id)] = rollout

    def record_group(self, group: RolloutGroup) -> None:
        self.groups.append(group)


class Shelf(Memory):
    """A recorder in memory that finds many at once."""

    readings = 0

    def find_rollouts(self, rollout_ids: Sequence[str], verifier_id: str) -> dict[str, Rollout]:
        self.readings += 1
        found = {name: self.rollouts.get((name, verifier_id)) for name in rollout_ids}
        return {name: rollout for name, rollout in found.items() if rollout is not None}

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        raise AssertionError("one by one")


def tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", "same text") for i in range(n)]


async def test_groups_follow_task_ids_and_never_text() -> None:
    groups = await Sampler(Echo(), Parity()).groups(tasks(3), GroupSpec(group_size=4))
    assert [g.task.task_id for g in groups] == ["t0", "t1", "t2"]
    assert len({g.group_id for g in groups}) == 3
    assert all(g.rewards_G == (1.0, 0.0, 1.0, 0.0) for g in groups)
    assert all([r.sample_index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
    assert len({r.seed for g in groups for r in g.rollouts}) == 12


async def test_the_rollouts_of_many_groups_are_found_in_few_readings() -> None:
    shelf, policy = Shelf(), Echo()
    first = await Sampler(policy, Parity(), recorder=shelf).groups(tasks(150))
    shelf.readings = 0
    del shelf.rollouts[first[120].rollouts[3].rollout_id, "parity"]
    policy.attempts.clear()
    again = await Sampler(policy, Parity(), recorder=shelf).groups(tasks(150))
    assert shelf.readings == 2 and policy.attempts == [("t120", 3)]
    assert [[r.rollout_id for r in g.rollouts] for g in again] == [
        [r.rollout_id for r in g.rollouts] for g in first
    ]


async def test_results_do_not_depend_on_concurrency() -> None:
    one = await Sampler(Echo(), Parity(), SampleSettings(concurrency=1)).groups(tasks(5))
    many = await Sampler(Echo(), Parity(), SampleSettings(concurrency=64)).groups(tasks(5))
    strip = [[(r.rollout_id, r.seed, r.reward) for r in g.rollouts] for g in one]
    assert strip == [[(r.rollout_id, r.seed, r.reward) for r in g.rollouts] for g in many]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (RuntimeError("boom"), "policy_failed"),
        ("refused", "refused"),
        ("provider_failed", "provider_failed"),
        ("truncated", "truncated"),
    ],
)
async def test_a_failed_rollout_has_an_outcome_and_no_reward(
    fault: BaseException | str, outcome: str
) -> None:
    group = await sample_group(
        Task("t", "x"), Echo({1: fault}), Parity(), draws=GroupSpec(group_size=3)
    )
    assert [r.outcome for r in group.rollouts] == ["graded", outcome, "graded"]
    assert group.rollouts[1].reward is None
    assert group.rewards_G == (1.0, 1.0)


async def test_a_cut_reply_is_graded_on_request_and_keeps_its_flag() -> None:
    settings = SampleSettings(on_truncated="grade")
    group = await sample_group(
        Task("t", "x"), Echo({1: "truncated"}), Parity(), settings=settings, draws=GroupSpec(3)
    )
    assert group.rewards_G == (1.0, 0.0, 1.0)
    assert [r.is_truncated for r in group.rollouts] == [False, True, False]


async def test_a_slow_rollout_times_out_alone() -> None:
    class Slow(Echo):
        async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
            if current_scope().sample_index == 0:
                await asyncio.sleep(30)
            return await super().attempt(task, context, seed)

    group = await sample_group(
        Task("t", "x"),
        Slow(),
        Parity(),
        settings=SampleSettings(timeout_s=0.05),
        draws=GroupSpec(2),
    )
    assert [r.outcome for r in group.rollouts] == ["timed_out", "graded"]


async def test_a_crashing_verifier_is_never_a_reward() -> None:
    class Picky(Parity):
        async def score(self, rollout: Rollout, task: Task) -> Score:
            if rollout.answer == "2":
                raise ZeroDivisionError("division by zero")
            return await super().score(rollout, task)

    group = await sample_group(Task("t", "x"), Echo(), Picky(), draws=GroupSpec(4))
    assert group.outcome_counts() == {"graded": 3, "verifier_failed": 1}
    assert "ZeroDivisionError" in group.rollouts[2].error


@pytest.mark.parametrize(
    ("policy", "verifier", "error", "most"),
    [
        (Echo(dict.fromkeys(range(99), "auth")), Parity(), ProviderError, 5),
        (Echo(), Parity(error=RuntimeError("no reference")), VerifierError, 9),
        (Echo({i: RuntimeError("x") for i in range(99)}), Parity(), PolicyError, 9),
    ],
)
async def test_a_run_that_cannot_work_stops_within_a_handful_of_calls(
    policy: Echo, verifier: Parity, error: type[Exception], most: int
) -> None:
    policy.attempts.clear()
    with pytest.raises(error):
        await Sampler(policy, verifier).groups(tasks(50), GroupSpec(group_size=4))
    assert len(policy.attempts) <= most


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no tasks"),
        ([Task("a", "x"), Task("a", "y")], "'a' occurs twice"),
        ([Task("a", "x", reference="unreadable")], "'unreadable' is not a number"),
    ],
)
async def test_bad_tasks_are_refused_before_any_call(given: list[Task], message: str) -> None:
    policy = Echo()
    with pytest.raises(ConfigError, match=message):
        await Sampler(policy, Parity()).groups(given)
    assert policy.attempts == []


async def test_recorded_rollouts_are_never_made_again() -> None:
    memory, policy = Memory(), Echo()
    first = await Sampler(policy, Parity(), recorder=memory).groups(
        tasks(2), GroupSpec(group_size=4)
    )
    again = await Sampler(policy, Parity(), recorder=memory).groups(
        tasks(2), GroupSpec(group_size=6)
    )
    assert len(policy.attempts) == 12
    assert [g.rollouts[:4] for g in again] == [g.rollouts for g in first]


async def test_a_reached_limit_keeps_finished_rollouts_and_ends_the_call() -> None:
    memory = Memory()
    policy = Echo({5: BudgetError("calls: 6 of 5", resource="calls")})
    sampler = Sampler(policy, Parity(), SampleSettings(concurrency=1), recorder=memory)
    with pytest.raises(BudgetError):
        await sampler.groups(tasks(1), GroupSpec(group_size=8))
    assert len(memory.rollouts) == 5
    assert memory.groups == []


async def test_a_stop_finishes_what_is_in_flight_and_resumes() -> None:
    memory, stop = Memory(), Stop()
    policy = Echo(latency_s=0.01)
    sampler = Sampler(
        policy,
        Parity(),
        SampleSettings(concurrency=2, probe=0),
        recorder=memory,
        stop=stop,
        on_progress=lambda p: stop.request() if p.done == 3 else None,
    )
    with pytest.raises(Stopped):
        await sampler.groups(tasks(4), GroupSpec(group_size=4))
    assert 3 <= len(memory.rollouts) <= 4
    groups = await Sampler(policy, Parity(), recorder=memory).groups(
        tasks(4), GroupSpec(group_size=4)
    )
    assert sum(len(g.rollouts) for g in groups) == 16
    assert len(policy.attempts) == 16


async def test_cancelling_leaves_no_task_behind() -> None:
    policy = Echo(latency_s=10)
    before = len(asyncio.all_tasks())
    run = asyncio.create_task(Sampler(policy, Parity()).groups(tasks(4)))
    await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(asyncio.all_tasks()) == before


async def test_temperature_zero_in_a_group_warns(caplog: pytest.LogCaptureFixture) -> None:
    class Cold(Echo):
        @property
        def sampling(self) -> object:
            return type("S", (), {"temperature": 0})()

    await Sampler(Cold(), Parity()).groups(tasks(1), GroupSpec(group_size=2))
    assert "cannot differ" in caplog.text


async def test_sizes_allocate_rollouts_and_zero_leaves_a_task_out() -> None:
    groups = await Sampler(Echo(), Parity()).groups(tasks(3), GroupSpec(), sizes=[2, 0, 3])
    assert [(g.task.task_id, len(g.rollouts)) for g in groups] == [("t0", 2), ("t2", 3)]


class Shared(Memory):
    """One process's view of a memory that two share; tells who makes which group."""

    def __init__(self, name: str, memory: Memory, holders: dict[str, str], gone: set[str]) -> None:
        super().__init__()
        self.rollouts, self.groups = memory.rollouts, memory.groups
        self.name, self.holders, self.gone = name, holders, gone

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        if self.holders.get(group_id) in self.gone:
            del self.holders[group_id]
        return self.holders.setdefault(group_id, self.name) == self.name


def shared_samplers(
    monkeypatch: pytest.MonkeyPatch, gone: set[str]
) -> tuple[list[Echo], list[Sampler], Memory]:
    monkeypatch.setattr("tfgrpo.sampling._LOOK_AGAIN_S", 0.01)
    memory, holders = Memory(), dict[str, str]()
    policies = [Echo(latency_s=0.01), Echo(latency_s=0.01)]
    samplers = [
        Sampler(p, Parity(), SampleSettings(4), recorder=Shared(name, memory, holders, gone))
        for p, name in zip(policies, "ab", strict=True)
    ]
    return policies, samplers, memory


async def test_processes_that_share_a_recorder_share_the_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies, samplers, _ = shared_samplers(monkeypatch, set())
    first, second = await asyncio.gather(*(s.groups(tasks(12), GroupSpec(3)) for s in samplers))
    assert first == second and [g.task.task_id for g in first] == [t.task_id for t in tasks(12)]
    made = [*policies[0].attempts, *policies[1].attempts]
    assert len(made) == len(set(made)) == 36
    assert policies[0].attempts and policies[1].attempts


async def test_groups_of_a_process_that_is_gone_are_made_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone: set[str] = set()
    policies, samplers, memory = shared_samplers(monkeypatch, gone)
    policies[0].latency_s = 60.0
    dying = asyncio.create_task(samplers[0].groups(tasks(8), GroupSpec(2)))
    while not policies[0].attempts:
        await asyncio.sleep(0)
    living = asyncio.create_task(samplers[1].groups(tasks(8), GroupSpec(2)))
    while len(memory.groups) < 4:
        await asyncio.sleep(0.01)
    assert not living.done()
    dying.cancel()
    gone.add("a")
    found = await living
    assert [len(g.rollouts) for g in found] == [2] * 8


async def test_a_stop_before_anything_was_graded_ends_the_sampling() -> None:
    stop = Stop()
    sampler = Sampler(
        Echo(dict.fromkeys(range(8), "provider_failed")),
        Parity(),
        SampleSettings(concurrency=8, probe=2),
        stop=stop,
        on_progress=lambda p: stop.request(),
    )
    with pytest.raises(Stopped):
        async with asyncio.timeout(PATIENCE_S):
            await sampler.groups([Task("t1", "?")], GroupSpec(group_size=8))


async def test_waiting_for_another_process_ends_with_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tfgrpo.sampling._LOOK_AGAIN_S", 0.01)
    stop, policy = Stop(), Echo()
    recorder = Shared("b", Memory(), {}, set())
    monkeypatch.setattr(recorder, "lease_group", lambda group, verifier: False)
    sampler = Sampler(policy, Parity(), recorder=recorder, stop=stop)
    task = asyncio.create_task(sampler.groups(tasks(2), GroupSpec(2)))
    await asyncio.sleep(0.05)
    stop.request()
    with pytest.raises(Stopped):
        await task
    assert policy.attempts == []
