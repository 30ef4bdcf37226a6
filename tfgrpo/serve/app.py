"""The API's ASGI application: who may come in, and which endpoint a path leads to.

Order: size of the headers, `Host`, `Origin`, path, key, rate, endpoint. Pages of other sites cannot
use it through a browser: a foreign `Host` (DNS rebinding) and any `Origin` are refused. Admin paths
do not exist here.

Does not know how endpoints work. Source: own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tfgrpo.errors import TfgrpoError, boundary
from tfgrpo.runtime.hosts import is_loopback
from tfgrpo.serve.endpoints import info
from tfgrpo.serve.endpoints.asking import ask
from tfgrpo.serve.endpoints.dialects import CHAT, EMBEDDINGS, RESPONSES
from tfgrpo.serve.endpoints.feedback import Feedback
from tfgrpo.serve.endpoints.groups import close
from tfgrpo.serve.gateway import Gateway, split_address
from tfgrpo.serve.identity import Place, read_place
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.http import ClientGone, Http, Receive, Send

log = logging.getLogger(__name__)

__all__ = ["ApiApp", "host_names"]

MAX_HEADERS, MAX_HEADER_BYTES = 64, 16_384
_ASKING = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/embeddings": EMBEDDINGS}


def host_names(address: str, further: tuple[str, ...]) -> frozenset[str]:
    """Return the values that a `Host` header may have."""
    host, port = split_address(address)
    names = {host, *further}
    if is_loopback(host):
        names |= {"localhost", "127.0.0.1", "[::1]"}
    return frozenset(n.lower() for n in names) | {f"{n}:{port}".lower() for n in names}


class ApiApp:
    """The application.

    Args:
        gateway: the running parts.
        admin_secret: opens /metrics from elsewhere than loopback.
    """

    def __init__(self, gateway: Gateway, admin_secret: str) -> None:
        self._gateway = gateway
        self._admin = admin_secret
        self._hosts: frozenset[str] = frozenset()
        self._feedback = Feedback(gateway)
        self._takes_tokens = False
        self._address = ""
        self.running: set[asyncio.Task[Any]] = set()
        self.listen(gateway.settings.serve.listen)

    def listen(self, address: str) -> None:
        """Tell the address that is listened on, whose names `Host` may have."""
        self._address = address
        self.follow()

    def follow(self) -> None:
        """Take over what the gateway's settings say, which may have been read anew."""
        routes = self._gateway.routes.values()
        self._takes_tokens = any(r.settings.feedback_tokens for r in routes)
        self._hosts = host_names(self._address, self._gateway.settings.serve.hosts)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            return
        http = Http(scope, receive, send, drop_after_s=self._gateway.settings.serve.drop_after_s)
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            with boundary(TfgrpoError, f"{http.method} {http.path[:100]}"):
                await self._guarded(http)
        except TfgrpoError as error:
            log.exception("a bug of ours, or the store")
            await http.error(ApiError("internal", f"{type(error).__name__}: see the log"))
        finally:
            self.running.discard(task)

    async def _guarded(self, http: Http) -> None:
        try:
            await self._serve(http)
        except ApiError as error:
            self._gateway.metrics.add("refusals", {"code": error.code})
            await http.error(error)
        except ClientGone:
            http.status = http.status or 499

    async def _serve(self, http: Http) -> None:
        http.check_headers(MAX_HEADERS, MAX_HEADER_BYTES)
        if http.headers.get("host", "").lower() not in self._hosts:
            raise ApiError("host_not_allowed", "this Host is not served; see serve.hosts")
        if "origin" in http.headers:
            if self._takes_tokens and http.path == "/v1/feedback":
                await self._browser(http)
                return
            raise ApiError("origin_not_allowed", "pages of other sites may not use this API")
        if http.path == "/openapi.json":
            _allow(http, "GET")
            await info.schema(http)
            return
        if http.path in ("/health", "/ready", "/metrics"):
            await self._operate(http)
            return
        place = read_place(http.path)
        dialect = _ASKING.get(place.path)
        if dialect is not None:
            _allow(http, "POST")
            await self._as_key(http, "use", lambda key: ask(self._gateway, http, place, key,
                                                            dialect))  # fmt: skip
            return
        await self._read(http, place)

    async def _browser(self, http: Http) -> None:
        """Let pages of any site rate the one response that their token names."""
        rows = [(b"access-control-allow-origin", b"*")]
        http.extra = rows
        if http.method == "OPTIONS":
            allowed = [(b"access-control-allow-methods", b"POST"),
                       (b"access-control-allow-headers", b"content-type")]  # fmt: skip
            await http.reply(204, b"", allowed)
            return
        _allow(http, "POST")
        await self._feedback.post(http, None)

    async def _operate(self, http: Http) -> None:
        _allow(http, "GET")
        if http.path == "/health":
            await info.health(http)
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        is_admin = hmac.compare_digest(given.encode(), self._admin.encode())
        if not http.is_loopback and not is_admin:
            raise ApiError("forbidden", "from elsewhere this needs the admin secret")
        if http.path == "/ready":
            await info.ready(self._gateway, http)
        else:
            await info.metrics(self._gateway, http)

    async def _read(self, http: Http, place: Place) -> None:
        gateway, path = self._gateway, place.path
        if path == "/v1/models":
            _allow(http, "GET")
            await self._as_key(http, "", lambda key: info.models(gateway, http, key))
        elif path.startswith("/v1/models/"):
            _allow(http, "GET")
            name = path.removeprefix("/v1/models/")
            await self._as_key(http, "", lambda key: info.model(gateway, http, key, name))
        elif path == "/v1/feedback" and http.method == "GET":
            await self._as_key(http, "read", lambda key: self._feedback.read(http, key))
        elif path == "/v1/feedback":
            _allow(http, "POST")
            await self._as_key(http, "feedback", lambda key: self._feedback.post(http, key))
        elif path.startswith("/v1/feedback/"):
            _allow(http, "DELETE")
            name = path.removeprefix("/v1/feedback/")
            await self._as_key(
                http, "feedback", lambda key: self._feedback.withdraw(http, key, name)
            )
        elif path.startswith("/tfgrpo/v1/groups/") and path.endswith("/close"):
            _allow(http, "POST")
            name = path.removeprefix("/tfgrpo/v1/groups/").removesuffix("/close")
            await self._as_key(http, "feedback", lambda key: close(gateway, http, key, name))
        elif path.startswith("/tfgrpo/v1/responses/"):
            _allow(http, "GET")
            name = path.removeprefix("/tfgrpo/v1/responses/")
            await self._as_key(http, "read", lambda key: info.response(gateway, http, key, name))
        else:
            raise ApiError("not_found", f"the path {http.path!r:.200} names nothing here")

    async def _as_key(self, http: Http, scope: str, run: Callable[[str], Awaitable[None]]) -> None:
        """Let a key in and count it, then serve."""
        gateway = self._gateway
        key_name = await gateway.keys.name_of(http.headers.get("authorization", ""))
        key = gateway.key(key_name)
        if scope and scope not in key.scopes:
            raise ApiError("forbidden", f"this key may not {scope}")
        if gateway.is_draining:
            raise ApiError("draining", "the gateway is shutting down", retry_after_s=5.0)
        gateway.rates.enter(key_name, key.rate, gateway.settings.serve.in_flight)
        try:
            await run(key_name)
        finally:
            gateway.rates.leave(key_name)


def _allow(http: Http, method: str) -> None:
    if http.method != method:
        raise ApiError("method_not_allowed", f"{http.method} is not served here; use {method}")
