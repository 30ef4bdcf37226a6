"""The page's ASGI application and its commands, on a listener of its own for this machine.

Sign in with the admin secret: a `SameSite=Strict` cookie opens the pages, a token in every form
proves that the form is ours. Programs send the secret as `Authorization: Bearer …` and get JSON.
A command carries the version of the state that it was given for.

Does not know how libraries are judged. Source: own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl

from tfgrpo.errors import StoreError, TfgrpoError, boundary
from tfgrpo.serve import tables
from tfgrpo.serve.app import host_names
from tfgrpo.serve.content import forget
from tfgrpo.serve.endpoints.feedback import feedback_rows
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning import canary
from tfgrpo.serve.learning.evidence import read_seen, read_units
from tfgrpo.serve.learning.proposing import flagged
from tfgrpo.serve.learning.ratings import in_force
from tfgrpo.serve.learning.route import RouteLearning
from tfgrpo.serve.learning.service import Learning
from tfgrpo.serve.page import views
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.http import Http, Receive, Send
from tfgrpo.statistics.sequential import EffectInterval
from tfgrpo.store import Journal

log = logging.getLogger(__name__)

__all__ = ["PageApp"]

_COOKIE = "tfgrpo_admin"
_COMMANDS = frozenset({"approve", "reject", "roll_back", "freeze", "thaw", "pause", "resume"})


class PageApp:
    """The application.

    Args:
        gateway, learning: the running parts.
        secret: what opens it.
    """

    def __init__(self, gateway: Gateway, learning: Learning, secret: str) -> None:
        self._gateway, self._learning, self._secret = gateway, learning, secret
        self._hosts: frozenset[str] = frozenset()
        self._origins: frozenset[str] = frozenset()

    def listen(self, address: str) -> None:
        """Tell the address that is listened on."""
        self._hosts = host_names(address, ())
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        http = Http(scope, receive, send)
        http.extra = [
            (b"content-security-policy", views.policy().encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"no-store"),
            # Not `no-referrer`: under it browsers send our own forms with `Origin: null`.
            (b"referrer-policy", b"same-origin"),
        ]
        try:
            with boundary(TfgrpoError, f"page {http.method} {http.path[:100]}"):
                await self._guarded(http)
        except TfgrpoError as error:
            log.exception("a bug of ours, or the store")
            await http.error(ApiError("internal", f"{type(error).__name__}: see the log"))

    async def _guarded(self, http: Http) -> None:
        try:
            http.check_headers(64, 16_384)
            if http.headers.get("host", "").lower() not in self._hosts:
                raise ApiError("host_not_allowed", "this Host is not served")
            origin = http.headers.get("origin")
            if origin is not None and origin not in self._origins:
                raise ApiError("origin_not_allowed", "pages of other sites may not use this")
            await self._serve(http)
        except ApiError as error:
            if self._is_program(http):
                await http.error(error)
            else:
                page = views.document("That did not work", error.message)
                await self._html(http, error.status, page)

    async def _serve(self, http: Http) -> None:
        if http.path == "/login" and http.method == "POST":
            await self._login(http)
            return
        if not self._is_signed_in(http):
            if self._is_program(http):
                raise ApiError("invalid_api_key", "the admin secret is wrong")
            await self._html(http, 200 if http.method == "GET" else 401, views.login(False))
            return
        if http.method == "POST":
            await self._command(http)
        elif http.path == "/":
            await self._html(http, 200, self._overview())
        elif http.path.startswith("/routes/"):
            await self._html(http, 200, await self._route(http.path.removeprefix("/routes/")))
        else:
            raise ApiError("not_found", "there is no such page")

    async def _html(
        self, http: Http, status: int, page: bytes, *headers: tuple[bytes, bytes]
    ) -> None:
        await http.reply(status, page, headers, content_type=b"text/html; charset=utf-8")

    def _is_program(self, http: Http) -> bool:
        return http.headers.get("authorization", "").startswith("Bearer ")

    def _is_signed_in(self, http: Http) -> bool:
        if self._is_program(http):
            given = http.headers["authorization"][7:]
            return hmac.compare_digest(given.encode(), self._secret.encode())
        for part in http.headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == _COOKIE and hmac.compare_digest(value.encode(), self._mark("cookie")):
                return True
        return False

    def _mark(self, what: str) -> bytes:
        digest = hmac.digest(self._secret.encode(), what.encode(), "sha256")
        return digest.hex().encode()

    async def _form(self, http: Http) -> dict[str, str]:
        raw = await http.body(64_000, 10.0)
        if "json" in http.headers.get("content-type", ""):
            from tfgrpo.serve.wire.http import parse_object

            return {k: str(v) for k, v in parse_object(raw).items()}
        return dict(parse_qsl(raw.decode("utf-8", "replace")))

    async def _login(self, http: Http) -> None:
        form = await self._form(http)
        if not hmac.compare_digest(form.get("secret", "").encode(), self._secret.encode()):
            await asyncio.sleep(0.5)
            await self._html(http, 401, views.login(True))
            return
        cookie = b"%s=%s; HttpOnly; SameSite=Strict; Path=/" % (
            _COOKIE.encode(), self._mark("cookie"))  # fmt: skip
        await http.reply(303, b"", [(b"location", b"/"), (b"set-cookie", cookie)])

    async def _command(self, http: Http) -> None:
        form = await self._form(http)
        is_program = self._is_program(http)
        token = form.get("token", "").encode()
        if not is_program and not hmac.compare_digest(token, self._mark("form")):
            raise ApiError("forbidden", "the form is not ours or too old: load the page again")
        if http.path == "/admin/forget":
            await self._forget(http, form)
            return
        learning = self._of(form.get("route", ""))
        if http.path == "/admin/act":
            await self._act(learning, form)
        elif http.path == "/admin/settle":
            await self._settle(learning, form)
        else:
            raise ApiError("not_found", "there is no such command")
        if is_program:
            state = learning.state
            await http.json(200, {"state": state.name, "version": state.version,
                                  "library": state.current})  # fmt: skip
        else:
            place = f"/routes/{learning.route.name}".encode()
            await http.reply(303, b"", [(b"location", place)])

    def _of(self, name: str) -> RouteLearning:
        found = self._learning.routes.get(name)
        if found is None:
            raise ApiError("not_found", f"no route {name!r:.80} learns here")
        return found

    async def _act(self, learning: RouteLearning, form: dict[str, str]) -> None:
        event = form.get("event", "")
        if event not in _COMMANDS:
            raise ApiError("invalid_request", f"there is no command {event!r:.40}")
        expected = form.get("expected", "")
        if not expected.isdecimal():
            raise ApiError("invalid_request", "expected: the version of the state that you saw")
        if event == "approve" and learning.state.name == "waiting":
            self._check_ticks(learning, form)
        await learning.act(event, "person", form.get("reason", ""), expected=int(expected))
        if event == "roll_back" and form.get("now"):
            learning.route.forget_sessions(everywhere=True)

    def _check_ticks(self, learning: RouteLearning, form: dict[str, str]) -> None:
        """Ask for a tick of its own for each new entry that the guards would hold back."""
        candidate = learning.candidate
        if candidate is None:
            return
        known = {e.experience_id for e in learning.current.library.entries}
        missing = [k for k, _ in flagged(candidate) if k not in known and f"tick-{k}" not in form]
        if missing:
            raise ApiError(
                "invalid_request",
                f"each flagged entry needs a tick of its own: {', '.join(missing)}",
            )

    async def _forget(self, http: Http, form: dict[str, str]) -> None:
        """Remove the content of one end user and say which entries came from it."""
        end_user = form.get("end_user", "")
        if not end_user:
            raise ApiError("invalid_request", "end_user: whose content is to be removed")
        gateway, key = self._gateway, form.get("key") or None
        removed = forget(gateway.journal, gateway.folder, gateway.secret, end_user, key)
        if self._is_program(http):
            await http.json(200, asdict(removed))
        else:
            await self._html(http, 200, views.forgotten(removed))

    async def _settle(self, learning: RouteLearning, form: dict[str, str]) -> None:
        try:
            value = float(form.get("value", ""))
        except ValueError:
            raise ApiError("invalid_request", "value must be a number") from None
        target, now = form.get("response_id", ""), time.time()
        if not self._gateway.journal.writer.read(
            "SELECT 1 FROM requests WHERE response_id = ?", (target,)
        ):
            raise ApiError("unknown_response", "there is no such response")
        row = (
            tables.FEEDBACK,
            ("fb_" + secrets.token_hex(12), now, now, "response", target, None,
             learning.settings.feedback.metric, "settled", str(value), "human:page", "", "", ""),
        )  # fmt: skip
        try:
            await self._gateway.journal.writer.commit([row])
        except StoreError as exc:
            raise ApiError("storage", str(exc)) from exc

    def _overview(self) -> bytes:
        gateway = self._gateway
        midnight = gateway.caps.today() * 86_400.0
        counts = dict(
            gateway.journal.writer.read(
                "SELECT route, count(*) FROM requests WHERE at >= ? GROUP BY route", (midnight,)
            )
        )
        rows = []
        for name, route in gateway.routes.items():
            learning = self._learning.routes.get(name)
            rows.append(
                {
                    "name": name,
                    "state": learning.state.name if learning else "fixed",
                    "library": route.current.version,
                    "upstreams": ", ".join(route.settings.upstreams),
                    "requests": counts.get(name, 0),
                }
            )
        caps = [row for scope in gateway.all_scopes() for row in gateway.caps.standing(scope)]
        token = self._mark("form").decode()
        return views.overview(
            rows, caps, gateway.journal.spend(), [*gateway.not_ready(), *gateway.notes()], token
        )

    async def _route(self, name: str) -> bytes:
        learning = self._of(name)
        groups = await learning.traffic.aside(learning.traffic.groups)
        forms = views.Forms(name, learning.state.version, self._mark("form").decode())
        return views.route_page(
            learning,
            forms,
            await learning.traffic.aside(lambda journal: _conflicts(journal, learning)),
            await self._worth(learning),
            (len(groups), sum(g.is_informative() for g in groups)),
        )

    async def _worth(self, learning: RouteLearning) -> EffectInterval | None:
        holdout, settings = learning.route.settings.holdout, learning.settings.feedback
        if not holdout:
            return None
        return await learning.traffic.aside(
            lambda journal: canary.worth(
                read_units(journal, learning.route.name, settings, now=time.time()), holdout
            )
        )


def _conflicts(journal: Journal, learning: RouteLearning) -> list[tuple[str, float, float]]:
    """Return (response, lowest, highest) of what sources contradict each other on."""
    settings = learning.settings.feedback
    since = time.time() - learning.route.settings.keep_days * 86_400.0
    found = []
    for one in read_seen(journal, learning.route.name, settings, since=since):
        if any(r.is_conflict for r in one.ratings.values()):
            rows = in_force(feedback_rows(journal, "response", one.response_id))
            values = [float(r.value) for r in rows
                      if r.kind == "reward" and r.metric == settings.metric]  # fmt: skip
            found.append((one.response_id, min(values), max(values)))
    return found[:100]
