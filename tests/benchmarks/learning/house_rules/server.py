"""The simulators behind HTTP: `/LABEL/v1/chat/completions`, `/LABEL/grade`, `/LABEL/spent`.

The model's name picks the role, `policy` or `critic`. What is asked under a label is counted
there. Does not know methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.benchmarks.learning.house_rules.families import Case, Family
from tests.benchmarks.learning.house_rules.model import Account, ask


@dataclass
class Seat:
    """What one learner may ask for."""

    family: Family
    cases: Mapping[str, Case]
    noise: float
    tell: bool
    account: Account = field(default_factory=Account)


class Bench:
    """The running server: seat a learner under a label, then hand out its address."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}
        self.port = 0
        self._app = Starlette(
            routes=[
                Route("/{label}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/{label}/grade", self._grade, methods=["POST"]),
                Route("/{label}/spent", self._spent),
            ]
        )

    def url(self, label: str) -> str:
        """Address of a label, without a final slash."""
        return f"http://127.0.0.1:{self.port}/{label}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        """Serve while the block runs."""
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=0, log_level="warning", access_log=False,
            lifespan="off", timeout_graceful_shutdown=2,
        )  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        try:
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(0.02)
            self.port = server.servers[0].sockets[0].getsockname()[1]
            yield self
        finally:
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)

    async def _chat(self, request: Request) -> JSONResponse:
        seat = self.seats[request.path_params["label"]]
        body = await request.json()
        role = str(body["model"])
        messages = [(str(m["role"]), _text(m.get("content"))) for m in body["messages"]]
        choices: list[dict[str, Any]] = []
        sent = made = 0
        for i in range(int(body.get("n") or 1)):
            text, a, b = ask(role, messages, None, seat.noise, seat.account)
            sent, made = sent + a, made + b
            message = {"role": "assistant", "content": text}
            choices.append({"index": i, "message": message, "finish_reason": "stop"})
        usage = {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made}
        return JSONResponse(
            {"id": "c", "object": "chat.completion", "created": int(time.time()), "model": role,
             "choices": choices, "usage": usage}
        )  # fmt: skip

    async def _grade(self, request: Request) -> JSONResponse:
        seat = self.seats[request.path_params["label"]]
        row = await request.json()
        case = seat.cases[row["task_id"]]
        reward, feedback = seat.family.grade(row["reply"], case, tell=seat.tell)
        return JSONResponse({"reward": reward, "feedback": feedback})

    async def _spent(self, request: Request) -> JSONResponse:
        return JSONResponse({"tokens": self.seats[request.path_params["label"]].account.tokens})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(piece.get("text", "")) for piece in content)
    return str(content or "")
