"""The first stage of training: rows from draws and journal, an objective, looks on the gate tasks.

Rows come from practice tasks only. After every few epochs the bare model is scored on the gate
tasks; the best look is exported, so that training too long costs nothing but time.

Does not know the plan's reasons or the table. Source: own.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfgrpo.context import Context
from tfgrpo.escalate.run_data import Material
from tfgrpo.escalate.stage import Stage
from tfgrpo.messages import Message
from tfgrpo.protocols import Verifier
from tfgrpo.rl.distillation.distiller import Distiller, DistillSettings
from tfgrpo.rl.distillation.fresh_groups import FreshGroups
from tfgrpo.rl.distillation.icpo import Icpo, IcpoSettings
from tfgrpo.rl.distillation.nudgerl import NudgeRL
from tfgrpo.rl.distillation.objectives import Imitation, NearTeacher, PassSettings
from tfgrpo.rl.distillation.rows import (
    DistillRow,
    balanced,
    counts_by_source,
    graded,
    rows_of_groups,
    verified,
)
from tfgrpo.rollout import Rollout, RolloutGroup, Step
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.files import write_whole
from tfgrpo.sampling import judge
from tfgrpo.statistics import Scores, mean_interval

DRAWING = ("nudge", "icpo")
"""Objectives that draw their own rollouts at every step."""
STRATEGIES = 2
"""Contexts that the library is dealt into for NudgeRL, the released trainer's number."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of it."""

    spec: str
    """`local:` spec of the best look."""
    gate: Scores
    """Its rewards on the gate tasks, bare prompt."""
    rows: dict[str, int]
    """Distinct replies trained on, by source; empty for objectives that draw their own."""
    tasks: int
    """Practice tasks that gave rows."""
    looks: dict[str, float]
    """Mean on the gate tasks by step."""
    steps: int


def best_look(means: dict[str, float]) -> str:
    """Return the step of the best look; the earliest of equals, so that less is trained.

    >>> best_look({"10": 0.2, "2": 0.2, "4": 0.1})
    '2'
    """
    return min(means, key=lambda step: (-means[step], int(step)))


def scores_of(groups: Sequence[RolloutGroup]) -> dict[str, tuple[float, ...]]:
    """Return rewards by task."""
    return {g.task.task_id: g.rewards_G for g in groups}


def distil(stage: Stage) -> Distilled | None:
    """Train the student as the plan says and return its best look; goes on where it was cut.

    Returns None where no reply was fit to be trained on.

    Raises:
        ConfigError: a gradient that is not finite.
        StoreError: the folder cannot be written or holds another run's checkpoints.
    """
    student, material, settings = stage.student, stage.material, stage.settings
    plan, folder, say = stage.plan, stage.folder, stage.say
    done = folder / "distilled.json"
    if done.is_file():
        row = json.loads(done.read_text(encoding="utf-8"))
        gate = {t: tuple(r) for t, r in row.pop("gate").items()}
        return Distilled(gate=gate, **row)
    rows = _rows(stage)
    if not rows and plan.distil not in DRAWING:
        say("distil: left out, no reply of a practice task was fit to be trained on")
        return None
    counts = counts_by_source(rows)
    tasks = len({r.task_id for r in rows}) if rows else len(material.practice)
    if rows:
        told = ", ".join(f"{n} from {source}" for source, n in counts.items())
        say(f"distil: {len(rows)} distinct replies of {tasks} practice tasks ({told})")
    objective = _objective(stage, rows)
    steps = settings.epochs * objective.steps_per_epoch
    every = max(1, math.ceil(settings.epochs / settings.looks)) * objective.steps_per_epoch
    training = DistillSettings(
        steps=steps,
        lr=settings.lr,
        warmup=min(5, steps // 4),
        schedule="linear",
        lora_rank=settings.lora_rank,
        seed=settings.seed,
        save_every=every,
    )
    distiller = Distiller(student.parts, objective, training, folder)
    looking = _Looks(stage, distiller)

    def on_step(step: int, figures: dict[str, float]) -> None:
        looking.losses.append(figures["loss"])
        if step % every == 0 or step == steps:
            looking.look(step)

    distiller.run(on_step)
    looking.catch_up(steps)
    found = Distilled(
        spec=f"local:{folder / 'best'}",
        gate=looking.best_scores(),
        rows=counts,
        tasks=tasks,
        looks=looking.means,
        steps=steps,
    )
    write_json(done, {**_plain(found), "gate": {t: list(r) for t, r in found.gate.items()}})
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # four times the model's size
    return found


def _plain(found: Distilled) -> dict[str, Any]:
    names = ("spec", "rows", "tasks", "looks", "steps")
    return {name: getattr(found, name) for name in names}


class _Looks:
    """Scores on the gate tasks while training goes on, and the export of the best one."""

    def __init__(self, stage: Stage, distiller: Distiller) -> None:
        self._stage, self._distiller = stage, distiller
        self._tasks, self._journal = stage.material.gate, stage.journal
        self.losses: list[float] = []
        kept = self._journal.decided("look")
        self.means: dict[str, float] = {k: v["mean"] for k, v in kept.items()}
        self._scores: dict[str, dict[str, tuple[float, ...]]] = {}

    def look(self, step: int) -> None:
        """Score the weights as they are; export them where no earlier look was better."""
        label = f"distil-{step}"
        groups = self._journal.drawn(
            "gate",
            label,
            self._tasks,
            lambda: self._stage.student.groups(
                self._tasks,
                self._stage.sizes.gate,
                derive_seed(self._stage.settings.seed, "gate"),
                label=label,
            ),
        )
        scores = scores_of(groups)
        mean = mean_interval(scores).estimate
        self._scores[str(step)] = scores
        self.means[str(step)] = mean
        if best_look(self.means) == str(step):
            self._stage.student.export(self._stage.folder / "best", self._distiller.export)
        self._journal.decide("look", {"mean": mean}, key=str(step))
        recent = self.losses[-5:]
        loss = f", loss {sum(recent) / len(recent):.3f}" if recent else ""
        self._stage.say(f"distil, step {step}: gate tasks {mean:.3f} without the library{loss}")

    def catch_up(self, steps: int) -> None:
        """Look at the last step where a resumed run had nothing left to train."""
        if str(steps) not in self.means:
            self.look(steps)

    def best_scores(self) -> dict[str, tuple[float, ...]]:
        """Rewards of the best look."""
        best = best_look(self.means)
        if best not in self._scores:
            label = f"distil-{best}"
            kept = self._journal.drawn("gate", label, self._tasks, list)
            self._scores[best] = scores_of(kept)
        return self._scores[best]


def _rows(stage: Stage) -> list[DistillRow]:
    """Return the rows of the offline objectives; none for those that draw their own."""
    student, material, settings = stage.student, stage.material, stage.settings
    plan = stage.plan
    if plan.distil in DRAWING:
        return []
    practice = {t.task_id for t in material.practice}
    rows: list[DistillRow] = []
    keep = verified(stage.full_marks) if plan.distil == "supervised" else graded
    if material.has_library:
        draws = stage.sizes.draws
        seed = derive_seed(settings.seed, "draws")
        groups = stage.journal.drawn(
            "practice",
            "library",
            material.practice,
            lambda: student.groups(material.practice, draws, seed, material.context),
        )
        rows += rows_of_groups(
            groups,
            student.prompts,
            keep=keep,
            source="library",
            end_id=student.end_id,
            own_tokens=True,
        )
    if plan.distil == "supervised":
        more = (
            ("journal", material.practice_groups),
            ("exemplar", exemplar_groups(material, stage.verifier)),
        )
        for source, groups_of in more:
            rows += rows_of_groups(
                groups_of,
                student.prompts,
                keep=keep,
                source=source,
                end_id=student.end_id,
                own_tokens=False,
                turns=student.turns,
            )
    assert all(r.task_id in practice for r in rows), "a row of a task that is not practised"
    per_task = settings.rows_per_task if plan.distil == "supervised" else 0
    return balanced(rows, per_task=per_task)


def exemplar_groups(material: Material, verifier: Verifier) -> list[RolloutGroup]:
    """Return the library's worked examples as groups of one, judged again by the verifier."""
    by_id = {t.task_id: t for t in material.practice}
    found = []
    for entry in material.library.shown:
        sources = [t for t in entry.provenance.task_ids if t in by_id]
        replies = [m for m in entry.turns if m.role == "assistant"]
        if entry.kind != "exemplar" or len(sources) != 1 or len(replies) != 1:
            continue
        task = by_id[sources[0]]
        reply = Message("assistant", replies[0].content)
        attempt = Rollout(f"exemplar-{entry.experience_id}", task.task_id, steps=(Step(reply),))
        judged = asyncio.run(judge(attempt, task, verifier))
        found.append(
            RolloutGroup(f"exemplar-{entry.experience_id}", task, (judged,), Context(), "exemplar")
        )
    return found


def _objective(stage: Stage, rows: Sequence[DistillRow]) -> Any:
    """Return the plan's objective, with `steps_per_epoch`."""
    student, material, settings = stage.student, stage.material, stage.settings
    plan = stage.plan
    temperature = student.sampling.temperature or 1.0
    passes = PassSettings(micro_batch_tokens=settings.micro_batch_tokens)
    common: dict[str, Any] = {"tasks_per_step": settings.tasks_per_step, "seed": settings.seed}
    if plan.distil == "supervised":
        return Imitation(rows, settings=passes, **common)
    if plan.distil in ("forward_kl", "reverse_kl"):
        direction: Any = plan.distil.removesuffix("_kl")
        return NearTeacher(
            student.parts.decoder,
            rows,
            direction=direction,
            top_k=settings.top_k,
            settings=passes,
            **common,
        )
    source = FreshGroups(
        student.draw("on-policy"),
        material.practice,
        lambda task: dealt(material.context(task), STRATEGIES),
        student.prompts.ids,
        passes=replace(passes, temperature=temperature),
        **common,
    )
    if plan.distil == "nudge":
        return NudgeRL(source)
    whole = replace(source, contexts_of=lambda task: [material.context(task)])
    return Icpo(whole, IcpoSettings(steps=settings.epochs * source.steps_per_epoch))


def dealt(context: Context, n: int) -> list[Context]:
    """Deal a library's parts into at most n contexts, as strategies for NudgeRL (approximation)."""
    hands = [context.parts[i::n] for i in range(n)]
    return [Context(hand, context.placement, context.template) for hand in hands if hand]


def write_json(path: Path, row: Any) -> None:
    """Write JSON so that the file appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(row, indent=1) + "\n")
