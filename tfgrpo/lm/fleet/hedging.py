"""When a call is sent a second time because its first token is late.

Only the first token decides, never the end: of two random draws the one that ends first is the
shorter one, which would bias every reward. Late is later than a quantile of the recent times by a
tenth, so that servers of nearly constant times waste no copies, and no more than a share of all
calls is sent twice.

Does not know calls or servers. Source: Dean and Barroso 2013, "The tail at scale".
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Hedging"]

_KEPT = 512
_FEWEST = 50
_RENEWED_EVERY = 16
_SLACK = 1.1


class Hedging:
    """Times to the first token and the share of calls that were sent twice.

    Args:
        share: largest share of calls, from 0.
        quantile: of the recent times, after which a call is late.
    """

    def __init__(self, share: float, quantile: float) -> None:
        self._share, self._quantile = share, quantile
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._new = 0
        self._delay: float | None = None
        self.calls = 0
        self.hedges = 0

    def observe(self, seconds: float) -> None:
        """Note a time to the first token."""
        self._times.append(seconds)
        self._new += 1

    def delay(self) -> float | None:
        """Return after how many seconds a call is late; None while that is not known.

        >>> hedging = Hedging(0.05, 0.95)
        >>> for ms in range(1, 101):
        ...     hedging.observe(ms / 1000)
        >>> round(hedging.delay(), 4)
        0.1045
        """
        if self._share <= 0 or len(self._times) < _FEWEST:
            return None
        if self._delay is None or self._new >= _RENEWED_EVERY:
            ranked = sorted(self._times)
            self._delay = _SLACK * ranked[math.ceil(self._quantile * len(ranked)) - 1]
            self._new = 0
        return self._delay

    def may_hedge(self) -> bool:
        """True where one more call may be sent twice."""
        return self.hedges + 1 <= self._share * self.calls
