"""The one model of the head-to-head behind HTTP, with an account of tokens for each learner.

`/LABEL/v1` is the model as `serve-model` offers it; what is asked there is counted for LABEL at
the server, and past the hard limit refused. `/LABEL/grade` gives the learning reward of a reply,
`/LABEL/spent` the tokens so far. All labels share one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from tests.benchmarks.head_to_head.data import grade
from tests.benchmarks.head_to_head.families import Family
from tfgrpo.errors import ProviderError
from tfgrpo.lm.server.app import ServerSettings, make_app
from tfgrpo.protocols import LM, Completion, Request

MODEL = "smollm2-135m"
HARD_LIMIT = 1.25
"""A learner is asked to stop at its budget and refused at this multiple of it."""
LONGEST_REPLY = 300
"""Tokens of a reply whose client named no limit: this model would go on to the window's end."""


@dataclass
class Account:
    """What one learner may spend and has spent."""

    limit: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    refused: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens, each draw's prompt counted as the engine reports it."""
        return self.prompt_tokens + self.completion_tokens


class MeteredLM:
    """Counts the tokens of one account and refuses past its hard limit."""

    def __init__(self, lm: LM, account: Account) -> None:
        self._lm = lm
        self.account = account

    @property
    def model_id(self) -> str:
        """The model's own."""
        return self._lm.model_id

    @property
    def identity(self) -> Mapping[str, Any]:
        """The model's own."""
        return self._lm.identity

    @property
    def prefers_n(self) -> bool:
        """The model's own."""
        return self._lm.prefers_n

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Ask the model, unless the account is used up."""
        account = self.account
        if account.limit is not None and account.tokens >= HARD_LIMIT * account.limit:
            account.refused += 1
            raise ProviderError("this learner's tokens are used up", kind="quota")
        if request.sampling.max_tokens is None:
            request = request.with_sampling(max_tokens=LONGEST_REPLY)
        replies = await self._lm.complete(request, n, seeds)
        for reply in replies:
            account.prompt_tokens += reply.usage.prompt_tokens
            account.completion_tokens += reply.usage.completion_tokens
        account.calls += n
        return replies

    async def aclose(self) -> None:
        """The model outlives its accounts."""


class Bench:
    """The running server: give a label an account, then hand out its address."""

    def __init__(self, lm: LM, family: Family) -> None:
        self._lm = lm
        self.family = family
        self._tasks = {t.task_id: t for t in family.tasks()}
        self.accounts: dict[str, Account] = {}
        self._app = Starlette()
        self.port = 0

    def open_account(self, label: str, limit: int | None) -> Account:
        """Start counting for `label`; its address answers from now on."""
        account = self.accounts[label] = Account(limit)
        inner = make_app(MeteredLM(self._lm, account), ServerSettings(MODEL, port=0))

        async def spent(request: HttpRequest) -> JSONResponse:
            return JSONResponse({"tokens": account.tokens, "limit": limit})

        async def grading(request: HttpRequest) -> JSONResponse:
            row = await request.json()
            score = await grade(self.family, self._tasks[row["task_id"]], row["reply"])
            return JSONResponse({"reward": score.reward, "feedback": score.feedback})

        routes = [
            Route("/spent", spent),
            Route("/grade", grading, methods=["POST"]),
            Mount("/", app=inner),
        ]
        self._app.router.routes.append(Mount(f"/{label}", routes=routes))
        return account

    def url(self, label: str) -> str:
        """Address of a label, without a final slash."""
        return f"http://127.0.0.1:{self.port}/{label}"

    def spec(self, label: str) -> str:
        """Spec string of the model under a label."""
        return f"{self.url(label)}/v1#{MODEL}"

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
