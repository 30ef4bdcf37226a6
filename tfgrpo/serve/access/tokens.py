"""Tokens with which a browser may rate one response once: a keyed digest and an expiry.

Does not know feedback. Source: own.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

__all__ = ["FeedbackTokens"]


class FeedbackTokens:
    """Makes and reads tokens.

    >>> tokens = FeedbackTokens(b"k" * 32, clock=lambda: 1000.0)
    >>> tokens.read(tokens.make("tf_X", "reward"))
    ('tf_X', 'reward')
    """

    def __init__(
        self, secret: bytes, *, valid_s: float = 86_400.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._secret = hashlib.sha256(b"feedback token\0" + secret).digest()
        self._valid_s, self._clock = valid_s, clock

    def make(self, response_id: str, metric: str) -> str:
        """Return a token for one metric of one response."""
        text = f"{response_id}.{int(self._clock() + self._valid_s)}.{metric.encode().hex()}"
        return f"{text}.{self._mark(text)}"

    def read(self, token: str) -> tuple[str, str] | None:
        """Return (response id, metric), or None for a token that is not ours or too old."""
        text, _, mark = token.rpartition(".")
        parts = text.split(".")
        if not hmac.compare_digest(self._mark(text).encode(), mark.encode()) or len(parts) != 3:
            return None
        response_id, until, metric = parts
        if self._clock() > int(until):
            return None
        return response_id, bytes.fromhex(metric).decode()

    def _mark(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode("utf-8", "replace"), "sha256")[:16].hex()
