"""A small learner made of the store's parts: practice, one lesson a step, a decision, a library.

Everything it does is fixed by its settings, so that an interrupted and resumed run can be compared
with one that was never stopped. The scripted server behind it counts what it was asked and answers
by content alone.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import LM, Completion, Finish, Request, Sampling
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task, Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope, current_scope
from tfgrpo.runtime.canonical import digest
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store.budget import Budget
from tfgrpo.store.fold import SpendRow
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.store.keys import RequestKey

PRICES = {"http://server/v1#m": {"input": 1.0, "output": 2.0}}
MODEL = "http://server/v1#m"
NO_LIMITS = Budget()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory where there is one: loops over hundreds of runs sync often."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


@dataclass(slots=True)
class CountingServer:
    """What stands behind the network: counts requests by content, survives the client's death."""

    received: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    cost_usd: float = 0.0


def reply_to(asked: str) -> Completion:
    """Return the one reply to a draw's key: text, length and truncation follow from it."""
    number = int(asked[:8], 16)
    usage = Usage(uncached_tokens=5 + number % 7, text_tokens=1 + number % 5, calls=1)
    finish: Finish = "length" if number % 11 == 0 else "stop"
    return Completion(f"answer {number % 100}", finish=finish, usage=usage, model="m")


class ServerLM:
    """A client of a `CountingServer`; text, token counts and truncation follow from the content."""

    prefers_n = False

    def __init__(self, server: CountingServer, model: str = MODEL) -> None:
        self.server = server
        self.model_id = model

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self.model_id}

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        draw = RequestKey(request, self.identity).draw(current_scope().sample_index, seeds[0])
        asked = draw.hex()
        self.server.received[asked] += 1
        await asyncio.sleep(0)
        reply = reply_to(asked)
        usage = reply.usage
        self.server.cost_usd += (usage.uncached_tokens * 1.0 + usage.text_tokens * 2.0) / 1e6
        self.server.answered[asked] += 1
        return [reply]

    async def aclose(self) -> None:
        pass


class EvenVerifier:
    """Reward 1 for an even number at the end."""

    reward_range = (0.0, 1.0)

    def __init__(self, verifier_id: str = "even-1") -> None:
        self.verifier_id = verifier_id

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        await asyncio.sleep(0)
        return Score(1.0 - int(rollout.answer.split()[-1]) % 2, feedback="even is right")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run of the small learner is told."""

    tasks: int = 4
    group_size: int = 3
    steps: int = 2
    model: str = MODEL
    temperature: float = 0.7
    verifier_id: str = "even-1"
    concurrency: int = 4
    budget: Budget = NO_LIMITS

    def to_config(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tasks": self.tasks,
            "group_size": self.group_size,
            "steps": self.steps,
            "temperature": self.temperature,
            "verifier": self.verifier_id,
            "run": {"concurrency": self.concurrency},
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run says, without times."""

    library: list[str]
    groups: list[dict[str, Any]]
    spend: list[tuple[str, str, dict[str, Any]]]


async def learn(
    store: Journal, server: CountingServer, settings: Settings, raw: LM | None = None
) -> list[str]:
    """Run or continue; return the lessons."""
    raw = raw or ServerLM(server, settings.model)
    lm = JournaledLM(raw, store, prices=_prices(settings.model))
    policy = ChatPolicy(lm, sampling=Sampling(settings.temperature, max_tokens=8))
    sampler = Sampler(
        policy,
        EvenVerifier(settings.verifier_id),
        SampleSettings(concurrency=settings.concurrency, probe=0),
        recorder=store,
    )
    tasks = [Task(f"t{i}", f"question {i}") for i in range(settings.tasks)]
    lessons: list[str] = []
    for step in range(settings.steps):
        draws = GroupSpec(settings.group_size, scope=f"step{step}", metadata={"step": step})
        groups = await sampler.groups(tasks, draws, _context(lessons))
        lesson = await _contrast(lm, groups)
        store.record_decision("step", {"lesson": lesson}, key=str(step))
        lessons = [*lessons, lesson]
        store.record_library(f"v{step}", lessons)
    return lessons


def _prices(model: str) -> dict[str, dict[str, float]]:
    return {model: PRICES[MODEL]}


def _context(lessons: Sequence[str]) -> Context:
    if not lessons:
        return EMPTY_CONTEXT
    return Context(tuple(ContextPart("lesson", text) for text in lessons))


async def _contrast(lm: JournaledLM, groups: Sequence[RolloutGroup]) -> str:
    seen = digest([g.rewards_G for g in groups], 12)
    request = Request((Message("user", f"contrast {seen}"),), sampling=Sampling(max_tokens=8))
    with call_scope(CallScope(stage="contrast")):
        reply = (await lm.complete(request, 1, [None]))[0]
    return f"lesson from {seen}: {reply.text}"


def result_of(store: Journal) -> Result:
    """Return what the journal says, times left out, groups in the order of their ids."""
    groups = sorted((_timeless(g.to_dict()) for g in store.groups()), key=lambda g: g["group_id"])
    libraries = store.libraries()
    return Result(
        libraries[-1][1] if libraries else [],
        groups,
        [(r.stage, r.model, _rounded(r)) for r in store.spend()],
    )


def _rounded(row: SpendRow) -> dict[str, Any]:
    usage = row.usage.to_dict()
    return usage | {"cost_usd": round(usage.get("cost_usd", 0.0) or 0.0, 12)}


def _timeless(group: dict[str, Any]) -> dict[str, Any]:
    for rollout in group["rollouts"]:
        rollout.pop("duration_s", None)
    return group


def run_whole(folder: Path | str, server: CountingServer, settings: Settings) -> Result:
    """Open, learn, close, and return the result."""
    config = settings.to_config()
    with Journal.open(folder, create=True, config=config, budget=settings.budget) as store:
        asyncio.run(learn(store, server, settings))
        return result_of(store)
