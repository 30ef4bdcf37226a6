"""Limits and what counts against them: reserve before, settle after, give back on the way out.

A `Budget` is the limits, a `Ledger` what is spent and reserved under them, a `Reservation` one
promise that is settled or released. A reservation asks for the worst case, so that any number of
callers at once stay under a limit; what settles above its reservation is the only way past one.
Amounts are kept as whole multiples of 1e-12, so any order of reserve, settle and release ends in
the same sums and in exactly nothing reserved.

Three kinds of resource: amounts that add up (money, calls, tokens, tool calls, expansions, nodes),
`depth`, which only has a highest value, and `seconds`, which the clock spends.

Does not know: prices, models, files; standard library and our error tree only.
Idea: two-phase accounting, as in a card payment's authorise and capture (own).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self

from tfgrpo.errors import BudgetError, ConfigError

__all__ = ["ADDITIVE", "RESOURCES", "Budget", "Ledger", "Reservation"]

UNIT = 10**12
"""Amounts are kept in whole multiples of its inverse."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None is no limit. A limit of 0 forbids.

    Raises:
        ConfigError: a limit that is negative or not a number.
    """

    cost_usd: float | None = None
    """Money in US dollars."""
    calls: float | None = None
    """LM requests, failed ones included."""
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    tool_calls: float | None = None
    expansions: float | None = None
    """Search nodes expanded."""
    nodes: float | None = None
    """Search nodes held."""
    depth: float | None = None
    """Deepest search node; compared, never added up."""
    seconds: float | None = None
    """Wall time since the ledger was made, earlier sessions of a run included."""

    def __post_init__(self) -> None:
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and not (_is_number(limit) and limit >= 0):
                raise ConfigError(
                    f"budget {name}={limit!r} is not a limit: give a number of at least 0, or None"
                )

    def to_dict(self) -> dict[str, float]:
        """Return the limits that are set."""
        rows = ((name, getattr(self, name)) for name in RESOURCES)
        return {name: limit for name, limit in rows if limit is not None}


RESOURCES: tuple[str, ...] = tuple(f.name for f in fields(Budget))
"""Every resource a ledger knows."""
_NAMES = frozenset(RESOURCES)
_NOT_ADDITIVE = frozenset({"depth", "seconds"})
ADDITIVE: tuple[str, ...] = tuple(n for n in RESOURCES if n not in _NOT_ADDITIVE)
"""The resources that add up and can be held by a reservation."""
_SUMS = frozenset(ADDITIVE)


class Ledger:
    """What is spent and reserved under a budget; safe to use from threads and asyncio tasks.

    A reservation on a ledger with a `parent` also counts against the parent and is refused by
    whichever of the two has less left.

    Args:
        budget: the limits.
        parent: a wider ledger, such as the whole run's.
        clock: seconds on a clock that never goes back.

    >>> ledger = Ledger(Budget(calls=2))
    >>> with ledger.reserve(calls=1) as reservation:
    ...     reservation.settle()
    >>> with ledger.reserve(calls=1):
    ...     pass  # failed before anything was used: released
    >>> ledger.spent["calls"], ledger.reserved["calls"], ledger.remaining("calls")
    (1.0, 0.0, 1.0)
    """

    def __init__(
        self,
        budget: Budget = Budget(),
        *,
        parent: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.parent = parent
        self.clock = clock
        """Seconds on a clock that never goes back."""
        self._started_s = clock()
        self._earlier_s = 0.0
        self._depth = 0.0
        self._spent = dict.fromkeys(ADDITIVE, 0)
        self._reserved = dict.fromkeys(ADDITIVE, 0)
        self._lock: threading.RLock = parent._lock if parent is not None else threading.RLock()
        self._chain: tuple[Ledger, ...] = (self, *(parent._chain if parent is not None else ()))
        self._is_limited = bool(budget.to_dict())
        self._limits = {
            name: _units(limit)
            for name, limit in budget.to_dict().items()
            if name in ADDITIVE and not math.isinf(limit)
        }
        self._caps = self._limits
        """What can be spent in the end; a ledger that shares its budget has less at hand."""

    def reserve(self, **amounts: float) -> Reservation:
        """Hold amounts at their worst case until they are settled or released.

        `depth` and `seconds` are compared with their limits and not held. Every reservation, also
        one that does not name it, is refused once the time is up or a cap has been passed.

        Raises:
            BudgetError: an amount would pass a limit here or further up; nothing is held then.
            ConfigError: an unknown resource, or an amount that is negative or not a number.
        """
        held = additive_units(amounts)
        with self._lock:
            for ledger in self._chain:
                if ledger._is_limited:
                    ledger._check(amounts, held)
            for ledger in self._chain:
                reserved = ledger._reserved
                for name, units in held.items():
                    reserved[name] += units
        return Reservation(self, held, amounts.get("depth", 0.0))

    def charge(self, **amounts: float) -> None:
        """Add to what is spent without asking, here and further up.

        For work of an earlier session, and for costs that are known only afterwards. `seconds`
        moves the clock forward.
        """
        units = additive_units(amounts)
        with self._lock:
            for ledger in self._chain:
                ledger._earlier_s += amounts.get("seconds", 0.0)
                ledger._add(units, amounts.get("depth", 0.0))

    @property
    def spent(self) -> dict[str, float]:
        """What is settled or charged, by resource; `depth` is the highest, `seconds` elapsed."""
        with self._lock:
            row = {name: units / UNIT for name, units in self._spent.items()}
            return row | {"depth": self._depth, "seconds": self.elapsed_s}

    @property
    def reserved(self) -> dict[str, float]:
        """What is held by reservations that are neither settled nor released, by resource."""
        with self._lock:
            return {name: units / UNIT for name, units in self._reserved.items()}

    def remaining(self, resource: str) -> float:
        """Return what can still be reserved here and further up; infinity where nothing limits.

        For `depth` this is the limit itself. Never negative.
        """
        _check_amounts({resource: 0.0})
        with self._lock:
            return min(ledger._left(resource) for ledger in self._chain)

    def could_fit(self, **amounts: float) -> bool:
        """Return whether the amounts fit what is spent, leaving reservations out of account.

        True after a refusal means: the reservations of others may settle below their worst case,
        and asking again later may succeed.
        """
        _check_amounts(amounts)
        with self._lock:
            return all(ledger._fits_spent(amounts) for ledger in self._chain)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the ledger was made, and those charged."""
        return self._earlier_s + max(0.0, self.clock() - self._started_s)

    def _left(self, resource: str) -> float:
        limit: float | None = getattr(self.budget, resource)
        if limit is None:
            return math.inf
        if resource == "depth":
            return float(limit)
        if resource == "seconds":
            return max(0.0, limit - self.elapsed_s)
        units = self._limits.get(resource)
        if units is None:
            return math.inf
        return max(0, units - self._spent[resource] - self._reserved[resource]) / UNIT

    def _fits_spent(self, amounts: Mapping[str, float]) -> bool:
        for name, limit in self._caps.items():
            if self._spent[name] + _units(amounts.get(name, 0.0)) > limit:
                return False
        return self.budget.seconds is None or self.elapsed_s < self.budget.seconds

    def _check(self, amounts: Mapping[str, float], held: Mapping[str, int]) -> None:
        for name, limit in self._limits.items():
            units = held.get(name, 0)
            if self._spent[name] + self._reserved[name] + units <= limit:
                continue
            raise BudgetError(
                f"budget {name}: {amounts.get(name, 0.0):.12g} asked, {self._left(name):.12g} of "
                f"{getattr(self.budget, name):.12g} left ({self._spent[name] / UNIT:.12g} spent, "
                f"{self._reserved[name] / UNIT:.12g} reserved); raise the cap to go on",
                resource=name,
            )
        depth, deepest = amounts.get("depth", 0.0), self.budget.depth
        if deepest is not None and depth > deepest:
            raise BudgetError(
                f"budget depth: {depth:.12g} asked, at most {deepest:.12g}", resource="depth"
            )
        limit_s, elapsed_s = self.budget.seconds, self.elapsed_s
        if limit_s is not None and elapsed_s + max(amounts.get("seconds", 0.0), 1e-9) > limit_s:
            raise BudgetError(
                f"budget seconds: {elapsed_s:.1f} of {limit_s:.12g} have passed; "
                "raise the cap to go on",
                resource="seconds",
            )

    def _add(self, units: Mapping[str, int], depth: float) -> None:
        total = self._spent
        for name, amount in units.items():
            total[name] += amount
        if depth > self._depth:
            self._depth = depth

    def _close(self, held: Mapping[str, int], spent: Mapping[str, int], depth: float) -> None:
        with self._lock:
            for ledger in self._chain:
                reserved = ledger._reserved
                for name, units in held.items():
                    reserved[name] -= units
                ledger._add(spent, depth)


class Reservation:
    """Amounts held on a ledger; a context manager that releases what was not settled."""

    __slots__ = ("_depth", "_held", "_is_open", "_ledger")

    def __init__(self, ledger: Ledger, held: dict[str, int], depth: float) -> None:
        self._ledger = ledger
        self._held = held
        self._depth = depth
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """True until settled or released."""
        return self._is_open

    @property
    def amounts(self) -> dict[str, float]:
        """What is, or was, held."""
        return {name: units / UNIT for name, units in self._held.items()}

    def settle(self, **actual: float) -> None:
        """Spend the actual amounts and give back the rest; may exceed what was held.

        A resource that was held and is not named counts as held, so `settle()` spends it all.
        `seconds` is ignored: the clock has spent it.

        Raises:
            ConfigError: already settled or released, an unknown resource or a bad amount.
        """
        units = additive_units(actual)
        if not self._is_open:
            raise ConfigError("this reservation is closed: settle or release it once")
        self._is_open = False
        self._ledger._close(self._held, self._held | units, actual.get("depth", self._depth))

    def extend(self, **amounts: float) -> None:
        """Hold more under the same reservation.

        Raises:
            BudgetError: it would pass a limit; what was held stays held.
            ConfigError: already settled or released, an unknown resource or a bad amount.
        """
        if not self._is_open:
            raise ConfigError("this reservation is closed: settle or release it once")
        more = self._ledger.reserve(**amounts)
        more._is_open = False
        for name, units in more._held.items():
            self._held[name] = self._held.get(name, 0) + units

    def release(self) -> None:
        """Give everything back; nothing happens when it is closed already."""
        if self._is_open:
            self._is_open = False
            self._ledger._close(self._held, {}, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _is_number(value: object) -> bool:
    if type(value) is int or type(value) is float:
        return value == value
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _units(amount: float) -> int:
    return round(amount * UNIT)


def _check_amounts(amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        if name not in _NAMES:
            raise ConfigError(f"unknown resource {name!r}; there are {', '.join(RESOURCES)}")
        if not _is_number(amount) or amount < 0 or math.isinf(amount):
            raise ConfigError(f"{name}={amount!r} is not an amount: give a number of at least 0")


def additive_units(amounts: Mapping[str, float]) -> dict[str, int]:
    """Check amounts and return those that add up, in units."""
    units: dict[str, int] = {}
    for name, amount in amounts.items():
        if type(amount) is int and amount >= 0 and name in _SUMS:  # most amounts are counts
            units[name] = amount * UNIT
            continue
        if type(amount) is not float or not 0 <= amount < math.inf or name not in _NAMES:
            _check_amounts({name: amount})
        if name in _SUMS:
            units[name] = round(amount * UNIT)
    return units
