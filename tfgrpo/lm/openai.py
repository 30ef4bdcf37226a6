"""Any OpenAI-compatible server, through the `openai` client used as a plain transport.

The client signs, connects and pools; everything that decides is ours: no retries, no redirects,
one total deadline on monotonic time (a slow drip never resets it), a limit for the first token,
and the typing of every failure. What comes back is read by `openai_reply`.

Does not know retries, prices, caches. Idea: one layer, one job (own).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError, ProviderFailure
from tfgrpo.lm.failures import http_failure
from tfgrpo.lm.openai_reply import ReplyReader
from tfgrpo.lm.single_draws import draws_in_parallel
from tfgrpo.lm.usage import normalise_usage, share_usage
from tfgrpo.lm.wire import prompt_bytes, reply_bytes, request_json, timed_out
from tfgrpo.protocols import Completion, Limits, Request
from tfgrpo.runtime.redaction import Secret, redact, redact_logs

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

OFFICIAL_URL = "https://api.openai.com/v1"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_SURROGATE = re.compile("[\ud800-\udfff]")


class OpenAILM:
    """A model behind `/chat/completions`.

    Args:
        model: the name sent to the server.
        base_url: including `/v1`; None is api.openai.com.
        api_key_env: environment variable that holds the key. For api.openai.com the default is
            `OPENAI_API_KEY`; other servers get a key only where this is given.
        api_key_query: send the key as this query parameter instead of a header.
        stream: True or False forces it for single draws; None streams them. n > 1 is always plain.
        supports_n: False sends parallel calls instead of `n`; learnt when the server returns one.
        send_seed: False keeps seeds back, for servers that fail on them (vLLM on a CPU ends with
            "CPU Generator does not use offset" where it cuts a seeded prompt into chunks).
        strict_model: refuse replies of a model with another name instead of warning once.
        headers: further request headers; must hold no key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = None,
        api_key_query: str | None = None,
        stream: bool | None = None,
        supports_n: bool = True,
        send_seed: bool = True,
        strict_model: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._base_url, self._query = _split_query(base_url or OFFICIAL_URL)
        self._secret = _find_secret(api_key_env, is_official=base_url is None)
        self._api_key_query = api_key_query
        self._stream = stream is not False
        self._supports_n = supports_n
        self._send_seed = send_seed
        self._strict_model = strict_model
        self._headers = dict(headers or {})
        self._spec = f"openai:{model}" if base_url is None else f"{self._base_url}#{model}"
        self._clients: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}
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
        wire format carries.
        """
        if n > 1 and self._supports_n:
            replies = await self._try_n(request, n, seeds)
            if len(replies) == n or len(replies) > 1:
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
        """Make one HTTP call. The error is raised outside the handler, so that no foreign
        exception, which may hold a URL with a key, hangs on it as context."""
        import httpx2
        import openai

        try:
            return await self._exchange(request, n, seed, stream=stream)
        except ProviderError as exc:
            failure = exc
        except openai.APIStatusError as exc:
            failure = http_failure(
                exc.status_code,
                exc.response.headers,
                exc.response.content,
                where=self._where,
                key_source=self._key_source,
            )
        except (openai.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as exc:
            failure = self._connection_failure(exc)
        except (openai.OpenAIError, httpx2.InvalidURL, UnicodeError) as exc:
            failure = ProviderError(
                redact(f"{self._where}: {type(exc).__name__}: {exc}"), kind="bad_request"
            )
        failure.__cause__ = failure.__context__ = None
        raise failure

    def _connection_failure(self, exc: BaseException) -> ProviderError:
        import httpx2
        import openai

        root: BaseException = exc
        while (inner := root.__cause__ or root.__context__) is not None:
            root = inner
        kind: ProviderFailure = "connection"
        if isinstance(exc, (openai.APITimeoutError, httpx2.TimeoutException)):
            kind = "timeout"
        said = f"{type(root).__name__}: {root}".rstrip(": ")
        return ProviderError(
            redact(f"{self._where}: no connection or it broke off ({said})"), kind=kind
        )

    async def _exchange(
        self, request: Request, n: int, seed: int | None, *, stream: bool
    ) -> list[Completion]:
        body = request_json(request, self._model)
        if n > 1:
            body["n"] = n
        if seed is not None and self._send_seed:
            body["seed"] = seed
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        reader = ReplyReader(request, self._where)
        async with (
            _deadline(request.limits, self._where) as first_token,
            self._open(body, request.limits) as chunks,
        ):
            if stream:
                await reader.read_stream(chunks, first_token)
            else:
                await reader.read_body(chunks)
        return self._completions(reader, request)

    @asynccontextmanager
    async def _open(
        self, body: dict[str, Any], limits: Limits
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        client = self._client()
        fields = _clean(body)
        create = client.chat.completions.with_streaming_response.create
        async with create(
            model=fields.pop("model"),
            messages=fields.pop("messages"),
            extra_body=fields,
            extra_headers=self._omitted(),
            timeout=limits.timeout_s,
        ) as response:
            yield response.iter_bytes()

    def _omitted(self) -> dict[str, Any]:
        """Headers that the client must leave out: it never sends a made-up key."""
        import openai

        if self._secret is None or self._api_key_query:
            return {"Authorization": openai.Omit()}
        return {}

    def _client(self) -> AsyncOpenAI:
        """The client of the running loop: a connection pool belongs to one loop."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            for old in [k for k in self._clients if k.is_closed()]:
                del self._clients[old]
            client = self._clients[loop] = self._make_client()
        return client

    def _make_client(self) -> AsyncOpenAI:
        try:
            import httpx2
            import openai
        except ImportError as exc:
            raise MissingExtraError.of(
                "openai", "the openai backend", exc.name or "openai"
            ) from exc

        redact_logs("openai", "httpx2", "httpcore2", "httpx", "httpcore")
        host = urlsplit(self._base_url).hostname or ""
        headers: dict[str, Any] = {"Accept-Encoding": "identity", **self._headers}
        query: dict[str, object] = dict(self._query)
        key = self._secret.value if self._secret else "no-key"
        if self._secret and self._api_key_query:
            query[self._api_key_query] = self._secret.value
        if self._base_url != OFFICIAL_URL:
            headers["OpenAI-Organization"] = headers["OpenAI-Project"] = openai.Omit()
        return openai.AsyncOpenAI(
            api_key=key,
            base_url=self._base_url,
            max_retries=0,
            default_headers=headers,
            default_query=query,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False,
                trust_env=host not in _LOOPBACK,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
            ),
        )

    @property
    def _where(self) -> str:
        return f"model {self._model!r} at {self._base_url}"

    @property
    def _key_source(self) -> str:
        return f"from {self._secret.source}" if self._secret else "none was sent"

    def _completions(self, reply: ReplyReader, request: Request) -> list[Completion]:
        self._check_model(reply.model)
        parts = [reply.choices[i] for i in sorted(reply.choices)]
        weights = [reply_bytes(p) for p in parts]
        usage = normalise_usage(
            reply.usage, prompt_chars=prompt_bytes(request), reply_chars=sum(weights)
        )
        shares = share_usage(usage, weights)
        return [
            p.completion(usage=share, model=reply.model or self._model)
            for p, share in zip(parts, shares, strict=True)
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
        client = self._clients.pop(asyncio.get_running_loop(), None)
        self._clients.clear()
        if client is not None:
            await client.close()


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


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which no UTF-8 body can carry, by U+FFFD; copies containers."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value


def _split_query(url: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(redact(f"base_url {url!r} is not an http or https URL"))
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    return bare, tuple(parse_qsl(parts.query))


def _find_secret(variable: str | None, *, is_official: bool) -> Secret | None:
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
