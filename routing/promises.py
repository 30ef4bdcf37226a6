"""What a fitted router may promise of prompts kept on cheaper models, by held-out outcomes.

Several cheap models share one threshold of p(model) − p(strong); the cheapest that is kept answers,
the strong model the rest, and the promise is tested on just that. A promise a model alone would not
add up: what two gates keep overlaps, and each could lose δ.
Does not know how thresholds are tested (`calibration`). Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.calibration import (
    Gate,
    Risk,
    check_values,
    least_level,
    losses_of,
    most_lenient,
    risk_of,
)
from tfgrpo.routing.estimator.prompt_features import embed_prompts
from tfgrpo.routing.records import OutcomeTable, SuccessCount
from tfgrpo.routing.rules import UNPROVEN, Candidate
from tfgrpo.runtime.canonical import digest

if TYPE_CHECKING:
    from tfgrpo.routing.router import Router

__all__ = ["Calibrated", "HeldOut", "calibrate_pool", "calibrate_router"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts of several cheap models under a strong one; arrays (prompts, models)."""

    names: tuple[str, ...]
    """The cheap models."""
    scores: Array
    """p(model) − p(strong); −inf is never kept."""
    weak: Array
    """Success of each cheap model, from 0 to 1."""
    strong: Array
    """Success of the strong model, shape (prompts,)."""
    costs: Array
    """Predicted dollars: the cheapest model that is kept answers; infinity is unknown."""

    def __post_init__(self) -> None:
        n = len(self.strong)
        shapes = {v.shape for v in (self.scores, self.weak, self.costs)}
        if shapes != {(n, len(self.names))} or not self.names:
            raise ConfigError(
                f"held-out arrays of shapes {sorted(shapes)} for {n} prompts and the models "
                f"{list(self.names)}: each must be (prompts, models)"
            )


@dataclass(frozen=True, slots=True)
class _Together:
    """Several cheap models at one threshold: the cheapest that is kept answers."""

    held: HeldOut
    losses: Array

    @property
    def ranked(self) -> Array:
        return np.sort(self.held.scores.max(axis=1))[::-1]

    def chosen(self, threshold: float) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Which prompts are kept, and by whom: ties in cost go to the better score."""
        scores = self.held.scores
        kept = scores >= threshold
        costs = np.where(kept, np.minimum(self.held.costs, 1e18), np.inf)
        cheapest = kept & (costs <= costs.min(axis=1, keepdims=True))
        who = np.where(cheapest, scores, -np.inf).argmax(axis=1)
        return np.asarray(kept.any(axis=1)), np.asarray(who)

    def at(self, threshold: float) -> tuple[NDArray[np.bool_], Array]:
        keep, who = self.chosen(threshold)
        return keep, self.losses[np.arange(len(who)), who]


def calibrate_pool(
    held: HeldOut,
    *,
    against: str = "",
    risk: Risk = "net",
    delta: float = 0.02,
    confidence: float = 0.90,
) -> dict[str, Gate]:
    """Return a gate a cheap model, all at one threshold; the promise is that of all together.

    What is tested is what a router then does: the cheapest model whose gate keeps a prompt answers
    it, the strong model the rest. A promise a model alone would not add up: what two gates keep
    overlaps, and each could lose δ.

    Raises:
        ConfigError: NaN, or values outside their range.
    """
    strong = np.asarray(held.strong, dtype=np.float64)
    for j in range(len(held.names)):
        finite = np.where(np.isneginf(held.scores[:, j]), 0.0, held.scores[:, j])
        check_values(finite, held.weak[:, j], strong, risk, delta, confidence)
    policy = _Together(held, losses_of(held.weak, strong[:, None], risk))
    found = most_lenient(policy, risk, delta, confidence)
    threshold, _, observed = found or (math.inf, 0, 0.0)
    keep, who = policy.chosen(threshold)
    least = delta if found is not None else least_level(policy, risk, confidence)
    attainable = _attainable_together(policy, risk, delta)
    data = [held.scores.tolist(), policy.losses.tolist(), held.costs.tolist()]
    version = digest([[risk, delta, confidence], list(held.names), repr(data)], 12)
    return {
        name: Gate(
            risk, delta, confidence, threshold, len(strong), int((keep & (who == j)).sum()),
            observed, attainable, least, version, name, against,
        )
        for j, name in enumerate(held.names)
    }  # fmt: skip


def _attainable_together(policy: _Together, risk: Risk, delta: float) -> float:
    """As `_attainable`, over some two hundred thresholds."""
    ranked = policy.ranked
    best, n = 0.0, len(ranked)
    for i in np.unique(np.linspace(0, n - 1, 200).astype(int)) if n else ():
        keep, losses = policy.at(float(ranked[i]))
        if math.isfinite(ranked[i]) and risk_of(losses, keep, risk) <= delta:
            best = max(best, float(keep.mean()))
    return best


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Gates of a router, and what they were measured on."""

    gates: dict[str, Gate]
    against: str
    prompts: int
    """Held-out prompts that counted."""
    seen: int
    """Prompts left out because the router was fitted on them."""
    partial: int
    """Prompts left out because not every model had answered."""

    @property
    def attainable(self) -> float:
        """Share of the prompts that the best threshold in hindsight keeps on cheaper models."""
        return next(iter(self.gates.values())).attainable

    @property
    def coverage(self) -> float:
        """Share of the held-out prompts that cheaper models keep under the promise."""
        return sum(g.coverage for g in self.gates.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "against": self.against,
            "prompts": self.prompts,
            "left_out_seen": self.seen,
            "left_out_partial": self.partial,
            "attainable": round(self.attainable, 4),
            "coverage": round(self.coverage, 4),
            "gates": {name: g.to_dict() for name, g in self.gates.items()},
        }


def calibrate_router(
    router: Router,
    outcomes: Sequence[SuccessCount],
    *,
    against: str = "",
    weak: Sequence[str] = (),
    risk: Risk = "net",
    delta: float = 0.02,
    confidence: float = 0.90,
) -> Calibrated:
    """Measure gates for the models cheaper than the strong one, and give them to the router.

    Args:
        router: fitted; prompts that it was fitted on do not count as held out and are left out.
        outcomes: of the same prompts by all these models.
        against: the strong model; default the one with the best success rate.
        weak: the cheap models; default all whose predicted costs are below the strong one's.
        risk: what is promised.
        delta: bound of the risk.
        confidence: 1 − α.

    Raises:
        ConfigError: an unknown model, none that is cheaper, or no prompt that counts.
    """
    against = against or router.best_model()
    for name in (against, *weak):
        router.info(name)
    known = {o.prompt for o in router.outcomes()}
    fresh = [o for o in outcomes if o.prompt not in known]
    table = OutcomeTable.from_outcomes(fresh)
    if against not in table.model_names:
        raise ConfigError(
            f"no prompt that the router has not been fitted on has an outcome of {against!r}: "
            "calibrate on outcomes that were kept apart from the fit"
        )
    candidates = _candidates_of(router, table, {o.key: o.tags for o in fresh})
    names = list(weak) or _cheaper(candidates, against, table.model_names)
    whole = np.all([table.trials[:, table.column(n)] > 0 for n in (against, *names)], axis=0)
    kept = [c for c, is_whole in zip(candidates, whole, strict=True) if is_whole]
    if not kept:
        raise ConfigError(f"no held-out prompt has outcomes of {against} and {', '.join(names)}")
    rates = table.rates[whole]
    gates = calibrate_pool(
        HeldOut(
            tuple(names),
            np.array([[_score(c, n, against) for n in names] for c in kept]),
            rates[:, [table.column(n) for n in names]],
            rates[:, table.column(against)],
            np.array([[_usd(c[n]) for n in names] for c in kept]),
        ),
        against=against, risk=risk, delta=delta, confidence=confidence,
    )  # fmt: skip
    router.promise(gates, against)
    n_seen = len({o.key for o in outcomes if o.prompt in known})
    return Calibrated(gates, against, len(kept), n_seen, len(candidates) - len(kept))


def _candidates_of(
    router: Router, table: OutcomeTable, tags: Mapping[str, Sequence[str]]
) -> list[dict[str, Candidate]]:
    vectors = embed_prompts(router.embedder, table.prompts, [tags[k] for k in table.keys])
    asked = zip(table.prompts, vectors, strict=True)
    return [{c.model: c for c in router.candidates(p, vector=v)} for p, v in asked]


def _cheaper(
    candidates: Sequence[Mapping[str, Candidate]], against: str, known: Sequence[str]
) -> list[str]:
    """The models with outcomes whose predicted costs are below those of the strong one."""
    means = {n: np.mean([_usd(c[n]) for c in candidates]) for n in candidates[0] if n in known}
    names = [n for n, usd in means.items() if n != against and usd < means[against]]
    if not names:
        raise ConfigError(
            f"no model with held-out outcomes is known to be cheaper than {against}: give prices "
            "when fitting, or name the cheap models"
        )
    return names


def _usd(candidate: Candidate) -> float:
    return math.inf if candidate.cost_usd is None else candidate.cost_usd


def _score(candidates: Mapping[str, Candidate], model: str, against: str) -> float:
    """As `Guaranteed` judges: without evidence nothing is kept."""
    if candidates[model].coverage in UNPROVEN:
        return -math.inf
    return candidates[model].mean - candidates[against].mean
