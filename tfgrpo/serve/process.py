"""The process: two listeners, start, drain and stop.

TERM or Ctrl-C: `/ready` fails and new requests are refused; running ones have `drain_s`, then they
are cancelled and booked. HUP: the settings are read anew.

Does not know endpoints. Source: own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError, StoreError, TfgrpoError
from tfgrpo.runtime.redaction import redact, register
from tfgrpo.serve.app import ApiApp
from tfgrpo.serve.gateway import Gateway, split_address
from tfgrpo.serve.learning.service import Learning
from tfgrpo.serve.page.app import PageApp
from tfgrpo.serve.reload import apply_settings
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.serve.shadow import Shadows
from tfgrpo.serve.wire.protocol import guarded_protocol

log = logging.getLogger(__name__)

__all__ = ["Running", "new_loop", "serve"]


def new_loop() -> asyncio.AbstractEventLoop:
    """Return the fastest event loop that is installed."""
    with suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()  # type: ignore[no-any-return]
    return asyncio.new_event_loop()


def admin_secret(settings: GatewaySettings) -> tuple[str, bool]:
    """Return the admin secret and whether it was made now.

    One that was made now is not yet registered as a secret: it has to be told once, and what is
    registered can no longer be printed.
    """
    given = os.environ.get(settings.serve.admin_key_env, "").strip()
    if given and len(given) < 16:
        raise ConfigError(f"{settings.serve.admin_key_env} is shorter than 16 characters")
    if given:
        register(given)
    return given or secrets.token_urlsafe(24), not given


class Running:
    """A started gateway; `stop` drains and closes it."""

    def __init__(self, gateway: Gateway, app: ApiApp, secret: str) -> None:
        self.gateway, self.app, self.secret = gateway, app, secret
        self.learning = Learning(gateway, redraw=Shadows(gateway))
        self.api_url = ""
        self.page_url = ""
        self.shows_secret = False
        """True where the secret was made now and must be told once."""
        self._servers: list[tuple[Any, asyncio.Task[None]]] = []

    @classmethod
    async def start(cls, settings: GatewaySettings, secret: str = "") -> Running:
        """Open the folder and listen; port 0 takes a free one.

        Raises:
            ConfigError, StoreError, MissingExtraError: it cannot start.
        """
        secret = secret or admin_secret(settings)[0]
        gateway = Gateway(settings)
        app = ApiApp(gateway, secret)
        running = cls(gateway, app, secret)
        try:
            address = await running._listen(app, settings.serve.listen)
            app.listen(address)
            running.api_url = f"http://{address}"
            if settings.serve.admin_listen:
                page = PageApp(gateway, running.learning, secret)
                address = await running._listen(page, settings.serve.admin_listen)
                page.listen(address)
                running.page_url = f"http://{address}/"
            running.learning.start()
        except BaseException:
            await running.stop(0.0)
            raise
        return running

    async def _listen(self, app: Any, address: str) -> str:
        try:
            import uvicorn
        except ImportError as exc:
            raise MissingExtraError.of("serve", "the gateway", "uvicorn") from exc
        host, port = split_address(address)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=guarded_protocol(),  # type: ignore[arg-type]
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=75,
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        try:
            await server.startup()
        except SystemExit:
            raise StoreError(f"cannot listen on {address}: is another process there?") from None
        task = asyncio.ensure_future(server.main_loop())
        self._servers.append((server, task))
        found = server.servers[0].sockets[0].getsockname()[1]
        return f"{f'[{host}]' if ':' in host else host}:{found}"

    def reload(self, reread: Callable[[], GatewaySettings]) -> str:
        """Read the settings anew and return what came of it, in one line.

        Settings that cannot work change nothing.
        """
        try:
            notes = apply_settings(self.gateway, self.learning, reread())
        except TfgrpoError as exc:
            told = redact(f"the settings stay as they were: {exc}")
            log.error("%s", told)
            return told
        self.app.follow()
        told = "; ".join(["the settings were read anew", *notes])
        log.warning("%s", told)
        return told

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones end within `drain_s`, then cancel and book them."""
        self.gateway.is_draining = True
        await self.learning.stop()
        tasks = set(self.app.running)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for task in self.app.running:
            task.cancel()
        if self.app.running:
            await asyncio.wait(set(self.app.running), timeout=5.0)
        for server, task in self._servers:
            server.should_exit = True
            await task
            await server.shutdown()
        await self.gateway.aclose()


async def serve(
    settings: GatewaySettings,
    tell: Callable[[Running], None],
    reread: Callable[[], GatewaySettings] | None = None,
) -> None:
    """Serve until TERM or INT.

    Args:
        settings: checked.
        tell: told the started gateway.
        reread: reads the settings anew, at each HUP.
    """
    secret, is_new = admin_secret(settings)
    running = await Running.start(settings, secret)
    running.shows_secret = is_new
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    if reread is not None and hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, running.reload, reread)
    # What the start made stays for good: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    try:
        tell(running)
        register(secret)
        await stopped.wait()
    finally:
        await running.stop(settings.serve.drain_s)
