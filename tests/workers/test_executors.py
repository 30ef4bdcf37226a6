"""One suite for all places where rollouts run: equal rollouts, lost workers, nothing paid twice."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.workers import worlds
from tests.workers.conftest import TOKEN
from tfgrpo.errors import BudgetError, ConfigError, ExecutorError, UnitLost
from tfgrpo.execute.protocol import Executor
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.rollout import Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Budget, Journal, JournaledLM
from tfgrpo.testing import check_executor
from tfgrpo.workers.endpoint import RunEndpoint
from tfgrpo.workers.pool import PoolExecutor, WorkerPool
from tfgrpo.workers.processes import process_starter
from tfgrpo.workers.ray_cluster import RayCluster, RaySettings

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.name == "nt", reason="Unix sockets")]
pytest.importorskip("aiohttp")


@dataclass
class Place:
    """Where rollouts run, for a test."""

    lm: LM
    pool: WorkerPool | None
    endpoint: RunEndpoint | None

    def executor(self, **values: object) -> Executor:
        if self.pool is None:
            return worlds.local(self.lm)
        return PoolExecutor(self.pool, worlds.spec(self.lm, **values))


@asynccontextmanager
async def place(kind: str, lm: LM, *, workers: int = 2, slots: int = 4) -> AsyncIterator[Place]:
    if kind == "local":
        yield Place(lm, None, None)
        return
    endpoint = RunEndpoint({"main": lm}, TOKEN)
    if kind == "ray":
        cluster = RayCluster(RaySettings(), workers, TOKEN)
        start = cluster.starter(await endpoint.start("127.0.0.1:0"))
    else:
        start = process_starter(await endpoint.start(), TOKEN)
    pool = WorkerPool(start, workers=workers, slots=slots, grace_s=5.0)
    try:
        yield Place(lm, pool, endpoint)
    finally:
        await pool.aclose()
        await endpoint.aclose()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The place to test; the cluster is started where it is Ray."""
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    return name


def places(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names, indirect=True)


every_place = places("local", "processes", "ray")
remote = places("processes", "ray")
of_the_pool = places("processes")
"""For what is the pool's own doing, the same for all its workers."""


class Counting:
    """An LM that counts what it was asked, with a pause before each answer."""

    prefers_n = False
    model_id = "scripted:counting"

    @property
    def identity(self) -> dict[str, str]:
        return {"backend": "scripted", "model": "counting"}

    def __init__(self, latency_s: float = 0.0) -> None:
        self.asked: Counter[tuple[str, int | None]] = Counter()
        self.answered: Counter[tuple[str, int | None]] = Counter()
        self.in_flight = 0
        self._lm = worlds.scripted(latency_s)

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        key = (request.messages[-1].content, seeds[0])
        self.asked[key] += 1
        self.in_flight += 1
        try:
            replies = await self._lm.complete(request, n, seeds)
        finally:
            self.in_flight -= 1
        self.answered[key] += 1
        return replies

    async def aclose(self) -> None:
        pass


@every_place
async def test_every_place_gives_the_same_rollouts(kind: str) -> None:
    units = [
        worlds.unit("101", indices=(0, 1, 2)),
        worlds.unit("1", "sleep:0.2", lesson="Count twice."),
        worlds.unit("11", "raise", indices=(4,)),
        worlds.unit("half \ud83d surrogate", lesson="Ünïcode ✓"),
    ]
    lm = worlds.scripted()
    async with place(kind, lm) as there:
        await check_executor(there.executor(), worlds.local(lm), units)


@remote
async def test_a_worker_that_dies_loses_its_unit_and_is_replaced(kind: str, tmp_path: Path) -> None:
    async with place(kind, worlds.scripted(), workers=1) as there:
        executor = there.executor(marks=str(tmp_path))
        unit = worlds.unit("101", "die once:a")
        with pytest.raises(UnitLost, match=r"SIGKILL|Actor\w*Error"):
            [r async for r in executor.submit(unit)]
        (rollout,) = [r async for r in executor.submit(replace(unit, losses=1))]
        assert rollout.outcome == "graded" and there.pool is not None and there.pool.lost == 1


@remote
async def test_the_sampler_does_lost_units_again_and_pays_nothing_twice(
    kind: str, tmp_path: Path
) -> None:
    raw = Counting(0.05)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = RetryingLM(JournaledLM(raw, store))
        async with place(kind, lm, slots=8) as there:
            sampler = Sampler(
                *worlds.build({}, lambda _: lm),
                SampleSettings(concurrency=16, probe=0),
                recorder=store,
                executor=there.executor(marks=str(tmp_path)),
            )
            tasks = [
                Task(f"{n}", f"How many ones in {n}?", "1",
                     metadata={"deed": f"die once:{n}" if n % 7 == 0 else ""})
                for n in range(30)
            ]  # fmt: skip
            groups = await sampler.groups(tasks, GroupSpec(group_size=2))
            assert there.pool is not None and there.pool.lost >= 1
    assert [g.outcome_counts() for g in groups] == [{"graded": 2}] * 30
    assert len(raw.answered) == 60 and set(raw.answered.values()) == {1}
    assert raw.asked == raw.answered


@remote
async def test_a_call_in_flight_when_its_worker_dies_is_finished_and_kept(
    kind: str, tmp_path: Path
) -> None:
    raw = Counting(0.5)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = RetryingLM(JournaledLM(raw, store))
        async with place(kind, lm, workers=1) as there:
            executor = there.executor()
            unit = worlds.unit("101")
            first = asyncio.create_task(_all(executor, unit))
            while not raw.in_flight:
                await asyncio.sleep(0.01)
            assert there.pool is not None
            pid = re.search(r"\d+", there.pool.alive[0])
            assert pid is not None
            os.kill(int(pid[0]), signal.SIGKILL)
            with pytest.raises(UnitLost):
                await first
            assert (await _all(executor, unit))[0].outcome == "graded"
    assert raw.asked.total() == raw.answered.total() == 1


async def _all(executor: Executor, unit: worlds.Unit) -> list[worlds.Rollout]:
    return [r async for r in executor.submit(unit)]


@of_the_pool
async def test_one_that_kills_workers_is_found_and_its_neighbours_are_graded(kind: str) -> None:
    lm = worlds.scripted(0.02)
    async with place(kind, lm, workers=2, slots=8) as there:
        sampler = Sampler(
            *worlds.build({}, lambda _: lm),
            SampleSettings(concurrency=16, probe=0),
            executor=there.executor(),
        )
        tasks = [
            Task(f"t{n}", f"{n}", "1", metadata={"deed": "die" if n == 5 else ""})
            for n in range(40)
        ]  # fmt: skip
        groups = await sampler.groups(tasks, GroupSpec(group_size=1))
        assert there.pool is not None and there.pool.lost == 3
    outcomes = [g.rollouts[0].outcome for g in groups]
    assert outcomes == ["graded"] * 5 + ["cancelled"] + ["graded"] * 34
    assert "lost 3 times with its worker" in groups[5].rollouts[0].error


@of_the_pool
async def test_where_every_worker_dies_the_run_ends_with_the_reason(kind: str) -> None:
    lm = worlds.scripted()
    async with place(kind, lm) as there:
        sampler = Sampler(*worlds.build({}, lambda _: lm), executor=there.executor())
        tasks = [Task(f"t{n}", f"{n}", "1", metadata={"deed": "die"}) for n in range(6)]
        with pytest.raises(ExecutorError, match="all failed alike: lost 3 times"):
            await sampler.groups(tasks, GroupSpec(group_size=1))


@of_the_pool
async def test_a_worker_that_hangs_is_killed_after_its_deadlines(kind: str) -> None:
    lm = worlds.scripted()
    async with place(kind, lm, workers=1) as there:
        spec = replace(
            worlds.spec(lm), settings=worlds.UnitSettings(timeout_s=0.5, verifier_timeout_s=0.5)
        )
        assert there.pool is not None
        there.pool._grace_s = 1.0
        executor = PoolExecutor(there.pool, spec)
        with pytest.raises(UnitLost, match="no answer within 2 s"):
            await _all(executor, worlds.unit("1", "hang"))
        assert (await _all(executor, worlds.unit("1")))[0].outcome == "graded"


@every_place
async def test_what_ends_a_run_is_raised_as_the_same_error(kind: str, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True, budget=Budget(calls=2)) as store:
        lm = RetryingLM(JournaledLM(worlds.scripted(), store))
        async with place(kind, lm) as there:
            with pytest.raises(BudgetError) as caught:
                await _all(there.executor(), worlds.unit("1", indices=(0, 1, 2)))
    assert caught.value.resource == "calls"


@remote
async def test_a_work_that_cannot_be_built_or_is_another_one_is_refused(kind: str) -> None:
    lm = worlds.scripted()
    async with place(kind, lm) as there:
        assert there.pool is not None
        other = PoolExecutor(there.pool, replace(worlds.spec(lm), policy_id="chat-other"))
        with pytest.raises(ConfigError, match="install the same code"):
            await _all(other, worlds.unit("1"))
        broken = replace(worlds.spec(lm), values={"fails": True})
        with pytest.raises(ConfigError, match="cannot be built"):
            await _all(PoolExecutor(there.pool, broken), worlds.unit("1"))


@remote
async def test_closing_early_frees_the_slot_and_stops_the_unit(kind: str) -> None:
    raw = Counting(0.3)
    async with place(kind, raw, workers=1, slots=1) as there:
        executor = there.executor()
        going = asyncio.create_task(_all(executor, worlds.unit("1", "sleep:600")))
        while not raw.answered:
            await asyncio.sleep(0.01)
        going.cancel()
        assert (await _all(executor, worlds.unit("11")))[0].outcome == "graded"
        assert there.pool is not None and there.pool.lost == 0
