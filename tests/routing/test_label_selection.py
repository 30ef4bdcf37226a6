"""Which prompts to run first: against brute force and against random."""

from __future__ import annotations

import numpy as np
import pytest

from tests.routing.worlds import make_world
from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.laplace import sigmoid
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel, prior_kernel
from tfgrpo.routing.label_selection import at_random, choose_prompts, k_centre


def _value(n=120):
    world = make_world(n, 6)
    pool = ReferencePool.fit(world.table, world.vectors, embedder_id=world.embedder.embedder_id)
    return world, ValueModel(world.embedder, pool)


def _left_over(value, vectors, chosen):
    """Mean posterior variance over all candidates, from the joint formula."""
    kernel, mean = prior_kernel(value, vectors.astype(float))
    p = sigmoid(mean / np.sqrt(1 + np.pi / 8 * np.diag(kernel)))
    noise = np.diag(1.0 / np.maximum(p * (1 - p), 1e-3)[chosen])
    cross = kernel[:, chosen]
    inner = np.linalg.solve(kernel[np.ix_(chosen, chosen)] + noise, cross.T)
    return float(np.mean(np.diag(kernel) - np.einsum("ij,ji->i", cross, inner)))


def test_the_first_pick_is_the_best_single_prompt():
    world, value = _value()
    first = choose_prompts(value, world.vectors, 1)
    every = [_left_over(value, world.vectors, np.array([i])) for i in range(120)]
    assert every[first[0]] == pytest.approx(min(every))


def test_chosen_prompts_leave_less_uncertainty_than_random_and_spread_out_ones():
    world, value = _value()
    ours = _left_over(value, world.vectors, choose_prompts(value, world.vectors, 12))
    random = [_left_over(value, world.vectors, at_random(120, 12, seed=s)) for s in range(10)]
    assert ours < min(random)
    assert ours < _left_over(value, world.vectors, k_centre(world.vectors, 12))


def test_picks_are_distinct_repeatable_and_bounded():
    world, value = _value()
    a = choose_prompts(value, world.vectors, 120)
    assert sorted(a) == list(range(120))
    assert np.array_equal(
        choose_prompts(value, world.vectors, 9), choose_prompts(value, world.vectors, 9)
    )
    assert len(set(k_centre(world.vectors, 30))) == 30
    for n in (0, 121):
        with pytest.raises(ConfigError, match="allowed is 1 to 120"):
            choose_prompts(value, world.vectors, n)
