"""What the journal costs: microseconds a rollout, opening 100,000 rollouts, bytes on disk.

The same scripted run is made with and without a store, on one core; the difference is the
journal's. Wall time counts: the best run with a store less the best run without one, of five each,
and the median of the five differences. It means something on a quiet machine only, so processor
time stands beside it. Replies have 500 bytes.
Beside it: the same rows committed in the writing thread and handed to a thread.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import LM, Request, Sampling
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store.journal import FILE, Journal
from tfgrpo.store.journaled_lm import JournaledLM

GROUP = 10
REPLY = "The answer follows from the second line of the table, as shown. " * 8


def _script(request: Request, seed: int | None) -> str:
    return f"{seed:>11} {REPLY}"[:500]


class _Length:
    verifier_id = "length-1"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(float(len(rollout.answer) % 2))


class _Forgetful(ScriptedLM):
    """A scripted LM that keeps no list of what it was asked."""

    def _one(self, request: Request, seed: int | None) -> Any:
        reply = super()._one(request, seed)
        self.requests.clear()
        return reply


async def _sample(rollouts: int, store: Journal | None, scope: str = "") -> tuple[float, float]:
    """Return (processor seconds, wall seconds)."""
    lm: LM = _Forgetful(_script)
    if store is not None:
        lm = JournaledLM(lm, store)
    policy = ChatPolicy(lm, sampling=Sampling(temperature=0.7, max_tokens=200))
    tasks = [Task(f"task-{i}", f"What is {i} times {i + 1}?") for i in range(rollouts // GROUP)]
    sampler = Sampler(policy, _Length(), SampleSettings(concurrency=64), recorder=store)
    busy, started = time.process_time(), time.perf_counter()
    await sampler.groups(tasks, GroupSpec(GROUP, scope=scope))
    return time.process_time() - busy, time.perf_counter() - started


def _cost_us(rollouts: int, repeats: int = 5) -> dict[str, float]:
    """Return the journal's microseconds a rollout and its bytes a rollout."""
    bare_runs, kept_runs, size = [], [], 0.0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as root:
            bare = asyncio.run(_sample(rollouts, None))
            with Journal.open(Path(root) / "run", create=True) as store:
                kept = asyncio.run(_sample(rollouts, store))
            size = (Path(root) / "run" / FILE).stat().st_size / rollouts
        bare_runs.append(bare)
        kept_runs.append(kept)

    def microseconds(which: int) -> tuple[float, float]:
        bare = [run[which] * 1e6 / rollouts for run in bare_runs]
        kept = [run[which] * 1e6 / rollouts for run in kept_runs]
        return min(kept) - min(bare), median(k - b for k, b in zip(kept, bare))

    busy, wall = microseconds(0), microseconds(1)
    return {
        "us_per_rollout": round(wall[0], 1),
        "us_per_rollout_median": round(wall[1], 1),
        "cpu_us_per_rollout": round(busy[0], 1),
        "cpu_us_per_rollout_median": round(busy[1], 1),
        "bytes_per_rollout": round(size),
    }


def _open_cost_s(rollouts: int) -> dict[str, float]:
    """Return seconds from opening to the folded state, after an orderly end and after a kill."""
    root = Path(tempfile.mkdtemp())
    try:
        part = 10_000
        with Journal.open(root / "run", create=True) as store:
            for start in range(0, rollouts, part):
                asyncio.run(_sample(part, store, scope=str(start)))
            store.record_library("v1", {"entries": ["a lesson"] * 50})
        times = {}
        for name in ("open_s_100k", "open_s_100k_after_kill"):
            started = time.perf_counter()
            store = Journal.open(root / "run")
            state = store.state()
            times[name] = round(time.perf_counter() - started, 3)
            assert state.rollouts == rollouts and state.library_id == "v1"
            store.abandon()  # the next opening checks the whole file
        times["file_mb_100k"] = round((root / "run" / FILE).stat().st_size / 1e6, 1)
        return times
    finally:
        shutil.rmtree(root)


def _commit_us(in_thread: bool, rows: int = 4000, tasks: int = 64) -> float:
    """Return microseconds a row that 64 busy tasks commit one by one."""
    sql = "INSERT INTO hits VALUES ('stage', 'model', 1)"

    async def work(store: Journal, pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(rows // tasks):
            sum(range(500))  # what a task does between two calls
            if in_thread:
                await loop.run_in_executor(pool, store._writer.commit_now, [(sql, ())])
            else:
                await store._writer.commit([(sql, ())])

    async def many(store: Journal) -> float:
        with ThreadPoolExecutor(1) as pool:
            started = time.perf_counter()
            await asyncio.gather(*(work(store, pool) for _ in range(tasks)))
            return (time.perf_counter() - started) / rows * 1e6

    with tempfile.TemporaryDirectory() as root, Journal.open(root, create=True) as store:
        return asyncio.run(many(store))


def main() -> None:
    """Measure and record."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures: dict[str, Any] = {
        **_cost_us(10_000),
        "rollouts": 10_000,
        "reply_bytes": 500,
        **_open_cost_s(100_000),
        "commit_us_in_turn": round(_commit_us(False), 1),
        "commit_us_in_thread": round(_commit_us(True), 1),
    }
    record("journal", figures, "python -m tests.benchmarks.runs.journal")


if __name__ == "__main__":
    main()
