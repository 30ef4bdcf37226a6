"""One admitted request: which upstreams are tried, what each is sent, what is booked.

The models of a route are tried in order while nothing has reached the client. A failure of the host
rests it and the next one takes over; a failure of the request itself is the client's. Every attempt
is a call of its own in the journal. After the first content nothing is retried or switched.

Does not know how a reply is read or written: an endpoint says that (`Dialect`). Source: own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from tfgrpo.errors import ProviderError
from tfgrpo.runtime.call_scope import CallScope, call_scope, extra_calls
from tfgrpo.runtime.cooldown import COUNTED
from tfgrpo.runtime.redaction import redact_known
from tfgrpo.serve import tables
from tfgrpo.serve.access.booking import OpenCall, Planned
from tfgrpo.serve.gateway import Gateway, Model
from tfgrpo.serve.identity import Extensions, private_hash
from tfgrpo.serve.inject import EMPTY, Injection
from tfgrpo.serve.routes import Assignment, Route, by_weight
from tfgrpo.serve.wire.errors import ApiError, from_failure
from tfgrpo.store.rows import Statement

__all__ = ["Attempt", "Exchange", "Ended"]

T = TypeVar("T")
_TOKENS_A_MESSAGE = 8
_NOT_REDRAWN = frozenset({"model", "messages", "tools", "stream", "stream_options", "n", "seed",
                          "user", "metadata", "store"})  # fmt: skip
"""Fields of a body that a further draw of it does not have."""


@dataclass(slots=True)
class Ended:
    """How an exchange ended, for its last row."""

    status: int
    state: str
    """`ok`, `failed`, `cut` (broken off after content), `left` (the client), `deadline`."""
    model: str = ""
    upstream_id: str = ""
    cost_usd: float | None = None
    error: str = ""


@dataclass(slots=True)
class Attempt:
    """One try at one upstream."""

    model: Model
    body: dict[str, Any]
    call: OpenCall


class Exchange:
    """A request that was let in.

    Args:
        gateway: the running parts.
        route: what the client named.
        endpoint: path after `/v1`.
        body: the client's, without `tfgrpo`; it is not changed.
        size: bytes of the client's body.
        key_name: who asks.
        ext: what the request says beyond the API.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: Route,
        endpoint: str,
        body: dict[str, Any],
        size: int,
        key_name: str,
        ext: Extensions,
    ) -> None:
        self.gateway, self.route, self.endpoint, self.body = gateway, route, endpoint, body
        self.size, self.key_name, self.ext = size, key_name, ext
        self.response_id = gateway.ids.make()
        self.assignment: Assignment = route.assign(ext, self.response_id, gateway.journal)
        self.captures = route.settings.capture and ext.capture
        self.end_user = private_hash(gateway.secret, ext.end_user)
        self.began = time.perf_counter()
        self.upstream_s = 0.0
        """Seconds spent waiting for upstreams."""
        self._waiting_since = 0.0
        self.calls = 0
        self.model: Model | None = None
        self.library = self.assignment.injection
        """What stands in the prompt; empty where it did not fit."""
        self.is_omitted = False
        self._scopes = gateway.scopes(route, key_name, self.end_user)
        self._is_capped = gateway.has_money_cap(route, key_name)
        self._any_billed = False
        self._has_row = False
        self._predictions: dict[str, float] = {}

    def ranking(self, prompt: Callable[[], str]) -> list[str]:
        """Return the upstreams in the order in which they are tried.

        Args:
            prompt: makes the text that a router judges.
        """
        names = [
            n for n in self.route.settings.upstreams
            if self.endpoint in self.gateway.models[n].upstream.endpoints()
        ]  # fmt: skip
        if not names:
            raise ApiError("no_upstream", f"no upstream of this route answers {self.endpoint}",
                           should_retry=False)  # fmt: skip
        weights = self.route.settings.weights
        if weights:
            shares = dict(zip(self.route.settings.upstreams, weights, strict=True))
            mine = {n: shares[n] for n in names}
            names = by_weight(self.route.secret, self.assignment.unit, mine)
        if self.route.chooser is not None:
            names, self._predictions = self.route.chooser.order(prompt(), names)
        first = self.assignment.upstream
        if first in names:
            names = [first, *(n for n in names if n != first)]
        return self.gateway.cooldowns.available(names)

    async def attempts(
        self,
        names: list[str],
        make_body: Callable[[Model, Injection], dict[str, Any]],
        run: Callable[[Attempt], Awaitable[T]],
        has_content: Callable[[], bool] = lambda: False,
        cut_rows: Callable[[], list[Statement]] = list,
        *,
        is_last: bool = True,
    ) -> T:
        """Try upstreams in order until one answers.

        Args:
            names: upstreams, best first.
            make_body: the body for an upstream, with a library in it.
            run: makes the call and books its reply; a `ProviderError` out of it is booked here.
            has_content: True once content has reached the client: nothing is tried again then.
            cut_rows: rows that keep what was broken off.
            is_last: a failure is the request's end; False leaves its last row to the caller.

        Raises:
            ApiError: the last failure, or a refusal by a cap or the journal.
            ProviderError: the reply broke off after content.
        """
        cooldowns = self.gateway.cooldowns
        last: ProviderError | None = None
        for name in names:
            if last is not None and cooldowns.state(name) == "cooling":
                continue
            attempt = await self._open(self.gateway.models[name], make_body)
            cooldowns.started(name)
            scope = CallScope(attempt.call.planned.stage, self.ext.session_id or self.ext.task_id)
            try:
                with call_scope(scope), extra_calls(attempt.call.one_more):
                    result = await run(attempt)
            except ProviderError as error:
                counted = self._rest(name, error)
                last = error
                if error.kind == "rate_limit":
                    self.route.limited_at = time.monotonic()
                self.gateway.metrics.add("upstream_failures", {"upstream": name,
                                                               "kind": error.kind})  # fmt: skip
                if has_content():
                    rows = [*cut_rows(), *self.end_rows(Ended(200, "cut", error=str(error)))]
                    error.had_output = True
                    await attempt.call.fail(error, rows)
                    raise
                self._any_billed |= await attempt.call.fail(error)
                if not counted and error.kind not in COUNTED:
                    break
                continue
            except BaseException:
                cooldowns.abandoned(name)
                raise
            cooldowns.succeeded(name)
            return result
        assert last is not None
        refusal = from_failure(last, is_billed=self._any_billed)
        if is_last:
            self.gateway.journal.writer.put_this_turn(
                self.end_rows(Ended(refusal.status, "failed", error=refusal.message))
            )
        raise refusal

    def _rest(self, name: str, error: ProviderError) -> bool:
        """Let an upstream rest; return whether the failure was its host's. One of several hosts
        rests by itself."""
        cooldowns = self.gateway.cooldowns
        if self.gateway.models[name].upstream.has_other_hosts:
            cooldowns.abandoned(name)
            return error.kind in COUNTED
        return cooldowns.failed(name, error)

    async def _open(
        self, model: Model, make_body: Callable[[Model, Injection], dict[str, Any]]
    ) -> Attempt:
        injection = self._fitting(model)
        body = make_body(model, injection)
        n = body.get("n")
        n = n if isinstance(n, int) and n > 0 else 1
        self.library, self.model = injection, model
        planned = Planned(
            response_id=self.response_id,
            stage=f"serve:{self.route.name}",
            model=model.upstream.spec,
            n=n,
            prompt_tokens=self._prompt_tokens(injection),
            max_tokens=self._reply_tokens(model, body),
            price=model.price,
            scopes=self._scopes,
        )
        most = self.ext.max_cost_usd
        if most is not None:
            _hold_to(self.gateway.book.worst(planned).cost_usd, most)
        rows = () if self._has_row else (self._request_row(),)
        call = await self.gateway.book.begin(planned, rows)
        self._has_row = True
        self.calls += 1
        return Attempt(model, body, call)

    def _fitting(self, model: Model) -> Injection:
        """Return the library, or the empty one where the prompt would not fit with it."""
        injection = self.assignment.injection
        window = model.settings.context_tokens
        if window is None or injection is EMPTY:
            return injection
        reply = self._reply_tokens(model, self.body)
        if self._prompt_tokens(injection) + reply <= window:
            self.is_omitted = False
            return injection
        self.is_omitted = True
        return EMPTY

    def _prompt_tokens(self, injection: Injection) -> int:
        turns = self.body.get("messages")
        frame = _TOKENS_A_MESSAGE * len(turns) if isinstance(turns, list) else 0
        return -(-self.size // 4) + frame + injection.tokens

    def _reply_tokens(self, model: Model, body: Mapping[str, Any]) -> int:
        """Return the longest reply; where a cap holds and nothing limits it, it is limited."""
        if self.endpoint == "/embeddings":
            return 0
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            value = body.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        most = self.route.settings.max_reply_tokens
        longest = model.price.max_output_tokens if model.price is not None else None
        most = min(most, longest or most)
        if self._is_capped or self.ext.max_cost_usd is not None:
            field = "max_output_tokens" if self.endpoint == "/responses" else model.limit_field
            if isinstance(body, dict) and body is not self.body:
                body[field] = most
        return most

    def _request_row(self) -> Statement:
        ext, drawn = self.ext, self.assignment
        turns = self.body.get("messages")
        wants_digest = self.captures or ext.task_id or ext.group_id
        prompt = None
        if self.captures and turns is not None:
            kept: dict[str, Any] = {"messages": turns, "tools": self.body.get("tools")}
            learn = self.route.settings.learn
            if learn is not None and learn.shadow is not None:
                kept["fields"] = {k: v for k, v in self.body.items() if k not in _NOT_REDRAWN}
            prompt = redact_known(orjson.dumps(kept).decode()).encode()
        predicted = self._predictions.get(self.model.name) if self.model is not None else None
        values = (
            self.response_id, time.time(), self.endpoint, self.route.name, self.key_name,
            self.end_user, ext.task_id, ext.session_id, ext.group_id, drawn.unit,
            drawn.experiment, drawn.arm, drawn.share, predicted, self.library.version,
            self.library.context_hash,
            orjson.dumps(dict(ext.metadata)).decode() if ext.metadata else "{}",
            digest_of(turns) if wants_digest else "", prompt,
        )  # fmt: skip
        return (tables.REQUEST, values)

    def end_rows(self, ended: Ended) -> list[Statement]:
        """Return the last row of the request."""
        spec = self.model.name if self.model is not None else ""
        values = (
            self.response_id, time.time(), ended.status, ended.state, spec, ended.model,
            ended.upstream_id, ended.cost_usd, self.calls, time.perf_counter() - self.began,
            ended.error[:500],
        )  # fmt: skip
        return [(tables.REPLY, values)] if self._has_row else []

    def choice_rows(self, choices: Mapping[int, tuple[str, Any]]) -> list[Statement]:
        """Return the rows that keep the draws: (finish, message) by choice."""
        if not self.captures:
            return []
        return [
            (
                tables.CHOICE,
                (self.response_id, index, finish,
                 redact_known(orjson.dumps(message).decode()).encode()),
            )
            for index, (finish, message) in choices.items()
        ]  # fmt: skip

    @contextmanager
    def upstream_time(self) -> Iterator[None]:
        """Count the time of the block as the upstream's."""
        self._waiting_since = time.perf_counter()
        try:
            yield
        finally:
            self.upstream_s += time.perf_counter() - self._waiting_since
            self._waiting_since = 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds so far that were ours."""
        now = time.perf_counter()
        waiting = now - self._waiting_since if self._waiting_since else 0.0
        return max(0.0, now - self.began - self.upstream_s - waiting)

    def headers(self, public_id: str, cost_usd: float | None = None) -> dict[str, str]:
        """Return the headers that say what the reply is."""
        version = "omitted" if self.is_omitted else self.library.version
        rows = {
            "x-request-id": public_id,
            "x-tfgrpo-response-id": public_id,
            "x-tfgrpo-route": self.route.name,
            "x-tfgrpo-model": self.model.name if self.model is not None else "",
            "x-tfgrpo-context": self.library.context_hash,
            "x-tfgrpo-library": version,
            "x-tfgrpo-arm": self.assignment.arm,
            "x-tfgrpo-cached": "none",
            "x-tfgrpo-overhead-ms": f"{self.overhead_s * 1000:.2f}",
        }
        if self.ext.group_id:
            rows["x-tfgrpo-group-id"] = self.ext.group_id
        if cost_usd is not None:
            rows["x-tfgrpo-cost-usd"] = f"{cost_usd:.9g}"
        return rows

    def remember(self) -> None:
        """Let the session stay on the model that answered."""
        if self.ext.session_id and self.model is not None:
            kept = replace(self.assignment, upstream=self.model.name)
            self.route.keep(self.ext.session_id, kept)


def _hold_to(worst_usd: float | None, most: float) -> None:
    if worst_usd is None:
        raise ApiError(
            "budget_exceeded", "the price of the model is unknown, so max_cost_usd cannot be held"
        )
    if worst_usd > most:
        raise ApiError(
            "budget_exceeded",
            f"the worst case of this call, ${worst_usd:.6g}, passes its max_cost_usd of "
            f"${most:.6g}; set max_tokens or raise it",
        )


def digest_of(turns: Any) -> str:
    """Return 16 hex digits fixed by the client's turns."""
    raw = orjson.dumps(turns, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(raw).hexdigest()[:16]
