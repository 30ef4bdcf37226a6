"""The methods of the comparison: tfgrpo under any preset and arm, and the rivals' scripts.

Each learns on practice and gate tasks with both simulators and returns what it puts before the
policy. Does not know how results become a table.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.head_to_head.methods import Learnt, Unavailable
from tests.benchmarks.head_to_head.rivals import run_script
from tests.benchmarks.learning.house_rules.families import Case, Family
from tests.benchmarks.learning.house_rules.model import Account, SimulatedLM
from tests.benchmarks.learning.house_rules.server import Bench, Seat
from tfgrpo.config.learn import Config
from tfgrpo.context import Context
from tfgrpo.experience import prompt_context
from tfgrpo.learning.experience_settings import experience_settings
from tfgrpo.learning.learn import learn_async
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Limits, Sampling
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.sampling import GroupSpec, SampleSettings, sample_groups
from tfgrpo.statistics import Scores

LIMITS = Limits(timeout_s=600.0)
DEADLINE_S = 400.0


@dataclass(frozen=True, slots=True)
class Arm:
    """What a learner may see and say."""

    name: str
    entries: str = "both"
    tell: bool = True
    """Feedback says what was wanted."""
    references: bool = True
    """The learner is given the tasks' keys."""


ARMS: Mapping[str, Arm] = {
    a.name: a
    for a in (
        Arm("both"),
        Arm("lessons", "lessons"),
        Arm("examples", "exemplars"),
        Arm("telling", "lessons", references=False),
        Arm("feedback", "both", tell=False, references=False),
    )
}


@dataclass(frozen=True, slots=True)
class Job:
    """One learning run."""

    family: Family
    practice: tuple[Case, ...]
    gate: tuple[Case, ...]
    noise: float
    seed: int
    arm: Arm
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of tfgrpo's config, by section."""


class HouseVerifier:
    """A family's own judgement as `tfgrpo.protocols.Verifier`."""

    reward_range = (0.0, 1.0)

    def __init__(self, family: Family, cases: Sequence[Case], *, tell: bool) -> None:
        self._family = family
        self._cases = {c.task_id: c for c in cases}
        self._tell = tell

    @property
    def verifier_id(self) -> str:
        """Family and what is told."""
        return f"house-{self._family.name}-{self._tell}"

    def check_task(self, task: Task) -> None:
        """Every task is judged by its case."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return the share of right parts, and which they are."""
        case = self._cases[task.task_id]
        reply = rollout.answer or ""
        reward, feedback = self._family.grade(reply, case, tell=self._tell)
        right = self._family.judge(reply, case)
        parts = {p: float(right.get(p, False)) for p in self._family.parts}
        return Score(reward, feedback, parts)


def as_task(case: Case, *, reference: bool) -> Task:
    """Return a case as the library reads it, with its key or without."""
    return Task(case.task_id, case.text, case.key if reference else None)


async def learn_ours(preset: str, job: Job, account: Account) -> Learnt:
    """Learn with tfgrpo; what its gate and final choice keep, as it is deployed."""
    cases = [*job.practice, *job.gate]
    tasks = [as_task(c, reference=job.arm.references) for c in cases]
    lms = {role: SimulatedLM(role, job.noise, account) for role in ("policy", "critic")}
    with tempfile.TemporaryDirectory(prefix="house-rules-") as folder:
        config = Config.from_mapping(our_config(preset, job, folder))
        result = await learn_async(
            config,
            tasks=tasks,
            verifier=HouseVerifier(job.family, cases, tell=job.arm.tell),
            opener=lambda spec, **options: lms[spec.removeprefix("scripted:")],
        )
    version, settings = result.learned.version, experience_settings(config)

    def context(task: Task) -> Context:
        return prompt_context(
            version.library, settings, use="deployment", task=task, selector=version.selector
        )

    kinds = Counter(e.kind for e in version.library.shown)
    note = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "empty library"
    return Learnt(job.family.system, context, note)


def our_config(preset: str, job: Job, folder: str) -> dict[str, Any]:
    """Return the settings of a run: the preset's own, beside sizes and the arm."""
    learn: dict[str, Any] = {
        "preset": preset,
        "seed": job.seed,
        "objective_agent": job.family.description,
        "objective_learning": "the house's rules for each part of the answer",
    }
    if not preset.startswith("paper"):
        learn["entries"] = job.arm.entries
    values: dict[str, Any] = {
        "run": {"folder": f"{folder}/run", "probe": 0, "concurrency": 64, "on_truncated": "grade"},
        "tasks": {
            "practice": len(job.practice),
            "gate": len(job.gate),
            "test": 0,
            "seed": job.seed,
        },
        "policy": {"lm": "scripted:policy", "system": job.family.system},
        "critic": {"lm": "scripted:critic"},
        "learn": learn,
    }
    for section, keys in job.settings.items():
        values[section] = {**values.get(section, {}), **keys}
    return values


RIVALS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "gepa": ("gepa", "gepa_arm.py", {"metric_calls": 150, "minibatch": 6}),
    "gepa-300": ("gepa", "gepa_arm.py", {"metric_calls": 300, "minibatch": 6}),
    "gepa-600": ("gepa", "gepa_arm.py", {"metric_calls": 600, "minibatch": 6}),
    "simba": ("dspy", "simba_arm.py", {"steps": 8}),
    "simba-demos": ("dspy", "simba_arm.py", {"steps": 8}),
    "ace": ("ace", "ace_arm.py", {}),
}


async def learn_rival(name: str, job: Job, bench: Bench, label: str) -> Learnt:
    """Run a rival's script against the server, under its own prompts."""
    cases = [*job.practice, *job.gate]
    seat = Seat(job.family, {c.task_id: c for c in cases}, job.noise, job.arm.tell)
    bench.seats[label] = seat
    environment, script, sizes = RIVALS[name]

    def row(case: Case) -> dict[str, str]:
        return {"task_id": case.task_id, "prompt": case.text, "reference": case.key}

    sent = {
        "url": bench.url(label),
        "model": "policy",
        "critic": "critic",
        "critic_tokens": 8000,
        "seed": job.seed,
        "system": job.family.system,
        "train": [row(c) for c in job.practice],
        "choose": [row(c) for c in job.gate],
        "budget_tokens": 10_000_000,
        "deadline_s": DEADLINE_S,
        "temperature": 0.7,
        "max_tokens": 400,
        "tell": job.arm.tell,
        **sizes,
    }
    demos = {"DEMOS": 4} if name.endswith("demos") else {}
    return Learnt.from_row(await run_script(environment, script, sent, demos))


async def test_scores(learnt: Learnt, job: Job, test: Sequence[Case], account: Account) -> Scores:
    """Return the rewards on the test tasks; every method gets the same draws' seeds."""
    groups = await sample_groups(
        [as_task(c, reference=False) for c in test],
        ChatPolicy(SimulatedLM("policy", job.noise, account), system=learnt.system,
                   sampling=Sampling(), limits=LIMITS),
        HouseVerifier(job.family, test, tell=False),
        context=learnt.context,
        draws=GroupSpec(2, seed=job.seed, scope="test", stage="test"),
        settings=SampleSettings(concurrency=64, on_truncated="grade"),
    )  # fmt: skip
    return {g.task.task_id: list(g.rewards_G) for g in groups}


__all__ = ["ARMS", "RIVALS", "Arm", "HouseVerifier", "Job", "Unavailable", "learn_ours",
           "learn_rival", "test_scores"]  # fmt: skip
