"""How candidates are judged: the cheapest above a target, the best trade-off, a promise kept.

Does not know how estimates are made, sessions or health of hosts.
Sources: routing rules of `docs/routing.md` (own reading of V_0's two uses).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from tfgrpo.errors import ConfigError
from tfgrpo.routing.calibration import Gate
from tfgrpo.routing.estimator.value_model import Coverage

__all__ = ["Candidate", "Cheapest", "Guaranteed", "RouteDecision", "RouteRule", "TradeOff"]


DEFAULT_TARGET = 0.8
UNPROVEN: tuple[Coverage, ...] = ("far", "empty")
"""Coverage under which no gate keeps a prompt."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model's standing for one prompt."""

    model: str
    mean: float
    low: float
    high: float
    cost_usd: float | None
    """Expected dollars of one answer; None is unknown."""
    cost_high_usd: float | None
    effective_n: float
    coverage: Coverage
    weights: Mapping[str, float]
    logit_mean: float = 0.0
    logit_sd: float = 0.0
    """Posterior of the log odds: what Thompson draws come from."""
    state: Literal["healthy", "cooling", "probe"] = "healthy"
    qualifies: bool = False
    utility: float = math.nan
    note: str = ""
    """Why it qualifies or not."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row = {name: getattr(self, name) for name in self.__slots__}
        row["weights"] = dict(self.weights)
        row["utility"] = None if math.isnan(self.utility) else self.utility
        return row


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The chosen model, why, and everything it was compared with, best first."""

    model: str
    reason: str
    ranking: tuple[Candidate, ...]
    kind: Literal["rule", "fallback", "session", "explore"]
    is_dearer_fallback: bool = False
    share_read: float = 1.0
    """Share of the text that the estimates are made of; long texts are read at both ends."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "model": self.model,
            "kind": self.kind,
            "reason": self.reason,
            "is_dearer_fallback": self.is_dearer_fallback,
            "share_read": round(self.share_read, 4),
            "ranking": [c.to_dict() for c in self.ranking],
        }


class RouteRule(Protocol):
    """How candidates are judged.

    Contract: `judge` returns (qualifies, utility, note); higher utility is better; it never raises
    for an unknown cost, and never lets a model without evidence qualify for a promise.
    """

    def judge(
        self, candidate: Candidate, others: Mapping[str, Candidate] = MappingProxyType({})
    ) -> tuple[bool, float, str]:
        """Judge one candidate; `others` are all candidates by name, itself among them."""
        ...


def _cost(candidate: Candidate) -> float:
    return math.inf if candidate.cost_usd is None else candidate.cost_usd


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest model whose success probability clears `target`."""

    target: float = DEFAULT_TARGET
    bound: Literal["low", "mean"] = "low"

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError(f"target {self.target!r}: allowed is a probability between 0 and 1")

    def judge(
        self, candidate: Candidate, others: Mapping[str, Candidate] = MappingProxyType({})
    ) -> tuple[bool, float, str]:
        """Clear the target with evidence; the utility is minus the cost."""
        value = candidate.low if self.bound == "low" else candidate.mean
        name = "lower bound" if self.bound == "low" else "mean"
        if self.bound == "low" and candidate.coverage != "covered":
            return False, -_cost(candidate), f"insufficient evidence: {candidate.coverage}"
        sign = "≥" if value >= self.target else "<"
        return value >= self.target, -_cost(candidate), f"{name} {value:.2f} {sign} {self.target:g}"


@dataclass(frozen=True, slots=True)
class TradeOff:
    """The largest p − `per_usd`·expected cost: a dollar is worth `per_usd` of success."""

    per_usd: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_usd) and self.per_usd >= 0):
            raise ConfigError(f"per_usd {self.per_usd!r}: allowed is a finite number from 0 up")

    def judge(
        self, candidate: Candidate, others: Mapping[str, Candidate] = MappingProxyType({})
    ) -> tuple[bool, float, str]:
        """Always qualifies, but for an unknown cost when costs matter."""
        if not self.per_usd:
            return True, candidate.mean, f"p {candidate.mean:.2f}"
        if candidate.cost_usd is None:
            return False, -math.inf, "cost unknown"
        utility = candidate.mean - self.per_usd * candidate.cost_usd
        return True, utility, f"p {candidate.mean:.2f} − {self.per_usd:g}·${candidate.cost_usd:.3g}"


@dataclass(frozen=True, slots=True)
class Guaranteed:
    """The cheapest model whose calibrated gate keeps the prompt."""

    gates: Mapping[str, Gate]

    def judge(
        self, candidate: Candidate, others: Mapping[str, Candidate] = MappingProxyType({})
    ) -> tuple[bool, float, str]:
        """Pass the model's gate; the score is its mean less that of the model it is set against."""
        gate = self.gates.get(candidate.model)
        if gate is None:
            return False, -_cost(candidate), "no gate calibrated"
        if not gate.is_open:
            return False, -_cost(candidate), gate.promise
        if candidate.coverage in UNPROVEN:
            return False, -_cost(candidate), f"insufficient evidence: {candidate.coverage}"
        score = candidate.mean
        if gate.against:
            rival = others.get(gate.against)
            score = math.nan if rival is None else score - rival.mean
        sign = "≥" if gate.keeps(score) else "<"
        note = f"score {score:.2f} {sign} {gate.threshold:.2f} ({gate.promise})"
        return gate.keeps(score), -_cost(candidate), note
