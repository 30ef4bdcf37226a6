"""A scripted OpenAI-compatible server on loopback, in a thread of its own.

Which answer a call gets is decided by a function of the call, a list used up in order, or one
fixed answer. Without a script every reply is fixed by (what is asked, seed), so that a run that
was interrupted and one that was not see equal draws; faults come by arrival or by attempt.

Does not know TLS, HTTP/2, or what is asked. Standard library only. Idea: test clients through a
real socket, not through a mocked transport (own).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tfgrpo.runtime.canonical import derive_seed, digest
from tfgrpo.runtime.event_loop import start_task
from tfgrpo.testing.answers import Answer, Call, Wire, choices, status

Script = Callable[[Call], Answer | str | None] | Sequence[Answer] | Answer | None
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many"}


class FaultServer:
    """Use as a context manager; `base_url` and `spec()` lead to it.

    Args:
        script: a function of the call (an answer, a text, or None for the default reply), a
            sequence of answers used up in order (the last one stays), one answer, or None.
        draw: text of a default reply, by (call, seed); None makes one from a digest.
        models: names that exist; None takes any name.
        api_key: the only key accepted; None takes any.

    `calls` holds every chat request in order of arrival, `open_connections` the present number.
    """

    def __init__(
        self,
        script: Script = None,
        *,
        draw: Callable[[Call, int], str] | None = None,
        models: Sequence[str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._script = script
        self._draw = draw or _digest_text
        self._models = None if models is None else tuple(models)
        self._api_key = api_key
        self._seen: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self.port = 0
        self.is_healthy = True
        """False makes `/health` say 503, as a server does that is about to leave."""
        self.root = ""
        """The weights that the model list names, where it does."""
        self.calls: list[Call] = []
        self.open_connections = 0
        self.dropped = 0
        """Calls whose client left before the answer was whole."""

    @property
    def base_url(self) -> str:
        """The URL including `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def call_count(self) -> int:
        """Chat requests received."""
        return len(self.calls)

    def spec(self, model: str = "scripted") -> str:
        """The spec string of a model on this server."""
        return f"{self.base_url}#{model}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="fault-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(10) or not self.port:
            raise RuntimeError("the scripted server did not start within 10 s")
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None and self._stop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            start_task(self._connection(reader, writer), tasks)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 26, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            while True:
                request = await _read_request(reader)
                if request is None:
                    return
                wire = self._answer(*request)
                if not await self._send(wire, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.dropped += 1
        finally:
            self.open_connections -= 1
            writer.close()

    def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Wire:
        bare = path.partition("?")[0]
        if method == "GET" and bare == "/health":
            return status(200 if self.is_healthy else 503, {}).render(Call(-1, path, headers, {}))
        if method == "GET" and bare.endswith("/models"):
            rows = [{"id": m, "object": "model"} for m in self._models or ("scripted",)]
            rows = [r | ({"root": self.root} if self.root else {}) for r in rows]
            return status(200, {"object": "list", "data": rows}).render(Call(-1, path, headers, {}))
        try:
            parsed = json.loads(body or b"{}")
        except ValueError:
            parsed = {"unreadable": repr(body[:100])}
        key = digest(parsed, 16)
        call = Call(len(self.calls), path, headers, parsed, self._seen[key])
        self._seen[key] += 1
        self.calls.append(call)
        return self._refusal(call) or self._scripted(call).render(call)

    def _refusal(self, call: Call) -> Wire | None:
        if self._api_key is not None:
            given = call.headers.get("authorization", "").removeprefix("Bearer ")
            if given != self._api_key:
                said = {
                    "message": f"Incorrect API key provided: {given}.",
                    "code": "invalid_api_key",
                }
                return status(401, {"error": said}).render(call)
        model = call.body.get("model")
        if self._models is not None and model not in self._models:
            said = {"message": f"The model `{model}` does not exist", "code": "model_not_found"}
            return status(404, {"error": said}).render(call)
        return None

    def _scripted(self, call: Call) -> Answer:
        script = self._script
        answer: Answer | str | None = None
        if isinstance(script, Answer):
            answer = script
        elif callable(script):
            answer = script(call)
        elif script:
            answer = script[min(call.index, len(script) - 1)]
        if answer is None:
            first = call.seed if call.seed is not None else derive_seed(call.key, call.attempt)
            return choices(*(self._draw(call, first + i) for i in range(call.n)))
        return choices(*([answer] * call.n)) if isinstance(answer, str) else answer

    async def _send(
        self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Write an answer; True when the connection can be used again."""
        if wire.wait_s:
            await asyncio.sleep(wire.wait_s)
        if wire.status:
            reason = _REASONS.get(wire.status, "Scripted")
            lines = [f"HTTP/1.1 {wire.status} {reason}", "transfer-encoding: chunked"]
            lines += [f"{k}: {v}" for k, v in wire.headers]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        for i, piece in enumerate(wire.pieces):
            if i and wire.between_s:
                await asyncio.sleep(wire.between_s)
            if piece:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
        if wire.breaks:
            await writer.drain()
            await asyncio.sleep(0.01)  # let what was written leave before the reset
            writer.transport.abort()
            return False
        if wire.hangs:
            await reader.read(1)  # until the client leaves
            self.dropped += 1
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, str, dict[str, str], bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *rest = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return method, path, headers, body


def _digest_text(call: Call, seed: int) -> str:
    return f"reply {digest([call.key, seed], 8)}"


def by_attempt(*faults: Answer, then: Answer | None = None) -> Callable[[Call], Answer | None]:
    """A script: the first tries of each request meet `faults` in order, later ones `then`."""

    def script(call: Call) -> Answer | None:
        return faults[call.attempt] if call.attempt < len(faults) else then

    return script


def sometimes(
    rate: float, faults: Sequence[Answer], *, seed: int = 0
) -> Callable[[Call], Answer | None]:
    """A script: the first try of a request meets one of `faults` with probability `rate`, fixed by
    (request, seed); the next try is answered."""

    def script(call: Call) -> Any:
        draw = derive_seed("fault", seed, call.key, call.seed)
        if call.attempt or draw % 10_000 >= rate * 10_000:
            return None
        return faults[draw // 10_000 % len(faults)]

    return script
