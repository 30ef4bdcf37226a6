"""Pages on 127.0.0.1 alone: read-only, behind a random token.

Requests that name another host are refused, so that no web page can reach it through a rebound
name. A reader who goes away in the middle of a page is no error.

Does not know what the pages show: a `Site` makes them. Source: own.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol, Self

from tfgrpo.errors import ConfigError

__all__ = ["NOT_FOUND", "Answer", "LiveServer", "Site"]

log = logging.getLogger(__name__)

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page is answered with."""

    text: str
    kind: str = "text/html"
    status: HTTPStatus = HTTPStatus.OK


NOT_FOUND = Answer("not found\n", "text/plain", HTTPStatus.NOT_FOUND)


class Site(Protocol):
    """What pages there are below the token."""

    def answer(self, path: str) -> Answer:
        """Return the page of a path, `NOT_FOUND` where there is none; must not raise."""
        ...


class _Server(ThreadingHTTPServer):
    """One that is silent about readers who went away."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, socket.timeout)):
            log.exception("a page could not be served")


class LiveServer:
    """A running server of pages; close it, or use it as a context manager."""

    def __init__(self, site: Site, port: int = 0) -> None:
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = _Server(
                ("127.0.0.1", port), _handler(site, self._token), bind_and_activate=True
            )
        except (OSError, OverflowError) as exc:  # a number that no port has
            raise ConfigError(
                f"the page cannot listen on 127.0.0.1:{port} ({exc}): choose another port, "
                "or 0 for a free one"
            ) from exc
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True,
            name="tfgrpo-live",
        )  # fmt: skip
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The page's address, token included: whoever has it can read the run."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    def wait(self) -> None:
        """Block until the server is closed or the process interrupted."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """Stop listening; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _handler(site: Site, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "tfgrpo"
        sys_version = ""
        timeout = 20

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            answer = self._content()
            body = answer.text.encode("utf-8")
            self.send_response(answer.status)
            self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _content(self) -> Answer:
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                return Answer("this address only\n", "text/plain", HTTPStatus.FORBIDDEN)
            given, _, rest = self.path.partition("?")[0].lstrip("/").partition("/")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return NOT_FOUND
            return site.answer(rest)

        def log_message(self, format: str, *args: object) -> None:
            # The request line holds the token.
            log.debug("live view: %s %s", self.command, args[1] if len(args) > 1 else "")

    return Handler
