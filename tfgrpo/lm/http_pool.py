"""One POST over pooled connections: a single try, with proxies and certificates as the environment
names them.

Nothing here decides: no retries, no redirects, no cookies, no passwords from `.netrc`, no deadline
of its own. A pool belongs to one event loop, so there is one for each. aiohttp underneath: what a
call costs there does not grow with the number of calls in flight.

Does not know chat, keys or what a reply means. Source: own; variables as curl reads them.
"""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.runtime.redaction import redact, redact_logs

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpPool"]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LARGE = 1_000_000
"""Bytes from which a body is sent in pieces, so that writing it does not hold up the loop."""
_LONGEST_HEADER = 65_536
_PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True, slots=True)
class _Session:
    """What one event loop posts with."""

    client: aiohttp.ClientSession
    url: Any
    proxy: str | None
    errors: tuple[type[Exception], ...]
    close_later: weakref.finalize[Any, Any]


class HttpPool:
    """Connections to one URL.

    Args:
        url: where to post, with its query.
        headers: sent with every post.
        where: model and address, for messages.
    """

    def __init__(self, url: str, headers: Mapping[str, str], where: str) -> None:
        self._url, self._where = url, where
        self._headers = dict(headers)
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a body and give the response, whatever its status, once its head has come.

        Leaving the block before the whole response was read closes the connection.

        Raises:
            ConfigError: no connection can be made with the proxy or certificates of the
                environment.
            ProviderError: the call failed on its way; whoever raises it further clears its
                context, which may hold the URL.
        """
        session = self._session()
        response: aiohttp.ClientResponse | None = None
        try:
            async with session.client.post(
                session.url,
                data=body if len(body) < _LARGE else io.BytesIO(body),
                headers=self._headers,  # of the call: the session's go to a proxy as well
                proxy=session.proxy,
                allow_redirects=False,
            ) as response:
                yield response
            return
        except ProviderError:
            raise
        except session.errors as exc:
            failure = self._failure(exc)
        except ValueError as exc:  # an address or header that cannot be written
            if response is not None:
                raise
            failure = self._failure(exc)
        raise failure

    def _failure(self, exc: Exception) -> ProviderError:
        import aiohttp

        said = f"{type(exc).__name__}: {exc}".rstrip(": ")
        if isinstance(exc, aiohttp.InvalidURL) or not isinstance(
            exc, (aiohttp.ClientError, OSError)
        ):
            return ProviderError(redact(f"{self._where}: {said}"), kind="bad_request")
        before_sending = (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError)
        return ProviderError(
            redact(f"{self._where}: no connection or it broke off ({said}){_through(self._url)}"),
            kind="timeout" if isinstance(exc, TimeoutError) else "connection",
            was_sent=False if isinstance(exc, before_sending) else None,
        )

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for old in [k for k in self._sessions if k.is_closed()]:
                self._sessions.pop(old).close_later()
            session = self._sessions[loop] = self._open(loop)
        return session

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Session:
        try:
            import aiohttp
            from yarl import URL
        except ImportError as exc:
            raise MissingExtraError(f"calls over HTTP need aiohttp: {exc}") from exc
        except OSError as exc:  # it makes a TLS context while it is imported
            raise _environment_problem(exc) from None
        redact_logs("aiohttp")
        try:
            url = URL(self._url)
        except ValueError as exc:
            raise ConfigError(redact(f"{self._where}: this address is no URL: {exc}")) from None
        reads_environment = (urlsplit(self._url).hostname or "") not in LOOPBACK
        try:
            proxy = _proxy_for(self._url) if reads_environment else None
            is_tls = self._url.startswith("https:") or (proxy or "").startswith("https:")
            context = _context(*map(os.environ.get, _CERTIFICATES)) if is_tls else True
            connector, proxy = _connector(proxy, context)
        except (ImportError, ValueError, OSError) as exc:
            problem = _environment_problem(exc)
        else:
            client = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                max_line_size=_LONGEST_HEADER,
                max_field_size=_LONGEST_HEADER,
            )
            # Who never closes the LM gets no complaint about it at the end of the program.
            close_later = weakref.finalize(self, _abandon, loop, client, connector)
            errors = (aiohttp.ClientError, OSError)
            return _Session(client, url, proxy, errors, close_later)
        raise problem

    async def aclose(self) -> None:
        """Close the connections of the running loop; those of other loops die with them."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        for other in self._sessions.values():
            other.close_later()
        self._sessions.clear()
        if session is not None:
            session.close_later.detach()
            await session.client.close()


def _connector(proxy: str | None, context: Any) -> tuple[aiohttp.TCPConnector, str | None]:
    """Return what connects, and the proxy that is still to be named for each call."""
    import aiohttp

    if proxy is None or not proxy.startswith("socks"):
        return aiohttp.TCPConnector(limit=0, ssl=context), proxy
    from aiohttp_socks import ProxyConnector

    address = proxy.replace("socks5h:", "socks5:", 1)  # names are resolved by the proxy anyway
    return ProxyConnector.from_url(address, limit=0, ssl=context), None


def _abandon(
    loop: asyncio.AbstractEventLoop, client: aiohttp.ClientSession, connector: aiohttp.TCPConnector
) -> None:
    """Let go of a session whose owner is gone; a loop that still runs closes its connections."""
    client.detach()
    if not loop.is_closed():
        loop.call_soon_threadsafe(_close, connector)
    else:
        _close(connector)


def _close(connector: aiohttp.TCPConnector) -> None:
    for _ in connector.close().__await__():
        break  # the transports are closing; nobody waits for them


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL.

    Raises:
        ValueError: it is no proxy's address.
    """
    parts = urlsplit(url)
    found = getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    address = urlsplit(proxy)
    if address.scheme not in ("http", "https", "socks4", "socks5", "socks5h"):
        raise ValueError(f"unknown scheme {address.scheme!r} of a proxy")
    if not address.hostname or address.port == 0:
        raise ValueError("a proxy without a host")
    return proxy


def _through(url: str) -> str:
    """Name the variable whose proxy stands before a URL; empty where there is none."""
    parts = urlsplit(url)
    if (parts.hostname or "") in LOOPBACK or _proxy_for(url) is None:
        return ""
    names = (f"{parts.scheme}_proxy", "all_proxy")
    given = next((n for name in names for n in (name, name.upper()) if os.environ.get(n)), None)
    return f", through the proxy of {given}={os.environ[given]!r}" if given else ""


@cache
def _context(certificates: str | None, folder: str | None) -> ssl.SSLContext:
    """Return what checks a server: the certificates named, else those of the system."""
    context = ssl.create_default_context(cafile=certificates or None, capath=folder or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _environment_problem(exc: Exception) -> ConfigError:
    """Name the environment variables that a connection is made from, where it cannot be made."""
    names = (*_PROXIES, *_CERTIFICATES, "SSLKEYLOGFILE")
    given = [n for name in names for n in (name, name.lower()) if os.environ.get(n)]
    shown = ", ".join(f"{n}={os.environ[n]!r}" for n in given) or "no proxy variable is set"
    return ConfigError(
        redact(
            f"no connection can be made with these environment variables: {shown} "
            f"({type(exc).__name__}: {exc}). Unset or mend them; socks5:// needs `pip install "
            "aiohttp-socks`, http:// works as it is"
        )
    )
