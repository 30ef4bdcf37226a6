"""2,000 rollouts through a server that misbehaves in every way seen in the field.

Real sockets, the `openai` client, journal and retries as in a run. Each task of a fixed share is
always refused by a content filter; every other first try may meet a fault.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.lm import open_lm
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Limits, Sampling
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.testing import Answer, Call, FaultServer, choices, raw, reset, say, status

GROUP = 5
REFUSED_EVERY = 25
"""Every 25th task meets the content filter: 4 %."""

FAULTS: dict[str, Answer] = {
    "429 with a hint": status(429, {"error": {"message": "slow down"}}, retry_after="0.02"),
    "429 without a hint": status(429, {"error": {"message": "slow down"}}),
    "503": status(503, {"error": {"message": "overloaded"}}),
    "reset before the body": reset(after=0),
    "reset in the body": reset(after=40),
    "malformed JSON": raw(b'{"choices": [{"mess', content_type="application/json"),
    "an HTML page": raw(b"<html>busy</html>", content_type="text/html"),
    "an error in a 200": raw(b'{"error": {"message": "boom"}}', content_type="application/json"),
    "empty choices": choices(),
    "slow drip": say("too slow to be read").drip(0.2),
}
"""What a first try may meet; each is retried."""
ODDITIES: dict[str, Answer] = {
    "another model": say("answer 7 of another model", model="not-what-was-asked"),
    "a repeated id": say("answer 8 under one id", reply_id="chatcmpl-same"),
}
"""What is answered, strangely."""


class _Whole:
    """Reward 1 for any whole reply of the server: a 0 can only come from a fault."""

    verifier_id = "whole-1"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(1.0 if rollout.answer.startswith(("reply ", "answer ")) else 0.0)


def _is_refused(text: str) -> bool:
    return int(text.split()[1]) % REFUSED_EVERY == 0


def script(call: Call) -> Answer | None:
    """Choose the answer to a call: one in four first tries meets a fault."""
    if _is_refused(call.text):
        return say("", finish="content_filter")
    draw = derive_seed("fault", call.key, call.seed)
    if call.attempt or draw % 4:
        return None
    answers = [*FAULTS.values(), *ODDITIES.values()]
    return answers[draw // 4 % len(answers)]


async def _sample(store: Journal, spec: str, rollouts: int) -> tuple[list[RolloutGroup], int]:
    lm = open_lm(spec, supports_n=False)
    retrying = RetryingLM(
        JournaledLM(lm, store, prices={spec: {"input": 1.0, "output": 2.0}}),
        RetryPolicy(first_wait_s=0.02, most_wait_s=0.1, deadline_s=60, breaker_s=0.2),
        limiter=AdaptiveLimiter(32, 64, clock=time.monotonic),
    )
    limits = Limits(timeout_s=2.0)
    policy = ChatPolicy(retrying, sampling=Sampling(0.7, max_tokens=32), limits=limits)
    tasks = [Task(f"t{i}", f"task {i} asks for a digit") for i in range(rollouts // GROUP)]
    sampler = Sampler(policy, _Whole(), SampleSettings(concurrency=48), recorder=store)
    try:
        return await sampler.groups(tasks, GroupSpec(GROUP)), retrying.retries
    finally:
        await retrying.aclose()


def measure(rollouts: int) -> dict[str, Any]:
    """Run and count."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root, FaultServer(script) as server:
        with Journal.open(Path(root) / "run", create=True) as store:
            groups, retries = asyncio.run(_sample(store, server.spec(), rollouts))
            rows, kept = store.spend(), store.state()
        asked = server.call_count
    made = [r for g in groups for r in g.rollouts]
    outcomes = Counter(r.outcome for r in made)
    refused = sum(_is_refused(g.task.text) for g in groups) * GROUP
    settled = sum(r.usage.calls for r in rows)
    booked = sum(r.booked.calls for r in rows)
    return {
        "rollouts": len(made),
        "lost": rollouts - kept.rollouts,
        "infra_scored": sum(r.reward == 0.0 for r in made),
        "by_outcome": dict(sorted(outcomes.items())),
        "outcomes_as_scripted": outcomes == {"refused": refused, "graded": rollouts - refused},
        "requests": asked,
        "retries": retries,
        "calls_settled": settled,
        "calls_booked": booked,
        "requests_between_settled_and_booked": settled <= asked <= settled + booked,
        "seconds": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    record("faults", measure(2000), "python -m tests.benchmarks.runs.faults")
