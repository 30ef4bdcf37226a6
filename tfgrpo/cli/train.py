"""`tfgrpo train CONFIG.toml`: train, resume, evaluate, export.

Wires what training may not know: rollout budgets of `tfgrpo.routing`. Does not know how training
works; prints one line per step and one verdict. Source: own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
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

    logging.getLogger("tfgrpo.rl.trainer").setLevel(logging.INFO)  # the size of a checkpoint
    add_module_folder(config.parent)
    settings = rl.TrainConfig.from_toml(config, overrides or [])
    rank, processes = distributed.start()
    lines = None if quiet or rank else StepLines(settings)
    try:
        result = rl.train(settings, allocate=allocator_of(settings), on_step=lines)
    finally:
        if lines is not None:
            lines.close()
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
    """Shows each step: a bar where standard error is a terminal, a line each step elsewhere, and
    what keeps steps from teaching.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: TrainConfig) -> None:
        self._steps = settings.optimiser.steps
        self._limit = settings.rollout.max_tokens
        self._seconds: list[float] = []
        self._told: set[str] = set()
        self._alike = 0
        self._bar = _Bar(self._steps) if sys.stderr.isatty() else None

    def __call__(self, report: Any) -> None:
        """Show a finished step."""
        figures = report.figures
        self._seconds.append(figures["seconds"])
        mean = sum(self._seconds) / len(self._seconds)
        left = (self._steps - report.step) * mean
        words = (
            f"reward {figures['reward_mean']:.3f}, informative "
            f"groups {figures['informative_share']:.0%}"
        )
        if self._bar is not None:
            self._bar.show(report.step, words)
        else:
            typer.echo(
                f"step {report.step}/{self._steps}: {words}, "
                f"gradient norm {figures['grad_norm']:.3g}, "
                f"{figures['seconds']:.2f} s ({figures['rollout_seconds']:.2f} rollout), "
                f"{figures['samples_per_s']:.1f} rollouts/s"
                + (f", about {duration_words(left)} left" if left > 0 else "")
            )
        self._remark(figures)

    def _remark(self, figures: Mapping[str, Any]) -> None:
        cut = figures.get("truncated_share", 0.0)
        if cut > 0.5:
            self._once(
                "cut",
                f"{cut:.0%} of the replies were cut at rollout.max_tokens = {self._limit}: "
                "raise it",
            )
        self._alike = self._alike + 1 if figures["informative_share"] == 0 else 0
        if self._alike in (1, 3, 10):
            steps = "this step moves" if self._alike == 1 else f"{self._alike} steps in a row move"
            self._once(
                f"alike {self._alike}",
                f"no group differs in reward, so {steps} no weight: [hints] for tasks that "
                "always fail, harder tasks for those that never do (docs/hints.md)",
            )

    def close(self) -> None:
        """Leave the bar."""
        if self._bar is not None:
            self._bar.close()

    def _once(self, what: str, words: str) -> None:
        if what not in self._told:
            self._told.add(what)
            if self._bar is not None:
                self._bar.say(f"note: {words}")
            else:
                typer.echo(f"  note: {words}")


class _Bar:
    """A bar over the steps with the time left.

    Args:
        steps: of the run.
    """

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("step"), BarColumn(bar_width=16), MofNCompleteColumn(),
            TimeRemainingColumn(compact=True), TextColumn("{task.description}"),
            console=Console(stderr=True), auto_refresh=False,
        )  # fmt: skip
        self._task = self._bars.add_task("", total=steps)
        self._bars.start()

    def show(self, step: int, words: str) -> None:
        """Move to a step."""
        self._bars.update(self._task, completed=step, description=words)
        self._bars.refresh()

    def say(self, words: str) -> None:
        """Print a line above the bar."""
        self._bars.console.print(words, markup=False, highlight=False)

    def close(self) -> None:
        """Leave it as it stands."""
        self._bars.stop()


def _verdict(result: TrainResult) -> str:
    where = (
        f"the model is in {result.model}: local:{result.model}, or `tfgrpo serve-model "
        f"local:{result.model}`, or `vllm serve {result.model}`"
    )
    if result.pushed:
        where += f"; uploaded to {result.pushed}"
    found = result.evaluation
    if not found:
        return f"done; no held-out tasks were given, so nothing was evaluated; {where}"
    words = (
        f"done; held-out mean reward {found['mean']:.3f} (95 % interval {found['low']:.3f} to "
        f"{found['high']:.3f}, {found['tasks']} tasks, no hints)"
    )
    if "gain" in found:
        gain = found["gain"]
        words += (
            f", before training {found['before']['mean']:.3f}: {gain['estimate']:+.3f} "
            f"({gain['low']:+.3f} to {gain['high']:+.3f})"
        )
    return f"{words}; {where}"
