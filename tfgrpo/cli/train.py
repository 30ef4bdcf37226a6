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
from tfgrpo.runtime.durations import duration_words
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
            on_step=None if quiet or rank else StepLines(settings),
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


class StepLines:
    """Prints a line for each step: figures, time left, and what keeps a step from teaching.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: TrainConfig) -> None:
        self._steps = settings.optimiser.steps
        self._limit = settings.rollout.max_tokens
        self._seconds: list[float] = []
        self._told: set[str] = set()

    def __call__(self, report: Any) -> None:
        """Print the lines of a finished step."""
        figures = report.figures
        self._seconds.append(figures["seconds"])
        mean = sum(self._seconds) / len(self._seconds)
        left = (self._steps - report.step) * mean
        typer.echo(
            f"step {report.step}/{self._steps}: reward {figures['reward_mean']:.3f}, informative "
            f"groups {figures['informative_share']:.0%}, gradient norm {figures['grad_norm']:.3g}, "
            f"{figures['seconds']:.2f} s ({figures['rollout_seconds']:.2f} rollout), "
            f"{figures['samples_per_s']:.1f} rollouts/s"
            + (f", about {duration_words(left)} left" if left > 0 else "")
        )
        cut = figures.get("truncated_share", 0.0)
        if cut > 0.5:
            self._once(
                "cut",
                f"{cut:.0%} of the replies were cut at rollout.max_tokens = {self._limit}: "
                "raise it",
            )
        if figures["informative_share"] == 0:
            self._once(
                "alike",
                "no group differs in reward, so this step moves no weight: [hints] for tasks that "
                "always fail, harder tasks for those that never do (docs/hints.md)",
            )

    def _once(self, what: str, words: str) -> None:
        if what not in self._told:
            self._told.add(what)
            typer.echo(f"  note: {words}")


def _verdict(result: TrainResult) -> str:
    where = f"the model is in {result.model} (load it as local:{result.model})"
    found = result.evaluation
    if not found:
        return f"done; no held-out tasks were given, so nothing was evaluated; {where}"
    return (
        f"done; held-out mean reward {found['mean']:.3f} (95 % interval {found['low']:.3f} to "
        f"{found['high']:.3f}, {found['tasks']} tasks, no hints); {where}"
    )
