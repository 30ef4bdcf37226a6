"""An upstream that costs next to nothing: fixed replies, one process, `asyncio.Protocol`.

Run: `python -m tests.benchmarks.serve.stub PORT [SECONDS]`. Whole replies, after so many seconds
where given, and streams of 50 chunks.
"""

from __future__ import annotations

import asyncio
import json
import sys

WORDS = " ".join(["A short answer of some forty tokens about the question that was asked."] * 3)
_HEAD = {"id": "chatcmpl-stub", "object": "chat.completion", "created": 1, "model": "stub"}
_USAGE = {"prompt_tokens": 400, "completion_tokens": 40, "total_tokens": 440}
_WHOLE = json.dumps(
    {
        **_HEAD,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": WORDS},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": _USAGE,
    }
).encode()
REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_WHOLE)
) + _WHOLE
CHUNKS = 50


def _chunk(row: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps({**_HEAD, "object": "chat.completion.chunk", **row}).encode()
    data += b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PIECE = _chunk({"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]})
_LAST = (
    _chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    + _chunk({"choices": [], "usage": _USAGE})
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
GAP_S = 0.01
"""Between two chunks of a stream."""


class Stub(asyncio.Protocol):
    def __init__(self, latency_s: float = 0.0) -> None:
        self._data, self._latency_s = b"", latency_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._data[:end].lower()
            mark = head.find(b"content-length:")
            length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            if b'"stream":true' in body or b'"stream": true' in body:
                self._transport.write(_STREAM_HEAD)  # type: ignore[attr-defined]
                self._piece(CHUNKS)
            elif self._latency_s:
                asyncio.get_running_loop().call_later(self._latency_s, self._reply)
            else:
                self._reply()

    def _reply(self) -> None:
        self._transport.write(REPLY)  # type: ignore[attr-defined]

    def _piece(self, left: int) -> None:
        if not left:
            self._transport.write(_LAST)  # type: ignore[attr-defined]
            return
        self._transport.write(_PIECE)  # type: ignore[attr-defined]
        asyncio.get_running_loop().call_later(GAP_S, self._piece, left - 1)


async def main(port: int, latency_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Stub(latency_s), "127.0.0.1", port, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        given = [float(a) for a in sys.argv[1:]]
        runner.run(main(int(given[0]) if given else 0, given[1] if len(given) > 1 else 0.0))
