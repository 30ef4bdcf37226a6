"""The sampler's own cost: rollouts a second, distance from ideal at a fixed latency, memory.

Run: python -m tests.benchmarks.runs.runner
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.record import record
from tfgrpo.lm import open_lm
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import LM
from tfgrpo.rollout import Task
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.testing import FaultServer, say
from tfgrpo.verifiers import Exact

LATENCY_S = 0.2
WIDTH = 256


def tasks(n: int) -> list[Task]:
    """Return n small tasks."""
    return [Task(f"t{i}", f"What is {i} plus {i}?", reference=str(2 * i)) for i in range(n)]


def wrapped(lm: LM, store: Journal) -> RetryingLM:
    """Return the LM as a learning run uses it: journalled, then retried."""
    limiter = AdaptiveLimiter(1000, 1000, clock=time.monotonic)
    return RetryingLM(JournaledLM(lm, store), limiter=limiter)


def scripted(latency_s: float = 0.0) -> ScriptedLM:
    """Return a stub whose draws are right for even seeds."""
    return ScriptedLM(
        lambda request, seed: str(
            2 * int(request.messages[-1].content.split()[2]) + (seed or 0) % 2
        ),
        latency_s=latency_s,
    )


async def sample(lm: LM, n: int, group_size: int, width: int, folder: Path) -> float:
    """Return the seconds that n rollouts take on a warmed sampler, journal and verifier on."""
    store = Journal.open(folder, create=True)
    try:
        sampler = Sampler(
            ChatPolicy(wrapped(lm, store)),
            Exact(),
            SampleSettings(concurrency=width),
            recorder=store,
        )
        await sampler.groups(
            [Task("warm", "What is 1 plus 1?", reference="2")], GroupSpec(group_size=1)
        )
        started = time.perf_counter()
        groups = await sampler.groups(tasks(n // group_size), GroupSpec(group_size=group_size))
        seconds = time.perf_counter() - started
        assert sum(len(g.graded) for g in groups) == n
        return seconds
    finally:
        store.close()


def measure(kind: str) -> float:
    """Run one measurement in this process."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if kind == "rate":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            return 4000 / asyncio.run(sample(scripted(), 4000, 8, 64, run))
        if kind == "ideal":
            ideal = math.ceil(1000 / WIDTH) * LATENCY_S
            return asyncio.run(sample(scripted(LATENCY_S), 1000, 8, WIDTH, run)) / ideal
        if kind == "http":
            return asyncio.run(over_http(run))
        asyncio.run(sample(scripted(), 10_000, 8, WIDTH, run))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def over_http(folder: Path) -> float:
    """Return the ratio to ideal with the same latency behind a loopback server, in one process."""
    with FaultServer(say("7").after(LATENCY_S)) as server:
        lm = open_lm(f"{server.base_url}#stub", stream=False, supports_n=False)
        try:
            ideal = math.ceil(1000 / WIDTH) * LATENCY_S
            return await sample(lm, 1000, 8, WIDTH, folder) / ideal
        finally:
            await lm.aclose()


def main() -> None:
    """Measure each figure five times in fresh processes and record the medians."""
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return
    figures = {}
    for kind, name in (
        ("rate", "rollouts_per_s"),
        ("ideal", "ideal_ratio"),
        ("http", "ideal_ratio_http"),
        ("memory", "rss_mb"),
    ):
        runs = []
        for _ in range(5):
            command = [sys.executable, "-m", "tests.benchmarks.runs.runner", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(float(done.stdout.split()[-1]))
        figures[name] = round(statistics.median(runs), 3)
        print(name, runs)
    record("runner", figures, "python -m tests.benchmarks.runs.runner")


if __name__ == "__main__":
    main()
