"""`tfgrpo train CONFIG.toml`: train, resume, evaluate, export.

Does not know how training works; prints a line a step and one verdict. Source: own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.errors import ConfigError, MissingExtraError


def train(
    config: Annotated[Path, typer.Argument(help="Settings as TOML; see docs/rl.md.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, over the file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line a step.")] = False,
) -> None:
    """Train a model on groups of rollouts; the same command goes on after a stop.

    Under `torchrun` every process trains a share and the first one prints and writes.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError.of("rl", "training", exc.name or "torch") from exc
    from tfgrpo.rl import distributed
    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.runtime.import_string import add_module_folder

    add_module_folder(config.parent)
    settings = TrainConfig.from_toml(config, overrides or [])
    rank, processes = distributed.start()
    try:
        result = run(settings, _quiet if quiet or rank else _print_step)
    finally:
        distributed.finish()
    if rank == 0:
        typer.echo(_verdict(settings, result))
    if processes > 1:
        distributed.end()


def run(settings: Any, on_step: Any) -> dict[str, Any]:
    """Train by settings and write the final model into `RUN/model`; return the evaluation."""
    from tfgrpo.rl import distributed
    from tfgrpo.rl.checkpoints.export import write_card
    from tfgrpo.rl.monitoring.metrics import tensorboard_sink, tracker_sink
    from tfgrpo.rl.rollouts.hint_setup import prepare
    from tfgrpo.rl.rollouts.plugins import allocator_of, engine_of
    from tfgrpo.rl.trainer import Trainer, load_parts
    from tfgrpo.tasks.files import read_tasks
    from tfgrpo.verifiers import make_verifier

    if not settings.tasks.path:
        raise ConfigError("tasks.path is empty: name a JSONL file of training tasks")
    verifier = make_verifier(settings.verifier)
    tasks = read_tasks(settings.tasks.path)
    held_out = read_tasks(settings.tasks.held_out) if settings.tasks.held_out else []
    parts = load_parts(settings.model.lm, device=settings.model.device, dtype=settings.model.dtype)
    tasks, hints = prepare(settings, tasks, parts)
    folder = Path(settings.run.folder)
    sinks = {}
    if settings.run.tensorboard and distributed.world()[0] == 0:
        sinks["tensorboard"] = tensorboard_sink(folder / "tensorboard")
    if settings.run.tracker and distributed.world()[0] == 0:
        sinks[settings.run.tracker] = tracker_sink(
            settings.run.tracker, "tfgrpo", settings.to_json()
        )
    trainer = Trainer(
        settings,
        parts,
        tasks,
        verifier,
        held_out=held_out,
        hints=hints,
        generator=engine_of(settings, parts),
        allocate=allocator_of(settings.curriculum),
        sinks=sinks,
    )
    result = trainer.train(on_step)
    if distributed.world()[0] == 0:
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        trainer.export(model)
        write_card(model, base_model=parts.name, config=settings.to_json(), evaluation=result)
    return result


def _print_step(report: Any) -> None:
    figures = report.figures
    typer.echo(
        f"step {report.step}: reward {figures['reward_mean']:.3f}, informative groups "
        f"{figures['informative_share']:.0%}, gradient norm {figures['grad_norm']:.3g}, "
        f"{figures['seconds']:.2f} s ({figures['rollout_seconds']:.2f} rollout), "
        f"{figures['samples_per_s']:.1f} rollouts/s"
    )


def _quiet(report: Any) -> None:
    """Print nothing."""


def _verdict(settings: Any, result: dict[str, Any]) -> str:
    where = Path(settings.run.folder) / "model"
    told = f"the model is in {where} (load it as local:{where})"
    if not result:
        return f"done; no held-out tasks were given, so nothing was evaluated; {told}"
    return (
        f"done; held-out mean reward {result['mean']:.3f} (95 % interval {result['low']:.3f} to "
        f"{result['high']:.3f}, {result['tasks']} tasks, no hints); {told}"
    )
