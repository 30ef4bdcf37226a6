"""The report of a running job, on 127.0.0.1 alone: read-only, behind a random token.

The page is the same as the written one and is made anew when the journal has grown; it polls the
server's `version` and reloads. Requests that name another host are refused, so that no web page
can reach it through a rebound name.

Does not know the job: it reads the run's folder. Source: own.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.report.page import render_page
from tfgrpo.report.view import RunView, load_view
from tfgrpo.store import Journal
from tfgrpo.store.postgres.places import place_of

__all__ = ["LiveServer", "serve_live"]

log = logging.getLogger(__name__)

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveServer:
    """A running live view; close it, or use it as a context manager."""

    def __init__(self, pages: _Pages, port: int) -> None:
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer(
                ("127.0.0.1", port), _handler(pages, self._token), bind_and_activate=True
            )
        except OSError as exc:
            raise ConfigError(
                f"the live view cannot listen on 127.0.0.1:{port} ({exc}): choose another port, "
                "or 0 for a free one"
            ) from exc
        self._server.daemon_threads = True
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


def serve_live(
    folder: Path | str, port: int = 0, *, load: Callable[[Path], RunView] = load_view
) -> LiveServer:
    """Serve the live report of a run's folder in a thread of its own.

    Args:
        folder: the run's folder; it may still be empty.
        port: to listen on; 0 takes a free one.
        load: how the view is read.

    Raises:
        ConfigError: the port cannot be used.
    """
    return LiveServer(_Pages(Path(folder), load), port)


class _Pages:
    """The newest page, made once a version."""

    def __init__(self, folder: Path, load: Callable[[Path], RunView]) -> None:
        self._folder = folder
        self._load = load
        self._lock = threading.Lock()
        self._made: tuple[str, str] = ("", "")

    def version(self) -> str:
        """Changes whenever the journal was written."""
        try:
            place = place_of(self._folder)
            if place.address is not None:
                with Journal.open(self._folder, readonly=True) as store:
                    return store.change_mark()
        except StoreError:
            return "none"  # the page tells why
        marks = []
        for name in ("run.db", "run.db-wal"):
            file = self._folder / name
            if file.exists():
                stat = file.stat()
                marks.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
        return "-".join(marks) or "none"

    def page(self) -> str:
        """The page of the newest version."""
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                self._made = (version, render_page(self._load(self._folder), live_version=version))
            return self._made[1]


def _handler(pages: _Pages, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "tfgrpo"
        sys_version = ""
        timeout = 20

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            status, kind, text = self._content()
            body = text.encode("utf-8")
            self.send_response(status)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _content(self) -> tuple[HTTPStatus, str, str]:
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                return HTTPStatus.FORBIDDEN, "plain", "this address only\n"
            given, _, rest = self.path.partition("?")[0].lstrip("/").partition("/")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return HTTPStatus.NOT_FOUND, "plain", "not found\n"
            if rest == "version":
                return HTTPStatus.OK, "plain", pages.version()
            if rest:
                return HTTPStatus.NOT_FOUND, "plain", "not found\n"
            try:
                return HTTPStatus.OK, "html", pages.page()
            except StoreError as exc:
                return HTTPStatus.SERVICE_UNAVAILABLE, "plain", f"no report yet: {exc}\n"

        def log_message(self, format: str, *args: object) -> None:
            # The request line holds the token.
            log.debug("live view: %s %s", self.command, args[1] if len(args) > 1 else "")

    return Handler
