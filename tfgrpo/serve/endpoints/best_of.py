"""`samples = G`: several draws of one request, of which the best is answered.

Drawn as one call with `n`; what a server leaves out is asked for in parallel. Each call is one in
the journal, all draws are kept as choices, the cost is the sum of all. Chosen by vote,
by the route's verifier, or by one comparison of a judge.

Does not know HTTP or how draws are compared (`selection`). Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from tfgrpo.errors import ProviderError
from tfgrpo.rollout import Task, Usage
from tfgrpo.runtime.canonical import digest
from tfgrpo.serve.endpoints.dialects import CHAT, Reply
from tfgrpo.serve.exchange import Attempt, Ended, Exchange
from tfgrpo.serve.gateway import Gateway, Model
from tfgrpo.serve.inject import Injection
from tfgrpo.serve.learning.grouping import read_turns
from tfgrpo.serve.selection import (
    Chosen,
    best_by_score,
    best_by_vote,
    comparison,
    extractor,
    read_best,
)
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.verifiers import make_verifier

__all__ = ["BestOf"]

MakeBody = Callable[[Model, Injection], dict[str, Any]]
_TASK_CHARS = 20_000


class BestOf:
    """The draws of one request.

    Args:
        gateway, exchange: the running parts and the request.
        make_body: the body for an upstream.
        public_id: the response's id.
    """

    def __init__(
        self, gateway: Gateway, exchange: Exchange, make_body: MakeBody, public_id: str
    ) -> None:
        self._gateway, self._exchange = gateway, exchange
        self._make, self._public_id = make_body, public_id
        self._usage = Usage()
        self._cost: float | None = 0.0
        self._check()

    def _check(self) -> None:
        ext, settings = self._exchange.ext, self._exchange.route.settings
        if self._exchange.endpoint != CHAT.endpoint:
            raise ApiError("invalid_request", "samples are for chat completions",
                           param="tfgrpo.samples")  # fmt: skip
        if ext.samples > settings.max_samples:
            raise ApiError("invalid_request", f"samples are at most {settings.max_samples} here",
                           param="tfgrpo.samples")  # fmt: skip
        if (self._exchange.body.get("n") or 1) > 1:
            raise ApiError("invalid_request", "set n or samples, not both", param="n")

    async def run(self, names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the reply's JSON with one choice, and its headers; all is booked then."""
        exchange = self._exchange
        wanted = exchange.ext.samples
        try:
            first = await self._draw(names, wanted)
            choices = list(first.row["choices"])[:wanted]
            model = [exchange.model.name] if exchange.model is not None else names
            if len(choices) < wanted:
                more = await asyncio.gather(
                    *(self._draw(model, 1) for _ in range(wanted - len(choices))),
                    return_exceptions=True,
                )
                choices += _good(more)
            chosen = await self._choose(choices)
        except asyncio.CancelledError:
            rows = exchange.end_rows(Ended(499, "left", error="left"))
            self._gateway.journal.writer.put(rows)
            raise
        except ApiError as error:
            rows = exchange.end_rows(Ended(error.status, "failed", error=error.message))
            self._gateway.journal.writer.put_this_turn(rows)
            raise
        return await self._reply(first, choices, chosen)

    async def _draw(self, names: list[str], n: int) -> Reply:
        def make(model: Model, injection: Injection) -> dict[str, Any]:
            body = self._make(model, injection)
            body.pop("stream", None)
            body.pop("stream_options", None)
            if n > 1:
                body["n"] = n
            return body

        return await self._exchange.attempts(names, make, self._call, is_last=False)

    async def _call(self, attempt: Attempt) -> Reply:
        exchange, model = self._exchange, attempt.model
        try:
            with exchange.upstream_time():
                raw = await model.upstream.call(
                    CHAT.endpoint, attempt.body, model.settings.timeout_s
                )
        except asyncio.CancelledError:
            attempt.call.abandon()
            raise
        reply = CHAT.read(raw, self._public_id, exchange.size, model.upstream.spec)
        priced = attempt.call.priced(reply.usage)
        cost = priced.cost_usd
        await attempt.call.end(priced, reply.model, len(reply.choices))
        self._usage += reply.usage
        self._cost = None if cost is None or self._cost is None else self._cost + cost
        return reply

    async def _choose(self, choices: list[dict[str, Any]]) -> Chosen:
        settings = self._exchange.route.settings
        texts = [_text(c["message"]) for c in choices]
        how = self._exchange.ext.select or settings.select
        if len(texts) == 1:
            return Chosen(0)
        if how == "verifier":
            if settings.verifier is None:
                raise ApiError("invalid_request", "this route has no verifier",
                               param="tfgrpo.select")  # fmt: skip
            turns = read_turns(self._exchange.body["messages"])
            task = Task(self._exchange.ext.task_id or digest(turns_of(turns), 16), turns)
            chosen, _ = await best_by_score(texts, task, make_verifier(settings.verifier))
            return chosen
        if how == "judge":
            return await self._judge(texts)
        return best_by_vote(texts, extractor(settings.answer))

    async def _judge(self, texts: list[str]) -> Chosen:
        settings = self._exchange.route.settings
        if not settings.judge:
            raise ApiError("invalid_request", "this route has no judge", param="tfgrpo.select")
        prompt = comparison(CHAT.prompt(self._exchange.body)[-_TASK_CHARS:], texts)

        def make(model: Model, injection: Injection) -> dict[str, Any]:
            turns = [{"role": "user", "content": prompt}]
            return {"model": model.upstream.model, "messages": turns, model.limit_field: 512}

        before = self._exchange.model, self._exchange.library
        try:
            reply = await self._exchange.attempts([settings.judge], make, self._call, is_last=False)
        except ApiError:
            return Chosen(0)  # what was drawn is paid for and answers the request
        finally:
            self._exchange.model, self._exchange.library = before
        return read_best(_text(reply.choices[0][1]), len(texts))

    async def _reply(
        self, first: Reply, choices: list[dict[str, Any]], chosen: Chosen
    ) -> tuple[dict[str, Any], dict[str, str]]:
        exchange = self._exchange
        kept = {
            i: (str(c.get("finish_reason") or "stop"), c["message"]) for i, c in enumerate(choices)
        }
        rows = exchange.choice_rows(kept)
        rows += exchange.end_rows(Ended(200, "ok", first.model, first.upstream_id, self._cost))
        await self._gateway.journal.writer.commit(rows)
        usage = {
            "prompt_tokens": self._usage.prompt_tokens,
            "completion_tokens": self._usage.completion_tokens,
            "total_tokens": self._usage.total_tokens,
        }
        row = {**first.row, "choices": [{**choices[chosen.index], "index": 0}], "usage": usage}
        headers = exchange.headers(self._public_id, self._cost)
        headers["x-tfgrpo-samples"] = str(len(choices))
        headers["x-tfgrpo-choice"] = str(chosen.index)
        if chosen.agreement is not None:
            is_low = chosen.agreement < exchange.route.settings.min_agreement
            headers["x-tfgrpo-agreement"] = f"{chosen.agreement:.2f}{' low' if is_low else ''}"
        return row, headers


def _good(results: list[Any]) -> list[dict[str, Any]]:
    """Return the choices of the draws that worked; a bug of ours is no failed draw."""
    found = []
    for result in results:
        if isinstance(result, Reply):
            found.append(result.row["choices"][0])
        elif not isinstance(result, (ApiError, ProviderError)):
            raise result
    return found


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    calls = message.get("tool_calls")
    if calls:
        text += orjson.dumps(
            [c.get("function") for c in calls if isinstance(c, dict)], option=orjson.OPT_SORT_KEYS
        ).decode()
    return text


def turns_of(turns: Any) -> list[Any]:
    """Return turns as JSON."""
    return [t.to_dict() for t in turns]
