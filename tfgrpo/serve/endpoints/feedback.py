"""`/v1/feedback`: take, withdraw and tell what clients report. Written first, acknowledged then.

A record may come at once after the reply, or while it streams: the response's row is in the journal
before its id leaves. The same event id is one record; other content under it is refused.

Does not know what records add up to (`learning.ratings`). Source: own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from datetime import datetime
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.runtime.redaction import redact_known
from tfgrpo.serve import tables
from tfgrpo.serve.endpoints.info import known_response
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning.ratings import RANKS, FeedbackRow, in_force, rate
from tfgrpo.serve.settings import FeedbackSettings
from tfgrpo.serve.tables import rows_as_dicts
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.http import Http, parse_object
from tfgrpo.store import Journal

__all__ = ["Feedback", "feedback_rows"]

MAX_COMMENT = 4096
_KINDS = ("reward", "answer", "comment")
_FIELDS = frozenset({"response_id", "session_id", "group_id", "choice", "metric", "value", "kind",
                     "source", "event_id", "at", "comment", "token"})  # fmt: skip
_COLUMNS = (
    "feedback, feedback_id, received, at, target_kind, target, choice, metric, kind, value, source"
)


def feedback_rows(journal: Journal, target_kind: str, target: str) -> list[FeedbackRow]:
    """Return all records of one target, oldest first."""
    rows = journal.writer.read(
        f"SELECT {_COLUMNS} FROM feedback WHERE target_kind = ? AND target = ? ORDER BY feedback",
        (target_kind, target),
    )
    return [
        FeedbackRow(a, b, c, d, e, f, g, h, i, json.loads(value), source)
        for a, b, c, d, e, f, g, h, i, value, source in rows
    ]


class Feedback:
    """The endpoint.

    Args:
        gateway: the running parts.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def post(self, http: Http, key_name: str | None) -> None:
        """Take one record.

        Args:
            http: the request.
            key_name: who sends it; None where only a feedback token may open the door.
        """
        serve = self._gateway.settings.serve
        body = parse_object(await http.body(64_000, serve.body_s))
        unknown = sorted(body.keys() - _FIELDS)
        if unknown:
            raise _bad(unknown[0], f"is unknown; there are {', '.join(sorted(_FIELDS))}")
        if "token" in body or key_name is None:
            body, key_name = self._by_token(body)
        event_id = body.get("event_id", http.headers.get("idempotency-key", ""))
        if not isinstance(event_id, str) or len(event_id) > 255:
            raise _bad("event_id", "must be a text of at most 255 characters")
        record = self._record(body, key_name)
        async with _Turn(self._running, (key_name, event_id)):
            status, row = await self._keep(record, body.get("comment"), key_name, event_id)
        await http.json(status, row)

    def _by_token(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Let a browser rate the one response that its token names, once."""
        token = body.get("token")
        found = self._gateway.tokens.read(token) if isinstance(token, str) else None
        if found is None or not isinstance(token, str):
            raise ApiError("invalid_api_key", "the feedback token is wrong or too old")
        response_id, metric = found
        rows = self._gateway.journal.writer.read(
            "SELECT key FROM requests WHERE response_id = ?", (response_id,)
        )
        if not rows:
            raise ApiError("gone", "the response is no longer kept")
        allowed = {"response_id": response_id, "metric": metric, "value": body.get("value"),
                   "source": "human:browser", "event_id": f"token:{token[-32:]}"}  # fmt: skip
        return allowed, rows[0][0]

    def _record(self, body: dict[str, Any], key_name: str) -> FeedbackRow:
        target_kind, target, route = self._target(body, key_name)
        settings = _settings_of(self._gateway, route)
        kind = body.get("kind", "reward")
        if kind not in _KINDS:
            raise _bad("kind", f"must be one of {', '.join(_KINDS)}")
        metric = body.get("metric", settings.metric)
        if not isinstance(metric, str) or not 1 <= len(metric) <= 64:
            raise _bad("metric", "must be a name of at most 64 characters")
        source = body.get("source", "human")
        if not isinstance(source, str) or len(source) > 64 or (
            source.partition(":")[0] not in RANKS
        ):  # fmt: skip
            raise _bad("source", f"must be one of {', '.join(RANKS)}, or KIND:NAME")
        now = time.time()
        return FeedbackRow(
            number=0,
            feedback_id="fb_" + secrets.token_hex(12),
            received=now,
            at=_time(body.get("at"), now),
            target_kind=target_kind,
            target=target,
            choice=_choice(body.get("choice")),
            metric=metric,
            kind=kind,
            value=_value(body.get("value"), kind, metric, settings),
            source=source,
        )

    def _target(self, body: dict[str, Any], key_name: str) -> tuple[str, str, str]:
        """Return (kind, id, route) of what is rated."""
        named = [n for n in ("response_id", "session_id", "group_id") if body.get(n) is not None]
        if len(named) != 1:
            raise _bad("response_id", "or session_id or group_id: name exactly one")
        name = named[0]
        value: Any = body[name]
        if not isinstance(value, str):
            raise _bad(name, "must be a text")
        if name == "response_id":
            row = known_response(self._gateway, value, key_name)
            return "response", row["response_id"], row["route"]
        rows = self._gateway.journal.writer.read(
            f"SELECT route FROM requests WHERE {name} = ? AND {name} <> '' AND key = ? LIMIT 1",
            (value, key_name),
        )
        if not rows:
            raise ApiError("unknown_response", f"no {name} {value!r:.80} is known here")
        return name.removesuffix("_id"), value, rows[0][0]

    async def _keep(
        self, record: FeedbackRow, comment: Any, key_name: str, event_id: str
    ) -> tuple[int, dict[str, Any]]:
        """Write a record, or find the first one under its event id."""
        digest = _digest(record, comment)
        if event_id:
            rows = rows_as_dicts(
                self._gateway.journal,
                f"SELECT {_COLUMNS}, digest FROM feedback WHERE key = ? AND event_id = ?"
                " ORDER BY feedback LIMIT 1",
                (key_name, event_id),
            )
            if rows:
                if rows[0].pop("digest") != digest:
                    raise ApiError("idempotency_key_reused",
                                   "this event_id was used with other content")  # fmt: skip
                return 200, _shown(rows[0])
        statements = [_statement(record, key_name, event_id, digest)]
        if comment is not None:
            text = _comment(comment)
            beside = FeedbackRow(0, record.feedback_id + "c", record.received, record.at,
                                 record.target_kind, record.target, record.choice, record.metric,
                                 "comment", text, record.source)  # fmt: skip
            statements.append(_statement(beside, key_name, "", digest))
        try:
            await self._gateway.journal.writer.commit(statements)
        except StoreError as exc:
            self._gateway.journal.writer.drop(statements)
            raise ApiError("storage", f"the journal cannot be written: {exc}") from exc
        return 201, _shown({n: getattr(record, n) for n in record.__slots__ if n != "number"}
                           | {"value": json.dumps(record.value)})  # fmt: skip

    async def withdraw(self, http: Http, key_name: str, feedback_id: str) -> None:
        """`DELETE /v1/feedback/{id}`: it counts no more, and neither does what it replaced."""
        rows = self._gateway.journal.writer.read(
            f"SELECT {_COLUMNS} FROM feedback WHERE feedback_id = ? AND key = ?"
            " AND kind <> 'withdrawn'",
            (feedback_id, key_name),
        )
        if not rows:
            raise ApiError("unknown_response", f"no feedback {feedback_id!r:.80} is known here")
        row = rows[0]
        now = time.time()
        tombstone = FeedbackRow(
            0, "fb_" + secrets.token_hex(12), now, now, row[4], row[5], row[6], row[7],
            "withdrawn", feedback_id, row[10],
        )  # fmt: skip
        await self._gateway.journal.writer.commit([_statement(tombstone, key_name, "", "")])
        await http.json(200, {"id": feedback_id, "withdrawn": True})

    async def read(self, http: Http, key_name: str) -> None:
        """`GET /v1/feedback?response_id=`: the records of a response and what they add up to."""
        row = known_response(self._gateway, http.query.get("response_id", ""), key_name)
        rows = feedback_rows(self._gateway.journal, "response", row["response_id"])
        session = []
        if row["session_id"]:
            session = feedback_rows(self._gateway.journal, "session", row["session_id"])
        counted = {r.feedback_id for r in in_force(rows)}
        rating = rate(rows, _settings_of(self._gateway, row["route"]), None, session)
        shown = [
            _shown({n: getattr(r, n) for n in r.__slots__ if n != "number"}
                   | {"value": json.dumps(r.value)}) | {"in_force": r.feedback_id in counted}
            for r in rows
        ]  # fmt: skip
        await http.json(200, {"data": shown, "reward": rating.reward, "parts": dict(rating.parts),
                              "conflict": rating.is_conflict})  # fmt: skip


class _Turn:
    """Lets records with one event id in one at a time."""

    def __init__(
        self, running: dict[tuple[str, str], asyncio.Future[None]], key: tuple[str, str]
    ) -> None:
        self._running, self._key = running, key

    async def __aenter__(self) -> None:
        if not self._key[1]:
            return
        while self._key in self._running:
            await asyncio.wait([self._running[self._key]])
        self._running[self._key] = asyncio.get_running_loop().create_future()

    async def __aexit__(self, *_: object) -> None:
        if self._key[1]:
            self._running.pop(self._key).set_result(None)


def _settings_of(gateway: Gateway, route: str) -> FeedbackSettings:
    found = gateway.routes.get(route)
    learn = found.settings.learn if found is not None else None
    return learn.feedback if learn is not None else FeedbackSettings()


def _statement(record: FeedbackRow, key_name: str, event_id: str, digest: str) -> Any:
    value = redact_known(json.dumps(record.value))
    return (
        tables.FEEDBACK,
        (record.feedback_id, record.received, record.at, record.target_kind, record.target,
         record.choice, record.metric, record.kind, value, record.source, event_id, key_name,
         digest),
    )  # fmt: skip


def _digest(record: FeedbackRow, comment: Any) -> str:
    content = [*record.slot, record.value, comment]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    out = {"id": row["feedback_id"], "object": "feedback", f"{row['target_kind']}_id":
           row["target"], "value": json.loads(row["value"])}  # fmt: skip
    for name in ("choice", "metric", "kind", "source", "at", "received"):
        out[name] = row[name]
    return out


def _bad(name: str, why: str) -> ApiError:
    return ApiError("invalid_request", f"{name} {why}", param=name)


def _choice(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 128:
        raise _bad("choice", "must be the number of a choice, from 0")
    return value


def _time(value: Any, now: float) -> float:
    if value is None:
        return now
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value).timestamp()
        except ValueError:
            value = None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= now + 3600
    ):
        raise _bad("at", "must be seconds since 1970 or an ISO time, not in the future")
    return float(value)


def _value(value: Any, kind: str, metric: str, settings: FeedbackSettings) -> Any:
    if kind == "comment":
        return _comment(value)
    if kind == "answer":
        if value is None or len(json.dumps(value)) > 16_000:
            raise _bad("value", "must be an answer of at most 16,000 characters")
        return value
    if isinstance(value, bool):
        return value
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad("value", "must be a number or true or false")
    if metric == settings.metric and not settings.low <= value <= settings.high:
        raise _bad("value", f"must be from {settings.low:g} to {settings.high:g}")
    return value


def _comment(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value.encode()) > MAX_COMMENT:
        raise _bad("comment", f"must be a text of at most {MAX_COMMENT} bytes")
    return value
