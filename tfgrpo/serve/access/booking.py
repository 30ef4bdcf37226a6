"""The one place of the gateway that books: reserve, intent, call, result.

A call goes through three steps. `begin` holds its worst case on every cap and commits its intent,
together with the request's own row, before a byte is sent. `end` commits result and reply in one
transaction before the last byte leaves. `abandon` books the worst case, kept apart, where nobody
can tell what was billed: a client that left, a lost connection, a timeout. The rows are those that
every run has (`tfgrpo.store`), so that reports, exports and `spend` read a gateway as any run.

Does not know HTTP, routes or what a reply means. Source: own.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tfgrpo.errors import ProviderError, StoreError
from tfgrpo.rollout import Usage
from tfgrpo.runtime.redaction import redact
from tfgrpo.serve.access.caps import Caps, Held, Scope, Spent
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.failures import NotSent
from tfgrpo.store import Journal
from tfgrpo.store.calls import CallEnd, CallStart
from tfgrpo.store.database import Statement
from tfgrpo.store.prices import Price

log = logging.getLogger(__name__)

__all__ = ["CallBook", "OpenCall", "Planned", "is_billed", "read_spent"]

_REJECTED = frozenset(
    {"auth", "not_found", "quota", "rate_limit", "overloaded", "context_too_long", "bad_request"}
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A call about to be made, at its worst case."""

    response_id: str
    stage: str
    model: str
    """The upstream's spec."""
    n: int
    prompt_tokens: int
    completion_tokens: int
    price: Price | None
    scopes: Sequence[Scope]

    @property
    def worst_usd(self) -> float | None:
        """The most it can cost; None where the price is unknown."""
        if self.price is None:
            return None
        return self.price.worst_usd(self.prompt_tokens, self.completion_tokens)


def is_billed(error: ProviderError) -> bool:
    """Tell whether a failed call may have been billed."""
    if isinstance(error, NotSent) or error.kind in _REJECTED:
        return False
    return not (error.kind == "refused" and error.status is not None)


class OpenCall:
    """A call whose intent is in the journal; ended exactly once."""

    __slots__ = ("_began", "_book", "_held", "_number", "planned")

    def __init__(self, book: CallBook, planned: Planned, number: int, held: Held) -> None:
        self._book, self.planned, self._number, self._held = book, planned, number, held
        self._began = book.clock()

    @property
    def duration_s(self) -> float:
        """Seconds since it began."""
        return self._book.clock() - self._began

    def cost_of(self, usage: Usage) -> float | None:
        """Return what a usage costs at the model's price; None where that is unknown."""
        price = self.planned.price
        return None if price is None else price.cost_usd(usage)

    async def end(
        self, usage: Usage, model: str, n: int, rows: Iterable[Statement] = ()
    ) -> float | None:
        """Book a reply with the request's last rows; return its cost.

        The cost is the price of the tokens that the provider told. A reply that cannot be written
        yet was paid all the same: it goes out, and its rows are tried again with the next write.
        """
        cost = self.cost_of(usage)
        priced = Usage(
            usage.uncached_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
            usage.text_tokens,
            usage.reasoning_tokens,
            1,
            cost,
            usage.is_estimated,
        )
        self._held.settle(cost or 0.0, 1)
        await self._write(CallEnd("ok", priced, self.duration_s, n, model), rows)
        return cost

    async def fail(
        self, error: ProviderError, rows: Iterable[Statement] = (), *, after_content: bool = False
    ) -> None:
        """Book a failure: nothing but the call where the server refused it, else the worst case.

        What breaks off after content was paid for, whatever its kind.
        """
        if after_content:
            kind, usage = "unsettled", Usage()
        elif isinstance(error, NotSent):
            kind, usage = "not_sent", Usage()
        elif not is_billed(error):
            kind, usage = "rejected", Usage(calls=1)
        else:
            kind, usage = "unsettled", Usage()
        if kind == "unsettled":
            self._held.settle(None, 1)
        else:
            self._held.settle(0.0, usage.calls)
        text = redact(str(error))[:1000]
        end = CallEnd(kind, usage, self.duration_s, failure=error.kind, error=text)
        await self._write(end, rows)

    def abandon(self, rows: Iterable[Statement] = (), error: str = "cancelled") -> None:
        """Book the worst case without waiting, as a cancelled task must."""
        self._held.settle(None, 1)
        self._book.journal.writer.put(list(rows))
        self._book.journal.calls.end_soon(
            self._number, CallEnd("unsettled", Usage(), self.duration_s, error=error)
        )

    async def _write(self, end: CallEnd, rows: Iterable[Statement]) -> None:
        journal = self._book.journal
        try:
            journal.writer.put_this_turn(list(rows))
            await journal.calls.end(self._number, end)
        except StoreError as exc:
            self._book.failed_writes += 1
            log.error("a paid reply could not be written yet and is tried again: %s", exc)


class CallBook:
    """Begins calls.

    Args:
        journal: where they are written.
        caps: what they count against.
        clock: monotonic seconds.
    """

    def __init__(
        self, journal: Journal, caps: Caps, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.journal = journal
        self.caps = caps
        self.clock = clock
        self.failed_writes = 0
        """Replies whose rows had to be tried again."""

    async def begin(self, planned: Planned, rows: Sequence[Statement] = ()) -> OpenCall:
        """Hold the worst case and commit the intent; the call may be sent after that.

        Args:
            planned: the call.
            rows: the request's own, committed with the intent.

        Raises:
            ApiError: a cap refuses it, or the journal cannot be written (503 `storage`).
        """
        held = await self.caps.reserve(planned.scopes, planned.worst_usd, 1)
        start = CallStart(
            key=hashlib.sha256(planned.response_id.encode()).digest(),
            stage=planned.stage,
            model=planned.model,
            rollout_id=planned.response_id,
            n=planned.n,
            prompt_tokens=planned.prompt_tokens,
            completion_tokens=planned.completion_tokens,
            cost_usd=planned.worst_usd,
        )
        try:
            self.journal.writer.put_this_turn(rows)
            number = await self.journal.calls.start(start)
        except StoreError as exc:
            self.journal.writer.drop(rows)
            held.release()
            raise ApiError("storage", f"the journal cannot be written: {exc}") from exc
        except BaseException:
            held.release()
            raise
        return OpenCall(self, planned, number, held)


def read_spent(journal: Journal) -> list[Spent]:
    """Return what earlier sessions spent by scope and day; a call without a result counts at its
    worst case."""
    rows = journal.writer.read(
        "SELECT q.route, q.key, q.end_user, CAST(c.at / 86400 AS INTEGER),"
        " sum(CASE WHEN r.kind IN ('ok', 'rejected', 'not_sent') THEN coalesce(r.cost_usd, 0)"
        "  ELSE coalesce(c.cost_usd, 0) END),"
        " sum(CASE WHEN r.kind = 'not_sent' THEN 0 ELSE 1 END)"
        " FROM calls c JOIN requests q ON q.response_id = c.rollout_id"
        " LEFT JOIN results r ON r.call = c.call GROUP BY 1, 2, 3, 4"
    )
    spent = []
    for route, key, user, day, cost, calls in rows:
        names = ["process", f"route:{route}", f"key:{key}"]
        names += [f"user:{key}/{user}"] if user else []
        spent += [Spent(name, int(day), float(cost), int(calls)) for name in names]
    return spent
