"""`train`: a whole training run by its config: load, train, evaluate, export.

Does not know how a step works (`trainer`). Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Allocator, Verifier
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints.export import write_card
from tfgrpo.rl.checkpoints.hub import push
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.config_sections import TrainRunConfig
from tfgrpo.rl.generation import engine_of
from tfgrpo.rl.judge_calls import JudgeCalls
from tfgrpo.rl.monitoring.metrics import Sink, tensorboard_sink, tracker_sink
from tfgrpo.rl.rollouts.factory import prompter_of
from tfgrpo.rl.rollouts.hint_setup import prepare
from tfgrpo.rl.rollouts.turn_tools import TurnText
from tfgrpo.rl.saved_groups import Reading, SavedGroups
from tfgrpo.rl.trainer import StepReport, Trainer, TrainerParts
from tfgrpo.rollout import Task
from tfgrpo.store import read_groups
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers import make_verifier


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training run."""

    steps: int
    model: Path
    """Folder of the trained model, in Hugging Face form."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """Held-out mean reward with its interval: `mean`, `low`, `high`, `tasks`, `step`, and where it
    was scored `before` training and the `gain`; empty without held-out tasks."""
    pushed: str = ""
    """Address on the hub, where it was uploaded."""


def train(
    config: TrainConfig,
    *,
    tasks: Sequence[Task] | None = None,
    held_out: Sequence[Task] | None = None,
    verifier: Verifier | None = None,
    allocate: Allocator | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> TrainResult:
    """Train a model, resuming the run folder's newest checkpoint; write it into `RUN/model`.

    Args:
        config: all settings.
        tasks: training tasks; None reads `tasks.path`.
        held_out: evaluation tasks; None reads `tasks.held_out`, where it is set.
        verifier: what judges replies; None makes the one of `[verifier]`.
        allocate: group sizes, for `curriculum.allocate`.
        on_step: called after each step.

    Raises:
        ConfigError: settings, tasks, a mismatch of log-probs, memory.
        VerifierError: nothing of several steps could be graded.
        StoreError: a checkpoint cannot be written or read.
    """
    if config.curriculum.allocate and allocate is None:
        raise ConfigError(
            "curriculum.allocate is set: pass the allocator as train(…, allocate=…), or use "
            "`tfgrpo train`, which makes it from the settings"
        )
    if tasks is None:
        tasks = [] if config.tasks.groups else _tasks(config.tasks.path)
    if held_out is None:
        held_out = read_tasks(config.tasks.held_out) if config.tasks.held_out else []
    with JudgeCalls(config) as judge:
        verifier = verifier or make_verifier(config.verifier, open_lm=judge.open)
        return _train(config, tasks, held_out, verifier, allocate, on_step)


def _train(
    config: TrainConfig,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    verifier: Verifier,
    allocate: Allocator | None,
    on_step: Callable[[StepReport], None] | None,
) -> TrainResult:
    model = load_parts(config.model.lm, device=config.model.device, dtype=config.model.dtype)
    saved: SavedGroups | None = None
    if config.tasks.groups:
        saved = saved_groups(config, model)
        tasks = saved.tasks
    tasks, hints = prepare(config, tasks, model)
    parts = TrainerParts(
        generator=engine_of(config, model),
        make_groups=saved,
        allocate=allocate,
        sinks=_sinks(config.run, config),
    )
    trainer = Trainer(config, model, tasks, verifier, held_out=held_out, hints=hints, parts=parts)
    evaluation = trainer.train(on_step)
    folder = Path(config.run.folder) / "model"
    pushed = ""
    if distributed.world()[0] == 0:
        folder.mkdir(parents=True, exist_ok=True)
        trainer.export(folder)
        write_card(folder, origin=trainer.origin, config=config.to_json(), evaluation=evaluation)
        if config.run.push_to_hub:
            pushed = push(folder, config.run.push_to_hub, private=config.run.hub_private)
    return TrainResult(trainer.step_number, folder, evaluation, pushed)


def saved_groups(config: TrainConfig, model: LoadedModel) -> SavedGroups:
    """Return the groups that `tasks.groups` names, as this model's tokens.

    Raises:
        ConfigError: none of them can be trained on.
    """
    prompter = prompter_of(config, model)
    eos_ids = tuple(model.eos_ids)
    turns = TurnText(prompter.tokenizer, template=config.model.template, eos_ids=eos_ids)
    reading = Reading(prompter.tokenizer, turns, eos_ids[0] if eos_ids else None)
    return SavedGroups(read_groups(config.tasks.groups), prompter, reading)


def _tasks(path: str) -> list[Task]:
    if not path:
        raise ConfigError("tasks.path is empty: name a JSONL file of training tasks")
    return read_tasks(path)


def _sinks(run: TrainRunConfig, config: TrainConfig) -> dict[str, Sink]:
    if distributed.world()[0]:
        return {}
    sinks: dict[str, Sink] = {}
    if run.tensorboard:
        sinks["tensorboard"] = tensorboard_sink(Path(run.folder) / "tensorboard")
    if run.tracker:
        sinks[run.tracker] = tracker_sink(run.tracker, "tfgrpo", config.to_json())
    return sinks
