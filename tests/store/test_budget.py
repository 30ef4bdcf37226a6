from __future__ import annotations

import asyncio
import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tfgrpo.errors import BudgetError, ConfigError
from tfgrpo.store.budget import ADDITIVE, RESOURCES, Budget, Ledger, Reservation

AMOUNT = st.one_of(st.integers(0, 4).map(float), st.sampled_from([0.1, 0.2, 0.3, 1e-6, 0.7]))


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving against a plain model: a list of open holds and a sum of settled ones."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.run = Ledger(Budget(cost_usd=2.0, calls=6))
        self.stage = Ledger(Budget(calls=4), parent=self.run)
        self.open: dict[Reservation, tuple[bool, float, float]] = {}
        self.cost: list[float] = []
        self.calls = {True: 0.0, False: 0.0}
        self.overshoot = 0.0

    @rule(target=held, in_stage=st.booleans(), cost=AMOUNT, calls=st.integers(0, 3))
    def reserve(self, in_stage: bool, cost: float, calls: int) -> Reservation | None:
        ledger = self.stage if in_stage else self.run
        cost_after = sum(self.cost) + sum(c for _, c, _ in self.open.values()) + cost
        stage_after = self.calls[True] + sum(n for s, _, n in self.open.values() if s) + calls
        run_after = sum(self.calls.values()) + sum(n for _, _, n in self.open.values()) + calls
        fits = cost_after <= 2.0 + 1e-9 and run_after <= 6 and (not in_stage or stage_after <= 4)
        before = self.run.reserved, self.stage.reserved
        try:
            reservation = ledger.reserve(cost_usd=cost, calls=calls)
        except BudgetError as exc:
            assert not fits
            assert exc.resource in ("cost_usd", "calls")
            assert (self.run.reserved, self.stage.reserved) == before
            return None
        assert fits
        self.open[reservation] = (in_stage, cost, float(calls))
        return reservation

    @rule(reservation=consumes(held), factor=st.sampled_from([0.0, 0.5, 1.0, 1.5]))
    def settle(self, reservation: Reservation | None, factor: float) -> None:
        if reservation is None:
            return
        in_stage, cost, calls = self.open.pop(reservation)
        reservation.settle(cost_usd=cost * factor)
        self.cost.append(cost * factor)
        self.calls[in_stage] += calls
        self.overshoot += max(0.0, cost * (factor - 1))

    @rule(reservation=consumes(held), raises=st.booleans())
    def leave(self, reservation: Reservation | None, raises: bool) -> None:
        if reservation is None:
            return
        self.open.pop(reservation)
        try:
            with reservation:
                if raises:
                    raise asyncio.CancelledError
        except asyncio.CancelledError:
            assert raises

    @invariant()
    def sums_agree_with_the_model(self) -> None:
        assert self.run.spent["cost_usd"] == pytest.approx(sum(self.cost), abs=1e-9)
        assert self.run.spent["calls"] == sum(self.calls.values())
        assert self.stage.spent["calls"] == self.calls[True]
        if not self.open:
            assert set(self.run.reserved.values()) == {0.0}
            assert set(self.stage.reserved.values()) == {0.0}

    @invariant()
    def a_cap_is_passed_by_overshoot_alone(self) -> None:
        assert self.run.spent["cost_usd"] <= 2.0 + self.overshoot + 1e-9
        assert self.run.spent["calls"] + self.run.reserved["calls"] <= 6


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLedgerMachine = LedgerMachine.TestCase


def test_ten_times_a_tenth_fits_one_dollar_exactly() -> None:
    ledger = Ledger(Budget(cost_usd=1.0))
    for _ in range(10):
        ledger.reserve(cost_usd=0.1).settle()
    assert ledger.remaining("cost_usd") == 0.0
    with pytest.raises(BudgetError, match=r"0 of 1 left \(1 spent, 0 reserved\)"):
        ledger.reserve(cost_usd=0.000001)


def test_a_parent_refuses_for_all_its_children() -> None:
    run = Ledger(Budget(expansions=5))
    first, second = Ledger(parent=run), Ledger(Budget(expansions=100), parent=run)
    first.reserve(expansions=3).settle()
    assert second.remaining("expansions") == 2
    with pytest.raises(BudgetError) as caught:
        second.reserve(expansions=3)
    assert caught.value.resource == "expansions"
    assert second.reserved["expansions"] == 0
    assert run.spent["expansions"] == 3


def test_depth_is_compared_and_never_added_up() -> None:
    ledger = Ledger(Budget(depth=3))
    for depth in (3, 2, 3):
        ledger.reserve(depth=depth, nodes=1).settle()
    assert ledger.spent["depth"] == 3
    assert ledger.spent["nodes"] == 3
    with pytest.raises(BudgetError) as caught:
        ledger.reserve(depth=4, nodes=1)
    assert caught.value.resource == "depth"


def test_time_is_spent_by_the_clock_and_carried_over_from_earlier_sessions() -> None:
    now = [100.0]
    ledger = Ledger(Budget(seconds=10), clock=lambda: now[0])
    ledger.charge(seconds=4)
    now[0] += 5
    assert ledger.remaining("seconds") == pytest.approx(1)
    ledger.reserve(calls=1).release()
    now[0] += 2
    with pytest.raises(BudgetError) as caught:
        ledger.reserve(calls=1)
    assert caught.value.resource == "seconds"


def test_a_clock_that_jumps_back_gives_no_time_back() -> None:
    now = [100.0]
    ledger = Ledger(Budget(seconds=10), clock=lambda: now[0])
    now[0] -= 86_400
    assert ledger.spent["seconds"] == 0.0


def test_a_refusal_caused_by_reservations_alone_may_fit_later() -> None:
    ledger = Ledger(Budget(calls=2))
    held = ledger.reserve(calls=2)
    with pytest.raises(BudgetError):
        ledger.reserve(calls=1)
    assert ledger.could_fit(calls=1)
    held.settle(calls=2)
    assert not ledger.could_fit(calls=1)


def test_what_is_not_named_settles_as_held_and_more_than_held_is_spent() -> None:
    ledger = Ledger(Budget(cost_usd=1))
    ledger.reserve(calls=2, cost_usd=0.5).settle(cost_usd=0.75, completion_tokens=10)
    spent = ledger.spent
    assert (spent["calls"], spent["cost_usd"], spent["completion_tokens"]) == (2, 0.75, 10)


async def test_a_cancelled_task_gives_its_reservation_back() -> None:
    ledger = Ledger(Budget(calls=1))

    async def work() -> None:
        with ledger.reserve(calls=1):
            await asyncio.sleep(3600)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert ledger.remaining("calls") == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.remaining("calls") == 1


@pytest.mark.parametrize(
    "amounts",
    [
        {"cals": 1},
        {"calls": -1},
        {"calls": float("nan")},
        {"cost_usd": float("inf")},
        {"calls": True},
    ],
)
def test_bad_amounts_are_refused_by_name(amounts: dict[str, float]) -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError, match=next(iter(amounts))):
        ledger.reserve(**amounts)
    with pytest.raises(ConfigError):
        ledger.charge(**amounts)


def test_a_negative_limit_is_refused_and_zero_forbids() -> None:
    with pytest.raises(ConfigError, match="cost_usd"):
        Budget(cost_usd=-1)
    with pytest.raises(BudgetError):
        Ledger(Budget(calls=0)).reserve(calls=1)


def test_a_reservation_is_closed_once() -> None:
    reservation = Ledger().reserve(calls=1)
    reservation.settle()
    reservation.release()
    with pytest.raises(ConfigError):
        reservation.settle()


def test_a_budget_error_survives_a_process_border() -> None:
    with pytest.raises(BudgetError) as caught:
        Ledger(Budget(calls=0)).reserve(calls=1)
    twin = copy.copy(caught.value)  # by the same __reduce__ that crosses process borders
    assert twin.resource == "calls"
    assert str(twin) == str(caught.value)


def test_every_resource_has_a_limit_of_its_own() -> None:
    assert set(ADDITIVE) < set(RESOURCES)
    for name in RESOURCES:
        ledger = Ledger(Budget(**{name: 3}), clock=lambda: 0.0)
        assert ledger.remaining(name) == 3
        assert Ledger().remaining(name) == float("inf")
