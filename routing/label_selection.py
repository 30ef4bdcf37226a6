"""Which prompts a new model should answer first.

The gain of a prompt is how much it is expected to narrow the log odds of all candidate prompts,
under the pool's prior and the curvature that the prior predicts: greedy, one exact rank-one update
a pick. `k_centre` (spread out in meaning) and `at_random` are the rivals.
Does not know the answers. Source: greedy variance reduction (Krause et al. 2008, the "A"
criterion); its use for onboarding is own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.laplace import sigmoid
from tfgrpo.routing.estimator.value_model import ValueModel, prior_kernel

__all__ = ["at_random", "choose_prompts", "k_centre"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_POOL = 1500
"""Candidates looked at; more are subsampled."""


def choose_prompts(value: ValueModel, vectors: NDArray[Any], n: int, *, seed: int = 0) -> Index:
    """Return the indices of n candidate prompts, most informative first.

    Quadratic in the candidates a pick; more than 1,500 candidates are subsampled.

    Raises:
        ConfigError: n is not between 1 and the number of candidates.
    """
    _check(len(vectors), n)
    rng = np.random.default_rng(seed)
    rows = np.arange(len(vectors))
    if len(rows) > max(_POOL, n):
        rows = np.sort(rng.permutation(rows)[: max(_POOL, n)])
    kernel, mean = prior_kernel(value, np.asarray(vectors, dtype=np.float64)[rows])
    p = sigmoid(mean / np.sqrt(1 + np.pi / 8 * np.diag(kernel)))
    noise = 1.0 / np.maximum(p * (1 - p), 1e-3)
    chosen: list[int] = []
    free = np.ones(len(rows), dtype=bool)
    for _ in range(n):
        gain = np.sum(kernel**2, axis=1) / (np.diag(kernel) + noise)
        pick = int(np.argmax(np.where(free, gain, -np.inf)))
        free[pick] = False
        chosen.append(pick)
        column = kernel[:, pick].copy()
        kernel -= np.outer(column, column) / (column[pick] + noise[pick])
    return np.asarray(rows[chosen])


def k_centre(vectors: NDArray[Any], n: int) -> Index:
    """Return n prompts that are far apart: farthest-first from the most central one."""
    _check(len(vectors), n)
    X = np.asarray(vectors, dtype=np.float64)
    chosen = [int(np.argmax(X @ X.mean(axis=0)))]
    nearest = X @ X[chosen[0]]
    while len(chosen) < n:
        chosen.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, X @ X[chosen[-1]])
    return np.array(chosen, dtype=np.intp)


def at_random(n_candidates: int, n: int, *, seed: int = 0) -> Index:
    """Return n prompts drawn without return."""
    _check(n_candidates, n)
    return np.asarray(np.random.default_rng(seed).permutation(n_candidates)[:n])


def _check(n_candidates: int, n: int) -> None:
    if not 1 <= n <= n_candidates:
        raise ConfigError(
            f"n is {n}: allowed is 1 to {n_candidates}, the number of candidate prompts"
        )
