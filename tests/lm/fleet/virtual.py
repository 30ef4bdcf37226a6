"""Servers and a clock that are simulated: a fleet's rules without sockets, load or waiting."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tfgrpo.errors import ProviderError
from tfgrpo.lm.fleet.calls import FleetCalls
from tfgrpo.lm.fleet.hedging import Hedging
from tfgrpo.lm.fleet.members import Members
from tfgrpo.lm.fleet.settings import FleetSettings

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if timeout is None:
                raise RuntimeError("everything waits for something that never comes")
            self._now += max(0.0, timeout)
            return select(0)

        selector.select = jump

    def time(self) -> float:
        return self._now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Simulated:
    """A server with slots, a time to the first token and one to the end."""

    first_s: float
    reply_s: float
    slots: int = 8
    dies_at_s: float = float("inf")
    stalls: Callable[[], float] = lambda: 0.0
    """Further seconds to a call's first token."""
    served: int = 0
    keys: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def call(self, key: str, tell: Callable[[], None]) -> float:
        """Return the time at which the call ended."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self.dies_at_s:
            raise ProviderError("refused", kind="connection", was_sent=False)
        async with self._free:
            await asyncio.sleep(self.first_s + self.stalls())
            tell()
            await asyncio.sleep(self.reply_s)
            if loop.time() >= self.dies_at_s:
                raise ProviderError("broke off", kind="connection", had_output=True)
            self.served += 1
            self.keys[key] += 1
            return loop.time()


@dataclass(frozen=True)
class Outcome:
    """What a closed loop of calls came to."""

    throughput_ratio: float
    """Against the slots over the service times of the servers that lived, while calls waited."""
    at_home: float
    together: float
    """Share of a group's calls on the server that had most of them."""
    p50_s: float
    p99_s: float
    hedged: float
    retries: int


async def closed_loop(
    servers: list[Simulated], *, calls: int, width: int, group: int = 8, share: float = 0.0
) -> Outcome:
    """Make calls with `width` in flight, groups of them one after the other."""
    loop = asyncio.get_running_loop()
    urls = [f"http://s{i}/v1" for i in range(len(servers))]
    settings = FleetSettings(urls, "m", hedge_share=share)
    members = Members("simulated", settings, clock=loop.time)
    members.keep(urls)
    for server in members.servers.values():
        server.state = "up"
    fleet = FleetCalls(members, Hedging(share, 0.95))
    waiting = iter(range(calls))
    times: list[float] = []
    last, retries = 0.0, 0

    async def one(n: int) -> None:
        nonlocal retries
        key = f"task {n // group}"

        async def begin(url: str, tell: Callable[[], None]) -> float:
            return await servers[urls.index(url)].call(key, tell)

        while True:
            try:
                attempt = await fleet.first(key, begin, may_hedge=True)
                await attempt.task
                return
            except ProviderError:
                retries += 1
                await asyncio.sleep(0.2)

    async def worker() -> None:
        nonlocal last
        for n in waiting:
            last = began = loop.time()
            await one(n)
            times.append(loop.time() - began)

    await asyncio.gather(*(worker() for _ in range(width)))
    ideal = sum(s.slots / (s.first_s + s.reply_s) * min(last, s.dies_at_s) for s in servers)
    most: Counter[str] = Counter()
    for server in servers:
        for key, n in server.keys.items():
            most[key] = max(most[key], n)
    times.sort()
    made = sum(s.calls for s in members.servers.values())
    return Outcome(
        (calls - width) / ideal,
        sum(s.at_home for s in members.servers.values()) / made,
        most.total() / calls,
        times[len(times) // 2],
        times[int(0.99 * len(times))],
        fleet.hedging.hedges / fleet.hedging.calls,
        retries,
    )


def stalling(seed: int, share: float, seconds: float) -> Callable[[], float]:
    """Stalls for a share of the calls, by chance."""
    rng = random.Random(seed)
    return lambda: seconds if rng.random() < share else 0.0
