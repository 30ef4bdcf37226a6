"""The one place of the gateway that books: reserve, intent, call, result.

A call goes through three steps. `begin` holds its worst case on every cap and commits its intent,
together with the request's own row, before a byte is sent. `end` commits result and reply in one
transaction before the last byte leaves. `abandon` books the worst case, kept apart, where nobody
can tell what was billed. The sums are those of `tfgrpo.store.booking`, the rows those that every
run has, so that reports, exports and `spend` read a gateway as any run.

Does not know HTTP, routes or what a reply means. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ProviderError, StoreError
from tfgrpo.rollout import Usage
from tfgrpo.serve import tables
from tfgrpo.serve.access.bounds import Beyond
from tfgrpo.serve.access.caps import Held, KeyCaps, Scope, Spent
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.store import Journal
from tfgrpo.store.booking import (
    WorstCase,
    book_failure,
    book_replies,
    checked_usage,
    settlement,
    with_cost,
    worst_case,
)
from tfgrpo.store.calls import CallEnd, CallStart
from tfgrpo.store.prices import Price
from tfgrpo.store.rows import Statement

log = logging.getLogger(__name__)

__all__ = ["CallBook", "OpenCall", "Planned", "read_spent"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A call about to be made, at its worst case."""

    response_id: str
    stage: str
    model: str
    """The upstream's spec."""
    n: int
    prompt_tokens: int
    max_tokens: int
    price: Price | None
    scopes: Sequence[Scope]
    worst_usd: float | None = None
    """Its worst cost, where that does not follow from tokens."""

    def worst(self, beyond: Beyond) -> WorstCase:
        """Return the most it can use, by what the model's calls have used beyond estimates."""
        prompt, completion = beyond.widen(self.prompt_tokens, self.max_tokens)
        worst = worst_case(prompt, completion, self.n, self.price)
        return worst if self.worst_usd is None else replace(worst, cost_usd=self.worst_usd)


class OpenCall:
    """A call whose intent is in the journal; ended exactly once."""

    __slots__ = ("_began", "_book", "_extra", "_held", "_number", "_worst", "planned")

    def __init__(
        self, book: CallBook, planned: Planned, worst: WorstCase, number: int, held: Held
    ) -> None:
        self._book, self.planned, self._number, self._held = book, planned, number, held
        self._worst = worst
        self._began = book.clock()
        self._extra = 0

    def one_more(self, is_reported: bool, failure: ProviderError | None) -> None:
        """Count that the upstream was asked once more for this call, as a fleet does."""
        self._extra += 1

    @property
    def duration_s(self) -> float:
        """Seconds since it began."""
        return self._book.clock() - self._began

    def priced(self, usage: Usage) -> Usage:
        """Return what is believed of a usage, with its cost at the model's price."""
        planned = self.planned
        checked = checked_usage(usage, planned.prompt_tokens, planned.max_tokens)
        return with_cost(checked, planned.price)

    async def end(self, priced: Usage, model: str, n: int, rows: Iterable[Statement] = ()) -> None:
        """Book a reply with the request's last rows.

        A reply that cannot be written yet was paid all the same: it goes out, and its rows are
        tried again with the next write.

        Args:
            priced: what `priced` returned for the usage that the provider told.
            model: the model's name as the server reported it.
            n: draws returned.
            rows: the request's own, committed with the result.
        """
        end = book_replies(
            (priced,), duration_s=self.duration_s, model=model, extra_calls=self._extra
        )._replace(n=n)
        self._settle(end)
        if not priced.is_estimated:
            self._book.learn(self.planned, priced)
        await self._write(end, rows)

    async def fail(self, error: ProviderError, rows: Iterable[Statement] = ()) -> bool:
        """Book a failure by what it can have cost; return whether it may have been billed."""
        end = book_failure(
            error, duration_s=self.duration_s, price=self.planned.price, extra_calls=self._extra
        )
        self._settle(end)
        await self._write(end, rows)
        return end.kind == "unsettled" or end.usage.total_tokens > 0

    def _settle(self, end: CallEnd) -> None:
        spent = settlement(end, self._worst.amounts)
        self._held.settle({k: v for k, v in spent.items() if k in ("calls", "cost_usd")})

    def abandon(self, rows: Iterable[Statement] = (), error: str = "cancelled") -> None:
        """Book the worst case without waiting, as a cancelled task must."""
        self._held.settle({})
        self._book.journal.writer.put(list(rows))
        self._book.journal.calls.end_soon(
            self._number, CallEnd("unsettled", Usage(), self.duration_s, error=error)
        )

    def leave(self, seen: Usage, rows: Iterable[Statement], why: str) -> None:
        """Book what was seen of a reply that nobody waits for any more, without waiting."""
        end = CallEnd("rejected", self.priced(seen), self.duration_s, error=why)
        self._settle(end)
        self._book.journal.writer.put(list(rows))
        self._book.journal.calls.end_soon(self._number, end)

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
        self, journal: Journal, caps: KeyCaps, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.journal = journal
        self.caps = caps
        self.clock = clock
        self.failed_writes = 0
        """Replies whose rows had to be tried again."""
        self._bounds = _read_bounds(journal)

    def worst(self, planned: Planned) -> WorstCase:
        """Return the most that a call can use."""
        return planned.worst(self._bounds[planned.model])

    def learn(self, planned: Planned, usage: Usage) -> None:
        """Make later worst cases of a model as large as what a call has used.

        Prompts are estimated by their bytes; a server may put more around them. It is noted, so
        that a cap holds after a restart too.
        """
        bound = self._bounds[planned.model]
        if bound.observe((planned.prompt_tokens, planned.max_tokens * planned.n), usage):
            body = json.dumps([bound.around, bound.factor, bound.reply])
            self.journal.writer.put([(tables.NOTE, (time.time(), _BOUND, planned.model, body))])

    async def begin(self, planned: Planned, rows: Sequence[Statement] = ()) -> OpenCall:
        """Hold the worst case and commit the intent; the call may be sent after that.

        Args:
            planned: the call.
            rows: the request's own, committed with the intent.

        Raises:
            ApiError: a cap refuses it, or the journal cannot be written (503 `storage`).
        """
        worst = self.worst(planned)
        held = await self.caps.reserve(planned.scopes, worst.cost_usd, 1)
        start = CallStart(
            key=hashlib.sha256(planned.response_id.encode()).digest(),
            stage=planned.stage,
            model=planned.model,
            rollout_id=planned.response_id,
            n=planned.n,
            prompt_tokens=worst.prompt_tokens,
            completion_tokens=worst.completion_tokens,
            cost_usd=worst.cost_usd,
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
        return OpenCall(self, planned, worst, number, held)


_BOUND = "bound"


def _read_bounds(journal: Journal) -> defaultdict[str, Beyond]:
    bounds: defaultdict[str, Beyond] = defaultdict(Beyond)
    rows = journal.writer.read("SELECT name, body FROM notes WHERE kind = ? ORDER BY note",
                               (_BOUND,))  # fmt: skip
    for model, body in rows:
        bounds[model] = Beyond(*json.loads(body))
    return bounds


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
