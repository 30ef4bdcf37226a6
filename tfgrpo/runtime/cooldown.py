"""Which host may be tried now: cooldown after failures, exactly one probe when it is over.

A refused connection, a name that does not resolve, a TLS failure, a timeout, an overloaded or
limited server, a rejected key and an empty purse count, wherever in a chain of fallbacks they
happen. A request that is itself wrong (400, too long, refused content) and the caller's own
cancellation do not.
Does not know what a host serves. Source: own rules for field reports on cooldowns that
exempt connection errors or an exhausted budget.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tfgrpo.errors import ConfigError, ProviderError, ProviderFailure

T = TypeVar("T")

__all__ = ["COUNTED", "Cooldowns", "NoneHealthyError"]

COUNTED: frozenset[ProviderFailure] = frozenset(
    {"connection", "timeout", "overloaded", "rate_limit", "quota", "auth", "not_found", "bad_reply"}
)
"""Failures that say something about the host and not about the request."""


class NoneHealthyError(ProviderError):
    """Every host of the pool is cooling down; nothing was sent."""


@dataclass
class _Health:
    failures: list[float] = field(default_factory=list)
    """When it failed since its last answer, within the window."""
    until: float | None = None
    """End of the cooldown; None while healthy."""
    probing: bool = False
    rests: int = 0
    """Cooldowns in a row, without an answer between them."""


def _locked(method: Callable[..., T]) -> Callable[..., T]:
    """Hold the lock of the object while its method runs."""

    @functools.wraps(method)
    def held(self: Cooldowns, *args: Any) -> T:
        with self._lock:
            return method(self, *args)

    return held


class Cooldowns:
    """Failures of each model, and who may be tried; safe between threads."""

    def __init__(
        self,
        *,
        cooldown_s: float = 60.0,
        allowed_failures: int = 0,
        when_none: Literal["try", "raise"] = "try",
        clock: Callable[[], float] = time.monotonic,
        window_s: float = math.inf,
        most_s: float = 0.0,
    ) -> None:
        """Set the rules.

        Args:
            cooldown_s: how long a model rests.
            allowed_failures: consecutive failures before it does.
            window_s: failures that are longer ago than this are forgotten.
            most_s: each further cooldown in a row is twice as long, up to this; 0 keeps the first
                length.
            when_none: with everything cooling down, try every model, ready first, or raise.
            clock: monotonic seconds.
        """
        if not cooldown_s >= 0 or allowed_failures < 0:
            raise ConfigError(
                f"cooldown_s {cooldown_s!r} and allowed_failures {allowed_failures!r}: both must "
                f"be 0 or more"
            )
        self._cooldown_s, self._allowed = cooldown_s, allowed_failures
        self._when_none, self._clock = when_none, clock
        self._window_s, self._most_s = window_s, most_s
        self._health: dict[str, _Health] = {}
        self._lock = threading.RLock()

    @_locked
    def state(self, model: str) -> Literal["healthy", "cooling", "probe"]:
        """Return whether a model may be used, rests, or is due for its one probe."""
        health = self._health.get(model)
        if health is None or health.until is None:
            return "healthy"
        if self._clock() < health.until or health.probing:
            return "cooling"
        return "probe"

    @_locked
    def available(self, models: Sequence[str]) -> list[str]:
        """Return the models that may be tried, in the order given; all of them, soonest ready
        first, where every one is cooling down.

        Raises:
            NoneHealthyError: all are cooling down and `when_none` is `raise`.
        """
        ready = [m for m in models if self.state(m) != "cooling"]
        if ready or not models:
            return ready
        waits = {m: (self._health[m].until or 0.0) - self._clock() for m in models}
        soonest = min(models, key=lambda m: waits[m])
        if self._when_none == "raise":
            raise NoneHealthyError(
                f"every model is cooling down ({', '.join(models)}); {soonest!r} may be tried "
                f"again in "
                f"{max(waits[soonest], 0.0):.0f} s: wait, add a model, or set when_none='try'",
                kind="overloaded",
                retry_after_s=max(waits[soonest], 0.0),
            )
        return sorted(models, key=lambda m: waits[m])

    @_locked
    def started(self, model: str) -> None:
        """Note that a call to the model begins; the first one after a cooldown is its probe."""
        if self.state(model) == "probe":
            self._health[model].probing = True

    @_locked
    def succeeded(self, model: str) -> None:
        """Note an answer: the model is healthy."""
        self._health.pop(model, None)

    @_locked
    def abandoned(self, model: str) -> None:
        """Note that a call was cancelled by its caller: says nothing of the model."""
        health = self._health.get(model)
        if health is not None:
            health.probing = False

    @_locked
    def failed(self, model: str, error: ProviderError) -> bool:
        """Note a failure; return whether it counts against the model."""
        self.abandoned(model)
        if error.kind not in COUNTED:
            return False
        health = self._health.setdefault(model, _Health())
        now = self._clock()
        health.failures = [t for t in health.failures if now - t <= self._window_s] + [now]
        if health.until is not None or len(health.failures) > self._allowed:
            # The server knows best when it will be back: its hint holds, shorter or longer.
            hint = error.retry_after_s
            if health.until is None or now >= health.until:  # not one more call of the same fall
                health.rests += 1
            health.until = now + (self._rest_s(health.rests) if hint is None else max(hint, 0.0))
        return True

    def _rest_s(self, rests: int) -> float:
        most = max(self._cooldown_s, self._most_s)
        return float(min(most, self._cooldown_s * 2.0 ** min(rests - 1, 32)))
