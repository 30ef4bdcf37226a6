"""What happens to a rule's choice: the fallback, a session that stays, an exploring draw.

Does not know how candidates are estimated or judged. Source: own; Thompson 1933.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tfgrpo.errors import BudgetError
from tfgrpo.routing.rules import Candidate, RouteDecision, RouteRule, TradeOff
from tfgrpo.store.budget import Budget, Ledger

__all__ = ["Explorer", "Session", "Sessions", "fall_back"]


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that a prompt belongs to."""

    name: str
    tokens: int = 0
    """Tokens of the conversation that another model would read anew."""


def fall_back(
    ranking: Sequence[Candidate], usable: Sequence[Candidate], fallback: str
) -> RouteDecision:
    """Return the fallback's decision, or that of the best usable model, and say if it is dearer."""
    by_name = {c.model: c for c in usable}
    chosen = by_name.get(fallback) or max(usable, key=lambda c: c.mean)
    known = [c.cost_usd for c in usable if c.cost_usd is not None]
    dearer = chosen.cost_usd is not None and bool(known) and chosen.cost_usd > min(known)
    which = "the fallback" if chosen.model == fallback else "in place of the fallback"
    notes = "; ".join(f"{c.model}: {c.note}" for c in usable if c.model != chosen.model)
    reason = f"no model qualifies ({notes or chosen.note}); {chosen.model} answers as {which}"
    if dearer:
        reason += ", which is not the cheapest"
    return RouteDecision(chosen.model, reason, tuple(ranking), "fallback", dearer)


class Sessions:
    """Which model each conversation is on; safe between threads.

    Args:
        most: sessions remembered; the oldest go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._models: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, session: Session | None, model: str) -> None:
        """Note the model that answers a session."""
        if session is None:
            return
        with self._lock:
            self._models[session.name] = model
            self._models.move_to_end(session.name)
            while len(self._models) > self._most:
                self._models.popitem(last=False)

    def stay(
        self,
        decision: RouteDecision,
        qualified: Sequence[Candidate],
        session: Session | None,
        rule: RouteRule,
        *,
        input_usd_per_mtok: float,
        margin: float,
    ) -> RouteDecision:
        """Return the session's own model unless leaving gains more than reading anew costs.

        `input_usd_per_mtok` is the price of the model that would take over; a `margin` in utility
        is asked beside it where the rule trades success off against dollars.
        """
        current = None if session is None else self._models.get(session.name)
        if session is None or current is None or current == decision.model:
            return decision
        by_name = {c.model: c for c in qualified}
        if current not in by_name:
            return decision
        new, old = by_name[decision.model], by_name[current]
        price = session.tokens * input_usd_per_mtok / 1e6
        if isinstance(rule, TradeOff):
            price = price * rule.per_usd + margin
        gain = new.utility - old.utility
        if gain > price:
            return decision
        reason = (
            f"the session stays with {current}: {new.model} gains {gain:.3g}, changing costs "
            f"{price:.3g}"
        )
        return RouteDecision(current, reason, decision.ranking, "session")


class Explorer:
    """Thompson draws under a cap on extra expected dollars; safe between threads.

    Args:
        usd: the cap; None explores nothing.
        seed: of the draws.
    """

    def __init__(self, usd: float | None, seed: int) -> None:
        self._ledger = None if usd is None else Ledger(Budget(cost_usd=usd))
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    @property
    def spent_usd(self) -> float:
        """Extra expected dollars so far."""
        return 0.0 if self._ledger is None else float(self._ledger.spent.get("cost_usd", 0.0))

    def turn(
        self, decision: RouteDecision, usable: Sequence[Candidate], rule: RouteRule
    ) -> RouteDecision:
        """Draw each model's success probability and follow the rule on the draws."""
        if self._ledger is None or len(usable) < 2 or decision.kind == "session":
            return decision
        with self._lock:
            noise = self._rng.standard_normal(len(usable))
        f = np.array([c.logit_mean for c in usable]) + noise * [c.logit_sd for c in usable]
        samples = {
            c.model: replace(c, mean=float(p), low=float(p), coverage="covered")
            for c, p in zip(usable, 1 / (1 + np.exp(-f)), strict=True)
        }
        drawn = []
        for c in usable:
            qualifies, utility, _ = rule.judge(samples[c.model], samples)
            drawn.append((qualifies, utility, c.model == decision.model, c))
        qualifies, _, _, pick = max(drawn, key=lambda d: d[:3])
        greedy = next(c for c in usable if c.model == decision.model)
        if not qualifies or pick is greedy or pick.cost_usd is None or greedy.cost_usd is None:
            return decision
        extra = max(pick.cost_usd - greedy.cost_usd, 0.0)
        try:
            self._ledger.reserve(cost_usd=extra).settle(cost_usd=extra)
        except BudgetError:
            return decision
        reason = f"{pick.model} is explored in place of {greedy.model} (extra ${extra:.3g})"
        return RouteDecision(pick.model, reason, decision.ranking, "explore")
