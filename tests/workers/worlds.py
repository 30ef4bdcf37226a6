"""Policies and verifiers that workers build, and the run's side of them.

What a task is to do stands in its prompt: `die`, `hang`, `raise`, or a sum. Everything is fixed by
(task, context, seed), so every place must give the same rollouts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.execute import LocalExecutor, Unit, UnitSettings
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import LM, Policy, Request, Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.workers.remote_lm import LmFacts
from tfgrpo.workers.work import WorkSpec

BUILDER = "tests.workers.worlds:build"
SETTINGS = UnitSettings(timeout_s=20.0, verifier_timeout_s=20.0)


def script(request: Request, seed: int | None) -> str:
    """An answer by (prompt, seed): right for even ones."""
    text = request.messages[-1].content
    return f"{text.count('1') + derive_seed(text, seed or 0) % 2}"


class Deeds:
    """A verifier that does what the task says."""

    verifier_id = "deeds-1"
    reward_range = (0.0, 1.0)

    def __init__(self, marks: str = "") -> None:
        self._marks = marks

    def check_task(self, task: Task) -> None:
        if task.reference is None:
            raise ConfigError("no reference")

    async def score(self, rollout: Rollout, task: Task) -> Score:
        deed, _, mark = str(task.metadata.get("deed", "")).partition(":")
        if deed == "die" or (deed == "die once" and self._is_first(mark)):
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":
            time.sleep(600)
        if deed == "sleep":
            await asyncio.sleep(float(mark))
        if deed == "raise":
            raise VerifierError("as told")
        return Score(float(rollout.answer == task.reference), feedback=rollout.answer)

    def _is_first(self, mark: str) -> bool:
        try:
            (Path(self._marks) / mark).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def build(values: Mapping[str, Any], lm: Callable[[str], LM]) -> tuple[Policy, Verifier | None]:
    """A `Builder`."""
    if values.get("fails"):
        raise ConfigError("this work cannot be built")
    policy = ChatPolicy(lm("main"), system="Count the ones.", policy_id=values.get("policy_id"))
    return policy, Deeds(values.get("marks", ""))


def spec(lm: LM, **values: Any) -> WorkSpec:
    """The work of `build` for an LM of the run."""
    policy, verifier = build(values, lambda _: lm)
    assert verifier is not None
    facts = LmFacts.of(lm)
    return WorkSpec(
        BUILDER, values, SETTINGS, policy.policy_id, verifier.verifier_id, {"main": facts}
    )


def scripted(latency_s: float = 0.0) -> ScriptedLM:
    return ScriptedLM(script, latency_s=latency_s)


def local(lm: LM) -> LocalExecutor:
    policy, verifier = build({}, lambda _: lm)
    return LocalExecutor(policy, verifier, SETTINGS)


def unit(name: str, deed: str = "", *, indices: Sequence[int] = (0,), lesson: str = "") -> Unit:
    """A unit of one task."""
    task = Task(name, f"How many ones are in {name}?", reference="1", metadata={"deed": deed})
    parts = (ContextPart("lesson", lesson, source="l1"),) if lesson else ()
    return Unit(f"g-{name}", task, Context(parts), "practice", 7, tuple(indices))


def count_ones(text: str) -> int:
    """Count the ones in a text."""
    return text.count("1")
