"""A finite-sample promise for the prompts kept on a cheaper model, and when to give none.

A gate keeps a prompt on the cheap model when its score reaches a threshold. What is promised:

    net      mean quality over all prompts is at most δ below always asking the strong model
    regret   at most a share δ of all prompts is lost that the strong model would have solved
    failure  at most a share δ of the kept prompts fails, whether or not another would solve it

Thresholds are tested from strict to lenient on held-out prompts until one fails (fixed-sequence
testing), so the last one passed holds with the stated confidence. Losses of 0 and 1 are tested by
the exact binomial bound, net losses by betting. Before anything is promised the gate says what
could be had: the coverage of the best threshold in hindsight, and the least δ at which it opens.
The promise is for exchangeable prompts: under a shift it is void, which the benchmark shows.
Does not know how scores are made. Sources: Learn then Test (arXiv 2110.01052); Clopper & Pearson
1934; betting bounds, Waudby-Smith & Ramdas (arXiv 2010.09686); net loss against the strong model as
the promise, and the coverage told beforehand, are own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import digest

__all__ = [
    "Gate",
    "Risk",
    "betting_rejects",
    "calibrate",
    "failure_bound",
]

Array = NDArray[np.float64]
Risk = Literal["net", "regret", "failure"]

_STEPS = 40
_STARTS = (0.05, 0.2, 0.5)
"""Shares kept at which the tests of `failure` start; each gets a third of the error: the strictest
sets are too small to prove anything. Net and regret count over all prompts and start at none."""
_LEVELS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_WORTH = 0.05
"""Coverage from which an open gate counts as open when the least δ is looked for."""


def failure_bound(failures: int, n: int, confidence: float) -> float:
    """Return the upper Clopper–Pearson bound of a failure rate; 1 without data.

    >>> round(failure_bound(0, 22, 0.9), 4)
    0.0994
    """
    from scipy.special import betaincinv

    if n <= 0 or failures >= n:
        return 1.0
    return float(betaincinv(failures + 1, n - failures, confidence))


def betting_rejects(losses: Array, delta: float, alpha: float, *, seed: int = 0) -> bool:
    """Return whether "the mean loss is above δ" is refuted at level α; losses lie in [−1, 1].

    One bets against the hypothesis on each loss in turn, with a stake fixed by the losses before
    it; under the hypothesis a capital of 1/α is reached with probability α at most (Ville). Stakes
    are sized for the variance seen so far and the number of losses. The order is drawn by `seed`.

    >>> betting_rejects(np.zeros(500), 0.05, 0.1)
    True
    """
    n = len(losses)
    if not n:
        return False
    y = (1.0 - losses[np.random.default_rng(seed).permutation(n)]) / 2
    m = (1.0 - delta) / 2
    seen = np.arange(1, n + 1)
    mean = (0.5 + np.cumsum(y)) / (seen + 1)
    spread = (0.05 + np.cumsum((y - mean) ** 2)) / (seen + 1)
    before = np.concatenate([[0.05], spread[:-1]])
    stake = np.minimum(np.sqrt(2 * math.log(1 / alpha) / (n * before)), 0.75 / m)
    capital = np.cumsum(np.log1p(stake * (y - m)))
    return bool(capital.max() >= math.log(1 / alpha))


@dataclass(frozen=True, slots=True)
class Gate:
    """What may be kept on a cheap model, what is promised, and what could be had."""

    risk: Risk
    delta: float
    """The promised bound of the risk."""
    confidence: float
    """Probability, over calibration draws, that the risk is at most `delta`."""
    threshold: float
    """Least score that is kept; infinity where the evidence allows nothing."""
    n: int
    """Calibration prompts."""
    kept: int
    """Those that the model keeps: at or above the threshold and, among several, cheapest there."""
    observed: float
    """The risk among the calibration prompts at the threshold."""
    attainable: float
    """Coverage of the best threshold in hindsight on the calibration prompts: no gate on this score
    can be expected to keep more."""
    least_delta: float | None
    """For a closed gate the least level tried at which one opens, None where none does up to 0.5;
    for an open one its own."""
    version: str
    """Digest of the calibration prompts and the rule."""
    model: str = ""
    against: str = ""
    """The strong model; where it is named the score is p(model) − p(against), else p(model)."""

    @property
    def is_open(self) -> bool:
        """True when the evidence allows keeping anything."""
        return math.isfinite(self.threshold)

    @property
    def coverage(self) -> float:
        """Share of the calibration prompts that are kept."""
        return self.kept / self.n if self.n else 0.0

    @property
    def promise(self) -> str:
        """The promise in words, or why there is none and what could be promised."""
        what = {
            "net": f"at most {self.delta:.1%} below always asking {self.against or 'the strong'}",
            "regret": f"at most {self.delta:.1%} of all prompts lost by routing",
            "failure": f"failures ≤ {self.delta:.1%} among the kept",
        }[self.risk]
        if self.is_open:
            return f"{what}, confidence {self.confidence:g}"
        least = "nothing up to 50% can be promised"
        if self.least_delta is not None:
            least = f"the least level at which the gate opens is {self.least_delta:.1%}"
        return (
            f"'{what}' cannot be promised: in hindsight {self.attainable:.1%} of the prompts could "
            f"be kept; {least}"
        )

    def keeps(self, score: float) -> bool:
        """Return whether a prompt of this score stays on the model; NaN never does."""
        return bool(score >= self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; a closed gate has no threshold."""
        return {
            name: None if name == "threshold" and not self.is_open else getattr(self, name)
            for name in self.__slots__
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Gate:
        """Restore a gate from its JSON form."""
        values = dict(row)
        if values.get("threshold") is None:
            values["threshold"] = math.inf
        return cls(**values)


def calibrate(
    scores: Array,
    weak: Array,
    strong: Array | None = None,
    *,
    risk: Risk = "net",
    delta: float = 0.02,
    confidence: float = 0.90,
    min_coverage: float = 0.0,
) -> Gate:
    """Return the most lenient gate whose risk is at most `delta` with `confidence`.

    Args:
        scores: one a held-out prompt; p(weak) − p(strong) tells most.
        weak: success of the cheap model, from 0 to 1 a prompt.
        strong: success of the strong model on the same prompts; `failure` needs none.
        risk: what is promised.
        delta: bound of the risk, in (0, 1).
        confidence: 1 − α.
        min_coverage: a gate that keeps less stays closed.

    Raises:
        ConfigError: unlike lengths, NaN, values outside [0, 1], or no `strong` where it is needed.
    """
    scores, weak = np.asarray(scores, dtype=np.float64), np.asarray(weak, dtype=np.float64)
    strong = np.zeros_like(weak) if strong is None and risk == "failure" else strong
    if strong is None:
        raise ConfigError(f"risk {risk!r} compares with the strong model: give its successes too")
    strong = np.asarray(strong, dtype=np.float64)
    check_values(scores, weak, strong, risk, delta, confidence)
    policy = _Alone(scores, losses_of(weak, strong, risk))
    found = most_lenient(policy, risk, delta, confidence)
    if found is not None and found[1] < min_coverage * len(scores):
        found = None
    threshold, kept, observed = found or (math.inf, 0, 0.0)
    rule = [risk, delta, confidence, min_coverage]
    data = [[float(v) for v in values] for values in (scores, policy.losses)]
    least = delta if found is not None else least_level(policy, risk, confidence)
    return Gate(
        risk, delta, confidence, threshold, len(scores), kept, observed,
        _attainable(scores, policy.losses, risk, delta), least, digest([rule, data], 12),
    )  # fmt: skip


def check_values(
    scores: Array, weak: Array, strong: Array, risk: str, delta: float, confidence: float
) -> None:
    if not scores.shape == weak.shape == strong.shape or scores.ndim != 1:
        raise ConfigError(
            f"scores {scores.shape}, weak {weak.shape} and strong {strong.shape} must be equal "
            "lists, one value a prompt"
        )
    if not all(np.isfinite(v).all() for v in (scores, weak, strong)):
        raise ConfigError("scores or successes hold NaN or infinity: leave those prompts out")
    if any(len(v) and (v.min() < 0 or v.max() > 1) for v in (weak, strong)):
        raise ConfigError("successes lie outside 0 to 1: give shares of successes")
    if risk not in ("net", "regret", "failure"):
        raise ConfigError(f"risk {risk!r} is unknown: use net, regret or failure")
    for name, value in (("delta", delta), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} is {value!r}; allowed is a number between 0 and 1")


def losses_of(weak: Array, strong: Array, risk: Risk) -> Array:
    """Loss of keeping each prompt; of `regret` and `failure` 0 or 1, above one half is 1."""
    if risk == "net":
        return strong - weak
    if risk == "regret":
        return ((strong - weak) > 0.5).astype(np.float64)
    return (1 - weak > 0.5).astype(np.float64)


class Keeping(Protocol):
    """What a threshold does: which prompts it keeps, and what each would lose if kept."""

    @property
    def ranked(self) -> Array:
        """The thresholds at which something changes, falling; one a prompt."""
        ...

    def at(self, threshold: float) -> tuple[NDArray[np.bool_], Array]:
        """Return which prompts are kept, and the loss of each."""
        ...


@dataclass(frozen=True, slots=True)
class _Alone:
    """One cheap model under a strong one."""

    scores: Array
    losses: Array

    @property
    def ranked(self) -> Array:
        return np.sort(self.scores)[::-1]

    def at(self, threshold: float) -> tuple[NDArray[np.bool_], Array]:
        return self.scores >= threshold, self.losses


def most_lenient(
    policy: Keeping, risk: Risk, delta: float, confidence: float
) -> tuple[float, int, float] | None:
    """Return threshold, number kept and observed risk of the last test passed."""
    ranked = policy.ranked
    n, best = len(ranked), None
    starts = _STARTS if risk == "failure" else (0.0,)
    alpha = (1 - confidence) / len(starts)
    for start in starts:
        first = max(math.ceil(start * n), 1)
        if risk == "failure":
            first = max(first, math.ceil(math.log(alpha) / math.log(1 - delta)) + 1)
        if first > n:
            continue
        sizes = np.unique(np.linspace(first, n, _STEPS).astype(int))
        for threshold in dict.fromkeys(float(ranked[s - 1]) for s in sizes):
            if not math.isfinite(threshold):
                break
            keep, losses = policy.at(threshold)
            if not _passes(losses, keep, risk, delta, alpha):
                break
            if best is None or keep.sum() > best[1]:
                best = threshold, int(keep.sum()), risk_of(losses, keep, risk)
    return best


def risk_of(losses: Array, keep: NDArray[np.bool_], risk: Risk) -> float:
    kept = float(losses[keep].sum())
    return kept / max(int(keep.sum()), 1) if risk == "failure" else kept / max(len(losses), 1)


def _passes(losses: Array, keep: NDArray[np.bool_], risk: Risk, delta: float, alpha: float) -> bool:
    if risk == "net":
        return betting_rejects(np.where(keep, losses, 0.0), delta, alpha)
    trials = int(keep.sum()) if risk == "failure" else len(losses)
    return failure_bound(int(losses[keep].sum()), trials, 1 - alpha) <= delta


def _attainable(scores: Array, losses: Array, risk: Risk, delta: float) -> float:
    """Largest share kept by any threshold whose observed risk is at most δ."""
    order = np.argsort(-scores, kind="stable")
    total, n = np.cumsum(losses[order]), np.arange(1, len(scores) + 1)
    risks = total / (n if risk == "failure" else max(len(scores), 1))
    # A threshold cannot part equal scores.
    ends = np.append(np.diff(scores[order]) < 0, True) if len(scores) else np.zeros(0, bool)
    fine = np.flatnonzero((risks <= delta) & ends)
    return float((fine[-1] + 1) / len(scores)) if len(fine) else 0.0


def least_level(policy: Keeping, risk: Risk, confidence: float) -> float | None:
    """Least level of `_LEVELS` at which a gate keeps something worth having."""
    low, high = 0, len(_LEVELS)
    while low < high:
        middle = (low + high) // 2
        found = most_lenient(policy, risk, _LEVELS[middle], confidence)
        if found is not None and found[1] >= _WORTH * len(policy.ranked):
            high = middle
        else:
            low = middle + 1
    return _LEVELS[low] if low < len(_LEVELS) else None
