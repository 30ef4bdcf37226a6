"""One suite for all places where rollouts run: equal rollouts, lost workers, nothing paid twice.

Each check takes the kind of place and a folder; `test_executors` and `test_ray` run them.
"""

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
from tfgrpo.errors import BudgetError, ConfigError, UnitLost
from tfgrpo.execute.protocol import Executor
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.rollout import Rollout, Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Budget, Journal, JournaledLM
from tfgrpo.testing import check_executor
from tfgrpo.workers.endpoint import RunEndpoint
from tfgrpo.workers.pool import PoolExecutor, WorkerPool
from tfgrpo.workers.processes import process_starter
from tfgrpo.workers.ray_cluster import RayCluster, RaySettings


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


async def run_unit(executor: Executor, unit: worlds.Unit) -> list[Rollout]:
    return [r async for r in executor.submit(unit)]


async def every_place_gives_the_same_rollouts(kind: str, tmp_path: Path) -> None:
    units = [
        worlds.unit("101", indices=(0, 1, 2)),
        worlds.unit("1", "sleep:0.2", lesson="Count twice."),
        worlds.unit("11", "raise", indices=(4,)),
        worlds.unit("half \ud83d surrogate", lesson="Ünïcode ✓"),
    ]
    lm = worlds.scripted()
    async with place(kind, lm) as there:
        await check_executor(there.executor(), worlds.local(lm), units)


async def a_worker_that_dies_loses_its_unit_and_is_replaced(kind: str, tmp_path: Path) -> None:
    async with place(kind, worlds.scripted(), workers=1) as there:
        executor = there.executor(marks=str(tmp_path))
        unit = worlds.unit("101", "die once:a")
        with pytest.raises(UnitLost, match=r"SIGKILL|Actor\w*Error"):
            [r async for r in executor.submit(unit)]
        (rollout,) = [r async for r in executor.submit(replace(unit, losses=1))]
        assert rollout.outcome == "graded" and there.pool is not None and there.pool.lost == 1


async def the_sampler_does_lost_units_again_and_pays_nothing_twice(
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


async def a_call_in_flight_when_its_worker_dies_is_finished_and_kept(
    kind: str, tmp_path: Path
) -> None:
    raw = Counting(0.5)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = RetryingLM(JournaledLM(raw, store))
        async with place(kind, lm, workers=1) as there:
            executor = there.executor()
            unit = worlds.unit("101")
            first = asyncio.create_task(run_unit(executor, unit))
            while not raw.in_flight:
                await asyncio.sleep(0.01)
            assert there.pool is not None
            pid = re.search(r"\d+", there.pool.alive[0])
            assert pid is not None
            os.kill(int(pid[0]), signal.SIGKILL)
            with pytest.raises(UnitLost):
                await first
            assert (await run_unit(executor, unit))[0].outcome == "graded"
    assert raw.asked.total() == raw.answered.total() == 1


async def what_ends_a_run_is_raised_as_the_same_error(kind: str, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True, budget=Budget(calls=2)) as store:
        lm = RetryingLM(JournaledLM(worlds.scripted(), store))
        async with place(kind, lm) as there:
            with pytest.raises(BudgetError) as caught:
                await run_unit(there.executor(), worlds.unit("1", indices=(0, 1, 2)))
    assert caught.value.resource == "calls"


async def a_work_that_cannot_be_built_or_is_another_is_refused(kind: str, tmp_path: Path) -> None:
    lm = worlds.scripted()
    async with place(kind, lm) as there:
        assert there.pool is not None
        other = PoolExecutor(there.pool, replace(worlds.spec(lm), policy_id="chat-other"))
        with pytest.raises(ConfigError, match="install the same code"):
            await run_unit(other, worlds.unit("1"))
        broken = replace(worlds.spec(lm), values={"fails": True})
        with pytest.raises(ConfigError, match="cannot be built"):
            await run_unit(PoolExecutor(there.pool, broken), worlds.unit("1"))


async def closing_early_frees_the_slot_and_stops_the_unit(kind: str, tmp_path: Path) -> None:
    raw = Counting(0.3)
    async with place(kind, raw, workers=1, slots=1) as there:
        executor = there.executor()
        going = asyncio.create_task(run_unit(executor, worlds.unit("1", "sleep:600")))
        while not raw.answered:
            await asyncio.sleep(0.01)
        going.cancel()
        assert (await run_unit(executor, worlds.unit("11")))[0].outcome == "graded"
        assert there.pool is not None and there.pool.lost == 0


EVERYWHERE = (every_place_gives_the_same_rollouts, what_ends_a_run_is_raised_as_the_same_error)
ON_WORKERS = (
    a_worker_that_dies_loses_its_unit_and_is_replaced,
    the_sampler_does_lost_units_again_and_pays_nothing_twice,
    a_call_in_flight_when_its_worker_dies_is_finished_and_kept,
    a_work_that_cannot_be_built_or_is_another_is_refused,
    closing_early_frees_the_slot_and_stops_the_unit,
)
