"""How many calls may be in flight to one endpoint: additive increase, multiplicative decrease.

The width starts low, grows by one for every full window of successes and is cut once for each
rate-limit episode, however many replies of that episode arrive. Server errors that are not rate
limits leave the width alone. Does not know what a call is; time comes from the caller's clock.
Source: TCP's AIMD (Jacobson 1988); the episode rule is our own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType


class AdaptiveLimiter:
    """An asyncio limiter whose width adapts.

    Args:
        start: width at the beginning, at least 1.
        most: largest width.
        cut: factor of a cut, in (0, 1).
        episode_s: replies that say "too many" within this many seconds of a cut are the same
            episode and cut nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        start: int = 20,
        most: int = 200,
        *,
        cut: float = 0.8,
        episode_s: float = 15.0,
        clock: Callable[[], float],
    ) -> None:
        self._width = float(max(1, min(start, most)))
        self._most = max(1, most)
        self._cut = cut
        self._episode_s = episode_s
        self._clock = clock
        self._episode_ends = float("-inf")
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = 0
        self.history: list[tuple[float, int]] = [(clock(), self.width)]
        """(monotonic seconds, width) at the start and after every cut."""

    @property
    def width(self) -> int:
        """Calls that may be in flight now."""
        return int(self._width)

    async def __aenter__(self) -> None:
        if self.in_flight < self.width and not self._waiting:
            self.in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the slot was handed over in the same moment
            elif turn in self._waiting:  # not when `_wake` has passed it over in the same moment
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.in_flight < self.width:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def succeeded(self) -> None:
        """Widen by one for each full window of successes."""
        if self._width < self._most and self.in_flight >= self.width - 1:
            self._width = min(self._most, self._width + 1.0 / self._width)
            self._wake()

    def rate_limited(self, retry_after_s: float | None = None) -> None:
        """Narrow once an episode; a server's hint prolongs the episode."""
        now = self._clock()
        if now >= self._episode_ends:
            self._width = max(1.0, self._width * self._cut)
            self.history.append((now, self.width))
            self._episode_ends = now + max(self._episode_s, retry_after_s or 0.0)
