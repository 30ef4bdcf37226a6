"""Replies kept under an `Idempotency-Key`, so that a client's retry is answered and never paid.

Scoped to (API key, endpoint). The same body gets the kept reply, streams replayed from it; while
the first is still running a whole reply waits and a stream is refused; another body is refused.

Does not know what a reply is. Source: the IETF draft on the header.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfgrpo.serve import tables
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.store import Journal
from tfgrpo.store.rows import Statement

__all__ = ["Idempotency", "Kept", "KeyScope"]


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What a key is scoped to."""

    key: str
    endpoint: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A reply that was given."""

    response_id: str
    status: int
    headers: dict[str, str]
    body: bytes


class Idempotency:
    """Finds and keeps replies.

    Args:
        journal: where they are kept.
        keep_s: for how long.
        clock: seconds since the epoch.
    """

    def __init__(
        self, journal: Journal, keep_s: float, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._journal, self._keep_s, self._clock = journal, keep_s, clock
        self._running: dict[KeyScope, tuple[str, asyncio.Future[None]]] = {}

    async def enter(self, place: KeyScope, digest: str, *, is_stream: bool) -> Kept | None:
        """Return the kept reply, or None where the caller is to make it; it must `leave` then.

        Raises:
            ApiError: 409 while a stream is running, 422 for another body, 400 for a bad key.
        """
        if not 1 <= len(place.idempotency_key) <= 255:
            raise ApiError("invalid_request", "Idempotency-Key must have 1 to 255 characters")
        while True:
            running = self._running.get(place)
            if running is None:
                kept = self._find(place, digest)
                if kept is None:
                    future = asyncio.get_running_loop().create_future()
                    self._running[place] = (digest, future)
                return kept
            if running[0] != digest:
                raise _reused()
            if is_stream:
                raise ApiError(
                    "idempotency_in_progress",
                    "the first request with this Idempotency-Key is still running",
                    retry_after_s=1.0,
                )
            await asyncio.wait([running[1]])

    def leave(self, place: KeyScope) -> None:
        """Tell that the reply is kept, or will not come."""
        running = self._running.pop(place, None)
        if running is not None:
            running[1].set_result(None)

    def rows(self, place: KeyScope, digest: str, kept: Kept) -> list[Statement]:
        """Return the row that keeps a reply."""
        values = (
            place.key,
            place.endpoint,
            place.idempotency_key,
            self._clock(),
            digest,
            kept.response_id,
            kept.status,
            json.dumps(kept.headers),
            kept.body,
        )
        return [(tables.IDEMPOTENCY, values)]

    def _find(self, place: KeyScope, digest: str) -> Kept | None:
        rows = self._journal.writer.read(
            "SELECT digest, response_id, status, headers, body FROM idempotency WHERE key = ?"
            " AND endpoint = ? AND idempotency_key = ? AND at > ? ORDER BY at DESC LIMIT 1",
            (place.key, place.endpoint, place.idempotency_key, self._clock() - self._keep_s),
        )
        if not rows:
            return None
        kept_digest, response_id, status, headers, body = rows[0]
        if kept_digest != digest:
            raise _reused()
        return Kept(response_id, status, json.loads(headers), bytes(body))


def _reused() -> ApiError:
    return ApiError(
        "idempotency_key_reused", "this Idempotency-Key was used with another body before"
    )
