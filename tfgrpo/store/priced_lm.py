"""`PricedLM`: an LM whose replies carry their cost, where no journal keeps them.

Does not know budgets or files. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfgrpo.protocols import LM, Completion, LMWrapper, Request
from tfgrpo.store.booking import with_cost
from tfgrpo.store.prices import Price

__all__ = ["PricedLM"]


class PricedLM(LMWrapper):
    """Wraps an LM; each reply's usage gets its cost, None where the price is unknown."""

    def __init__(self, lm: LM, price: Price | None) -> None:
        super().__init__(lm)
        self._price = price

    @property
    def price(self) -> Price | None:
        """The price given."""
        return self._price

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return the wrapped LM's replies, priced."""
        replies = await self._lm.complete(request, n, seeds)
        return [replace(r, usage=with_cost(r.usage, self._price)) for r in replies]
