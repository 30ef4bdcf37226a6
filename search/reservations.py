"""What a visit may use at most, what it has used, and both in the ledger.

Does not know order, slots or what a visit does. Source: own.
"""

from __future__ import annotations

from tfgrpo.rollout import Usage
from tfgrpo.search.proposers.expander import estimate_of
from tfgrpo.search.worker import Ticket, Worker
from tfgrpo.store.budget import Ledger, Reservation

__all__ = ["Reservations"]


class Reservations:
    """Reserves visits at their worst case and settles them at what they used."""

    def __init__(self, ledger: Ledger, worker: Worker) -> None:
        self._ledger, self._worker = ledger, worker

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
                for name, amount in estimate_of(part, ctx, node, ticket.k).items():  # type: ignore[arg-type]  # both have the same optional method
                    amounts[name] = amounts.get(name, 0.0) + amount
        return self._ledger.reserve(**amounts)

    def actual(self, ticket: Ticket) -> dict[str, float]:
        """Return what a visit used, by resource."""
        fold, visit = self._worker.fold, ticket.visit
        node = fold.tree[ticket.work.node]
        usage = sum(visit.usage.values(), Usage())
        children = 0
        if visit.proposals is not None:
            children = fold.count_children(visit.proposals)
        actual = {
            "calls": float(usage.calls),
            "prompt_tokens": float(usage.prompt_tokens),
            "completion_tokens": float(usage.completion_tokens),
            "tool_calls": float(visit.tool_calls),
            "expansions": 1.0 if visit.proposals is not None or visit.error else 0.0,
            "nodes": float(children),
            "depth": float(node.depth + (1 if children else 0)),
        }
        if usage.cost_usd is not None:
            actual["cost_usd"] = usage.cost_usd
        return actual

    def settle(self, ticket: Ticket) -> None:
        """Spend what arrived and give the rest back, also for a visit that was stopped."""
        if ticket.reservation is not None and ticket.reservation.is_open:
            held = ticket.reservation.amounts
            ticket.reservation.settle(**dict.fromkeys(held, 0.0) | self.actual(ticket))
