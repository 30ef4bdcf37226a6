"""Any OpenAI-compatible server, over plain HTTP.

`http_pool` connects; what decides is here: no retries, no redirects, one total deadline on
monotonic time (a slow drip never resets it), a limit for the first token, and the typing of every
failure. What comes back is read by `openai_reply`.

Does not know retries, prices, caches. Idea: one layer, one job (own).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm.failures import http_failure
from tfgrpo.lm.http_pool import HttpPool
from tfgrpo.lm.openai_reply import ReplyReader
from tfgrpo.lm.parameters import Parameters
from tfgrpo.lm.single_draws import draws_in_parallel
from tfgrpo.lm.usage import normalise_usage, share_usage, unseen_in
from tfgrpo.lm.wire import (
    finished,
    prompt_bytes,
    reply_bytes,
    request_json,
    timed_out,
)
from tfgrpo.protocols import Completion, Limits, Request
from tfgrpo.runtime.call_scope import calls_are_counted, count_extra_call
from tfgrpo.runtime.redaction import Secret, redact, register_headers
from tfgrpo.runtime.texts.surrogates import without_surrogates

logger = logging.getLogger(__name__)

OFFICIAL_URL = "https://api.openai.com/v1"
_ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
"""Headers that api.openai.com alone gets, by their environment variable."""
_MOST_LESSONS = 6
"""Refused fields that one call may learn of."""
_PROBE_WAIT_S = 10.0
"""Longest wait for the first request to find out which fields a server takes."""
_LONGEST_ERROR = 1_000_000
"""Bytes read of an answer that is an error."""


class _Turn:
    """The right to be the one request that finds out which fields are taken; ends once."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock: asyncio.Lock | None = lock

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


_TURN: ContextVar[_Turn | None] = ContextVar("tfgrpo_openai_turn", default=None)


@dataclass(frozen=True, slots=True)
class _Refused:
    """A request that the server refused as it was, with the body that says why."""

    failure: ProviderError
    body: bytes


@dataclass(frozen=True, slots=True)
class ServerRules:
    """What a server is known to take, and what is taken from it."""

    stream: bool | None = None
    """True or False forces it for single draws; None streams them. n > 1 is always plain."""
    supports_n: bool = True
    """False sends parallel calls instead of `n`; learnt when the server returns one."""
    send_seed: bool = True
    """False keeps seeds back, for servers that fail on them (vLLM on a CPU ends with "CPU Generator
    does not use offset" where it cuts a seeded prompt into chunks)."""
    strict_model: bool = False
    """Refuse replies of a model with another name instead of warning once."""


_RULES = ServerRules()


class OpenAILM:
    """A model behind `/chat/completions`.

    Args:
        model: the name sent to the server.
        base_url: including `/v1`; None is the environment's OPENAI_BASE_URL, else api.openai.com.
        api_key_env: environment variable that holds the key. For api.openai.com the default is
            `OPENAI_API_KEY`; other servers get a key only where this is given.
        api_key_query: send the key as this query parameter instead of a header.
        rules: of the server; specs and settings give its fields as options of their own.
        headers: further request headers; must hold no key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = None,
        api_key_query: str | None = None,
        rules: ServerRules = _RULES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        address = base_url or os.environ.get("OPENAI_BASE_URL", "").strip() or OFFICIAL_URL
        self._base_url, self._query = _split_query(address)
        self._secret = find_secret(api_key_env, is_official=base_url is None)
        self._api_key_query = api_key_query
        self._stream = rules.stream is not False
        self._supports_n = rules.supports_n
        self._send_seed = rules.send_seed
        self._strict_model = rules.strict_model
        self._headers = dict(headers or {})
        register_headers(self._headers)
        register_headers(dict(self._query))
        self._spec = f"openai:{model}" if base_url is None else f"{self._base_url}#{model}"
        self._pool = HttpPool(self._address(), self._fields(), self._where)
        self._parameters = Parameters()
        self._probes: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"OpenAILM({self._spec!r}, key {self._key_source})"

    @property
    def model_id(self) -> str:
        """The spec string."""
        return self._spec

    @property
    def identity(self) -> Mapping[str, Any]:
        """Backend, model, base URL, query and a fingerprint of the key."""
        return {
            "backend": "openai",
            "model": self._model,
            "base_url": self._base_url,
            "query": dict(self._query),
            "headers": {k.lower(): v for k, v in self._headers.items()},
            "credential": self._secret.fingerprint if self._secret else "",
        }

    @property
    def prefers_n(self) -> bool:
        """True until the server turned out not to honour `n`."""
        return self._supports_n

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return 1 to n replies; one call where the server honours `n`, else parallel calls.

        In one call for several draws the server gets the first seed alone, for that is all the
        wire format carries. Under a caller that books each call, a server that turns out not to
        honour `n` gives a short answer, so that every further call is booked on its own.
        """
        if n > 1 and self._supports_n:
            replies = await self._try_n(request, n, seeds)
            if len(replies) > 1 or calls_are_counted():
                return replies
            return [*replies, *await self._parallel(request, seeds[len(replies) :])]
        if n > 1:
            return await self._parallel(request, seeds)
        return await self._call(request, 1, seeds[0], stream=self._stream)

    async def _try_n(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        try:
            replies = await self._call(request, n, seeds[0], stream=False)
        except ProviderError as error:
            if error.kind != "bad_request" or not re.search(r"\bn\b", str(error)):
                raise
            replies = []
        if len(replies) < 2:
            self._supports_n = False
        if not replies:
            count_extra_call()
            replies = await self._call(request, 1, seeds[0], stream=self._stream)
        return replies

    async def _parallel(self, request: Request, seeds: Sequence[int | None]) -> list[Completion]:
        """One call a draw; the draws before the first failure are kept, its cause raised only
        where nothing is."""
        return await draws_in_parallel(
            self._call(request, 1, seed, stream=self._stream) for seed in seeds
        )

    async def _call(
        self, request: Request, n: int, seed: int | None, *, stream: bool
    ) -> list[Completion]:
        """Make one call; where the server refuses a field that may go, learn it and send again."""
        for lesson in range(_MOST_LESSONS + 1):
            async with self._first_alone(
                lambda: self._body(request, n, seed, stream=stream)
            ) as body:
                outcome = await self._send(request, body)
            if not isinstance(outcome, _Refused):
                return outcome
            told = self._parameters.learn(body, outcome.body, request.sampling.extra)
            if told is None or lesson == _MOST_LESSONS:
                raise outcome.failure
            if told:
                logger.warning("%s: %s from now on, as the server asks", self._where, told)
            count_extra_call()
        raise AssertionError("unreachable")

    def _body(self, request: Request, n: int, seed: int | None, *, stream: bool) -> dict[str, Any]:
        body = request_json(request, self._model)
        if n > 1:
            body["n"] = n
        if seed is not None and self._send_seed:
            body["seed"] = seed
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return self._parameters.apply(body, request.sampling.extra)

    @asynccontextmanager
    async def _first_alone(
        self, make_body: Callable[[], dict[str, Any]]
    ) -> AsyncIterator[dict[str, Any]]:
        """Give the body to send, made of what is known by then about the server's fields.

        One request finds out which fields the server takes; the others wait for its answer's
        head, a few seconds at most, so that a refused field costs one call and not one a draw.
        """
        body = make_body()
        if self._parameters.is_proven(body):
            yield body
            return
        probe = self._probes.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        try:
            async with asyncio.timeout(_PROBE_WAIT_S):
                await probe.acquire()
        except TimeoutError:
            yield make_body()
            return
        turn = _Turn(probe)
        body = make_body()
        if self._parameters.is_proven(body):
            turn.end()
        token = _TURN.set(turn)
        try:
            yield body
        finally:
            _TURN.reset(token)
            turn.end()

    async def _send(self, request: Request, body: dict[str, Any]) -> list[Completion] | _Refused:
        """Make one HTTP call. The error is raised outside the handler, so that no foreign
        exception, which may hold a URL with a key, hangs on it as context."""
        reader = ReplyReader(request, self._where)
        try:
            return await self._exchange(request, body, reader)
        except ProviderError as exc:
            failure = exc
        reader.blame(failure)
        failure.__cause__ = failure.__context__ = None
        raise failure

    async def _exchange(
        self, request: Request, body: dict[str, Any], reader: ReplyReader
    ) -> list[Completion] | _Refused:
        async with (
            _deadline(request.limits, self._where) as first_token,
            self._pool.post(_encoded(body)) as response,
        ):
            chunks = response.content.iter_any()
            if not 200 <= response.status < 300:
                return await self._refusal(response.status, response.headers, chunks)
            self._parameters.taken(body)
            turn = _TURN.get()
            if turn is not None:
                turn.end()
            if body.get("stream"):
                await reader.read_stream(chunks, first_token)
            else:
                await reader.read_body(chunks)
        return self._completions(reader, request)

    async def _refusal(
        self, status: int, headers: Mapping[str, str], chunks: AsyncIterator[bytes]
    ) -> _Refused:
        """Return what the server said against the request as it was; raise any other failure."""
        content = b""
        async for chunk in chunks:
            content += chunk
            if len(content) > _LONGEST_ERROR:
                break
        failure = http_failure(
            status, headers, content, where=self._where, key_source=self._key_source
        )
        if failure.kind != "bad_request":
            raise failure
        return _Refused(failure, content)

    def _address(self) -> str:
        query = list(self._query)
        if self._secret and self._api_key_query:
            query = [(k, v) for k, v in query if k != self._api_key_query]
            query.append((self._api_key_query, self._secret.value))
        return f"{self._base_url}/chat/completions" + (f"?{urlencode(query)}" if query else "")

    def _fields(self) -> dict[str, str]:
        """Headers of every call; a key is never made up."""
        fields = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "tfgrpo",
        }
        if self._secret and not self._api_key_query:
            fields["Authorization"] = f"Bearer {self._secret.value}"
        if self._base_url == OFFICIAL_URL:
            for name, variable in _ACCOUNT.items():
                if value := os.environ.get(variable, "").strip():
                    fields[name] = value
        given = {name.lower() for name in self._headers}
        return {k: v for k, v in fields.items() if k.lower() not in given} | self._headers

    @property
    def _where(self) -> str:
        return f"model {self._model!r} at {self._base_url}"

    @property
    def _key_source(self) -> str:
        if self._secret:
            return f"from {self._secret.source}"
        return (
            "none was sent; an own server gets one where the spec names its variable: "
            f"{self._base_url}?api_key_env=OPENAI_API_KEY#{self._model}"
        )

    def _completions(self, reply: ReplyReader, request: Request) -> list[Completion]:
        self._check_model(reply.model)
        parts = [reply.choices[i] for i in sorted(reply.choices)]
        good = finished(parts, self._where)
        weights = [reply_bytes(p) for p in good]
        usage = normalise_usage(
            reply.usage,
            prompt_chars=prompt_bytes(request),
            reply_chars=sum(map(reply_bytes, parts)),
            unseen=unseen_in(request.sampling.max_tokens, len(parts)),
        )
        shares = share_usage(usage, weights)
        stops = request.sampling.stop if "stop" in self._parameters.left_out else ()
        return [
            _cut(p.completion(usage=share, model=reply.model or self._model), stops)
            for p, share in zip(good, shares, strict=True)
        ]

    def _check_model(self, name: str) -> None:
        # A dated snapshot or a path that ends in the name is the model that was asked for.
        if not name or name.startswith(self._model) or name.endswith(self._model):
            return
        if self._strict_model:
            raise ProviderError(
                f"{self._where}: the server answered as model {name!r}, refused by strict_model",
                kind="bad_reply",
            )
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s: the server answered as model %r", self._where, name)

    async def aclose(self) -> None:
        """Close the connections of the running loop; those of other loops die with them."""
        await self._pool.aclose()


@asynccontextmanager
async def _deadline(limits: Limits, where: str) -> AsyncIterator[asyncio.Timeout]:
    """Bound a block by both limits on the loop's monotonic clock; gives the first-token timer,
    which the reader switches off."""
    total, first = asyncio.timeout(limits.timeout_s), asyncio.timeout(limits.first_token_s)
    failure: ProviderError | None = None
    try:
        async with total, first:
            yield first
    except TimeoutError:
        if first.expired():
            failure = timed_out(where, "no first token", "first_token_s", limits.first_token_s or 0)
        elif total.expired():
            failure = timed_out(where, "no whole reply", "timeout_s", limits.timeout_s)
        else:
            raise
    if failure is not None:
        raise failure


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON; a lone surrogate, which no UTF-8 can carry, becomes U+FFFD, and two
    halves of one character become it.

    Raises:
        ProviderError: a value that JSON does not have.
    """
    try:
        text = json.dumps(
            body, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain
        )
    except (TypeError, ValueError) as exc:
        raise ProviderError(
            f"the request cannot be written as JSON: {exc}", kind="bad_request"
        ) from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        return str(without_surrogates(text)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _cut(reply: Completion, stops: Sequence[str]) -> Completion:
    """Return a reply up to its first stop text, for a server that takes none."""
    at = min((i for stop in stops if (i := reply.text.find(stop)) >= 0), default=None)
    return reply if at is None else replace(reply, text=reply.text[:at])


def _split_query(url: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        is_address = False
    if not is_address:
        raise ConfigError(redact(f"base_url {url!r} is not an http or https URL"))
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    return bare, tuple(parse_qsl(parts.query))


def find_secret(variable: str | None, *, is_official: bool) -> Secret | None:
    """Return the key of a server, or None where it gets none.

    Raises:
        ProviderError: the variable is unset (kind `auth`).
    """
    name = variable or ("OPENAI_API_KEY" if is_official else None)
    if name is None:
        return None
    secret = Secret.from_environment(name)
    if secret is None:
        raise ProviderError(
            f"no key: environment variable {name} is unset or empty; export it, or name another "
            "one with api_key_env",
            kind="auth",
        )
    return secret
