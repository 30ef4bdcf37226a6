"""The run's endpoint: workers ask it for text, and only it knows keys, prices and the journal.

It serves the run's own LMs, journalled and retried, by name. A request says whose call it is
(stage, task, rollout, draw, seeds), so its content key is the one that it would have in the run's
process: what was answered is found, what is in flight is shared. A worker that dies in the middle
of a call costs nothing: the call is finished and its reply kept for whoever does the work again.

Listens on a Unix socket of this user, or on an address with a token. Does not know what a call is
for. Source: own.
"""

from __future__ import annotations

import asyncio
import hmac
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import MissingExtraError, TfgrpoError, boundary
from tfgrpo.protocols import LM
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.runtime.event_loop import start_task
from tfgrpo.store.codec import completion_to_dict
from tfgrpo.workers.codec import error_to_dict, request_from_dict

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["PATH", "RunEndpoint"]

PATH = "/run/v1/complete"
_MAX_BODY_BYTES = 64_000_000


class RunEndpoint:
    """Serves the LMs of a run to its workers.

    Args:
        lms: by the name that workers use; may grow.
        token: what workers must send.
    """

    def __init__(self, lms: Mapping[str, LM], token: str) -> None:
        self._lms, self._token = lms, token
        self._runner: web.AppRunner | None = None
        self._folder = ""
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self, listen: str = "") -> str:
        """Listen; returns the URL for workers.

        Args:
            listen: HOST:PORT, port 0 for a free one; empty for a Unix socket.
        """
        try:
            from aiohttp import web
        except ImportError as exc:
            raise MissingExtraError.of("serve", "running rollouts in workers", "aiohttp") from exc
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post(PATH, self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        if not listen:
            self._folder = tempfile.mkdtemp(prefix="tfgrpo-run-")  # 0700: a run's folder may be too
            path = str(Path(self._folder) / "endpoint")  # long a path for a socket
            await web.UnixSite(self._runner, path, backlog=4096).start()
            return f"unix:{path}"
        host, _, port = listen.rpartition(":")
        site = web.TCPSite(self._runner, host.strip("[]"), int(port), backlog=4096)
        await site.start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.Response:
        from aiohttp import web

        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return web.json_response({"error": "wrong or missing token"}, status=401)
        row = await request.json()
        lm = self._lms.get(row["lm"])
        if lm is None:
            return web.json_response({"error": f"no LM {row['lm']!r:.80} here"}, status=404)
        # A task of its own: it is finished where the worker leaves, since it may be paid for.
        call = start_task(_answer(lm, row), self._calls)
        return web.json_response(await asyncio.shield(call))

    async def aclose(self) -> None:
        """Listen no longer; calls that are running are cancelled."""
        runner, self._runner = self._runner, None
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if runner is not None:
            await runner.cleanup()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


async def _answer(lm: LM, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with call_scope(CallScope(**row["scope"])), boundary(TfgrpoError, f"lm {lm.model_id!r}"):
            request = request_from_dict(row["request"])
            replies = await lm.complete(request, row["n"], row["seeds"])
            return {"replies": [completion_to_dict(reply) for reply in replies]}
    except TfgrpoError as exc:
        return {"error": error_to_dict(exc)}
