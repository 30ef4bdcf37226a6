"""The next model's chance, given that this one failed."""

from __future__ import annotations

import numpy as np
import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.routing.cascade import Cascade, shared_of
from tfgrpo.routing.rules import Candidate


def candidate(name, mean, cost):
    return Candidate(name, mean, mean, mean, cost, cost, 10.0, "covered", {})


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.6), (0.4, 0.8), (0.3, 0.5)])
def test_the_chance_after_a_failure_is_that_of_two_shared_outcomes(p, q):
    """Outcomes drawn with a known joint distribution; their correlation gives the conditional."""
    rng = np.random.default_rng(0)
    both = p * q + 0.4 * min(p * (1 - q), q * (1 - p))
    a = rng.random(200_000) < p
    b = np.where(a, rng.random(len(a)) < both / p, rng.random(len(a)) < (q - both) / (1 - p))
    shared = shared_of(a, b, np.full(len(a), p), np.full(len(a), q))
    got = Cascade(shared=shared).after_failure(q, p)
    assert got == pytest.approx(b[~a].mean(), abs=0.01)
    assert got < q - 0.05
    assert Cascade(shared=0.0).after_failure(q, p) == q


def test_a_dearer_model_that_fails_with_this_one_is_not_worth_asking():
    cheap, dear = candidate("cheap", 0.5, 0.01), candidate("dear", 0.6, 0.3)
    alone = Cascade(target=0.95, per_usd=1.0, shared=0.0)
    alike = Cascade(target=0.95, per_usd=1.0, shared=0.9)
    assert not alone.stops(cheap, 0.3, [dear])[0]
    assert alike.stops(cheap, 0.3, [dear])[0]


def test_unlike_or_empty_lists_are_named():
    with pytest.raises(ConfigError, match="unlike or empty"):
        shared_of([1.0], [1.0, 0.0], [0.5], [0.5])
    with pytest.raises(ConfigError, match="unlike or empty"):
        shared_of([], [], [], [])
