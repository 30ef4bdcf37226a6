"""Eight uneven servers as one backend: throughput against the ideal, affinity, and the tail.

One server is killed on the way and one answers 500 from some moment on. The ideal is the sum of the
slots over the service times of the servers that work, as long as calls are waiting. A second part
measures the time to the whole reply with and without hedging, six calls at once, where the first
token takes 5 s in place of 0.2 s for 2 % of the calls.

Run: nice python -m tests.benchmarks.scale.fleet
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from tests.benchmarks.record import record
from tests.lm.fleet.virtual import Simulated, run_virtual, stalling
from tests.lm.fleet.virtual import closed_loop as closed
from tfgrpo.lm.fleet import fleet_lm
from tfgrpo.lm.fleet.fleet_lm import FleetLM
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.runtime.call_scope import CallScope, call_scope

SLOTS = 8
SERVICE_S = (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 4.0)
"""Time of a call on each server."""
KILLED, BROKEN = 1, 4
GROUP, WIDTH, CALLS = 8, 128, 3_000


@dataclass
class Stub:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def stubs(*rules: dict[str, Any]) -> Iterator[list[Stub]]:
    """Start servers; they are killed at the end."""
    started: list[Stub] = []
    try:
        for row in rules:
            command = [sys.executable, "-m", "tests.benchmarks.scale.stub", json.dumps(row)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            started.append(Stub(process, f"http://127.0.0.1:{int(process.stdout.readline())}/v1"))
        yield started
    finally:
        for stub in started:
            stub.process.kill()
            stub.process.wait()


def counts(url: str) -> dict[str, Any]:
    """Return what a server counted."""
    with urlopen(url.removesuffix("/v1") + "/counts") as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def request(task: str) -> Request:
    return Request((Message("system", "lessons"), Message("user", task)))


async def ask(lm: Any, n: int) -> None:
    task = f"task {n // GROUP}"
    with call_scope(CallScope("practice", task, f"g{n // GROUP}-{n % GROUP}", n % GROUP)):
        await lm.complete(request(task), 1, [n % GROUP])


async def closed_loop(lm: Any, calls: int, width: int, at: dict[int, Any]) -> tuple[float, float]:
    """Make calls with `width` in flight; return the start and the moment the last one began.

    Args:
        at: what to do when so many calls have begun.
    """
    began = time.perf_counter()
    waiting = iter(range(calls))
    last = began

    async def worker() -> None:
        nonlocal last
        for n in waiting:
            if n in at:
                await asyncio.to_thread(at[n])
            last = time.perf_counter()
            await ask(lm, n)

    await asyncio.gather(*(worker() for _ in range(width)))
    return began, last


async def throughput(affinity: bool) -> dict[str, float]:
    """Return the share of the ideal throughput, and what became of affinity."""
    rules = [{"slots": SLOTS, "first_s": s / 4, "reply_s": s * 3 / 4} for s in SERVICE_S]
    with stubs(*rules) as servers:
        raw = FleetLM("bench", servers=[s.url for s in servers], model="stub", hedge_share=0.0)
        lm = RetryingLM(raw, RetryPolicy(first_wait_s=0.2))
        lm.limiter._width = lm.limiter._most = 1000
        ended: dict[int, float] = {}

        def kill() -> None:
            ended[KILLED] = time.perf_counter()
            servers[KILLED].process.kill()

        def damage() -> None:
            ended[BROKEN] = time.perf_counter()
            urlopen(servers[BROKEN].url.removesuffix("/v1") + "/break", data=b"{}").read()

        key_of = fleet_lm.affinity_key
        if not affinity:
            fleet_lm.affinity_key = lambda turns, scope: ""
        try:
            events = {CALLS // 3: kill, CALLS // 2: damage}
            began, last = await closed_loop(lm, CALLS, WIDTH, events)
        finally:
            fleet_lm.affinity_key = key_of
        alive = [i for i in range(len(servers)) if i not in (KILLED, BROKEN)]
        ran_s = time.perf_counter() - began
        busy_s = sum(counts(servers[i].url)["busy_s"] for i in alive)
        rows = raw.fleet.figures()["servers"].values()
        await raw.aclose()
    ideal = sum(
        SLOTS / service * (ended.get(i, last) - began) for i, service in enumerate(SERVICE_S)
    )
    calls = sum(r["calls"] for r in rows)
    return {
        # the last ones in flight are not done yet when nothing waits any more
        "throughput_ratio": (CALLS - WIDTH) / ideal,
        "busy_share": busy_s / (ran_s * SLOTS * len(alive)),
        "at_home": sum(r["at_home"] for r in rows) / calls,
        "cached_share": sum(r["cached_tokens"] for r in rows)
        / sum(r["prompt_tokens"] for r in rows),
        "retries": lm.retries,
        "calls_per_s": (CALLS - WIDTH) / (last - began),
    }


async def tail(share: float) -> tuple[float, float, float]:
    """Return p50 and p99 of the time of a call, and the share of calls that were sent twice."""
    rules = {"slots": 64, "first_s": 0.2, "reply_s": 0.2, "stall_share": 0.02, "stall_s": 5.0}
    with stubs(*[rules] * 8) as servers:
        lm = FleetLM("bench", servers=[s.url for s in servers], model="stub", hedge_share=share)
        times: list[float] = []

        async def timed(n: int) -> None:
            began = time.perf_counter()
            await ask(lm, n)
            times.append(time.perf_counter() - began)

        waiting = iter(range(1_200))

        async def worker() -> None:
            for n in waiting:
                await timed(n)

        await asyncio.gather(*(worker() for _ in range(6)))
        hedges = lm.fleet.hedging.hedges / lm.fleet.hedging.calls
        await lm.aclose()
    times.sort()
    return times[len(times) // 2], times[int(0.99 * len(times))], hedges


def simulated() -> dict[str, float]:
    """The same two parts on a simulated clock, where nothing else uses the processor."""

    async def uneven() -> tuple[float, float]:
        dies = {KILLED: 40.0, BROKEN: 70.0}
        servers = [
            Simulated(s / 4, s * 3 / 4, SLOTS, dies.get(i, float("inf")))
            for i, s in enumerate(SERVICE_S)
        ]
        done = await closed(servers, calls=6_000, width=WIDTH, group=GROUP)
        return done.throughput_ratio, done.together

    async def late(share: float) -> float:
        servers = [
            Simulated(0.2, 0.2, 64, stalls=stalling(i, 0.02, 5.0)) for i in range(len(SERVICE_S))
        ]
        return (await closed(servers, calls=6_000, width=6, group=GROUP, share=share)).p99_s

    ratio, together = run_virtual(uneven())
    return {
        "simulated_throughput_ratio": round(ratio, 3),
        "simulated_together": round(together, 3),
        "simulated_p99_ratio": round(run_virtual(late(0.05)) / run_virtual(late(0.0)), 3),
    }


def main() -> None:
    """Measure and record."""
    exact = simulated()
    print(exact)
    with_key = asyncio.run(throughput(affinity=True))
    print(with_key)
    without = asyncio.run(throughput(affinity=False))
    print(without)
    plain, hedged = asyncio.run(tail(0.0)), asyncio.run(tail(0.05))
    print(plain, hedged)
    figures = {
        "servers": len(SERVICE_S),
        "failing": 2,
        "calls": CALLS,
        **{name: round(value, 3) for name, value in with_key.items()},
        "throughput_ratio_without_affinity": round(without["throughput_ratio"], 3),
        "cached_share_without_affinity": round(without["cached_share"], 3),
        "p50_s": round(plain[0], 3),
        "p50_s_hedged": round(hedged[0], 3),
        "p99_s": round(plain[1], 3),
        "p99_s_hedged": round(hedged[1], 3),
        "p99_ratio": round(hedged[1] / plain[1], 3),
        "hedged_share": round(hedged[2], 3),
        **exact,
    }
    record("fleet", figures, "python -m tests.benchmarks.scale.fleet")


if __name__ == "__main__":
    main()
