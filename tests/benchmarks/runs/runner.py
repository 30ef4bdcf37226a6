"""The sampler's own cost: rollouts a second, distance from ideal at a fixed latency, memory.

Over HTTP the model is a stub in a process of its own, and the processor time that a rollout costs
here is told beside the ratio: a machine that is busy otherwise changes the second, hardly the
first.

Run: python -m tests.benchmarks.runs.runner
"""

from __future__ import annotations

import asyncio
import json
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


async def sample(lm: LM, n: int, group_size: int, width: int, folder: Path) -> tuple[float, float]:
    """Return the seconds that n rollouts take on a warmed sampler, journal and verifier on: on the
    clock, and of this process on a processor."""
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
        started, cpu_before = time.perf_counter(), time.process_time()
        groups = await sampler.groups(tasks(n // group_size), GroupSpec(group_size=group_size))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        assert sum(len(g.graded) for g in groups) == n
        return seconds, cpu_s
    finally:
        store.close()


def measure(kind: str) -> dict[str, float]:
    """Run one measurement in this process; figures by name."""
    ideal_s = math.ceil(1000 / WIDTH) * LATENCY_S
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if kind == "rate":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            seconds, cpu_s = asyncio.run(sample(scripted(), 4000, 8, 64, run))
            return {"rollouts_per_s": 4000 / seconds, "cpu_ms": cpu_s / 4}
        if kind == "ideal":
            seconds, _ = asyncio.run(sample(scripted(LATENCY_S), 1000, 8, WIDTH, run))
            return {"ideal_ratio": seconds / ideal_s}
        if kind == "http":
            seconds, cpu_s = over_http(run)
            return {"ideal_ratio_http": seconds / ideal_s, "cpu_ms_http": cpu_s}
        asyncio.run(sample(scripted(), 10_000, 8, WIDTH, run))
        return {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def over_http(folder: Path) -> tuple[float, float]:
    """Return what 1,000 rollouts take with the same latency behind a server on this machine."""
    command = [sys.executable, "-m", "tests.benchmarks.serve.stub", "0", str(LATENCY_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        spec = f"http://127.0.0.1:{int(server.stdout.readline())}/v1#stub"
        try:
            return asyncio.run(ask_over_http(spec, folder))
        finally:
            server.terminate()


async def ask_over_http(spec: str, folder: Path) -> tuple[float, float]:
    """Sample 1,000 rollouts of a server's model, one call each."""
    lm = open_lm(spec, stream=False, supports_n=False)
    try:
        return await sample(lm, 1000, 8, WIDTH, folder)
    finally:
        await lm.aclose()


def main() -> None:
    """Measure each figure five times in fresh processes and record the medians."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    figures = {}
    for kind in ("rate", "ideal", "http", "memory"):
        runs: list[dict[str, float]] = []
        for _ in range(5):
            command = [sys.executable, "-m", "tests.benchmarks.runs.runner", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(kind, runs)
        for name in runs[0]:
            figures[name] = round(statistics.median(run[name] for run in runs), 3)
    record("runner", figures, "python -m tests.benchmarks.runs.runner")


if __name__ == "__main__":
    main()
