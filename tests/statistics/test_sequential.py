"""The live test: valid at every look, shown by simulation and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.statistics.sequential import (
    DriftAlarm,
    EffectTest,
    Unit,
    Wealth,
    effect_interval,
    effect_of,
    looks_level,
)

RUNS, UNITS = 1000, 6000


def simulated(
    effect: float, share: float, *, base: float = 0.5, seed: int = 0, units: int = UNITS
) -> tuple[Any, Any]:
    """Return the units at which gain and harm first reached 20 in each run; `units` for never."""
    rng = np.random.default_rng(seed)
    test = EffectTest(max_harm=0.05)
    first = np.full(RUNS, units), np.full(RUNS, units)
    for i in range(units):
        is_candidate = rng.random(RUNS) < share
        y = (rng.random(RUNS) < base + effect * is_candidate).astype(float)
        x = np.where(is_candidate, (y - 0.5) / share, -(y - 0.5) / (1 - share))
        test.observe(x, 1 / min(share, 1 - share))
        for found, log in ((first[0], test.log_gain), (first[1], test.log_harm)):
            hit = (log >= math.log(20)) & (found == units)
            found[hit] = i + 1
    return first


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_without_an_effect_at_most_one_run_in_twenty_is_ever_promoted(share: float) -> None:
    gain, _ = simulated(0.0, share, seed=1)
    # 1,000 runs looked at after each of 6,000 units; the guarantee is 0.05 in expectation.
    assert np.mean(gain < UNITS) <= 0.05


def test_at_the_tolerated_harm_at_most_one_run_in_twenty_is_rolled_back() -> None:
    _, harm = simulated(-0.05, 0.5, seed=2)
    assert np.mean(harm < UNITS) <= 0.05


def test_a_real_gain_is_found_in_a_few_hundred_units() -> None:
    gain, _ = simulated(0.2, 0.5, seed=3, units=1500)
    assert np.mean(gain < 1500) >= 0.99
    assert 100 <= np.median(gain) <= 260  # 141 to 179 in the literature's own bets


def test_a_harmful_candidate_is_stopped_and_never_promoted() -> None:
    # A tenth of some 770 units is served badly before a candidate at -0.2 is back.
    gain, harm = simulated(-0.2, 0.1, seed=4, units=4000)
    assert np.mean(harm < 4000) >= 0.99 and np.median(harm) <= 900
    assert np.mean(gain < 4000) <= 0.01


def test_the_interval_covers_the_effect_at_every_look() -> None:
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(100):
        rows = []
        for _ in range(500):
            is_candidate = bool(rng.random() < 0.5)
            y = float(rng.random() < 0.5 + 0.15 * is_candidate)
            rows.append(effect_of(Unit(is_candidate, 0.5, y)))
        # The running intersection has left the truth if it ever did.
        found = effect_interval(rows)
        missed += not found.low <= 0.15 <= found.high
    assert missed <= 5


def test_a_good_prediction_makes_the_interval_shorter() -> None:
    rng = np.random.default_rng(6)
    plain, helped = [], []
    for _ in range(800):
        p = 0.1 if rng.random() < 0.5 else 0.9
        is_candidate = bool(rng.random() < 0.5)
        y = float(rng.random() < p)
        plain.append(effect_of(Unit(is_candidate, 0.5, y)))
        helped.append(effect_of(Unit(is_candidate, 0.5, y, p)))
    one, two = effect_interval(plain), effect_interval(helped)
    assert two.high - two.low < one.high - one.low


def test_two_bets_by_hand() -> None:
    wealth = Wealth()
    wealth.bet(1.0, 2.0)  # nothing is known, nothing is bet
    assert wealth.log == 0.0
    # Mean 1/2, second moment (1 + 1) / 2 = 1: the bet is 0.5, capped at 0.75 / 2.
    wealth.bet(1.0, 2.0)
    assert float(wealth.log) == pytest.approx(math.log(1.375))


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.02, 0.98), st.floats(0, 1), st.floats(0, 1)),
        max_size=60,
    )
)
def test_no_outcome_ever_makes_a_wealth_negative(
    rows: list[tuple[bool, float, float, float]],
) -> None:
    test = EffectTest(min_difference=0.02)
    for row in rows:
        test.observe(*effect_of(Unit(*row)))
        assert math.isfinite(float(test.log_gain)) and math.isfinite(float(test.log_harm))


@given(st.booleans(), st.floats(0.02, 0.98), st.floats(0, 1), st.floats(0, 1))
def test_an_estimate_stays_within_its_bound(
    is_candidate: bool, share: float, outcome: float, prediction: float
) -> None:
    estimate, bound = effect_of(Unit(is_candidate, share, outcome, prediction))
    assert abs(estimate) <= bound * (1 + 1e-12)


def test_estimates_are_unbiased_for_any_prediction() -> None:
    # E = p (y1 - f) / p - (1 - p) (y0 - f) / (1 - p) = y1 - y0.
    for f in (0.0, 0.3, 1.0):
        one, _ = effect_of(Unit(True, 0.2, 0.9, f))
        two, _ = effect_of(Unit(False, 0.2, 0.4, f))
        assert 0.2 * one + 0.8 * two == pytest.approx(0.5)


def test_drift_is_told_late_where_there_is_none_and_soon_where_there_is() -> None:
    rng = np.random.default_rng(7)
    steady, fallen = DriftAlarm(0.6), DriftAlarm(0.6)
    told = np.zeros(RUNS, dtype=bool)
    for _ in range(2000):
        steady.observe((rng.random(RUNS) < 0.6).astype(float))
        told |= steady.evidence >= 1e4
    # Mean run length of at least 10,000: by Markov over 2,000 units at most a fifth.
    assert np.mean(told) <= 0.2
    for _ in range(500):
        fallen.observe(float(rng.random() < 0.4))
    assert fallen.evidence >= 1e4


def test_the_levels_of_all_candidates_sum_to_the_level() -> None:
    assert looks_level(0.05, 1) == 0.025
    assert sum(looks_level(0.05, k) for k in range(1, 2000)) < 0.05
