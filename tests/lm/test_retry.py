"""Retries against an injected clock: hints, deadlines, the circuit, short answers, the width."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import ProviderError, ProviderFailure
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.call_scope import CallScope, call_scope, current_scope

REQUEST = Request((Message("user", "hi"),))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def failure(kind: ProviderFailure, after: float | None = None) -> ProviderError:
    return ProviderError(kind, kind=kind, retry_after_s=after)


def wrap(script: Any, clock: Clock, **policy: Any) -> tuple[RetryingLM, ScriptedLM]:
    inner = ScriptedLM(script)
    limiter = AdaptiveLimiter(20, 100, clock=clock)
    lm = RetryingLM(
        inner,
        RetryPolicy(**policy),
        limiter=limiter,
        clock=clock,
        sleep=clock.sleep,
        rng=random.Random(1),
    )
    return lm, inner


async def test_a_hint_is_waited_for_with_jitter_upwards_only() -> None:
    clock = Clock()
    lm, _ = wrap([failure("rate_limit", 7.0), "ok"], clock)
    assert (await lm.complete(REQUEST, 1, [0]))[0].text == "ok"
    assert 7.0 <= clock.sleeps[0] <= 7.7
    assert lm.limiter.width == 16


async def test_many_rate_limits_of_one_episode_cut_the_width_once() -> None:
    clock = Clock()
    lm, _ = wrap([failure("rate_limit", 1.0)] * 5 + ["ok"], clock)
    await lm.complete(REQUEST, 1, [0])
    assert lm.limiter.width == 16


async def test_server_errors_leave_the_width_alone() -> None:
    clock = Clock()
    lm, _ = wrap([failure("overloaded")] * 5 + ["ok"], clock)
    await lm.complete(REQUEST, 1, [0])
    assert lm.limiter.width == 20


async def test_two_minutes_of_503_are_survived_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    lm, _ = wrap(
        lambda r, s: failure("overloaded") if clock.now < 120 else "ok", clock, most_tries=99
    )
    assert (await lm.complete(REQUEST, 1, [0]))[0].text == "ok"
    assert 1 <= len(caplog.records) <= 3


async def test_a_hint_beyond_the_deadline_is_not_slept() -> None:
    clock = Clock()
    lm, inner = wrap([failure("rate_limit", 900.0), "ok"], clock, deadline_s=300.0)
    with pytest.raises(ProviderError, match="wait 9"):
        await lm.complete(REQUEST, 1, [0])
    assert clock.sleeps == []
    assert len(inner.requests) == 1


@pytest.mark.parametrize(
    "kind", ["auth", "not_found", "quota", "context_too_long", "bad_request", "refused"]
)
async def test_what_cannot_pass_is_asked_once(kind: ProviderFailure) -> None:
    clock = Clock()
    lm, inner = wrap([failure(kind), "ok"], clock)
    with pytest.raises(ProviderError):
        await lm.complete(REQUEST, 1, [0])
    assert len(inner.requests) == 1


async def test_the_circuit_opens_then_one_probe_goes_through() -> None:
    clock = Clock()
    lm, inner = wrap(
        lambda r, s: failure("connection") if clock.now < 61 else "ok",
        clock,
        breaker_after=3,
        breaker_s=60.0,
        deadline_s=500.0,
        most_tries=50,
    )
    replies = await asyncio.gather(*(lm.complete(REQUEST, 1, [i]) for i in range(10)))
    assert [r[0].text for r in replies] == ["ok"] * 10
    # ten first tries at most meet the dead endpoint; then only probes do
    assert len(inner.requests) <= 10 + 2 + 10


async def test_short_answers_are_completed_under_the_missing_sample_indices() -> None:
    class Short:
        model_id = "short"
        identity: ClassVar[Mapping[str, Any]] = {}
        prefers_n = True
        asked: ClassVar[list[tuple[int, int, list[int | None]]]] = []

        async def complete(
            self, request: Request, n: int, seeds: Sequence[int | None]
        ) -> list[Completion]:
            first = current_scope().sample_index
            self.asked.append((first, n, list(seeds)))
            return [Completion(str(first + k)) for k in range(min(n, 5))]

        async def aclose(self) -> None: ...

    inner = Short()
    with call_scope(CallScope(sample_index=10)):
        replies = await RetryingLM(inner).complete(REQUEST, 8, list(range(8)))
    assert [r.text for r in replies] == [str(i) for i in range(10, 18)]
    assert inner.asked == [(10, 8, list(range(8))), (15, 3, [5, 6, 7])]


@given(st.lists(st.sampled_from(["ok", "cancel", "fail"]), max_size=40), st.integers(1, 5))
def test_every_slot_comes_back_whatever_happens(fates: list[str], width: int) -> None:
    async def run() -> None:
        limiter = AdaptiveLimiter(width, width, clock=lambda: 0.0)

        async def use(fate: str) -> None:
            async with limiter:
                assert limiter.in_flight <= width
                await asyncio.sleep(0)
                if fate == "fail":
                    raise RuntimeError

        jobs = [asyncio.create_task(use(f)) for f in fates]
        await asyncio.sleep(0)
        for job, fate in zip(jobs, fates, strict=True):
            if fate == "cancel":
                job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert limiter.in_flight == 0

    asyncio.run(run())


def test_the_width_grows_by_one_a_window_up_to_the_most() -> None:
    limiter = AdaptiveLimiter(4, 6, clock=lambda: 0.0)
    limiter.in_flight = 6
    for _ in range(4):
        limiter.succeeded()
    assert limiter.width == 4
    limiter.succeeded()
    assert limiter.width == 5
    for _ in range(50):
        limiter.succeeded()
    assert limiter.width == 6


async def test_a_waiter_cancelled_as_a_slot_comes_free_is_cancelled_and_the_next_one_goes() -> None:
    for freed_first in (False, True):
        limiter = AdaptiveLimiter(1, 1, clock=lambda: 0.0)
        await limiter.__aenter__()
        entered: list[int] = []

        async def wait(i: int, at: AdaptiveLimiter = limiter, into: list[int] = entered) -> None:
            async with at:
                into.append(i)

        first, second = (asyncio.ensure_future(wait(i)) for i in range(2))
        await asyncio.sleep(0)
        if freed_first:
            await limiter.__aexit__(None, None, None)
            first.cancel()
        else:
            first.cancel()
            await limiter.__aexit__(None, None, None)
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError) and results[1] is None
        assert entered == [1] and limiter.in_flight == 0
