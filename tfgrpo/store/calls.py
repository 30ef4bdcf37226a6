"""The calls of a run: intents, results, replies.

Does not know what is in a request, or prices. Source: own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfgrpo.errors import ProviderError, StoreError
from tfgrpo.protocols import Completion
from tfgrpo.rollout import Usage
from tfgrpo.store.checked_values import DAMAGED, Values
from tfgrpo.store.codec import column_text, completion_from_dict, completion_to_dict, pack
from tfgrpo.store.rows import Claim, RowStore, Statement

__all__ = ["CallEnd", "CallJournal", "CallStart", "ledger_amounts"]


class CallStart(NamedTuple):
    """A call about to be sent, at its worst case."""

    key: bytes
    stage: str
    model: str
    rollout_id: str
    n: int
    """Draws asked for."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """None where the price is unknown."""


class CallEnd(NamedTuple):
    """How a call ended."""

    kind: str
    """`ok`; `rejected` (failed, nothing generated); `not_sent`; `unsettled` (failed, perhaps
    billed: counts at its worst case)."""
    usage: Usage
    duration_s: float
    n: int = 0
    """Draws returned."""
    model: str = ""
    """The model's name as the server reported it."""
    failure: str = ""
    error: str = ""


Flight = asyncio.Future[ProviderError | None]
"""Done when a call has ended; holds its failure."""


class CallJournal:
    """Writes and finds calls.

    Args:
        elapsed_s: seconds since the session began.
    """

    def __init__(self, writer: RowStore, values: Values, elapsed_s: Callable[[], float]) -> None:
        self._writer = writer
        self._values = values
        self._elapsed_s = elapsed_s
        self._hits: dict[tuple[str, str], int] = {}
        self._fresh: set[int] = set()
        """Hashes of the keys whose reply this session wrote: half as large, and of two keys that
        have one hash the other is looked for in vain."""
        self._has_replies = bool(writer.read("SELECT 1 FROM completions LIMIT 1"))
        """False spares looking for what cannot be there: none written before this session."""
        self._in_flight = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.flights: dict[tuple[asyncio.AbstractEventLoop, bytes], Flight | None] = {}
        """Draws that are being asked for, by event loop and key; None where nobody else waits."""

    def began(self) -> None:
        """Count a call as in flight."""
        self._in_flight += 1

    def ended(self) -> None:
        """Count it no more, and wake those that wait for room in the budget."""
        self._in_flight -= 1
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                turn.get_loop().call_soon_threadsafe(_wake, turn)

    @property
    def any_in_flight(self) -> bool:
        """True while a call of this run is in flight."""
        return self._in_flight > 0

    async def wait_for_an_end(self, at_most_s: float | None = None) -> None:
        """Return when a call that is in flight has ended, or after some seconds."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await asyncio.wait([turn], timeout=at_most_s)

    async def start(self, start: CallStart) -> int:
        """Write a call's intent and return its number; the call may be sent after that.

        Raises:
            StoreError: it could not be written, so the call must not be sent.
        """
        call = (await self.claim(start, ())).call
        assert call is not None  # no draw was claimed, so none was refused
        return call

    async def claim(self, start: CallStart, keys: Sequence[bytes]) -> Claim:
        """Write a call's intent where no other writer asks for its draws; see `Claim`.

        Raises:
            StoreError: it could not be written, so the call must not be sent.
        """
        if self._writer.is_full or self._writer.failure is not None:
            self._writer.flush()  # what was paid for first; raises while the disk is full
            if self._writer.is_full:
                raise StoreError(
                    f"the disk of {self._writer.name!r} is full: what was paid for is kept and no "
                    "new call is made. Free some space and run again"
                )

        def intent(call: int, session: int) -> Statement:
            return (
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    call,
                    session,
                    time.time(),
                    start.key,
                    column_text(start.stage),
                    column_text(start.model),
                    column_text(start.rollout_id),
                    start.n,
                    start.cost_usd,
                    start.prompt_tokens,
                    start.completion_tokens,
                ),
            )

        claim = await self._writer.start_call(intent, self._unsent, keys)
        if claim.call is None or (claim.keys is not None and len(claim.keys) < len(keys)):
            self._has_replies = True  # another writer's
        return claim

    def _unsent(self, call: int) -> list[Statement]:
        return self._end_rows(call, CallEnd("not_sent", Usage(), 0.0, error="cancelled"), ())

    async def end(
        self, call: int, end: CallEnd, replies: Sequence[tuple[bytes, Completion]] = ()
    ) -> None:
        """Write a call's result and its replies by key; they are kept when this returns.

        Raises:
            StoreError: they could not be written yet; they are tried again with the next write.
        """
        await self._writer.commit(self._end_rows(call, end, replies))

    def end_soon(self, call: int, end: CallEnd) -> None:
        """Write a call's result without waiting, as a cancelled task must."""
        self._writer.put(self._end_rows(call, end, ()))

    def _end_rows(
        self, call: int, end: CallEnd, replies: Sequence[tuple[bytes, Completion]]
    ) -> list[Statement]:
        u = end.usage
        rows: list[Statement] = [
            (
                "INSERT INTO results VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    call,
                    self._elapsed_s(),
                    end.duration_s,
                    end.kind,
                    end.n,
                    u.calls,
                    u.uncached_tokens,
                    u.cache_read_tokens,
                    u.cache_write_tokens,
                    u.text_tokens,
                    u.reasoning_tokens,
                    u.cost_usd,
                    int(u.is_estimated),
                    column_text(end.model),
                    end.failure,
                    column_text(end.error),
                ),
            )
        ]
        for key, reply in replies:
            rows.append(self._reply_row(call, key, reply))
        return rows

    def _reply_row(self, call: int | None, key: bytes, reply: Completion) -> Statement:
        body, mark = pack(completion_to_dict(reply), "reply")
        self._fresh.add(hash(key))
        return (
            "INSERT INTO completions (key, call, finish, body, digest) VALUES (?, ?, ?, ?, ?)",
            (key, call, reply.finish, body, mark),
        )

    def keep_reply(self, key: bytes, reply: Completion) -> None:
        """Write a reply that another run paid for, without a call."""
        self._writer.commit_now([self._reply_row(None, key, reply)])

    def expect_replies(self) -> None:
        """Tell that replies were written by another way."""
        self._has_replies = True

    def find_reply(self, key: bytes) -> Completion | None:
        """Return the reply kept under a key, or None; a damaged one is set aside and missed."""
        if not self._has_replies and hash(key) not in self._fresh:
            return None
        rows = self._writer.read(
            "SELECT completion, body, digest FROM completions WHERE key = ? ORDER BY completion",
            (key,),
        )
        for row, body, mark in rows:
            value = self._values.get("completions", row, body, mark)
            if value is not DAMAGED:
                return completion_from_dict(value)
        return None

    def most_used(self, model: str) -> tuple[float, float]:
        """Return by what factors calls of a model that are kept used more than was reserved for
        them: prompt and completion, each at least 1."""
        rows = self._writer.read(
            "SELECT max(1.0 * (r.uncached + r.cache_read + r.cache_write)"
            "  / nullif(c.prompt_tokens, 0)),"
            " max(1.0 * (r.text + r.reasoning) / nullif(c.completion_tokens, 0))"
            " FROM calls c JOIN results r ON r.call = c.call WHERE r.kind = 'ok' AND c.model = ?",
            (column_text(model),),
        )
        prompt, completion = rows[0]
        return max(1.0, float(prompt or 1.0)), max(1.0, float(completion or 1.0))

    def count_hit(self, stage: str, model: str) -> None:
        """Count a reply that needed no call; written with the next rows."""
        key = (column_text(stage), column_text(model))
        self._hits[key] = self._hits.get(key, 0) + 1

    def hit_rows(self) -> list[Statement]:
        """Return the rows of hits not written yet, and forget them."""
        hits, self._hits = self._hits, {}
        return [("INSERT INTO hits VALUES (?, ?, ?)", (*key, n)) for key, n in hits.items()]


def ledger_amounts(usage: Usage) -> dict[str, float]:
    """Return a usage as amounts for a ledger; an unknown cost is left out."""
    amounts: dict[str, float] = {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if usage.cost_usd is not None:
        amounts["cost_usd"] = usage.cost_usd
    return {name: amount for name, amount in amounts.items() if amount}


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
