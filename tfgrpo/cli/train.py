"""`tfgrpo train CONFIG.toml`: train, resume, evaluate, export.

Wires what training may not know: rollout budgets of `tfgrpo.routing`. Does not know how training
works; prints one line per step and one verdict. Source: own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfgrpo.errors import MissingExtraError
from tfgrpo.protocols import Allocator
from tfgrpo.runtime.import_string import add_module_folder

if TYPE_CHECKING:
    from tfgrpo.rl import TrainResult
    from tfgrpo.rl.config import TrainConfig


def train(
    config: Annotated[Path, typer.Argument(help="Settings as TOML; see docs/rl.md.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, over the file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per step.")] = False,
) -> None:
    """Train a model on groups of rollouts; the same command goes on after a stop.

    Under `torchrun` every process trains a share and the first one prints and writes.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError.of("rl", "training", exc.name or "torch") from exc
    from tfgrpo import rl
    from tfgrpo.rl import distributed

    add_module_folder(config.parent)
    settings = rl.TrainConfig.from_toml(config, overrides or [])
    rank, processes = distributed.start()
    try:
        result = rl.train(
            settings,
            allocate=allocator_of(settings),
            on_step=None if quiet or rank else _print_step,
        )
    finally:
        distributed.finish()
    if rank == 0:
        typer.echo(_verdict(result))
    if processes > 1:
        distributed.end()


def allocator_of(settings: TrainConfig) -> Allocator | None:
    """Return what gives group sizes, or None; raises as `open_allocator`."""
    curriculum = settings.curriculum
    if not curriculum.allocate:
        return None
    from tfgrpo.routing.budgets.factory import open_allocator

    return open_allocator(
        curriculum.allocate, curriculum.allocate_options,
        group_size=settings.rollout.group_size, where="curriculum.allocate",
    )  # fmt: skip


def _print_step(report: Any) -> None:
    figures = report.figures
    typer.echo(
        f"step {report.step}: reward {figures['reward_mean']:.3f}, informative groups "
        f"{figures['informative_share']:.0%}, gradient norm {figures['grad_norm']:.3g}, "
        f"{figures['seconds']:.2f} s ({figures['rollout_seconds']:.2f} rollout), "
        f"{figures['samples_per_s']:.1f} rollouts/s"
    )


def _verdict(result: TrainResult) -> str:
    where = f"the model is in {result.model} (load it as local:{result.model})"
    found = result.evaluation
    if not found:
        return f"done; no held-out tasks were given, so nothing was evaluated; {where}"
    return (
        f"done; held-out mean reward {found['mean']:.3f} (95 % interval {found['low']:.3f} to "
        f"{found['high']:.3f}, {found['tasks']} tasks, no hints); {where}"
    )
