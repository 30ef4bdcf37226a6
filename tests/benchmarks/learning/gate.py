"""A harmful library planted on purpose, and runs in which nothing helps: what a run keeps.

`python -m tests.benchmarks.learning.gate` writes `harmful_rejected` and `empty_wins` of `of` runs
each. Every run is a whole `learn` with a scripted model: as the critic it proposes the planted
lesson, as the policy it obeys it (and does worse) or is not moved by it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.record import record
from tfgrpo.config.learn import Config
from tfgrpo.learning.learn import learn_async
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import derive_seed

RUNS = 20
PRACTICE, GATE = 24, 30
STEPS = 4
DRAWS = 4
HARMFUL = "Choose the second label that fits, never the first."
IDLE = (
    "Read the message twice before you choose.",
    "Think of what the customer feels.",
    "Stay calm with angry customers.",
    "Prefer plain words over jargon.",
)
LOSS = 0.2
"""How much of its chance the model loses under the harmful lesson."""


@dataclass(frozen=True)
class Outcome:
    """What one run did with the lessons it was given."""

    looks: int
    """Proposals that the gate judged."""
    accepted: int
    kept: str
    """`empty` or the version that won in the end."""


def model(seed: int, lessons: Sequence[str], chances: dict[str, float]) -> ScriptedLM:
    """Critic and policy in one: a critic's prompt names no task of ours as its last line."""

    def reply(request: Request, draw: int | None) -> str:
        text = "\n".join(m.content for m in request.messages)
        rng = random.Random(derive_seed(seed, text, draw))
        task_id = request.messages[-1].content.split(":", 1)[0]
        if task_id not in chances:
            return critic(text, rng.choice(lessons))
        chance = chances[task_id] - (LOSS if HARMFUL in text else 0.0)
        return "right" if rng.random() < chance else "wrong"

    return ScriptedLM(reply)


def critic(prompt: str, lesson: str) -> str:
    """Propose the lesson over all tasks of a panel, and stand by it where it comes back."""
    shown = re.findall(r"^### Task (\S+)", prompt, re.MULTILINE)
    row = {"topic": "class", "text": lesson, "support": shown}
    if "That was all." in prompt:
        ids = re.findall(r"^\[([ER]\d+)\]", prompt, re.MULTILINE)
        return json.dumps({"rules": [row | {"id": key} for key in ids]})
    return json.dumps({"rules": [row], "entries": []})


async def run(seed: int, lessons: Sequence[str]) -> Outcome:
    """One learning run whose critic knows nothing but `lessons`."""
    rng = random.Random(seed)
    tasks = [Task(f"t{i}", f"t{i}: which class?", "right") for i in range(PRACTICE + GATE)]
    chances = {t.task_id: rng.betavariate(1.5, 1.5) * 0.8 + LOSS for t in tasks}
    lm = model(seed, lessons, chances)
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        config = Config.from_mapping(
            {
                "run": {"folder": f"{folder}/run", "probe": 0, "concurrency": 64},
                "tasks": {"practice": PRACTICE, "gate": GATE, "test": 0, "seed": seed},
                "policy": {"lm": "scripted:model"},
                "learn": {
                    "batch": PRACTICE // STEPS,
                    "group_size": 4,
                    "seed": seed,
                    "entries": "lessons",
                },
                "gate": {"group_size": DRAWS},
            }
        )
        result = await learn_async(config, tasks=tasks, opener=lambda spec, **options: lm)
        looks = _looks(f"{folder}/run")
    learned = result.learned
    return Outcome(looks, len(learned.accepted), learned.choice.version_id)


def _looks(folder: str) -> int:
    from tfgrpo.store import Journal

    with Journal.open(folder, readonly=True) as store:
        return len(store.decisions("gate"))


async def measure() -> dict[str, object]:
    """Run both cases `RUNS` times."""
    harmful = [await run(seed, (HARMFUL,)) for seed in range(RUNS)]
    idle = [await run(1000 + seed, IDLE) for seed in range(RUNS)]
    if not all(o.looks for o in (*harmful, *idle)):
        raise SystemExit("a run made no proposal: nothing was tested")
    return {
        "harmful_rejected": sum(not o.accepted and o.kept == "empty" for o in harmful),
        "empty_wins": sum(o.kept == "empty" for o in idle),
        "of": RUNS,
        "harm": LOSS,
        "harmful_looks": sum(o.looks for o in harmful),
        "idle_looks": sum(o.looks for o in idle),
        "idle_accepted_by_the_gate": sum(o.accepted for o in idle),
        "gate_tasks": GATE,
        "draws": DRAWS,
    }


if __name__ == "__main__":
    record("gate", asyncio.run(measure()), "python -m tests.benchmarks.learning.gate")
