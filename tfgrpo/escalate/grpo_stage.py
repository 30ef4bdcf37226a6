"""The second stage of training: a profile of the distilled model, then GRPO where it is mixed.

A group in which all rollouts earn the same has no gradient, so the tasks to practise are found by
drawing a group of each under the weights that training starts from. All-fail tasks come along only
where hints can be cut for them.

Does not know how a step works (`tfgrpo.rl.trainer`). Source: own; the profiling pass as in sGPO.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.escalate.cost import GRPO_TASKS
from tfgrpo.escalate.distil_stage import scores_of, write_json
from tfgrpo.escalate.plan import states_after
from tfgrpo.escalate.run_data import PracticeState
from tfgrpo.escalate.stage import Stage
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.statistics import Scores, mean_interval

LEAST_TASKS = 2
"""Tasks below which GRPO is left out."""


@dataclass(frozen=True, slots=True)
class Practised:
    """What came of it."""

    spec: str
    """`local:` spec of the trained model; empty where GRPO was left out."""
    gate: Scores
    tasks: int
    hinted: int
    """All-fail tasks among them."""
    steps: int
    reason: str


def practice_tasks(groups: Sequence[RolloutGroup], full_marks: float, hints: bool) -> list[Task]:
    """Return the tasks that can teach: mixed ones, and with hints the all-fail ones that have
    something to cut from. Mixed is any difference between rewards, part marks included."""
    states: dict[str, PracticeState] = {s.task.task_id: s for s in states_after(groups, full_marks)}
    found = []
    for group in groups:
        state = states[group.task.task_id]
        can_be_hinted = hints and state.state == "all_fail" and bool(state.hint_from)
        if group.is_informative() or can_be_hinted:
            found.append(group.task)
    return found


def practise(stage: Stage) -> Practised:
    """Profile the student, train it on what is mixed, look at the gate tasks.

    Raises:
        ConfigError, StoreError, VerifierError: as the trainer does.
    """
    student, material, settings = stage.student, stage.material, stage.settings
    journal, folder, say = stage.journal, stage.folder, stage.say
    done = folder / "practised.json"
    if done.is_file():
        row = json.loads(done.read_text(encoding="utf-8"))
        return Practised(gate={t: tuple(r) for t, r in row.pop("gate").items()}, **row)
    sizes = stage.sizes
    seed = derive_seed(settings.seed, "profile")
    profile = journal.drawn(
        "practice",
        "profile",
        material.practice,
        lambda: student.groups(material.practice, sizes.draws, seed, label="profile"),
    )
    tasks = practice_tasks(profile, stage.full_marks, stage.plan.hints)
    mixed = sum(g.is_informative() for g in profile)
    if len(tasks) < LEAST_TASKS:
        reason = f"left out: the profile found {len(tasks)} of {len(profile)} tasks that can teach"
        say(f"GRPO {reason}")
        return Practised("", {}, len(tasks), 0, 0, reason)
    say(f"GRPO: {mixed} of {len(profile)} practice tasks are mixed; training on {len(tasks)} tasks")
    student.release()  # the trainer brings a sampler of its own
    config = train_config(stage, tasks)
    spec = _train(stage, config, tasks)
    gate = journal.drawn(
        "gate",
        "grpo",
        material.gate,
        lambda: student.groups(
            material.gate, sizes.gate, derive_seed(settings.seed, "gate"), label="grpo"
        ),
    )
    scores = scores_of(gate)
    say(f"GRPO: gate tasks {mean_interval(scores).estimate:.3f} without the library")
    reason = f"{config.optimiser.steps} steps on {len(tasks)} tasks"
    found = Practised(spec, scores, len(tasks), len(tasks) - mixed, config.optimiser.steps, reason)
    write_json(
        done,
        {
            "spec": spec,
            "tasks": found.tasks,
            "hinted": found.hinted,
            "steps": found.steps,
            "reason": reason,
            "gate": {t: list(r) for t, r in scores.items()},
        },
    )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return found


def train_config(stage: Stage, tasks: Sequence[Task]) -> TrainConfig:
    """Return the trainer's settings: the run's prompts and sampling, the plan's steps."""
    student, settings, plan = stage.student, stage.settings, stage.plan
    config = stage.material.config
    sampling = student.sampling
    values: dict[str, Any] = {
        "model": {
            "lm": student.spec,
            "system": config.policy.system,
            "template": student.template,
            "lora_rank": settings.lora_rank,
            "device": settings.device,
            "dtype": settings.dtype,
        },
        "rollout": {
            "tasks_per_step": min(GRPO_TASKS, len(tasks)),
            "group_size": max(2, stage.sizes.draws),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature or 1.0,
            "stop": list(sampling.stop),
            "max_rows": settings.max_rows,
            "on_truncated": "grade" if config.run.on_truncated == "grade" else "exclude",
            "verifier_timeout_s": config.run.timeout_s,
        },
        "optimiser": {
            "steps": plan.grpo_steps,
            "lr": settings.grpo_lr,
            "micro_batch_tokens": settings.micro_batch_tokens,
            "vocabulary_chunk": 1024,
        },
        "run": {"folder": str(stage.folder), "seed": settings.seed, "save_every": 5, "keep": 1},
    }
    if plan.hints:
        # A reward of full marks is a success; part marks still leave something to hint at.
        values["hints"] = {
            "name": "sage",
            "missing": "plain",
            "success_above": stage.full_marks - 1e-6,
        }
    return TrainConfig.from_mapping(values, "escalate")


def _train(stage: Stage, config: TrainConfig, tasks: Sequence[Task]) -> str:
    from tfgrpo.hints import make_scheduler
    from tfgrpo.rl.trainer import Trainer

    trainer = Trainer(
        config,
        stage.student.parts,
        tasks,
        stage.verifier,
        hints=make_scheduler(config.hints) if config.hints else None,
    )

    def on_step(report: Any) -> None:
        figures = report.figures
        stage.say(
            f"GRPO, step {report.step}: reward {figures['reward_mean']:.3f}, mixed groups "
            f"{figures['informative_share']:.0%}"
        )

    trainer.train(on_step)
    return stage.student.export(stage.folder / "model", trainer.export)
