"""One upstream call over raw bytes: whole bodies and event streams, as they come.

Kinds behind one seam. `HttpUpstream` forwards JSON to a server that speaks the API and hands
its bytes back; fields that we do not know travel untouched in both directions. `LocalUpstream` asks
an `LM` of this process and writes the same bytes; a fleet of servers has a module of its own.
Neither retries, follows redirects, or reads
proxies from the environment; every failure is typed as everywhere (`lm.failures`).

Does not know routes, money or clients. Source: own. aiohttp and not httpx: at equal load it leaves
room for the rest (`tests/benchmarks/serve`).
"""

from __future__ import annotations

import asyncio
import errno
import io
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import orjson

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.lm.failures import body_failure, http_failure
from tfgrpo.lm.server.replies import reply_events, reply_json
from tfgrpo.lm.server.requests import BadBody, read_request
from tfgrpo.protocols import LM
from tfgrpo.runtime.redaction import Secret, redact

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

__all__ = ["OFFICIAL_URL", "HttpUpstream", "LocalUpstream", "Upstream"]

OFFICIAL_URL = "https://api.openai.com/v1"
MAX_REPLY_BYTES = 16_000_000
PIECE_BYTES = 32_768
"""Largest piece of a stream: what waits for a slow client is a few of them."""
_LARGE = 1_000_000
"""Bytes from which a body is sent in pieces."""
_METADATA = ("169.254.", "fe80:", "fd00:ec2:")


class Upstream(Protocol):
    """A model that answers bodies of the API.

    Contract:
        1. `call` returns the bytes of a whole JSON reply; `stream` yields the bytes of an event
           stream as they come. Both raise `ProviderError`; where nothing was sent it says so.
        2. Cancelling a call, or leaving the block of `stream`, ends the work behind it.
        3. `has_other_hosts` is True where a failure was one host's and others can take the next
           call, so that the upstream as a whole need not rest.
    """

    @property
    def model(self) -> str:
        """The name that the upstream's bodies carry."""
        ...

    @property
    def spec(self) -> str:
        """The spec string without options, for ledgers."""
        ...

    @property
    def has_other_hosts(self) -> bool:
        """Whether the next call can go elsewhere."""
        ...

    def endpoints(self) -> frozenset[str]:
        """Paths after `/v1` that it answers."""
        ...

    async def call(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return a whole reply."""
        ...

    def stream(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a block that gives the pieces of an event stream."""
        ...

    async def aclose(self) -> None:
        """Free what it holds."""
        ...


class _OneHost:
    """What upstreams of one host have in common."""

    @property
    def has_other_hosts(self) -> bool:
        """False: there is one."""
        return False


class HttpUpstream(_OneHost):
    """A server that speaks the API.

    Args:
        model: the name sent to it.
        base_url: including `/v1`.
        api_key_env: environment variable of its key; the official API has a default.
    """

    def __init__(self, model: str, *, base_url: str, api_key_env: str | None = None) -> None:
        self._model, self._base = model, base_url.rstrip("/")
        is_official = self._base == OFFICIAL_URL
        self._spec = f"openai:{model}" if is_official else f"{self._base}#{model}"
        variable = api_key_env or ("OPENAI_API_KEY" if is_official else None)
        secret = Secret.from_environment(variable) if variable else None
        if variable and secret is None:
            raise ConfigError(f"upstream {self._spec}: environment variable {variable} is unset")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if secret is not None:
            self._headers["authorization"] = f"Bearer {secret.value}"
        self._key_source = f"from {secret.source}" if secret else "none was sent"
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, Any] = {}
        """Where each endpoint is, read once the session is open."""

    @property
    def model(self) -> str:
        """The name that the upstream's bodies carry."""
        return self._model

    @property
    def spec(self) -> str:
        """The spec string."""
        return self._spec

    def endpoints(self) -> frozenset[str]:
        """Whatever a server has, it is asked for."""
        return frozenset({"/chat/completions", "/responses", "/embeddings"})

    async def call(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return the bytes of a reply with status 200."""
        async with self._open(endpoint, body, timeout_s) as response:
            pieces, size = [], 0
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > MAX_REPLY_BYTES:
                    raise ProviderError(
                        f"{self._where}: the reply is larger than {MAX_REPLY_BYTES:,} bytes",
                        kind="bad_reply",
                    )
                pieces.append(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @asynccontextmanager
    async def stream(
        self, endpoint: str, body: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the pieces of an event stream."""
        async with self._open(endpoint, body, timeout_s) as response:
            kind = response.headers.get("content-type", "")
            if "json" in kind or "html" in kind:
                raw = await response.content.read(100_000)
                raise _not_a_stream(raw, self._where)
            yield response.content.iter_chunked(PIECE_BYTES)

    @asynccontextmanager
    async def _open(
        self, endpoint: str, body: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        failure: ProviderError
        data = orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._get_session().post(
                    self._urls[endpoint],
                    data=data if len(data) < _LARGE else io.BytesIO(data),
                    allow_redirects=False,
                ) as response,
            ):
                if response.status != 200:
                    raw = await response.content.read(100_000)
                    headers = {k.lower(): v for k, v in response.headers.items()}
                    raise http_failure(
                        response.status, headers, raw, where=self._where,
                        key_source=self._key_source,
                    )  # fmt: skip
                yield response
            return
        except ProviderError:
            raise
        except aiohttp.ClientConnectorError as exc:
            failure = ProviderError(
                self._said("no connection", exc), kind="connection", was_sent=False
            )
        except (aiohttp.ClientError, ConnectionError) as exc:
            failure = ProviderError(self._said("the connection broke off", exc), kind="connection")
        except TimeoutError:
            failure = ProviderError(
                f"{self._where}: no whole reply within {timeout_s:g} s", kind="timeout"
            )
        raise failure

    @property
    def _where(self) -> str:
        return f"model {self._model!r} at {self._base}"

    def _said(self, what: str, exc: BaseException) -> str:
        return redact(f"{self._where}: {what} ({type(exc).__name__}: {exc})")

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            try:
                import aiohttp
            except ImportError as exc:
                raise MissingExtraError.of("serve", "the gateway", "aiohttp") from exc
            from yarl import URL

            written = urlsplit(self._base).hostname or ""
            self._urls = {e: URL(self._base + e) for e in self.endpoints()}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, resolver=_resolver(), use_dns_cache=True, keepalive_timeout=60.0
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                read_bufsize=PIECE_BYTES // 2,
                trust_env=False,
                auto_decompress=False,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent",),
            )
            log.debug("upstream %s at host %s", self._spec, written)
        return self._session

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _resolver() -> Any:
    """Return a resolver that refuses link-local and metadata addresses behind a host's name."""
    from aiohttp.resolver import ThreadedResolver

    class Careful(ThreadedResolver):  # type: ignore[misc]
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> Any:
            rows = await super().resolve(host, port, family)
            for row in rows:
                address = ipaddress.ip_address(row["host"].partition("%")[0])
                if address.is_link_local or str(address).startswith(_METADATA):
                    why = f"{host} leads to the link-local address {address}: refused"
                    raise OSError(errno.EACCES, why)  # aiohttp tells the text of a numbered one
            return rows

    return Careful()


def _not_a_stream(raw: bytes, where: str) -> ProviderError:
    from tfgrpo.lm.failures import error_in_body

    try:
        error = orjson.loads(raw).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        error = None
    kind = error_in_body(error) if error else "bad_reply"
    return body_failure(kind, raw, "the reply is no event stream", where=where)


class LocalUpstream(_OneHost):
    """An `LM` of this process, answering with the bytes that a server would send."""

    def __init__(self, lm: LM, spec: str, model: str) -> None:
        self._lm, self._spec, self._model = lm, spec, model

    @property
    def model(self) -> str:
        """The name that its bodies carry."""
        return self._model

    @property
    def spec(self) -> str:
        """The spec string."""
        return self._spec

    def endpoints(self) -> frozenset[str]:
        """Chat alone."""
        return frozenset({"/chat/completions"})

    async def call(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return a whole reply."""
        asked = self._read(body, timeout_s)
        replies = await self._lm.complete(asked.request, asked.n, asked.seeds)
        return orjson.dumps(reply_json(replies, asked, self._model))

    @asynccontextmanager
    async def stream(
        self, endpoint: str, body: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the pieces of an event stream."""
        pieces = reply_events(self._lm, self._read(body, timeout_s), self._model)
        try:
            yield pieces
        finally:
            await pieces.aclose()

    def _read(self, body: Mapping[str, Any], timeout_s: float) -> Any:
        try:
            return read_request(body, model_name=self._model, timeout_s=timeout_s)
        except BadBody as exc:
            raise ProviderError(str(exc), kind="bad_request", status=400) from None

    async def aclose(self) -> None:
        """Close the LM."""
        await self._lm.aclose()
