"""A model server that costs next to nothing and behaves like one: slots, a queue, a prefix cache.

Run: `python -m tests.benchmarks.scale.stub '{"slots": 8, "first_s": 0.1, "reply_s": 0.5}'`; prints
its port. Replies are fixed by (prompt, seed). Counts how often each of those was answered, and
tells it under `/counts`. `POST /break` makes it fail from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

_CACHED = 64
"""Prefixes that the cache holds."""


@dataclass(frozen=True)
class Rules:
    """How a server behaves."""

    slots: int = 64
    """Calls that are worked on at once; others wait in order."""
    first_s: float = 0.02
    """To the first token."""
    reply_s: float = 0.0
    """From there to the last."""
    stall_share: float = 0.0
    """Share of calls whose first token takes `stall_s`, by arrival."""
    stall_s: float = 1.0
    lesson: str = ""
    """With it the reply is the prompt's last word, for sure where the lesson stands in the prompt
    and every second time else."""
    log: str = ""
    """File that gets a line for each call that was answered."""


class Server:
    """Every connection of one server."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.name = ""
        self.free = asyncio.Semaphore(rules.slots)
        self.is_broken = False
        self.counts: Counter[str] = Counter()
        self.arrived = 0
        self.busy_s = 0.0
        """Seconds that slots were taken."""
        self._cache: OrderedDict[str, None] = OrderedDict()

    def knows(self, prefix: str) -> bool:
        """Return whether the prefix is cached; it is from now on."""
        known = prefix in self._cache
        self._cache[prefix] = None
        self._cache.move_to_end(prefix)
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return known

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the client leaves."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line = head.split(b" ", 2)
                length = 0
                for row in head.lower().split(b"\r\n"):
                    if row.startswith(b"content-length:"):
                        length = int(row[15:])
                body = await reader.readexactly(length) if length else b""
                await self._answer(line[1].decode(), body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            pass  # the client left; uvloop says so with a RuntimeError
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            _send(writer, 200, {})
        elif path.endswith("/models"):
            _send(writer, 200, {"data": [{"id": "stub", "object": "model"}]})
        elif path == "/counts":
            _send(writer, 200, {"counts": dict(self.counts), "busy_s": self.busy_s})
        elif path == "/break":
            self.is_broken = True
            _send(writer, 200, {})
        elif self.is_broken:
            _send(writer, 500, {"error": {"message": "broken on purpose"}})
        else:
            await self._complete(json.loads(body), writer)

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.arrived += 1
        digest = int(hashlib.sha256(f"{self.name} {self.arrived}".encode()).hexdigest()[:8], 16)
        stalls = digest % 10_000 < self.rules.stall_share * 10_000
        known = self.knows(json.dumps(body["messages"][:2]))
        async with self.free:
            began = time.monotonic()
            try:
                await self._work(body, writer, known=known, stalls=stalls)
            finally:
                self.busy_s += time.monotonic() - began

    async def _work(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, *, known: bool, stalls: bool
    ) -> None:
        rules = self.rules
        await asyncio.sleep(rules.stall_s if stalls else rules.first_s)
        prompt = json.dumps(body["messages"])
        key = hashlib.sha256(f"{prompt}|{body.get('seed')}".encode()).hexdigest()
        text = f"answer {int(key[:4], 16) % 10}"
        if rules.lesson:
            is_right = rules.lesson in prompt or int(key[:4], 16) % 2
            text = body["messages"][-1]["content"].split()[-1] if is_right else f"guess {key[:4]}"
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103,
                 "prompt_tokens_details": {"cached_tokens": 90 if known else 0}}  # fmt: skip
        if not body.get("stream"):
            await asyncio.sleep(rules.reply_s)
            choice = {"index": 0, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": text}}  # fmt: skip
            _send(writer, 200, {"model": "stub", "choices": [choice], "usage": usage})
            await writer.drain()
            self._answered(key)
            return
        writer.write(_STREAM_HEAD + _chunk({"choices": [_delta("answer")]}))
        await writer.drain()
        await asyncio.sleep(rules.reply_s)
        last = _delta(text[6:]) | {"finish_reason": "stop"}
        writer.write(_chunk({"choices": [last]}) + _chunk({"choices": [], "usage": usage})
                     + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")  # fmt: skip
        await writer.drain()
        self._answered(key)

    def _answered(self, key: str) -> None:
        self.counts[key[:16]] += 1
        if self.rules.log:
            with open(self.rules.log, "a", encoding="ascii") as file:
                file.write(key[:16] + "\n")


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _delta(text: str) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": None}


def _chunk(row: dict[str, Any]) -> bytes:
    data = b"data: " + json.dumps({"model": "stub", **row}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _send(writer: asyncio.StreamWriter, status: int, row: Any) -> None:
    data = json.dumps(row).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, len(data))
        + data
    )


async def main(rules: Rules, port: int) -> None:
    """Serve until killed."""
    stub = Server(rules)
    server = await asyncio.start_server(stub.connection, "127.0.0.1", port, backlog=4096)
    stub.name = str(server.sockets[0].getsockname()[1])
    print(stub.name, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    at = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Rules(**given), at))
