"""Answer cheap, look, and only then pay more: when to stop in a chain of models.

After an answer, its score (of a verifier, a judge or the model itself, from 0 to 1) updates the
success probability that was predicted from the prompt: a logistic regression on both log odds,
fitted on past answers. The chain stops when the updated probability clears the target, or when the
next model's expected gain is not worth its price.
Does not know how to call or score. Sources: FrugalGPT's stop rule (arXiv 2305.05176), AutoMix; the
joint update with a prior from the prompt, and the next model's chance given this failure, are own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.laplace import fit_weights, logit, sigmoid
from tfgrpo.routing.rules import Candidate

__all__ = ["Cascade", "StopRule", "shared_of"]


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StopRule:
    """Success probability of an answer from the prompt's prediction and the answer's score."""

    intercept: float = 0.0
    on_prediction: float = 1.0
    on_score: float = 1.0

    @classmethod
    def fit(
        cls, predicted: Sequence[float], scores: Sequence[float], succeeded: Sequence[float]
    ) -> StopRule:
        """Fit on past answers; few answers stay near adding the two log odds.

        Raises:
            ConfigError: lists of unlike length, or values outside [0, 1].
        """
        p, s, y = (np.asarray(v, dtype=np.float64) for v in (predicted, scores, succeeded))
        if not p.shape == s.shape == y.shape:
            raise ConfigError(f"unlike lists: {p.shape}, {s.shape}, {y.shape}")
        for name, values in (("predicted", p), ("scores", s), ("succeeded", y)):
            if not (np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()):
                raise ConfigError(f"{name} must lie in [0, 1], without NaN")
        X = np.column_stack([np.ones(len(p)), logit(p), _score_odds(s)])
        prior = np.diag([1.0, 0.5, 0.5])
        w = fit_weights(X, y, np.ones(len(p)), np.array([0.0, 1.0, 1.0]), prior).mean
        return cls(*(float(v) for v in w))

    def posterior(self, predicted: float, score: float) -> float:
        """Return the success probability after seeing the answer's score."""
        odds = float(_score_odds(np.array([score]))[0])
        f = self.intercept + self.on_prediction * float(logit(np.array([predicted]))[0])
        return float(sigmoid(np.array([f + self.on_score * odds]))[0])


def _score_odds(scores: Array) -> Array:
    return logit(np.clip(scores, 0.05, 0.95))


@dataclass(frozen=True, slots=True)
class Cascade:
    """The order of models and the rule to stop."""

    rule: StopRule = StopRule()
    target: float = 0.9
    """Probability from which an answer is taken."""
    per_usd: float = 0.0
    """What a dollar is worth in success; 0 looks at the target alone."""
    shared: float = 0.25
    """Correlation of two models' successes on one prompt, given their predictions: prompts that
    defeat one defeat others. `shared_of` measures it."""
    keeps: float = 1.0
    """Share of right answers that stay right when the next model answers instead."""

    def after_failure(self, following: float, failed: float) -> float:
        """Return the next model's success probability, given that this one failed.

        For two successes of correlation ρ: q − ρ·√(q(1 − q)·p/(1 − p)), cut to [0, 1].
        """
        spread = following * (1 - following) * failed / max(1 - failed, 1e-6)
        return min(max(following - self.shared * math.sqrt(max(spread, 0.0)), 0.0), 1.0)

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the models from cheap to dear that may be worth asking; unknown costs go last.

        A model that is both dearer and likelier to fail than one before it is left out.
        """
        chain: list[Candidate] = []
        for c in sorted(candidates, key=lambda c: (c.cost_usd is None, c.cost_usd or 0.0, -c.mean)):
            if not chain or c.mean > chain[-1].mean:
                chain.append(c)
        return chain

    def stops(self, at: Candidate, score: float, rest: Sequence[Candidate]) -> tuple[bool, str]:
        """Return whether to take the answer of `at`, and why."""
        p = self.rule.posterior(at.mean, score)
        if not rest:
            return True, f"{at.model} is the last of the chain"
        if p >= self.target:
            return True, f"p {p:.2f} ≥ {self.target:g} after the score {score:.2f}"
        following = rest[0]
        price = self.per_usd * (following.cost_usd or 0.0)
        # Going on helps where this answer is wrong, and then the next model is likelier to be too.
        rescued = (1 - p) * self.after_failure(following.mean, at.mean)
        gain = max(p * self.keeps + rescued - p, 0.0)
        if self.per_usd and gain <= price:
            return True, f"{following.model} would gain {gain:.2f} for {price:.2f}"
        return False, f"p {p:.2f} < {self.target:g}: on to {following.model}"


def shared_of(
    first: Sequence[float], second: Sequence[float], p: Sequence[float], q: Sequence[float]
) -> float:
    """Return the correlation of two models' successes beyond what their predictions say.

    `first` and `second` are outcomes, `p` and `q` the predictions before them, a prompt each.

    Raises:
        ConfigError: lists of unlike length, or none.
    """
    a, b, x, y = (np.asarray(v, dtype=np.float64) for v in (first, second, p, q))
    if not a.shape == b.shape == x.shape == y.shape or not len(a):
        raise ConfigError(f"unlike or empty lists: {a.shape}, {b.shape}, {x.shape}, {y.shape}")
    u, v = a - x, b - y
    scale = float(np.sqrt(np.mean(u**2) * np.mean(v**2)))
    return float(np.clip(np.mean(u * v) / max(scale, 1e-9), 0.0, 1.0))
