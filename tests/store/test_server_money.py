"""Whatever writers of a run do, and whoever of them dies: its books are right at every moment."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.driver import MODEL
from tfgrpo.errors import BudgetError
from tfgrpo.rollout import Usage
from tfgrpo.store import Journal, OpenOptions
from tfgrpo.store.budget import UNIT, Budget, Reservation
from tfgrpo.store.calls import CallEnd, CallStart
from tfgrpo.store.postgres.seat import Terms

CAP_USD = 1.0
TERMS = Terms(lease_s=30.0, call_s=30.0, beat_s=0.05)
_RUNS = itertools.count()
_KEYS = itertools.count()

WRITER = st.integers(0, 2)
ACTION = st.one_of(
    st.tuples(st.just("call"), WRITER, st.integers(1, 400)),  # thousandths of a dollar at most
    st.tuples(st.just("end"), WRITER, st.integers(0, 100)),  # per cent of its worst case
    st.tuples(st.just("lose"), WRITER, st.just(0)),  # ends, and nobody can tell its cost
    st.tuples(st.just("kill"), WRITER, st.just(0)),
    st.tuples(st.just("leave"), WRITER, st.just(0)),
)


@dataclass(slots=True)
class Person:
    """A writer and its calls in flight."""

    store: Journal
    flying: list[tuple[int, Reservation, float]] = field(default_factory=list)


def sit(place: str) -> Person:
    budget = Budget(cost_usd=CAP_USD)
    return Person(
        Journal.open(
            place, create=True, role="writer", budget=budget, options=OpenOptions(terms=TERMS)
        )
    )


def books(store: Journal) -> tuple[int, int]:
    ((cap, spent, held, overshoot),) = store._writer.read(
        "SELECT cap, spent, held, overshoot FROM tfgrpo.ledgers WHERE run = tfgrpo.run()"
    )
    assert spent + held <= cap == UNIT and overshoot == 0 and spent >= 0 and held >= 0
    return spent, held


def in_the_journal(store: Journal) -> int:
    cost = sum((r.usage.cost_usd or 0.0) + (r.booked.cost_usd or 0.0) for r in store.spend())
    return round(cost * UNIT)


async def act(people: list[Person], place: str, what: str, who: int, amount: int) -> None:
    person = people[who]
    if what == "call":
        worst = amount / 1000
        try:
            reservation = person.store.ledger.reserve(cost_usd=worst)
        except BudgetError:
            return
        key = next(_KEYS).to_bytes(32, "big")
        start = CallStart(key, "s", MODEL, "r", 1, 5, 8, worst)
        claim = await person.store.calls.claim(start, (key,))
        assert claim.call is not None
        person.flying.append((claim.call, reservation, worst))
    elif what in ("end", "lose") and person.flying:
        call, reservation, worst = person.flying.pop(0)
        cost = round(worst * amount / 100, 6)
        if what == "end":
            reservation.settle(cost_usd=cost)
            end = CallEnd("ok", Usage(calls=1, cost_usd=cost), 0.1, 1)
        else:
            reservation.settle()
            end = CallEnd("unsettled", Usage(), 0.1)
        await person.store.calls.end(call, end)
    elif what == "kill":
        person.store.abandon()
        people[who] = sit(place)
    elif what == "leave":
        person.store.close()
        people[who] = sit(place)


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(actions=st.lists(ACTION, min_size=5, max_size=30))
def test_the_books_are_right_at_every_moment_and_the_cap_is_usable_to_the_end(
    one_database: str, actions: list[tuple[str, int, int]]
) -> None:
    place = f"{one_database}#money-{next(_RUNS)}"

    async def run() -> None:
        people = [sit(place) for _ in range(3)]
        watcher = Journal.open(place, readonly=True)
        for what, who, amount in actions:
            await act(people, place, what, who, amount)
            books(watcher)
        for person in people:
            person.store.close()
        spent, held = books(watcher)
        assert held == 0
        assert abs(spent - in_the_journal(watcher)) <= 100
        watcher.close()
        alone = sit(place)
        left = (UNIT - spent - 100) / UNIT
        if left > 0:
            alone.store.ledger.reserve(cost_usd=left).release()
        try:
            alone.store.ledger.reserve(cost_usd=(UNIT - spent + 100) / UNIT)
        except BudgetError:
            alone.store.close()
        else:
            raise AssertionError("more than the cap could be reserved")

    asyncio.run(run())
