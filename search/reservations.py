"""What a visit may use at most, what it has used, and both in the ledger.

Does not know order, slots or what a visit does. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Usage
from tfgrpo.search.proposers.expander import estimate_of
from tfgrpo.search.worker import Ticket, Worker
from tfgrpo.store.booking import require_price
from tfgrpo.store.budget import Ledger, Reservation

__all__ = ["Reservations"]

_OF_A_CALL = ("calls", "prompt_tokens", "completion_tokens", "cost_usd")


class Reservations:
    """Reserves visits at their worst case and settles them at what they used."""

    def __init__(self, ledger: Ledger, worker: Worker) -> None:
        self._ledger, self._worker = ledger, worker
        self._excess: dict[str, float] = {}
        """How far visits passed what was reserved for them: later ones reserve as much more."""

    def reserve(self, ticket: Ticket) -> Reservation:
        """Reserve a visit's worst case; fewer samples where only fewer children fit."""
        worker, visit = self._worker, ticket.visit
        node = worker.fold.tree[ticket.work.node]
        amounts: dict[str, float] = {}
        if not node.is_executed:
            amounts["tool_calls"] = 1.0
        if worker.fold.wants_children(node):
            room = self._ledger.remaining("nodes")
            if 1 <= room < ticket.k and visit.proposals is None:
                ticket.k = int(room)
            ctx = worker.context_of(ticket, node)
            amounts["expansions"] = 1.0
            amounts["nodes"] = float(ticket.k)
            if worker.settings.execution == "eager":
                amounts["tool_calls"] = amounts.get("tool_calls", 0.0) + ticket.k
            for part in (worker.expander, worker.scorer):
                if part is worker.scorer and not hasattr(part, "estimate"):
                    continue
                estimate = estimate_of(part, ctx, node, ticket.k)  # type: ignore[arg-type]  # both have the same optional method
                self._check_whole(part, estimate)
                for name, amount in estimate.items():
                    amounts[name] = amounts.get(name, 0.0) + amount
        for name, more in self._excess.items():
            amounts[name] = amounts.get(name, 0.0) + more
        return self._ledger.reserve(**amounts)

    def _check_whole(self, part: object, estimate: Mapping[str, float]) -> None:
        """Refuse a part that asks a model and does not say how much of a capped resource it may
        use: its cap would bind nobody.

        Raises:
            ConfigError: with what to do.
        """
        if not estimate.get("calls"):
            return
        for name in ("cost_usd", "prompt_tokens", "completion_tokens"):
            if name in estimate or not math.isfinite(self._ledger.remaining(name)):
                continue
            lm = getattr(part, "lm", None)
            if name == "cost_usd" and lm is not None:
                require_price(self._ledger, None, lm.model_id)
            raise ConfigError(
                f"the budget caps {name}, but {type(part).__name__} does not say how much of it a "
                f"visit may use: let its estimate() name {name!r}, or cap calls instead"
            )

    def actual(self, ticket: Ticket) -> dict[str, float]:
        """Return what a visit used, by resource."""
        fold, visit = self._worker.fold, ticket.visit
        node = fold.tree[ticket.work.node]
        usage = sum(visit.usage.values(), Usage())
        children = 0
        if visit.proposals is not None:
            children = fold.count_children(visit.proposals)
        actual = {
            "calls": float(usage.calls + ticket.extra_calls),
            "prompt_tokens": float(usage.prompt_tokens),
            "completion_tokens": float(usage.completion_tokens),
            "tool_calls": float(visit.tool_calls),
            "expansions": 1.0 if visit.proposals is not None or visit.error else 0.0,
            "nodes": float(children),
            "depth": float(node.depth + (1 if children else 0)),
        }
        if usage.cost_usd is not None:
            actual["cost_usd"] = usage.cost_usd
        if ticket.is_at_worst and ticket.reservation is not None:
            held = ticket.reservation.amounts
            return actual | {name: held.get(name, 0.0) for name in _OF_A_CALL}
        for name, amount in ticket.lost.items():
            actual[name] = actual.get(name, 0.0) + amount
        return actual

    def settle(self, ticket: Ticket) -> None:
        """Spend what arrived and give the rest back, also for a visit that was stopped."""
        if ticket.reservation is not None and ticket.reservation.is_open:
            held, actual = ticket.reservation.amounts, self.actual(ticket)
            rest = {n: 0.0 for n in held if n != "cost_usd" or not actual["calls"]}
            ticket.reservation.settle(**rest | actual)
            for name in _OF_A_CALL:
                over = actual.get(name, 0.0) - held.get(name, 0.0)
                if over > self._excess.get(name, 0.0):
                    self._excess[name] = over
