"""Draws of the turns and texts that live rollouts wait for: together, once nobody else can go on.

Does not know rollouts. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tfgrpo.protocols import Generated, Generator, Sampling


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One who waits for tokens."""

    ids: Sequence[int]
    seed: int
    sampling: Sampling
    future: asyncio.Future[Generated]


@dataclass(slots=True)
class TurnDraws:
    """Turns that live rollouts wait for; drawn when nobody else can go on."""

    generator: Generator
    sampling: Sampling
    """Of a turn."""
    live: int
    """Rollouts, texts and visits that may still ask."""
    waiting: list[_Waiting] = field(default_factory=list)

    async def sample(
        self, ids: Sequence[int], seed: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        """Return the next turn of one rollout."""
        made = await self.draw(ids, seed, self.sampling)
        return made.token_ids, made.logprobs, made.finish == "length"

    async def text(self, ids: Sequence[int], seed: int, limit: int | None) -> Generated:
        """Return a text that is no turn: no stop strings, its own limit."""
        limit = limit or self.sampling.max_tokens
        return await self.draw(ids, seed, replace(self.sampling, stop=(), max_tokens=limit))

    async def draw(self, ids: Sequence[int], seed: int, sampling: Sampling) -> Generated:
        """Wait until tokens are drawn."""
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Waiting(list(ids), seed, sampling, future))
        self.draw_if_all_wait()
        return await future

    def ended(self) -> None:
        """One who was live asks for nothing more."""
        self.live -= 1
        self.draw_if_all_wait()

    def draw_if_all_wait(self) -> None:
        """Draw for all who wait, those of one sampling together; errors go to those who wait."""
        self.waiting = [w for w in self.waiting if not w.future.done()]  # cancelled ones are done
        if not self.waiting or len(self.waiting) < self.live:
            return
        waiting, self.waiting = self.waiting, []
        for sampling in dict.fromkeys((w.sampling.stop, w.sampling.max_tokens) for w in waiting):
            batch = [w for w in waiting if (w.sampling.stop, w.sampling.max_tokens) == sampling]
            self._draw(batch)

    def _draw(self, batch: Sequence[_Waiting]) -> None:
        try:
            made = self.generator.generate(
                [w.ids for w in batch], 1, batch[0].sampling, [[w.seed] for w in batch]
            )
        except Exception as exc:
            for w in batch:
                w.future.set_exception(exc)
            return
        for w, rows in zip(batch, made, strict=True):
            w.future.set_result(rows[0])


class Round:
    """What one visit makes at once; the last to end leaves its place to the visit.

    Args:
        draws: counts who is live; the visit itself has a place there.
        n: rollouts and texts of the round.
        keeps: the visit may ask again, so its place stays taken.
    """

    def __init__(self, draws: TurnDraws, n: int, *, keeps: bool) -> None:
        draws.live += n - 1
        self._draws, self._left, self._keeps = draws, n, keeps

    def ended(self) -> None:
        """One of them ended."""
        self._left -= 1
        if self._left or not self._keeps:
            self._draws.ended()
