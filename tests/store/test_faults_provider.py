"""F01 to F12 and F35 through the whole stack: client, journal, retries, sampler.

Single calls are checked with the clients; here it counts that nothing is lost, scored or unpaid.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.driver import EvenVerifier, scratch
from tfgrpo.errors import ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Request, Sampling
from tfgrpo.rollout import Task
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.sampling import GroupSpec, Sampler
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.store.budget import Budget
from tfgrpo.testing import FaultServer, status

ASK = Request((Message("user", "q"),), sampling=Sampling(max_tokens=5))


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def retrying(store: Journal, script: object, clock: Clock, **policy: float) -> RetryingLM:
    lm = JournaledLM(ScriptedLM(script), store)  # type: ignore[arg-type]
    return RetryingLM(
        lm,
        RetryPolicy(**policy),  # type: ignore[arg-type]
        limiter=AdaptiveLimiter(clock=clock),
        clock=clock,
        sleep=clock.sleep,
    )


async def test_f01_a_rate_limit_waits_as_told_and_each_try_is_in_the_journal(
    tmp_path: Path,
) -> None:
    clock = Clock()
    busy = ProviderError("slow", kind="rate_limit", status=429, retry_after_s=3.0)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = retrying(store, [busy, busy, "fine"], clock)
        assert (await lm.complete(ASK, 1, [1]))[0].text == "fine"
        row = store.spend()[0]
    assert all(3.0 <= wait <= 3.3 for wait in clock.slept) and len(clock.slept) == 2
    assert (row.usage.calls, row.failed_calls, row.booked.calls) == (3, 2, 0)
    assert len(lm.limiter.history) == 2  # one cut an episode


async def test_f03_a_hint_beyond_the_deadline_is_not_slept(tmp_path: Path) -> None:
    clock = Clock()
    busy = ProviderError("slow", kind="rate_limit", status=429, retry_after_s=3600.0)
    with (
        Journal.open(tmp_path / "run", create=True) as store,
        pytest.raises(ProviderError, match="next would wait 3"),
    ):
        await retrying(store, [busy], clock).complete(ASK, 1, [1])
    assert clock.slept == []


async def test_f05_two_minutes_of_503_cost_waiting_and_nothing_else(tmp_path: Path) -> None:
    clock = Clock()

    def script(request: Request, seed: int | None) -> str | ProviderError:
        if clock.now < 120:
            return ProviderError("overloaded", kind="overloaded", status=503)
        return f"answer {seed}"

    with Journal.open(tmp_path / "run", create=True) as store:
        lm = retrying(store, script, clock, most_tries=1000, deadline_s=600)
        sampler = Sampler(ChatPolicy(lm), EvenVerifier(), recorder=store)
        groups = await sampler.groups([Task(f"t{i}", f"q{i}") for i in range(4)], GroupSpec(2))
        row = store.spend()[0]
    assert [r.outcome for g in groups for r in g.rollouts] == ["graded"] * 8
    assert row.usage.calls == row.failed_calls + 8
    assert row.usage.completion_tokens == 16  # "answer N", eight times
    assert row.booked.calls == 0


@pytest.mark.real
@pytest.mark.parametrize(
    ("server", "kind"),
    [
        (FaultServer(api_key="right-key-0123456789"), "auth"),
        (FaultServer(models=["another"]), "not_found"),
        (
            FaultServer(
                status(429, {"error": {"code": "insufficient_quota", "message": "no money"}})
            ),
            "quota",
        ),
    ],
)
async def test_f04_f06_a_hopeless_endpoint_stops_the_run_within_five_calls(
    tmp_path: Path, server: FaultServer, kind: str
) -> None:
    with server, Journal.open(tmp_path / "run", create=True) as store:
        lm = RetryingLM(JournaledLM(open_lm(server.spec(), supports_n=False), store))
        sampler = Sampler(ChatPolicy(lm), EvenVerifier(), recorder=store)
        started = time.monotonic()
        with pytest.raises(ProviderError) as caught:
            await sampler.groups([Task(f"t{i}", f"q{i}") for i in range(20)], GroupSpec(4))
        await lm.aclose()
        assert caught.value.kind == kind and caught.value.is_fatal
        assert server.call_count <= 5
        assert time.monotonic() - started < 60
        assert all(r.score is None for g in store.groups() for r in g.rollouts)
        assert store.spend()[0].usage.calls == server.call_count


@pytest.mark.real
def test_f01_f12_a_misbehaving_server_loses_and_scores_nothing() -> None:
    from tests.benchmarks.runs.faults import measure

    figures = measure(250)
    assert (figures["lost"], figures["infra_scored"]) == (0, 0)
    assert figures["outcomes_as_scripted"] is True
    assert figures["requests_between_settled_and_booked"] is True


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    cancels=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    steps=st.integers(0, 4),
)
def test_f35_cancelled_anywhere_slots_and_money_come_back(cancels: list[int], steps: int) -> None:
    async def session(store: Journal) -> None:
        lm = JournaledLM(ScriptedLM("x", latency_s=0.0005 * steps), store)
        limiter = AdaptiveLimiter(start=3, clock=time.monotonic)
        outer = RetryingLM(lm, limiter=limiter)

        async def one(i: int) -> None:
            with call_scope(CallScope(sample_index=i)):
                await outer.complete(ASK, 1, [i])

        tasks = [asyncio.create_task(one(i // 2)) for i in range(16)]
        for turns in cancels:
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[turns % 16].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert limiter.in_flight == 0

    with scratch() as folder:
        with Journal.open(Path(folder) / "run", create=True, budget=Budget(calls=40)) as store:
            asyncio.run(session(store))
            assert set(store.ledger.reserved.values()) == {0.0}
            assert not store.calls.any_in_flight and not store.calls.flights
            spent = store.ledger.spent["calls"]
        with Journal.open(Path(folder) / "run") as store:  # the journal says the same
            rows = store.spend()
            assert spent == sum(r.usage.calls + r.booked.calls for r in rows)
            assert store.ledger.spent["calls"] == spent
