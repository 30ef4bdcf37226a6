"""A harmful library planted on purpose, and runs in which nothing helps: what the gate lets by.

`python -m tests.benchmarks.gate` writes `harmful_rejected` and `empty_wins` of `of` runs each.
Every run samples rollouts through the sampler with a scripted model that obeys or ignores the
lesson it is shown, gates each step's library and makes the final choice.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from tests.benchmarks.record import record
from tfgrpo.canonical import derive_seed
from tfgrpo.context import Context
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.gate import EMPTY, final_choice, gate_step
from tfgrpo.experience.library import EMPTY_LIBRARY, Library
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.policies import ChatPolicy
from tfgrpo.protocols import Request
from tfgrpo.report.view import scores_of
from tfgrpo.rollout import Task
from tfgrpo.sampling import Draws, SampleSettings, sample_groups
from tfgrpo.statistics import Scores, gate_level
from tfgrpo.verifiers import Exact

RUNS = 20
STEPS = 5
GATE_TASKS = 30
DRAWS = 4
LEVEL = 0.90
HARMFUL = "Always answer with the second label that comes to mind."
IDLE = ("Read the message twice.", "Be careful.", "Think of the customer.", "Stay calm.", "Relax.")
LOSS = 0.2
"""How much of its chance the model loses under the harmful lesson."""


@dataclass(frozen=True)
class Outcome:
    """What one run did with the lesson it was given."""

    accepted: int
    """Steps that the gate let pass."""
    kept: str
    """`empty` or the version that won in the end."""


def model(seed: int, chances: dict[str, float]) -> ScriptedLM:
    """Right with the task's own chance, less where it is told to be wrong."""

    def reply(request: Request, draw: int | None) -> str:
        text = "\n".join(m.content for m in request.messages)
        task_id = request.messages[-1].content.split()[0]
        chance = chances[task_id] - (LOSS if HARMFUL in text else 0.0)
        rng = random.Random(derive_seed(seed, text, draw))
        return "right" if rng.random() < chance else "wrong"

    return ScriptedLM(reply)


async def run(seed: int, lessons: tuple[str, ...]) -> Outcome:
    """One run: a step a lesson, each gated on the same tasks, then the final choice."""
    rng = random.Random(seed)
    tasks = [Task(f"t{i}", f"t{i} which class?", reference="right") for i in range(GATE_TASKS)]
    chances = {t.task_id: rng.betavariate(1.5, 1.5) * 0.8 + LOSS for t in tasks}
    policy = ChatPolicy(model(seed, chances))

    async def measured(library: Library, scope: str) -> Scores:
        groups = await sample_groups(
            tasks,
            policy,
            Exact(),
            context=library.context() if library.entries else Context(),
            draws=Draws(DRAWS, seed=seed, scope=scope),
            settings=SampleSettings(concurrency=64, probe=0),
        )
        return scores_of(groups)

    library = EMPTY_LIBRARY
    current = await measured(library, "current")
    candidates: dict[str, Scores] = {EMPTY: current}
    accepted = 0
    for look, lesson in enumerate(lessons, 1):
        proposal = library.apply([Edit("add", lesson)]).library
        scores = await measured(proposal, f"proposed-{look}")
        decision = gate_step(
            current, scores, level=gate_level(look, len(lessons), LEVEL), seed=seed
        )
        if decision.accepted:
            accepted += 1
            library, current = proposal, scores
            candidates[proposal.version_id] = scores
    return Outcome(accepted, final_choice(candidates, seed=seed).version_id)


async def measure() -> dict[str, object]:
    """Run both cases `RUNS` times."""
    harmful = [await run(seed, (HARMFUL,)) for seed in range(RUNS)]
    idle = [await run(1000 + seed, IDLE[:STEPS]) for seed in range(RUNS)]
    return {
        "harmful_rejected": sum(o.accepted == 0 and o.kept == EMPTY for o in harmful),
        "empty_wins": sum(o.kept == EMPTY for o in idle),
        "of": RUNS,
        "harm": LOSS,
        "idle_steps_accepted": sum(o.accepted for o in idle),
        "idle_steps": RUNS * STEPS,
        "gate_tasks": GATE_TASKS,
        "draws": DRAWS,
        "gate_level": LEVEL,
    }


if __name__ == "__main__":
    record("gate", asyncio.run(measure()), "python -m tests.benchmarks.gate")
