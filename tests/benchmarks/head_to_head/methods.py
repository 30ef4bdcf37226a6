"""The methods that run in this process: no library, tips, voting, and tfgrpo's two presets.

A method learns on tasks under an account of tokens and returns what to put before the actor. Does
not know how results become a table.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.head_to_head.data import Split
from tests.benchmarks.head_to_head.families import Family
from tfgrpo.config.learn import Config
from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart
from tfgrpo.experience import prompt_context
from tfgrpo.learning.experience_settings import experience_settings
from tfgrpo.learning.learn import learn_async
from tfgrpo.lm import open_lm
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Limits, Request, Sampling
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.sampling import GroupSpec, SampleSettings, sample_groups
from tfgrpo.statistics import Scores

ACTOR = Sampling(temperature=0.7, max_tokens=24)
LIMITS = Limits(timeout_s=600.0)
TEST_SEED = 77
N_TIPS = 4


class Unavailable(Exception):
    """A method cannot run here; the message goes into the table."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a method puts before the actor."""

    system: str
    context: Context | Callable[[Task], Context] = EMPTY_CONTEXT
    note: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Learnt:
        """Restore what a rival's script printed."""
        parts = tuple(
            ContextPart("exemplar", turns=(Message("user", q), Message("assistant", a)))
            for q, a in row["turns"]
        )
        return cls(row["system"], Context(parts), row["note"])


@dataclass(frozen=True, slots=True)
class Setup:
    """One learning run."""

    family: Family
    spec: str
    seed: int
    split: Split
    budget_tokens: int
    deadline_s: float
    extra: Mapping[str, Any] = field(default_factory=dict)


async def test_scores(
    family: Family, learnt: Learnt, spec: str, tasks: list[Task], draws: int
) -> Scores:
    """Return test rewards on the test tasks; every method gets the same draws' seeds."""
    lm = open_lm(spec)
    try:
        groups = await sample_groups(
            tasks,
            ChatPolicy(lm, system=learnt.system, sampling=ACTOR, limits=LIMITS),
            family.test_verifier(),
            context=learnt.context,
            draws=GroupSpec(draws, seed=TEST_SEED, scope="test", stage="test"),
            settings=SampleSettings(concurrency=64, on_truncated="grade"),
        )
    finally:
        await lm.aclose()
    failed = sum(len(g.rollouts) - len(g.rewards_G) for g in groups)
    if failed:
        raise RuntimeError(f"{failed} test rollouts have no reward: the figures would not compare")
    return {g.task.task_id: list(g.rewards_G) for g in groups}


async def tips(setup: Setup) -> Learnt:
    """Ask the model once for tips, without any practice."""
    prompt = (
        f"{setup.family.description}\n\nWrite {N_TIPS} short tips that help an assistant to "
        "answer such questions exactly. One tip a line, nothing else."
    )
    lm = open_lm(setup.spec)
    try:
        request = Request(
            (Message("user", prompt),),
            sampling=Sampling(temperature=0.7, max_tokens=200),
            limits=LIMITS,
        )
        (reply,) = await lm.complete(request, 1, [setup.seed])
    finally:
        await lm.aclose()
    lines = [re.sub(r"^[\s\d.)*-]+", "", line).strip() for line in reply.text.splitlines()]
    kept = [line for line in lines if line][:N_TIPS]
    parts = tuple(ContextPart("lesson", t, source=f"tip{i}") for i, t in enumerate(kept))
    return Learnt(setup.family.system, Context(parts), note=f"{len(kept)} tips")


async def voting_scores(
    family: Family, spec: str, tasks: list[Task], *, votes: int, answers: int, seed: int
) -> Scores:
    """Return rewards of `answers` majority answers a task, each out of `votes` draws."""
    lm = open_lm(spec)
    try:
        groups = await sample_groups(
            tasks,
            ChatPolicy(lm, system=family.system, sampling=ACTOR, limits=LIMITS),
            None,
            draws=GroupSpec(votes * answers, seed=1000 + seed, scope="vote", stage="test"),
            settings=SampleSettings(concurrency=64),
        )
    finally:
        await lm.aclose()
    verifier = family.test_verifier()
    scores: dict[str, list[float]] = {}
    for group in groups:
        for first in range(0, votes * answers, votes):
            chosen = majority(family, group.rollouts[first : first + votes])
            attempt = Rollout("vote", group.task.task_id, (Step(Message("assistant", chosen)),))
            score = await verifier.score(attempt, group.task)
            scores.setdefault(group.task.task_id, []).append(score.reward)
    return scores


def majority(family: Family, rollouts: tuple[Rollout, ...]) -> str:
    """Return the most frequent answer, the earlier one on a tie."""
    answers = [family.vote(r.answer) for r in rollouts if r.answer]
    return Counter(answers).most_common(1)[0][0] if answers else ""


async def learnt_by(preset: str, setup: Setup) -> Learnt:
    """Learn with tfgrpo under a preset; what its gate and final choice keep, as it is deployed."""
    with tempfile.TemporaryDirectory(prefix="head-to-head-") as folder:
        file = Path(folder) / "tasks.jsonl"
        _write_tasks(file, [*setup.split.train, *setup.split.choose])
        config = Config.from_mapping(learn_config(preset, setup, folder, file))
        result = await learn_async(config)
    version, settings = result.learned.version, experience_settings(config)

    def context(task: Task) -> Context:
        return prompt_context(
            version.library, settings, use="deployment", task=task, selector=version.selector
        )

    kinds = Counter(e.kind for e in version.library.shown)
    words = (
        ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(kinds.items()))
        or "empty library"
    )
    stopped = f" ({result.learned.stopped_by})" if result.learned.stopped_by else ""
    return Learnt(setup.family.system, context, note=words + stopped)


def learn_config(preset: str, setup: Setup, folder: str, tasks: Path) -> dict[str, Any]:
    """The settings of a run whose tokens fit the budget.

    The published preset has neither gate nor rollback: all tasks are practised in small steps, so
    that a spent budget costs one step and not all lessons. Ours shares the tasks between practice
    and gate, and takes worked examples alone: the example's own page says that this model writes no
    lessons worth trying, and each kind of proposal costs another round of the gate. Prompts and
    replies have caps of their own, together 1.1 of the budget; rivals may go to 1.25.
    """
    n_train, n_choose = len(setup.split.train), len(setup.split.choose)
    is_ours = preset == "default"
    learn: dict[str, Any] = {
        "preset": preset,
        "seed": setup.seed,
        "objective_agent": setup.family.description,
        "objective_learning": setup.family.objective,
    }
    if is_ours:
        learn |= {
            "batch": n_train,
            "group_size": 6,
            "reference_exemplars": True,
            "entries": "exemplars",
            "settings": {"exemplars": 4},
        }
    else:
        learn |= {"batch": 6, "group_size": 5, "epochs": 3}
    return {
        "run": {"folder": f"{folder}/run", "concurrency": 64, "on_truncated": "grade", "probe": 0},
        "tasks": {
            "path": str(tasks),
            "practice": n_train if is_ours else n_train + n_choose,
            "gate": n_choose if is_ours else 0,
            "test": 0,
            "seed": setup.seed,
            "stratify": "kind",
        },
        "policy": {
            "lm": setup.spec,
            "system": setup.family.system,
            "sampling": {"temperature": ACTOR.temperature, "max_tokens": ACTOR.max_tokens},
            "timeout_s": LIMITS.timeout_s,
        },
        "critic": {
            "sampling": {"temperature": 0.7, "max_tokens": 160},
            "context_tokens": 2000,
            "timeout_s": LIMITS.timeout_s,
        },
        "verifier": dict(setup.family.verifier),
        "learn": learn,
        "gate": {"enabled": is_ours, "group_size": 4},
        "budget": {
            "prompt_tokens": int(0.75 * setup.budget_tokens),
            "completion_tokens": int(0.35 * setup.budget_tokens),
            "seconds": setup.deadline_s,
        },
    }


def _write_tasks(file: Path, tasks: list[Task]) -> None:
    import json

    file.write_text("".join(json.dumps(t.to_dict()) + "\n" for t in tasks), encoding="utf-8")
