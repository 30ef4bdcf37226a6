"""The table's arithmetic: Fieller against a grid search, paired differences, words for people."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student_t

from tfgrpo.escalate.comparison import fieller, make_table, retained

BASE = {"a": (0.0, 0.2), "b": (0.1,), "c": (0.0,), "d": (0.3,), "e": (0.0,)}
LIBRARY = {"a": (0.6, 0.8), "b": (0.5,), "c": (0.7,), "d": (0.7,), "e": (0.9,)}
TRAINED = {"a": (0.5, 0.5), "b": (0.6,), "c": (0.3,), "d": (0.8,), "e": (0.5,)}


def by_grid(level: float) -> tuple[float, float]:
    """The smallest and largest ratio that the paired t-test on trained − θ · library does not
    reject, found by trying them all."""
    means = [{t: np.mean(r) for t, r in arm.items()} for arm in (BASE, LIBRARY, TRAINED)]
    gain = np.array([means[1][t] - means[0][t] for t in BASE])
    kept = np.array([means[2][t] - means[0][t] for t in BASE])
    limit = student_t.ppf((1 + level) / 2, len(BASE) - 1)
    inside = []
    for theta in np.linspace(-1, 3, 40_001):
        left = kept - theta * gain
        if abs(left.mean()) <= limit * left.std(ddof=1) / math.sqrt(len(left)):
            inside.append(theta)
    return min(inside), max(inside)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_ratios_interval_holds_what_the_paired_test_does_not_reject(level) -> None:
    found = retained(BASE, LIBRARY, TRAINED, level=level)
    low, high = by_grid(level)
    assert found.low == pytest.approx(low, abs=2e-4)
    assert found.high == pytest.approx(high, abs=2e-4)
    gain = sum(np.mean(LIBRARY[t]) - np.mean(BASE[t]) for t in BASE)
    kept = sum(np.mean(TRAINED[t]) - np.mean(BASE[t]) for t in BASE)
    assert found.estimate == pytest.approx(kept / gain)
    assert found.n_tasks == 5


def test_a_gain_that_may_be_zero_has_a_ratio_without_an_interval() -> None:
    shaky = {**BASE, "e": (0.6,)}
    found = retained(BASE, shaky, TRAINED)
    assert found.estimate is not None and found.low is None and found.high is None
    assert "no interval" in str(found)
    nothing = retained(BASE, dict.fromkeys(BASE, (0.0,)), TRAINED)
    assert nothing.estimate is None and "not defined" in str(nothing)


def test_without_variance_the_ratio_is_a_point() -> None:
    assert fieller(0.2, 0.4, np.zeros((2, 2)), 9, 0.95) == pytest.approx((0.5, 0.5))


def test_the_table_holds_four_arms_and_their_paired_differences() -> None:
    table = make_table(
        {"base": BASE, "base_library": LIBRARY, "trained": TRAINED, "trained_library": TRAINED}
    )
    assert table.arms["base"].estimate == pytest.approx((0.1 + 0.1 + 0 + 0.3 + 0) / 5)
    gain = table.differences["training"]
    assert gain.estimate == pytest.approx(
        table.arms["trained"].estimate - table.arms["base"].estimate
    )
    assert gain.low < gain.estimate < gain.high
    assert table.differences["library_on_trained"].estimate == 0
    assert table.verdict.status == "met" and table.draws == 2
    text = "\n".join(table.lines())
    assert "trained + library" in text and f"{table.arms['base_library'].estimate:.3f}" in text
    page = table.markdown()
    assert page.count("\n| ") == 4 + 5 + 2 and "5 tasks, 2 draws" in page
    row = table.to_dict()
    assert set(row["arms"]) == {"base", "base_library", "trained", "trained_library"}


def test_without_a_library_there_are_two_arms_and_nothing_to_keep() -> None:
    table = make_table({"base": BASE, "trained": TRAINED})
    assert list(table.arms) == ["base", "trained"]
    assert list(table.differences) == ["training"] and table.retained is None
