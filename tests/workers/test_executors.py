"""The suite of all places here and in worker processes, and what is the pool's own doing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers import worlds
from tests.workers.contract import EVERYWHERE, ON_WORKERS, place, run_unit
from tfgrpo.errors import ExecutorError, UnitLost
from tfgrpo.rollout import Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.workers.pool import PoolExecutor

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.name == "nt", reason="Unix sockets")]
pytest.importorskip("aiohttp")


@pytest.mark.parametrize("kind", ["local", "processes"])
@pytest.mark.parametrize("check", EVERYWHERE, ids=lambda check: check.__name__)
async def test_everywhere(check: Callable[..., Any], kind: str, tmp_path: Path) -> None:
    await check(kind, tmp_path)


@pytest.mark.parametrize("check", ON_WORKERS, ids=lambda check: check.__name__)
async def test_on_worker_processes(check: Callable[..., Any], tmp_path: Path) -> None:
    await check("processes", tmp_path)


async def test_one_that_kills_workers_is_found_and_its_neighbours_are_graded() -> None:
    lm = worlds.scripted(0.02)
    async with place("processes", lm, workers=2, slots=8) as there:
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


async def test_where_every_worker_dies_the_run_ends_with_the_reason() -> None:
    lm = worlds.scripted()
    async with place("processes", lm) as there:
        sampler = Sampler(*worlds.build({}, lambda _: lm), executor=there.executor())
        tasks = [Task(f"t{n}", f"{n}", "1", metadata={"deed": "die"}) for n in range(6)]
        with pytest.raises(ExecutorError, match="all failed alike: lost 3 times"):
            await sampler.groups(tasks, GroupSpec(group_size=1))


async def test_a_worker_that_hangs_is_killed_after_its_deadlines() -> None:
    lm = worlds.scripted()
    async with place("processes", lm, workers=1) as there:
        limits = worlds.UnitSettings(timeout_s=8.0, verifier_timeout_s=3.0)
        spec = replace(worlds.spec(lm), settings=limits)
        assert there.pool is not None
        there.pool._grace_s = 1.0
        executor = PoolExecutor(there.pool, spec)
        with pytest.raises(UnitLost, match="no answer within 12 s"):
            await run_unit(executor, worlds.unit("1", "hang"))
        assert (await run_unit(executor, worlds.unit("1")))[0].outcome == "graded"
