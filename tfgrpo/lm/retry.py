"""Retries in one layer: an LM that asks again while a failure may pass.

Wraps the journalled LM, so each try is reserved, booked and counted on its own. Waits follow the
server's hint (jitter upwards only) or grow exponentially; a hint longer than what is left of the
deadline is not slept through. After `breaker_after` connection failures in a row the endpoint is
left alone for `breaker_s` seconds, then tried once. Short answers (fewer draws than asked for)
are completed here, under the sample indices still missing.

Does not know: money, caches, what a reply means. Source: own; jitter after Brooker,
"Exponential Backoff and Jitter" (2015).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ProviderError
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.protocols import LM, Completion, LMWrapper, Request
from tfgrpo.runtime.call_scope import CallScope, call_scope, count_extra_call, current_scope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to ask again. All times in seconds."""

    most_tries: int = 12
    """Tries of one call, the first included."""
    deadline_s: float = 300.0
    """From the first try of a call to the last moment another may start."""
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0
    """Largest wait of our own; a server's hint may be longer."""
    breaker_after: int = 8
    """Connection failures in a row, over all calls, that open the circuit."""
    breaker_s: float = 60.0


class RetryingLM(LMWrapper):
    """An `LM` that retries what may pass, within a deadline and an adaptive width.

    Args:
        lm: the LM to ask, usually a journalled one.
        policy: when to ask again.
        limiter: width of the endpoint; share one between roles that use the same server.
        clock, sleep, rng: injected time and chance, for tests.
    """

    def __init__(
        self,
        lm: LM,
        policy: RetryPolicy | None = None,
        *,
        limiter: AdaptiveLimiter | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(lm)
        self._policy = policy or RetryPolicy()
        self._limiter = limiter or AdaptiveLimiter(clock=clock)
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random(0)
        self._failures_in_row = 0
        self._open_until = float("-inf")
        self._last_log = float("-inf")
        self.retries = 0
        """How many tries were made beyond the first."""

    @property
    def limiter(self) -> AdaptiveLimiter:
        """The width of the endpoint, with its history."""
        return self._limiter

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return exactly n replies, or raise the failure that would not pass.

        Without `prefers_n` each draw is a call of its own, tried again by itself.
        """
        scope = current_scope()
        if n > 1 and not self._lm.prefers_n:
            places = (replace(scope, sample_index=scope.sample_index + i) for i in range(n))
            jobs = (self._persist_at(p, request, [seed]) for p, seed in zip(places, seeds))
            results = await asyncio.gather(*jobs, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return [r for some in results if not isinstance(some, BaseException) for r in some[:1]]
        replies = (await self._persist(request, n, seeds))[:n]
        while len(replies) < n:
            left = n - len(replies)
            for _ in range(1 if self._lm.prefers_n else left):
                count_extra_call(is_reported=True)
            rest = replace(scope, sample_index=scope.sample_index + len(replies))
            replies.extend((await self._persist_at(rest, request, seeds[len(replies) :]))[:left])
        return replies

    async def _persist_at(
        self, scope: CallScope, request: Request, seeds: Sequence[int | None]
    ) -> list[Completion]:
        with call_scope(scope):
            return await self._persist(request, len(seeds), seeds)

    async def _persist(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        started = self._clock()
        tries = 0
        while True:
            await self._wait_for_circuit(started)
            try:
                async with self._limiter:
                    replies = await self._lm.complete(request, n, seeds)
            except ProviderError as exc:
                tries += 1
                self._note(exc)
                if not exc.is_retryable:
                    raise
                await self._sleep(self._wait_or_raise(exc, tries, started))
                count_extra_call(failure=exc)
                self.retries += 1
                continue
            if not replies:
                raise ProviderError(
                    f"{self.model_id} returned no reply where {n} were asked for", kind="bad_reply"
                )
            self._close_circuit()
            self._limiter.succeeded()
            return replies

    async def _wait_for_circuit(self, started: float) -> None:
        """While the circuit is open, wait for another call's probe to succeed, or become it."""
        while (left := self._open_until - self._clock()) > 0:
            if self._clock() - started + left > self._policy.deadline_s:
                raise ProviderError(
                    f"{self.model_id}: {self._failures_in_row} connections failed in a row, the "
                    f"endpoint is left alone for {left:.0f} s more, longer than this call may wait",
                    kind="connection",
                )
            await self._sleep(min(left, 1.0))
        if self._failures_in_row >= self._policy.breaker_after:
            self._open_until = self._clock() + self._policy.breaker_s  # this call is the one probe

    def _note(self, exc: ProviderError) -> None:
        if exc.kind == "rate_limit":
            self._limiter.rate_limited(exc.retry_after_s)
        if exc.kind == "connection":
            self._failures_in_row += 1
            if self._failures_in_row >= self._policy.breaker_after:
                self._open_until = self._clock() + self._policy.breaker_s
        else:
            self._close_circuit()
        now = self._clock()
        if exc.is_retryable and now - self._last_log >= 60.0:
            self._last_log = now
            log.warning("%s: %s (further failures are logged once a minute)", self.model_id, exc)

    def _close_circuit(self) -> None:
        self._failures_in_row = 0
        self._open_until = float("-inf")

    def _wait_or_raise(self, exc: ProviderError, tries: int, started: float) -> float:
        policy = self._policy
        if exc.retry_after_s is not None:
            wait = exc.retry_after_s + self._rng.uniform(0.0, 0.1 * exc.retry_after_s)
        else:
            most = min(policy.most_wait_s, policy.first_wait_s * 2.0 ** (tries - 1))
            wait = self._rng.uniform(most / 2.0, most)
        left = policy.deadline_s - (self._clock() - started)
        if tries >= policy.most_tries or wait > left:
            raise ProviderError(
                f"{exc} (gave up after {tries} tries: the next would wait {wait:.1f} s, "
                f"{max(left, 0.0):.1f} s of {policy.deadline_s:.0f} s are left)",
                kind=exc.kind,
                status=exc.status,
                retry_after_s=exc.retry_after_s,
            ) from exc
        return wait
