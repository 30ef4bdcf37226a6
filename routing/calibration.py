"""A finite-sample promise for the prompts kept on a cheaper model, and when to give none.

A gate keeps a prompt on a model when its score reaches a threshold. Thresholds are tested from
strict to lenient on held-out (score, failed) pairs, each by the exact binomial (Clopper–Pearson)
bound, until one fails: fixed-sequence testing, so the last one passed holds with the stated
confidence. With several cheaper models the error is shared out among them (Bonferroni). The promise
is for exchangeable prompts: under a shift it is void, which the benchmark shows.
Does not know how scores are made. Sources: Clopper & Pearson 1934; fixed-sequence risk control as
in Learn then Test (arXiv 2110.01052); the coverage and versioning rules are own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import digest

__all__ = ["Gate", "calibrate", "calibrate_pool", "failure_bound"]

Array = NDArray[np.float64]

_STEPS = 40
_STARTS = (0.05, 0.2, 0.5)
"""Shares kept at which the tests from strict to lenient start; each gets a third of the error. The
strictest sets are too small to prove anything."""


def failure_bound(failures: int, n: int, confidence: float) -> float:
    """Return the upper Clopper–Pearson bound of a failure rate; 1 without data.

    >>> round(failure_bound(0, 22, 0.9), 4)
    0.0994
    """
    from scipy.special import betaincinv

    if n <= 0 or failures >= n:
        return 1.0
    return float(betaincinv(failures + 1, n - failures, confidence))


@dataclass(frozen=True, slots=True)
class Gate:
    """What may be kept on a model, and what is promised of it."""

    model: str
    threshold: float
    """Least score that is kept; infinity where the evidence allows nothing."""
    level: float
    """Allowed failure rate among kept prompts."""
    confidence: float
    """Probability, over calibration draws, that the rate is at most `level`."""
    n: int
    """Calibration pairs."""
    kept: int
    """Pairs at or above the threshold."""
    failures: int
    """Failures among them."""
    upper: float
    """Upper bound of the failure rate among kept prompts."""
    version: str
    """Digest of the calibration pairs and the rule."""

    @property
    def is_open(self) -> bool:
        """True when the evidence allows keeping anything."""
        return math.isfinite(self.threshold)

    @property
    def coverage(self) -> float:
        """Share of the calibration prompts that are kept."""
        return self.kept / self.n if self.n else 0.0

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
    failed: Array,
    *,
    model: str = "",
    level: float = 0.10,
    confidence: float = 0.90,
    min_coverage: float = 0.0,
) -> Gate:
    """Return the most lenient gate whose failure rate is at most `level` with `confidence`.

    `failed` holds 0 or 1 a row, or a failure probability that is rounded up to a failure when above
    one half. The grid of thresholds depends on the scores alone, never on the failures.

    Raises:
        ConfigError: unlike lengths, NaN, or a level or confidence outside (0, 1).
    """
    scores, failed = np.asarray(scores, dtype=np.float64), np.asarray(failed, dtype=np.float64)
    if scores.shape != failed.shape or scores.ndim != 1:
        raise ConfigError(
            f"scores {scores.shape} and failed {failed.shape} must be two equal lists"
        )
    if not (np.isfinite(scores).all() and np.isfinite(failed).all()):
        raise ConfigError("scores or failures hold NaN or infinity: leave those rows out")
    for name, value in (("level", level), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} is {value!r}; allowed is a number between 0 and 1")
    bad = failed > 0.5
    each = 1 - (1 - confidence) / len(_STARTS)
    least = math.ceil(math.log(1 - each) / math.log(1 - level)) + 1
    best: tuple[float, int, int, float] | None = None
    ranked = np.sort(scores)[::-1]
    for start in _STARTS:
        first = max(least, math.ceil(start * len(scores)))
        if first > len(scores):
            continue
        sizes = np.unique(np.linspace(first, len(scores), _STEPS).astype(int))
        for threshold in dict.fromkeys(float(ranked[s - 1]) for s in sizes):
            keep = scores >= threshold
            n, failures = int(keep.sum()), int(bad[keep].sum())
            upper = failure_bound(failures, n, each)
            if upper > level:
                break
            if best is None or n > best[1]:
                best = threshold, n, failures, upper
    if best is not None and best[1] < min_coverage * len(scores):
        best = None
    threshold, kept, failures, upper = best or (math.inf, 0, 0, 1.0)
    rule = [model, level, confidence, min_coverage]
    version = digest([rule, [float(s) for s in scores], [float(f) for f in bad]], 12)
    return Gate(model, threshold, level, confidence, len(scores), kept, failures, upper, version)


def calibrate_pool(
    scores: Mapping[str, Array],
    failed: Mapping[str, Array],
    *,
    level: float = 0.10,
    confidence: float = 0.90,
    min_coverage: float = 0.0,
) -> dict[str, Gate]:
    """Return a gate a model; all hold together with `confidence` (Bonferroni over the models)."""
    each = 1 - (1 - confidence) / max(len(scores), 1)
    return {
        name: calibrate(
            scores[name], failed[name], model=name, level=level, confidence=each,
            min_coverage=min_coverage,
        )
        for name in scores
    }  # fmt: skip
