"""Eight processes write one run on a PostgreSQL server, and are killed at it, and the server too.

    python -m tests.benchmarks.scale.postgres

Speed: each writer makes calls of a scripted model, all under one cap, as fast as the journal takes
them; beside it one process and a file. The server commits to the disk; `durable` means that the
file does, too.

Damage: writers ask a provider over a socket for replies that two of them want each, while one of
them is killed every second or two and the server every dozen seconds, all with `kill -9`. The
provider writes down what it was asked for and when; a writer says when it was given a reply. At the
end:

    lost            replies that a writer was given and the journal lacks, or that nobody got
    paid_twice      requests for what some writer had been given before
    cap_violations  the provider sold more than the cap, or the books said so at any look at them
    in_flight_asked_again   calls of killed writers, asked again and booked at their worst case

A second round has a cap for a third of the work: it must be used up and not passed.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.record import record
from tests.store.driver import MODEL, PRICES, reply_to
from tests.store.postgres_server import PostgresServer
from tfgrpo.errors import BudgetError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.store import Journal, JournaledLM, OpenOptions
from tfgrpo.store.budget import UNIT, Budget
from tfgrpo.store.keys import RequestKey
from tfgrpo.store.postgres.address import parse_address
from tfgrpo.store.postgres.link import Link
from tfgrpo.store.postgres.opening import find_run

WRITERS = 8
LATENCY_S = 0.03
_PAUSES_S = (0.5, 2.0)
"""Between two writers killed."""
_SERVER_EVERY_S = 12.0
_MOST_KILLS = (60, 8)
"""Writers and servers; what is left is then done in peace, however slow the machine."""
REPLIES = 4000
CONCURRENCY = 16
RACING = 64
"""Calls in flight of a writer: while it is killed, and while it is timed."""
_MODULE = "tests.benchmarks.scale.postgres"


def ask(number: int) -> Request:
    """Return the request of one reply; its worst case is 20 prompt and 8 reply tokens."""
    return Request((Message("user", f"question {number:08d}"),), sampling=Sampling(max_tokens=8))


# The provider ----------------------------------------------------------------------------


class Provider:
    """Answers the key of a draw; writes down which and when."""

    def __init__(self) -> None:
        self.log: list[tuple[float, str]] = []
        self.port = 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line:
            self.log.append((time.monotonic(), line.decode().strip()))
            await asyncio.sleep(LATENCY_S)
            writer.write(b"ok\n")
        writer.close()

    @property
    def sold_usd(self) -> float:
        """What the replies cost."""
        total = 0.0
        for _, key in self.log:
            usage = reply_to(key).usage
            total += (usage.uncached_tokens * 1.0 + usage.text_tokens * 2.0) / 1e6
        return total


class SocketLM:
    """The client of a `Provider`."""

    prefers_n = False
    model_id = MODEL

    def __init__(self, port: int) -> None:
        self._port = port

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self.model_id}

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        asked = key_of(request, seeds[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(asked.encode() + b"\n")
            if await reader.readline() != b"ok\n":
                raise ProviderError("the connection broke", kind="connection")
        finally:
            writer.close()
        return [reply_to(asked)]

    async def aclose(self) -> None:
        pass


def key_of(request: Request, seed: int | None) -> str:
    """Return a draw's key."""
    index = current_scope().sample_index
    return RequestKey(request, {"model": MODEL}).draw(index, seed).hex()


# The writers ----------------------------------------------------------------------------


def _say(*words: object) -> None:
    print(*words, flush=True)


async def _each(numbers: Sequence[int], work: Any, at_once: int) -> None:
    left = iter(numbers)

    async def worker() -> None:
        for number in left:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


def writing(address: str, port: str, first: str, count: str, cap: str, seed: str) -> None:
    """Ask for replies in an order of its own until all are had or the cap is used up."""
    numbers = list(range(int(first), int(first) + int(count)))
    random.Random(int(seed)).shuffle(numbers)
    refused = False

    async def run(store: Journal) -> None:
        lm = JournaledLM(SocketLM(int(port)), store, prices=PRICES)

        async def one(number: int) -> None:
            nonlocal refused
            if refused:
                return
            try:
                await lm.complete(ask(number), 1, [number])
            except BudgetError:
                refused = True
            else:
                _say("had", time.monotonic(), key_of(ask(number), number))

        await _each(numbers, one, CONCURRENCY)

    budget = Budget(cost_usd=float(cap))
    with Journal.open(address, create=True, role="writer", budget=budget) as store:
        _say("open")
        asyncio.run(run(store))
    _say("refused" if refused else "done")


def racing(place: str, count: str, number: str, durable: str) -> None:
    """Make calls of a scripted model when told to go."""
    calls = int(count)
    reply = "The answer follows from the second line of the table, as shown. " * 8

    async def run(store: Journal) -> None:
        lm = JournaledLM(ScriptedLM(reply, model_id=MODEL), store, prices=PRICES)
        base = int(number) * 10_000_000
        numbers = range(base, base + calls)
        await _each(numbers, lambda n: lm.complete(ask(n), 1, [n]), RACING)

    budget = Budget(cost_usd=1000.0)
    with Journal.open(
        place,
        create=True,
        role="writer",
        budget=budget,
        options=OpenOptions(durable=durable == "durable"),
    ) as store:
        _say("open")
        sys.stdin.readline()
        began, busy = time.monotonic(), time.process_time()
        asyncio.run(run(store))
        _say("raced", began, time.monotonic(), time.process_time() - busy)


@dataclass(slots=True)
class Writer:
    """A started writer and what it says."""

    arguments: list[str]
    had: list[tuple[float, str]] = field(default_factory=list)
    words: list[list[str]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    thread: threading.Thread | None = None
    is_open: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Writer:
        self.is_open.clear()
        self.words = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *self.arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        self.thread = threading.Thread(target=self._listen, args=(self.process,))
        self.thread.start()
        return self

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, *rest = line.split()
            if word == "had" and len(rest) == 2:
                self.had.append((float(rest[0]), rest[1]))
            elif word == "open":
                self.is_open.set()
            else:
                self.words.append([word, *rest])

    def go(self) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait()

    def wait(self, seconds: float = 280) -> int:
        assert self.process is not None and self.thread is not None
        code = self.process.wait(seconds)
        self.thread.join()
        return code

    @property
    def is_over(self) -> bool:
        """True once it has ended by itself."""
        return self.process is not None and self.process.poll() is not None


# Speed ----------------------------------------------------------------------------


def race(places: Sequence[str], calls: int, durable: bool = False) -> tuple[float, float]:
    """Return the calls a second of writers that start together, one a place, and the processor's
    microseconds a call that they took."""
    kind = "durable" if durable else ""
    writers = [
        Writer(["racing", place, str(calls), str(n), kind]).start()
        for n, place in enumerate(places)
    ]
    for writer in writers:
        assert writer.is_open.wait(280)
    for writer in writers:
        writer.go()
    for writer in writers:
        assert writer.wait() == 0
    times = [tuple(map(float, w.words[-1][1:])) for w in writers]
    total = calls * len(places)
    seconds = max(t[1] for t in times) - min(t[0] for t in times)
    return total / seconds, 1e6 * sum(t[2] for t in times) / total


def speed(server: PostgresServer, calls: int, rounds: int = 3) -> dict[str, Any]:
    """Return the best calls a second of some rounds of each kind, one after another, and the least
    processor time a call: on a busy machine the second says more."""
    fastest: dict[str, int] = {}
    least: dict[str, int] = {}
    for number in range(rounds):
        database = server.new_database()
        with tempfile.TemporaryDirectory() as root:
            kinds: dict[str, tuple[list[str], int, bool]] = {
                "sqlite": ([f"{root}/a"], calls, False),
                "sqlite_durable": ([f"{root}/b"], calls, True),
                "one_writer": ([f"{database}#one"], calls, False),
                "": ([f"{database}#r"] * WRITERS, calls // 2, False),
            }
            for name, (places, each, durable) in kinds.items():
                busy = server.cpu_seconds()
                per_s, cpu_us = race(places, each, durable)
                own_us = 1e6 * (server.cpu_seconds() - busy) / (each * len(places))
                found = {f"{name}_calls_per_s".lstrip("_"): per_s}
                spent = {f"{name or 'writers'}_us": cpu_us}
                if "sqlite" not in name:
                    spent[f"{name or 'writers'}_server_us"] = own_us
                print(number, found, spent, file=sys.stderr)
                for key, value in found.items():
                    fastest[key] = max(fastest.get(key, 0), round(value))
                for key, value in spent.items():
                    least[key] = min(least.get(key, 10**9), round(value))
    return {**fastest, "processor_a_call": least}


# Damage ----------------------------------------------------------------------------


class Books:
    """Looks at a run's books again and again; counts the looks and what was wrong."""

    def __init__(self, address: str) -> None:
        self.looks = self.wrong = 0
        self.over_usd = 0.0
        self._link = Link(parse_address(address), patience_s=60)
        self._address = parse_address(address)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        number = 0
        while not self._over.wait(0.02):
            if not number:
                number, _ = self._link.retry(
                    "look", lambda c: find_run(c, self._address, create=True)
                )
                self._link.see(number)
            rows = self._link.retry(
                "look",
                lambda c: c.execute(
                    "SELECT cap, spent + held - overshoot, overshoot FROM tfgrpo.ledgers"
                    " WHERE run = tfgrpo.run()"
                ).fetchall(),
            )
            self.looks += bool(rows)
            self.wrong += sum(used > cap or overshoot > 0 for cap, used, overshoot in rows)
            self.over_usd = max([self.over_usd, *(over / UNIT for _, _, over in rows)])

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._link.close()


def damage(server: PostgresServer, replies: int, cap_usd: float, seed: int) -> dict[str, Any]:
    """Let writers work while they and the server are killed; return what came of it."""
    rng, provider = random.Random(seed), Provider()
    address = f"{server.new_database()}#run"
    share = replies // (WRITERS // 2)
    writers = [
        Writer(["writing", address, str(provider.port), str(share * (n // 2)), str(share),
                str(cap_usd), str(n)]).start()
        for n in range(WRITERS)
    ]  # fmt: skip
    books = Books(address)
    killed = killed_servers = 0
    next_server = time.monotonic() + _SERVER_EVERY_S
    while not all(w.is_over for w in writers):
        time.sleep(rng.uniform(*_PAUSES_S))
        victims = [w for w in writers if not w.is_over and w.is_open.is_set()]
        if victims and killed < _MOST_KILLS[0]:
            victim = rng.choice(victims)
            victim.kill()
            killed += 1
            victim.start()
        if time.monotonic() > next_server and killed_servers < _MOST_KILLS[1]:
            server.kill()
            time.sleep(rng.uniform(0.0, 0.5))
            server.start()
            killed_servers += 1
            next_server = time.monotonic() + _SERVER_EVERY_S
    books.close()
    ends = Counter(w.words[-1][0] for w in writers if w.wait() == 0 and w.words)
    assert sum(ends.values()) == WRITERS, ends
    return {
        "writers_killed": killed,
        "server_killed": killed_servers,
        "ended": dict(ends),
        **_compare(address, provider, writers, cap_usd, replies if ends["done"] else 0),
        "book_looks": books.looks,
        "book_wrong": books.wrong,
        "book_over_usd": books.over_usd,
    }


def _compare(
    address: str, provider: Provider, writers: list[Writer], cap_usd: float, wanted: int
) -> dict[str, Any]:
    with Journal.open(address, readonly=True) as store:
        kept = {key.hex() for (key,) in store._writer.read("SELECT key FROM completions")}
        rows = store.spend()
        (spent, held) = store._writer.read(
            "SELECT spent, held FROM tfgrpo.ledgers WHERE run = tfgrpo.run()"
        )[0]
    first_had: dict[str, float] = {}
    for at, key in (row for w in writers for row in w.had):
        first_had[key] = min(at, first_had.get(key, at))
    asked = Counter(key for _, key in provider.log)
    booked = sum(r.booked.calls for r in rows)
    journal_usd = sum((r.usage.cost_usd or 0) + (r.booked.cost_usd or 0) for r in rows)
    assert abs(spent / UNIT - journal_usd) < 1e-6 and held == 0, (spent, held, journal_usd)
    resent = sum(asked.values()) - len(asked)
    return {
        "lost": len(first_had.keys() - kept) + max(0, wanted - len(kept)),
        "paid_twice": sum(at > first_had.get(key, at) for at, key in provider.log),
        "in_flight_asked_again": resent,
        "booked_calls": booked,
        "unbooked": max(0, sum(asked.values()) - booked - sum(r.usage.calls for r in rows)),
        "cap_violations": int(provider.sold_usd > cap_usd) + int(journal_usd > cap_usd + 1e-9),
        "cap_used": round(journal_usd / cap_usd, 4),
        "calls": sum(asked.values()),
    }


def main() -> None:
    """Measure and record."""
    racing_server = PostgresServer(settings=())
    try:
        figures: dict[str, Any] = {"writers": WRITERS, **speed(racing_server, 2000)}
    finally:
        racing_server.close()
    server = PostgresServer(settings=())
    try:
        free = damage(server, REPLIES, 1000.0, seed=1)
        print(free, file=sys.stderr)
        capped = damage(server, REPLIES, 0.02, seed=2)
        print(capped, file=sys.stderr)
    finally:
        server.close()
    for name in ("lost", "paid_twice"):
        figures[name] = free[name] + capped[name]
    figures["cap_violations"] = sum(d["cap_violations"] + d["book_wrong"] for d in (free, capped))
    figures |= {"replies": REPLIES, "killed": free, "killed_under_a_cap": capped}
    record("scale_postgres", json.loads(json.dumps(figures)), f"python -m {_MODULE}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["writing"]:
        writing(*sys.argv[2:])
    elif sys.argv[1:2] == ["racing"]:
        racing(*sys.argv[2:])
    else:
        main()
