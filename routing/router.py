"""Choose a model for a prompt, and say why.

Rules: `Cheapest` takes the cheapest model whose lower bound clears a target; `TradeOff` takes the
largest p − λ·cost; `Guaranteed` takes the cheapest model whose gate keeps the prompt. Where no
model qualifies, the named fallback answers, and the reason says whether it is dearer. A session
stays on its model unless leaving it gains more than reading the conversation anew costs. Thompson
draws explore under a cap on extra dollars. New outcomes are appended; no step of training.
Does not know how to call a model (`routed_lm`) or files (`saved`).
Sources: routing rules of `docs/routing.md` (own reading of V_0's two uses); Thompson 1933.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from tfgrpo.errors import BudgetError, ConfigError
from tfgrpo.routing.calibration import Gate
from tfgrpo.routing.cooldown import Cooldowns
from tfgrpo.routing.costs import CostModel
from tfgrpo.routing.estimator.embedders import Floats
from tfgrpo.routing.estimator.value_model import Coverage, ModelState, ValueModel
from tfgrpo.routing.records import ModelInfo, SuccessCount
from tfgrpo.store.budget import Budget, Ledger

__all__ = [
    "Candidate",
    "Cheapest",
    "Guaranteed",
    "RouteDecision",
    "RouteRule",
    "Router",
    "TradeOff",
]


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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "model": self.model,
            "kind": self.kind,
            "reason": self.reason,
            "is_dearer_fallback": self.is_dearer_fallback,
            "ranking": [c.to_dict() for c in self.ranking],
        }


class RouteRule(Protocol):
    """How candidates are judged.

    Contract: `judge` returns (qualifies, utility, note); higher utility is better; it never raises
    for an unknown cost, and never lets a model without evidence qualify for a promise.
    """

    def judge(self, candidate: Candidate) -> tuple[bool, float, str]:
        """Judge one candidate."""
        ...


def _cost(candidate: Candidate) -> float:
    return math.inf if candidate.cost_usd is None else candidate.cost_usd


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest model whose success probability clears `target`."""

    target: float = 0.8
    bound: Literal["low", "mean"] = "low"

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError(f"target {self.target!r}: allowed is a probability between 0 and 1")

    def judge(self, candidate: Candidate) -> tuple[bool, float, str]:
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

    def judge(self, candidate: Candidate) -> tuple[bool, float, str]:
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

    def judge(self, candidate: Candidate) -> tuple[bool, float, str]:
        """Pass the model's gate with its mean as the score."""
        gate = self.gates.get(candidate.model)
        if gate is None:
            return False, -_cost(candidate), "no gate calibrated"
        if not gate.is_open:
            return False, -_cost(candidate), "insufficient evidence: the gate is closed"
        if candidate.coverage in ("far", "empty"):
            return False, -_cost(candidate), f"insufficient evidence: {candidate.coverage}"
        sign = "≥" if gate.keeps(candidate.mean) else "<"
        promise = f"failures ≤ {gate.level:g} with confidence {gate.confidence:g}"
        note = f"score {candidate.mean:.2f} {sign} {gate.threshold:.2f} ({promise})"
        return gate.keeps(candidate.mean), -_cost(candidate), note


@dataclass
class _Known:
    info: ModelInfo
    outcomes: list[SuccessCount]
    state: ModelState | None = None
    costs: CostModel | None = None


class Router:
    """Models with their outcomes, a rule, a named fallback."""

    def __init__(
        self,
        value: ValueModel,
        models: Sequence[ModelInfo],
        outcomes: Iterable[SuccessCount] = (),
        *,
        rule: RouteRule = Cheapest(),
        fallback: str,
        interval: float = 0.9,
        cooldowns: Cooldowns | None = None,
        switch_margin: float = 0.02,
        explore_usd: float | None = None,
        seed: int = 0,
        max_sessions: int = 10_000,
    ) -> None:
        """Set up the router.

        Args:
            value: makes the estimates.
            models: who can be chosen; prices make costs.
            outcomes: what is known of them so far.
            rule: how candidates are judged.
            fallback: model that answers when nothing qualifies.
            interval: probability mass of the intervals.
            cooldowns: which models may be tried; None means all, always.
            switch_margin: least gain in utility that makes a session change its model.
            explore_usd: cap on the extra expected dollars of Thompson exploration; None is none.
            seed: of the Thompson draws.
            max_sessions: sessions remembered; the oldest go first.
        """
        names = [m.name for m in models]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"models {names}: give at least one, each under a name of its own")
        if fallback not in names:
            raise ConfigError(f"fallback {fallback!r} is not among the models {names}")
        self.value, self.rule, self.fallback = value, rule, fallback
        self._known = {m.name: _Known(m, []) for m in models}
        self._interval, self._cooldowns = interval, cooldowns
        self._margin = switch_margin
        self._explore = None if explore_usd is None else Ledger(Budget(cost_usd=explore_usd))
        self._rng = np.random.default_rng(seed)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = max_sessions
        self.record(*outcomes)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Who can be chosen."""
        return tuple(self._known)

    @property
    def cooldowns(self) -> Cooldowns | None:
        """The health of the models."""
        return self._cooldowns

    def info(self, model: str) -> ModelInfo:
        """Return prices and family of a model.

        Raises:
            ConfigError: the router has no such model.
        """
        return self._of(model).info

    def outcomes(self, model: str) -> tuple[SuccessCount, ...]:
        """Return what is known of a model."""
        return tuple(self._of(model).outcomes)

    def _of(self, model: str) -> _Known:
        if model not in self._known:
            raise ConfigError(
                f"model {model!r} is unknown to this router; it has {', '.join(self._known)}: add "
                f"it with "
                "its prices, then record outcomes"
            )
        return self._known[model]

    def add(self, info: ModelInfo) -> None:
        """Add a model, or change its prices."""
        known = self._known.setdefault(info.name, _Known(info, []))
        known.info, known.costs = info, None

    def record(self, *outcomes: SuccessCount) -> None:
        """Append outcomes; late, missing and repeated ones are fine.

        Raises:
            ConfigError: an outcome of a model that the router does not have; nothing is recorded.
        """
        for outcome in outcomes:
            self._of(outcome.model)
        for outcome in outcomes:
            known = self._known[outcome.model]
            known.outcomes.append(outcome)
            known.state = known.costs = None

    def state(self, model: str) -> ModelState:
        """Return a model's state, made anew after new outcomes."""
        known = self._of(model)
        if known.state is None:
            pool = self.value.pool
            value = self.value
            if model in pool.model_names:
                # A model never is its own reference.
                value = ValueModel(value.embedder, pool.without(names=[model]), layers=value.layers)
            known.state = value.state(known.outcomes, model=model)
        return known.state

    def _costs(self, known: _Known) -> CostModel:
        if known.costs is None:
            vectors = self.value.embedder.embed([o.prompt for o in known.outcomes])
            known.costs = CostModel.fit(known.info, known.outcomes, vectors)
        return known.costs

    def ask(
        self,
        prompt: str,
        *,
        vector: Floats | None = None,
        session: str | None = None,
        session_tokens: int = 0,
        among: Sequence[str] | None = None,
    ) -> RouteDecision:
        """Choose a model.

        Args:
            prompt: the text to be answered.
            vector: its vector where it is known already, shape (width,).
            session: conversation it belongs to.
            session_tokens: tokens of the conversation that another model would read anew.
            among: restrict the choice to these models.

        Raises:
            ConfigError: an empty prompt or an unknown model in `among`.
            NoneHealthyError: every model is cooling down and the cooldowns say raise.
        """
        if not prompt.strip():
            raise ConfigError("the prompt is empty: there is nothing to route")
        names = list(self._known if among is None else among)
        for name in names:
            self._of(name)
        candidates = self._candidates(prompt, vector, names)
        usable = [c for c in candidates if c.state != "cooling"] or candidates
        qualified = [c for c in usable if c.qualifies]
        ranking = tuple(
            sorted(
                candidates,
                key=lambda c: (c.state == "cooling", not c.qualifies, -c.utility, -c.mean),
            )
        )
        if not qualified:
            decision = self._fall_back(ranking, usable)
        else:
            best = max(qualified, key=lambda c: (c.utility, c.mean))
            decision = RouteDecision(best.model, f"{best.model}: {best.note}", ranking, "rule")
            decision = self._stay(decision, qualified, session, session_tokens)
            decision = self._try_other(decision, usable)
        if session is not None:
            self._sessions[session] = decision.model
            self._sessions.move_to_end(session)
            while len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return decision

    def _candidates(
        self, prompt: str, vector: Floats | None, names: Sequence[str]
    ) -> list[Candidate]:
        if vector is None:
            vector = self.value.embedder.embed([prompt])[0]
        row = np.asarray(vector, dtype=np.float32)[None, :]
        allowed = names
        if self._cooldowns is not None:
            allowed = self._cooldowns.available(list(names))
        candidates = []
        for name in names:
            e = self.state(name).predict_vectors(row, level=self._interval)
            costs = self._costs(self._known[name]).predict([prompt], row)
            usd, high = float(costs.expected_usd[0]), float(costs.high_usd[0])
            health = "healthy" if self._cooldowns is None else self._cooldowns.state(name)
            raw = Candidate(
                model=name,
                mean=float(e.mean[0]),
                low=float(e.low[0]),
                high=float(e.high[0]),
                cost_usd=None if math.isnan(usd) else usd,
                cost_high_usd=None if math.isnan(high) else high,
                effective_n=float(e.effective_n[0]),
                coverage=e.coverage[0],
                weights={str(k): v for k, v in e.weights.items()},
                logit_mean=float(e.logits.mean[0]),
                logit_sd=float(np.sqrt(e.logits.variance[0])),
                state=health if name in allowed else "cooling",
            )
            candidates.append(self._judged(raw))
        return candidates

    def _judged(self, raw: Candidate) -> Candidate:
        qualifies, utility, note = self.rule.judge(raw)
        return replace(raw, qualifies=qualifies, utility=utility, note=note)

    def _fall_back(
        self, ranking: Sequence[Candidate], usable: Sequence[Candidate]
    ) -> RouteDecision:
        by_name = {c.model: c for c in usable}
        chosen = by_name.get(self.fallback) or max(usable, key=lambda c: c.mean)
        known = [c.cost_usd for c in usable if c.cost_usd is not None]
        dearer = chosen.cost_usd is not None and bool(known) and chosen.cost_usd > min(known)
        which = "the fallback" if chosen.model == self.fallback else "in place of the fallback"
        notes = "; ".join(f"{c.model}: {c.note}" for c in usable if c.model != chosen.model)
        reason = f"no model qualifies ({notes or chosen.note}); {chosen.model} answers as {which}"
        if dearer:
            reason += ", which is not the cheapest"
        return RouteDecision(chosen.model, reason, tuple(ranking), "fallback", dearer)

    def _stay(
        self,
        decision: RouteDecision,
        qualified: Sequence[Candidate],
        session: str | None,
        tokens: int,
    ) -> RouteDecision:
        current = self._sessions.get(session) if session is not None else None
        if current is None or current == decision.model:
            return decision
        by_name = {c.model: c for c in qualified}
        if current not in by_name:
            return decision
        new, old = by_name[decision.model], by_name[current]
        reread_usd = tokens * (self.info(new.model).input_usd_per_mtok or 0.0) / 1e6
        price = reread_usd * (self.rule.per_usd if isinstance(self.rule, TradeOff) else 1.0)
        margin = self._margin if isinstance(self.rule, TradeOff) else 0.0
        gain = new.utility - old.utility
        if gain > price + margin:
            return decision
        reason = (
            f"the session stays with {current}: {new.model} gains {gain:.3g}, changing costs "
            f"{price + margin:.3g}"
        )
        return RouteDecision(current, reason, decision.ranking, "session")

    def _try_other(self, decision: RouteDecision, usable: Sequence[Candidate]) -> RouteDecision:
        """Draw each model's success probability and follow the rule on the draws, under the cap."""
        if self._explore is None or len(usable) < 2 or decision.kind == "session":
            return decision
        drawn = []
        for c in usable:
            f = c.logit_mean + c.logit_sd * float(self._rng.standard_normal())
            p = 1.0 / (1.0 + math.exp(-f))
            qualifies, utility, _ = self.rule.judge(replace(c, mean=p, low=p, coverage="covered"))
            drawn.append((qualifies, utility, c.model == decision.model, c))
        qualifies, _, _, pick = max(drawn, key=lambda d: d[:3])
        greedy = next(c for c in usable if c.model == decision.model)
        if not qualifies or pick is greedy or pick.cost_usd is None or greedy.cost_usd is None:
            return decision
        extra = max(pick.cost_usd - greedy.cost_usd, 0.0)
        try:
            self._explore.reserve(cost_usd=extra).settle(cost_usd=extra)
        except BudgetError:
            return decision
        reason = f"{pick.model} is explored in place of {greedy.model} (extra ${extra:.3g})"
        return RouteDecision(pick.model, reason, decision.ranking, "explore")

    @property
    def explored_usd(self) -> float:
        """Extra expected dollars spent on exploration so far."""
        return 0.0 if self._explore is None else float(self._explore.spent.get("cost_usd", 0.0))
