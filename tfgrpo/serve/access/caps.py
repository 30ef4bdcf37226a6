"""Caps by process, route, key and end user, over a UTC day and in all; and rates by key.

Every call is reserved at its worst case on all of its ledgers before it is sent, in one step of
the event loop, so any number of clients at once stay under each cap. Windows are UTC days; a clock
that goes back never opens a spent day again. After a restart what was spent is read from the
journal, so nothing is forgotten.

Does not know prices or how calls end. Source: two-phase accounting of `tfgrpo.store.budget`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tfgrpo.errors import BudgetError
from tfgrpo.serve.settings import BudgetSettings, RateSettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.store.budget import Budget, Ledger, Reservation

__all__ = ["KeyCaps", "Held", "Rates", "Scope"]

_DAY_S = 86_400
_MOST_BUCKETS = 50_000
_QUEUE_S = 20.0
"""How long a call waits for others' worst cases to settle before it is refused."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One owner of a cap: `process`, `route:NAME`, `key:NAME` or `user:KEY/HASH`."""

    name: str
    budget: BudgetSettings


@dataclass(frozen=True, slots=True)
class Spent:
    """What an earlier session spent in one scope on one day."""

    scope: str
    day: int
    cost_usd: float
    calls: int


class Held:
    """Worst cases held on several ledgers; settled or released as one."""

    __slots__ = ("_caps", "_parts")

    def __init__(self, caps: KeyCaps, parts: list[Reservation]) -> None:
        self._caps = caps
        self._parts = parts

    def settle(self, spent: Mapping[str, float]) -> None:
        """Spend the actual amounts; what is not named counts as held."""
        for part in self._parts:
            part.settle(**spent)
        self._caps.ended(self)

    def release(self) -> None:
        """Give back what was not settled."""
        for part in self._parts:
            part.release()
        self._caps.ended(self)


class KeyCaps:
    """All ledgers with a limit.

    Args:
        spent: what the journal says of earlier sessions.
        clock: seconds since the epoch.
    """

    def __init__(
        self, spent: Iterable[Spent] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._day = int(clock() // _DAY_S)
        self._ledgers: dict[tuple[str, int | None], Ledger] = {}
        self._spent: dict[tuple[str, int | None], tuple[float, int]] = {}
        self._held: set[int] = set()
        self._waiting: list[asyncio.Future[None]] = []
        for row in spent:
            self._day = max(self._day, row.day)
            for window in (row.day, None):
                cost, calls = self._spent.get((row.scope, window), (0.0, 0))
                self._spent[row.scope, window] = (cost + row.cost_usd, calls + row.calls)

    def today(self) -> int:
        """Return the number of the UTC day; it never goes back."""
        self._day = max(self._day, int(self._clock() // _DAY_S))
        return self._day

    async def reserve(self, scopes: Sequence[Scope], cost_usd: float | None, calls: int) -> Held:
        """Hold the worst case of a call on every ledger of its scopes.

        Waits while only the worst cases of calls in flight stand in the way.

        Raises:
            ApiError: 429 `budget_exceeded` where what is spent leaves no room, `queue_full` where
                it stays uncertain for too long.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _QUEUE_S
        while True:
            held = self._try(scopes, cost_usd, calls)
            if held is not None:
                return held
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                async with asyncio.timeout_at(until):
                    await turn
            except TimeoutError:
                raise ApiError(
                    "queue_full",
                    "the worst cases of the calls in flight leave no room under a cap; try again "
                    "when some have ended",
                    retry_after_s=1.0,
                ) from None
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)

    def _try(self, scopes: Sequence[Scope], cost_usd: float | None, calls: int) -> Held | None:
        parts: list[Reservation] = []
        day = self.today()
        for scope in scopes:
            for ledger, window in self._of(scope, day):
                amounts: dict[str, float] = {"calls": calls}
                if cost_usd is not None:
                    amounts["cost_usd"] = cost_usd
                try:
                    parts.append(ledger.reserve(**amounts))
                except BudgetError as exc:
                    for part in parts:
                        part.release()
                    if self._held and ledger.could_fit(**amounts):
                        return None
                    raise self._refusal(scope, ledger, window, exc) from None
        held = Held(self, parts)
        if parts:
            self._held.add(id(held))
        return held

    def _refusal(
        self, scope: Scope, ledger: Ledger, window: int | None, exc: BudgetError
    ) -> ApiError:
        amount = ledger.spent.get(exc.resource, 0.0)
        cap = getattr(ledger.budget, exc.resource)
        unit = "$" if exc.resource == "cost_usd" else ""
        message = (
            f"the cap of {scope.name} is reached: {unit}{amount:.6g} of {unit}{cap:.6g} "
            f"{'calls ' if not unit else ''}spent {'today' if window is not None else 'in all'}"
        )
        if window is None:
            return ApiError("budget_exceeded", f"{message}; it does not reset by itself")
        resets = datetime.fromtimestamp((window + 1) * _DAY_S, UTC)
        return ApiError("budget_exceeded", f"{message}; it resets at {resets:%Y-%m-%dT%H:%MZ}")

    def _of(self, scope: Scope, day: int) -> list[tuple[Ledger, int | None]]:
        budget = scope.budget
        found: list[tuple[Ledger, int | None]] = []
        if budget.usd_per_day is not None or budget.calls_per_day is not None:
            limits = Budget(cost_usd=budget.usd_per_day, calls=budget.calls_per_day)
            found.append((self._ledger(scope.name, day, limits), day))
        if budget.usd_total is not None:
            found.append((self._ledger(scope.name, None, Budget(cost_usd=budget.usd_total)), None))
        return found

    def _ledger(self, name: str, window: int | None, limits: Budget) -> Ledger:
        ledger = self._ledgers.get((name, window))
        if ledger is None or ledger.budget != limits:
            before = ledger
            ledger = self._ledgers[name, window] = Ledger(limits)
            if before is not None:
                # The settings were read anew: what was spent stays spent, and calls in flight,
                # which settle on the ledger before, count at their worst case.
                for rows in (before.spent, before.reserved):
                    ledger.charge(cost_usd=rows["cost_usd"], calls=rows["calls"])
            else:
                cost, calls = self._spent.get((name, window), (0.0, 0))
                ledger.charge(cost_usd=cost, calls=calls)
            self._forget_days()
        return ledger

    def _forget_days(self) -> None:
        """Drop the ledgers of days long gone, also those of end users."""
        for key in [k for k in self._ledgers if k[1] is not None and k[1] < self._day - 1]:
            del self._ledgers[key]

    def ended(self, held: Held) -> None:
        """Count a held call no more and let those try again that wait."""
        self._held.discard(id(held))
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                if not turn.done():
                    turn.set_result(None)

    def standing(self, scope: Scope) -> list[tuple[str, str, float, float]]:
        """Return (scope, window and unit, spent, cap) of each limit, for the page."""
        rows = []
        for ledger, window in self._of(scope, self.today()):
            for name, cap in ledger.budget.to_dict().items():
                label = f"{name} {'today' if window is not None else 'in all'}"
                rows.append((scope.name, label, ledger.spent[name], cap))
        return rows


class Rates:
    """Requests a minute and in flight, by key or end user.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[str, tuple[float, float]] = {}
        self._in_flight: dict[str, int] = {}
        self.total = 0
        """Requests in flight over all keys."""

    def enter(self, key: str, rate: RateSettings, most: int) -> None:
        """Count a request in.

        Raises:
            ApiError: 429 with the time to wait.
        """
        running = self._in_flight.get(key, 0)
        if self.total >= most or running >= rate.in_flight:
            whose = "the gateway" if self.total >= most else "this key"
            raise ApiError(
                "queue_full", f"{whose} has all its requests in flight", retry_after_s=1.0
            )
        if rate.per_minute is not None:
            self._take(key, rate.per_minute)
        self._in_flight[key] = running + 1
        self.total += 1

    def _take(self, key: str, per_minute: int) -> None:
        """Take one token of a bucket that holds `per_minute` and fills within a minute."""
        now = self._clock()
        tokens, at = self._minutes.get(key, (float(per_minute), now))
        tokens = min(float(per_minute), tokens + (now - at) * per_minute / 60.0)
        if tokens < 1.0:
            self._minutes[key] = (tokens, now)
            wait = (1.0 - tokens) * 60.0 / per_minute
            raise ApiError(
                "rate_limit", f"this key may ask {per_minute} times a minute", retry_after_s=wait
            )
        self._minutes[key] = (tokens - 1.0, now)
        if len(self._minutes) > _MOST_BUCKETS:  # a bucket of a minute ago is full again
            self._minutes = {k: v for k, v in self._minutes.items() if now - v[1] < 60.0}

    def leave(self, key: str) -> None:
        """Count a request out."""
        left = self._in_flight[key] - 1
        if left:
            self._in_flight[key] = left
        else:
            del self._in_flight[key]
        self.total -= 1
