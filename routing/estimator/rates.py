"""Success rates alone, asked like a bank of fitted states: what answers while states are made.

The same for every prompt, and flagged `thin`: no rule that wants evidence is met by it.
Does not know prompts. Source: Beta-binomial with one success and one failure added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.laplace import Gaussian
from tfgrpo.routing.estimator.value_model import Coverage, Estimates

__all__ = ["RateBank"]


class RateBank:
    """Beta posteriors of some models' success rates.

    Args:
        counts: successes and trials of each model, in order.
    """

    def __init__(self, counts: Sequence[tuple[float, float]]) -> None:
        k, n = np.array(counts, np.float64).reshape(-1, 2).T
        self._a, self._b = k + 1.0, n - k + 1.0
        self._n = n

    def ask(self, vector: NDArray[Any] | None = None, *, level: float = 0.9) -> Estimates:
        """Return every model's estimate, whatever the prompt."""
        from scipy.special import betaincinv, digamma, polygamma

        a, b = self._a, self._b
        coverage: list[Coverage] = ["thin" if n else "empty" for n in self._n]
        return Estimates(
            mean=a / (a + b),
            low=betaincinv(a, b, (1 - level) / 2),
            high=betaincinv(a, b, (1 + level) / 2),
            level=level,
            effective_n=a + b - 1,
            coverage=tuple(coverage),
            weights={},
            logits=Gaussian(digamma(a) - digamma(b), polygamma(1, a) + polygamma(1, b)),
        )

    def weights(self, i: int) -> dict[str, float]:
        """Return the mixture over layers: the level alone."""
        return {"level": 1.0}
