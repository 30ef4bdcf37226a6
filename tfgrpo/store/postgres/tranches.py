"""A run's budget shared by several writers: each draws a tranche and spends it on its own.

The server's `ledgers` hold, for each capped resource, what is spent and what writers hold. A writer
draws a tranche (from `held`), reserves call by call inside it without asking anybody, moves what it
has settled from `held` to `spent`, and gives back what it does not use. Near the cap tranches
shrink to single calls, so the last cent is as exact as with one writer. Closing a session computes
what its calls add up to, in the database, and trusts no figure of its writer.

Only what a call uses is shared; other limits (depth, nodes, seconds) stay with each writer.

Does not know calls or connections' failures. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import BudgetError, StoreError
from tfgrpo.store.budget import UNIT, Budget, Ledger, Reservation, additive_units

__all__ = ["SHARED", "Refusal", "SharedLedger", "set_caps"]

SHARED = ("calls", "completion_tokens", "cost_usd", "prompt_tokens")
"""Resources that a run's writers share, in the order in which their rows are locked."""
_QUICK_S, _SLOW_S = 2.0, 8.0
"""A tranche used up within the first doubles the next one; one that lasted the second halves it."""
_WANTED_S = 10.0
"""How long others go on giving back after a writer was refused."""

Units = dict[str, int]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tranche was not granted."""

    resource: str
    asked: int
    cap: int
    spent: int
    held: int
    held_by_others: int
    writers: int

    @property
    def could_fit(self) -> bool:
        """True where what is held, and not what is spent, stands in the way."""
        return self.spent + self.asked <= self.cap

    def error(self) -> BudgetError:
        """Return it as the error of a refused reservation."""
        cap, spent, held = self.cap / UNIT, self.spent / UNIT, self.held / UNIT
        return BudgetError(
            f"budget {self.resource}: {self.asked / UNIT:.12g} more asked, {cap:.12g} at most "
            f"({spent:.12g} spent, {held:.12g} held by {self.writers} writers); raise the cap "
            "to go on",
            resource=self.resource,
        )


class SharedLedger(Ledger):
    """The ledger of one writer of a run: local amounts inside the tranche it has drawn.

    `spent` counts what the run had spent when it was opened and what this writer has spent since.
    """

    def __init__(self, budget: Budget, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(budget, clock=clock)
        self._caps = dict(self._limits)
        self._names = tuple(name for name in SHARED if name in self._limits)
        self._moved: Units = dict.fromkeys(self._names, 0)
        """What of `_spent` the server counts as spent."""
        self._giving: Units = dict.fromkeys(self._names, 0)
        """On its way back to the server."""
        self._want: Units = dict.fromkeys(self._names, 0)
        self._drawn_at = -_SLOW_S
        self._used = False
        """True where something was reserved since the last `beat`."""
        self._ask: Callable[[Units], Future[Refusal | None]] | None = None
        self.refusal: Refusal | None = None
        """Why the newest tranche was refused; None where it was granted."""

    @property
    def is_started(self) -> bool:
        """True once what the run had spent before is known here."""
        return self._ask is not None

    @property
    def caps(self) -> Mapping[str, int]:
        """The shared limits, in units."""
        return {name: self._caps[name] for name in self._names}

    def start(self, ask: Callable[[Units], Future[Refusal | None]]) -> None:
        """Begin with an empty tranche; `ask` draws one (`draw`, in the writer's own way)."""
        with self._lock:
            self._ask = ask
            for name in self._names:
                self._limits[name] = self._moved[name] = self._spent[name]

    def begin_again(self) -> None:
        """Begin anew after the session was closed: what was spent or was held for calls is counted
        there."""
        with self._lock:
            for name in self._names:
                self._limits[name] = self._spent[name] + self._reserved[name]
                self._moved[name], self._giving[name] = self._spent[name], 0

    def reserve(self, **amounts: float) -> Reservation:
        """Hold amounts; draws a tranche, and waits for the server, where the one at hand is short.

        Raises:
            BudgetError, ConfigError: as `Ledger.reserve`; the run's writers together would pass it.
            StoreError: the server cannot be reached.
        """
        while True:
            try:
                return self.reserve_here(**amounts)
            except BudgetError as exc:
                drawing = self.draw_soon(exc, amounts)
                if drawing is None:
                    raise
                refusal = drawing.result()
                if refusal is not None:
                    raise refusal.error() from exc

    def reserve_here(self, **amounts: float) -> Reservation:
        """Hold amounts inside the tranche at hand; raises as `Ledger.reserve`."""
        self._used = True
        return super().reserve(**amounts)

    def draw_soon(
        self, exc: BudgetError, amounts: Mapping[str, float]
    ) -> Future[Refusal | None] | None:
        """Begin to draw what a refused reservation lacks; None where drawing would not help."""
        if self._ask is None or exc.resource not in self._names:
            return None
        return self._ask(additive_units(dict(amounts)))

    def _left(self, resource: str) -> float:
        if resource not in self._names:
            return super()._left(resource)
        used = self._spent[resource] + self._reserved[resource]
        return max(0, self._caps[resource] - used) / UNIT

    def lacks(self, units: Mapping[str, int]) -> Units:
        """Return what the tranche at hand is short of for further `units`."""
        with self._lock:
            return {
                name: max(
                    0,
                    self._spent[name]
                    + self._reserved[name]
                    + units.get(name, 0)
                    - self._limits[name],
                )
                for name in self._names
            }

    def draw(self, connection: Any, session: int, units: Mapping[str, int]) -> _Change:
        """Draw what `units` lack, in the caller's transaction; `_Change.apply` once committed."""
        need, settled = self.lacks(units), self._settled()
        rows = _lock_rows(connection, session)
        writers = int(connection.execute("SELECT count(*) FROM live").fetchone()[0])
        refusal = self._refusal(rows, need, settled, writers)
        grants: Units = {}
        if refusal is None:
            now = time.monotonic()
            grants = self._grants(rows, need, writers, now - self._drawn_at)
            self._drawn_at = now
        _store(connection, session, rows, settled, grants, wanted=refusal is not None)
        return _Change(self, grants, settled, refusal)

    def beat(self, connection: Any, session: int) -> _Change:
        """Move what is settled, and give back what is idle or wanted, in the caller's
        transaction."""
        wanted = connection.execute(
            "SELECT coalesce(bool_or(wanted_at > clock_timestamp() - %s * interval '1 second'),"
            " false) FROM tfgrpo.ledgers WHERE run = tfgrpo.run()",
            (_WANTED_S,),
        ).fetchone()[0]
        with self._lock:
            if wanted or not self._used:
                for name in self._names:
                    unused = self._limits[name] - self._spent[name] - self._reserved[name]
                    self._giving[name] += max(0, unused)  # gone before it is given
                    self._limits[name] -= max(0, unused)
            self._used = False
            settled = self._settled()
            back = {name: -units for name, units in self._giving.items()}
        if any(settled.values()) or any(back.values()):
            rows = _lock_rows(connection, session)
            _store(connection, session, rows, settled, back, wanted=False)
        return _Change(self, back, settled, None)

    def _settled(self) -> Units:
        with self._lock:
            return {name: self._spent[name] - self._moved[name] for name in self._names}

    def _refusal(
        self, rows: Mapping[str, _Row], need: Units, settled: Units, writers: int
    ) -> Refusal | None:
        for name, row in rows.items():
            asked, moved = need.get(name, 0), settled.get(name, 0)
            if asked > row.cap - row.spent - row.held:
                spent, held = row.spent + moved, row.held - min(moved, row.mine)
                return Refusal(name, asked, row.cap, spent, held, row.held - row.mine, writers)
        return None

    def _grants(
        self, rows: Mapping[str, _Row], need: Mapping[str, int], writers: int, lasted_s: float
    ) -> Units:
        grants: Units = {}
        for name, asked in need.items():
            want = self._want[name] or 4 * asked
            if lasted_s < _QUICK_S:
                want *= 2
            elif lasted_s > _SLOW_S:
                want //= 2
            row = rows[name]
            free = row.cap - row.spent - row.held
            grants[name] = max(asked, min(want, free // (2 * writers))) if asked else 0
            if asked:
                self._want[name] = max(asked, grants[name])
        return grants


@dataclass(frozen=True, slots=True)
class _Change:
    """What a transaction changes here, once it is committed."""

    ledger: SharedLedger
    drawn: Units
    """Below 0: given back."""
    settled: Units
    refusal: Refusal | None

    def apply(self) -> Refusal | None:
        """Take it over; returns the refusal."""
        ledger = self.ledger
        with ledger._lock:
            for name, units in self.drawn.items():
                if units > 0:
                    ledger._limits[name] += units
                else:
                    ledger._giving[name] += units
            for name, units in self.settled.items():
                ledger._moved[name] += units
            ledger.refusal = self.refusal
        return self.refusal


@dataclass(frozen=True, slots=True)
class _Row:
    cap: int
    spent: int
    held: int
    overshoot: int
    mine: int
    """What this session holds of `held`."""
    counted: int


def _lock_rows(connection: Any, session: int) -> dict[str, _Row]:
    """Return the run's ledgers, locked in their one order, with this session's part."""
    rows = connection.execute(
        "SELECT resource, cap, spent, held, overshoot FROM tfgrpo.ledgers"
        " WHERE run = tfgrpo.run() ORDER BY resource FOR UPDATE"
    ).fetchall()
    mine = {
        name: (int(held), int(counted))
        for name, held, counted in connection.execute(
            "SELECT resource, held, counted FROM tfgrpo.tranches"
            " WHERE run = tfgrpo.run() AND session = %s",
            (session,),
        ).fetchall()
    }
    return {
        name: _Row(int(cap), int(spent), int(held), int(over), *mine.get(name, (0, 0)))
        for name, cap, spent, held, over in rows
    }


def _store(
    connection: Any,
    session: int,
    rows: Mapping[str, _Row],
    settled: Mapping[str, int],
    granted: Mapping[str, int],
    *,
    wanted: bool,
) -> None:
    """Write the ledgers after `settled` has moved from held to spent and `granted` was drawn
    (negative: given back)."""
    for name, row in rows.items():
        moved, drawn = settled.get(name, 0), granted.get(name, 0)
        if not (moved or drawn or wanted):
            continue
        from_mine = min(moved, row.mine)
        drawn = max(drawn, from_mine - row.mine)
        spent, held = row.spent + moved, row.held - from_mine + drawn
        connection.execute(
            "UPDATE tfgrpo.ledgers SET spent = %s, held = %s, overshoot = greatest(overshoot, %s),"
            " wanted_at = CASE WHEN %s THEN clock_timestamp() ELSE wanted_at END"
            " WHERE run = tfgrpo.run() AND resource = %s",
            (spent, held, max(0, spent + held - row.cap), wanted, name),
        )
        connection.execute(
            "INSERT INTO tfgrpo.tranches (session, resource, held, counted) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (run, session, resource)"
            " DO UPDATE SET held = excluded.held, counted = excluded.counted",
            (session, name, row.mine - from_mine + drawn, row.counted + moved),
        )


def set_caps(
    connection: Any, name: str, caps: Mapping[str, int] | None, *, is_alone: bool
) -> dict[str, int]:
    """Make a run's caps those of the budget that it is opened with; return them.

    Alone at the run, what is spent is computed anew and nothing is held.

    Args:
        name: the run's, for messages.
        caps: in units; None takes those that the run has.
        is_alone: no other writer lives.

    Raises:
        StoreError: other writers are at work under other caps.
    """
    rows = connection.execute(
        "SELECT resource, cap FROM tfgrpo.ledgers WHERE run = tfgrpo.run() ORDER BY resource"
    ).fetchall()
    kept = {resource: int(cap) for resource, cap in rows}
    if caps is None:
        caps = kept
    if not is_alone:
        if caps != kept:
            raise StoreError(
                f"other writers are at work on run {name!r} under other caps ({_words(kept)}; "
                f"asked: {_words(caps)}): give the same budget, or stop them first"
            )
        return dict(caps)
    connection.execute("DELETE FROM tfgrpo.tranches WHERE run = tfgrpo.run()")
    connection.execute("DELETE FROM tfgrpo.ledgers WHERE run = tfgrpo.run()")
    for resource, cap in caps.items():
        connection.execute(
            "INSERT INTO tfgrpo.ledgers (resource, cap, spent, held, overshoot)"
            " SELECT resource, %s, amount, 0, greatest(0, amount - %s) FROM tfgrpo.spent_of(NULL)"
            " WHERE resource = %s",
            (cap, cap, resource),
        )
    # writers that were closed as if they were gone may still write what their calls have cost
    connection.execute(
        "INSERT INTO tfgrpo.tranches (session, resource, held, counted)"
        " SELECT w.session, s.resource, 0, s.amount"
        "  FROM tfgrpo.writers w, LATERAL tfgrpo.spent_of(w.session) s"
        " WHERE w.run = tfgrpo.run() AND w.closed_at IS NOT NULL AND NOT w.is_dead"
    )
    return dict(caps)


def _words(caps: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {cap / UNIT:.12g}" for name, cap in caps.items()) or "none"
