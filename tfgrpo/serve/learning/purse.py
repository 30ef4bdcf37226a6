"""The money of a proposal, held in the gateway's own books while a learning run spends it.

A proposal's run has a folder and a journal of its own. Here it is one call at its worst case,
`usd`, on the caps of the process and of its route, settled with what the run spent: caps hold over
traffic and learning together, also over a restart.

Does not know what is learnt. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tfgrpo.rollout import Usage
from tfgrpo.serve import tables
from tfgrpo.serve.access.booking import OpenCall, Planned
from tfgrpo.serve.gateway import Gateway, learn_key
from tfgrpo.serve.routes import Route
from tfgrpo.store.rows import Statement

__all__ = ["Purse"]


class Purse:
    """What one proposal may spend.

    Args:
        call: held in the books.
        response_id: of the row that the call belongs to.
    """

    def __init__(self, call: OpenCall, response_id: str) -> None:
        self._call, self._response_id = call, response_id

    @classmethod
    async def open(cls, gateway: Gateway, route: Route, usd: float | None, model: str) -> Purse:
        """Hold the most that a proposal can spend.

        Raises:
            ApiError: a cap refuses it, or the journal cannot be written.
        """
        response_id, key = gateway.ids.make(), learn_key(route.name)
        planned = Planned(
            response_id=response_id,
            stage=f"learn:{route.name}",
            model=model,
            n=1,
            prompt_tokens=0,
            max_tokens=0,
            price=None,
            scopes=gateway.scopes(route, key, ""),
            worst_usd=usd,
        )
        row = (response_id, time.time(), "learn", route.name, key, "", "", "", "", "", "", "pinned",
               0.0, None, route.current.version, route.current.context_hash, "{}", "",
               None)  # fmt: skip
        return cls(await gateway.book.begin(planned, [(tables.REQUEST, row)]), response_id)

    async def settle(self, spend: object) -> None:
        """Book what the learning run says that it spent."""
        rows = [r for r in spend if isinstance(r, Mapping)] if isinstance(spend, list) else []
        calls, cost = 0, 0.0
        for row in rows:
            for part in (row["usage"], row["booked"]):
                calls += int(part.get("calls", 0))
                cost += float(part.get("cost_usd") or 0.0)
        usage = Usage(calls=calls, cost_usd=cost)
        await self._call.end(usage, self._call.planned.model, 1, [self._end("ok", cost)])

    def abandon(self, why: str) -> None:
        """Book the worst case: nobody knows what the run spent."""
        self._call.abandon([self._end("failed", None)], why)

    def _end(self, state: str, cost: float | None) -> Statement:
        row: tuple[Any, ...] = (self._response_id, time.time(), 200 if state == "ok" else 500,
                                state, "", "", "", cost, 1, self._call.duration_s, "")  # fmt: skip
        return (tables.REPLY, row)
