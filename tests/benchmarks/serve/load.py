"""An open-loop load generator: request k is due at t0 + k / rate and its latency counts from then.

Run: `python -m tests.benchmarks.serve.load '{"port": …, "rate": …, "seconds": …}'`; prints JSON.
With `streams`, that many streams start, evenly over `over_s` seconds (0: at once), and the time
from when each was due to its first content is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

QUESTION = "How would you explain to a customer what went wrong with the order? " * 8


def request(job: dict[str, Any], *, stream: bool) -> bytes:
    body = {
        "model": job.get("model", "stub"),
        "messages": [
            {"role": "system", "content": "You answer customers briefly and exactly."},
            {"role": "user", "content": QUESTION},
        ],
        "max_tokens": 100,
    }
    if stream:
        body["stream"] = True
    raw = json.dumps(body).encode()
    head = (
        f"POST {job.get('path', '/v1/chat/completions')} HTTP/1.1\r\n"
        f"host: 127.0.0.1:{job['port']}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {job.get('key', 'x')}\r\ncontent-length: {len(raw)}\r\n"
    )
    for name, value in job.get("headers", {}).items():
        head += f"{name}: {value}\r\n"
    return head.encode() + b"\r\n" + raw


class Connection(asyncio.Protocol):
    """One keep-alive connection that carries one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self.done: asyncio.Future[tuple[int, float]] | None = None
        self._first = 0.0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, data: bytes) -> asyncio.Future[tuple[int, float]]:
        self._data, self._first = b"", 0.0
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(data)  # type: ignore[attr-defined]
        return self.done

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or self.done is None or self.done.done():
            return
        if not self._first and b'"content":"word ' in self._data.replace(b": ", b":"):
            self._first = time.perf_counter()
        head = self._data[:end].lower()
        mark = head.find(b"content-length:")
        if mark >= 0:
            length = int(head[mark + 15 :].split(b"\r\n", 1)[0])
            whole = len(self._data) >= end + 4 + length
        else:
            whole = self._data.endswith(b"0\r\n\r\n")
        if whole:
            self.done.set_result((int(head[9:12]), self._first))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self.done is not None and not self.done.done():
            self.done.set_result((0, 0.0))


class Pool:
    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def take(self) -> Connection:
        while self._idle:
            found = self._idle.pop()
            if found.is_open:
                return found
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return made

    def give(self, connection: Connection) -> None:
        self._idle.append(connection)


def share_ms(values: list[float], part: float) -> float | None:
    """Return a quantile of some seconds in milliseconds; None where there are none."""
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] * 1e3 if values else None


async def steady(job: dict[str, Any]) -> dict[str, Any]:
    pool, data = Pool(job["port"]), request(job, stream=False)
    latencies: list[float] = []
    statuses: dict[str, int] = {}
    tasks = set()

    async def one(due: float) -> None:
        connection = await pool.take()
        status, _ = await connection.ask(data)
        latencies.append(time.perf_counter() - due)
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        pool.give(connection)

    for _ in range(job.get("warm", 20)):
        await one(time.perf_counter())
    latencies.clear()
    statuses.clear()
    total = int(job["rate"] * job["seconds"])
    start = time.perf_counter() + 0.05
    for k in range(total):
        due = start + k / job["rate"]
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks, timeout=60)
    return {
        "requests": len(latencies),
        "statuses": statuses,
        "p50_ms": share_ms(latencies, 0.5),
        "p90_ms": share_ms(latencies, 0.9),
        "p99_ms": share_ms(latencies, 0.99),
        "max_ms": max(latencies, default=0.0) * 1e3,
    }


async def streams(job: dict[str, Any]) -> dict[str, Any]:
    pool, data = Pool(job["port"]), request(job, stream=True)
    firsts: list[float] = []
    statuses: dict[str, int] = {}

    async def one(after_s: float = 0.0) -> None:
        due = time.perf_counter() + after_s
        await asyncio.sleep(after_s)
        connection = await pool.take()
        status, first = await connection.ask(data)
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        pool.give(connection)
        if first:
            firsts.append(first - due)

    for _ in range(job.get("warm", 1)):
        await one()
    firsts.clear()
    statuses.clear()
    gap = job.get("over_s", 0.0) / job["streams"]
    await asyncio.gather(*(one(k * gap) for k in range(job["streams"])))
    return {
        "streams": len(firsts),
        "statuses": statuses,
        "ttft_p50_ms": share_ms(firsts, 0.5),
        "ttft_p99_ms": share_ms(firsts, 0.99),
    }


if __name__ == "__main__":
    import uvloop

    asked = json.loads(sys.argv[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(streams(asked) if asked.get("streams") else steady(asked))))
