"""`tfgrpo escalate RUN`: plan, cost, train, compare.

Progress goes to standard error, the result to standard output. Does not know the stages.
Source: own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tfgrpo.cli.options import flat
from tfgrpo.errors import MissingExtraError
from tfgrpo.escalate.settings import EscalateSettings
from tfgrpo.runtime.import_string import add_module_folder, noted_module_folder
from tfgrpo.runtime.terminal import printable
from tfgrpo.store.postgres.places import place_of
from tfgrpo.tasks.files import read_tasks


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how."""

    model: Annotated[
        str, typer.Option(help="local:PATH of the model to train; else the run's own policy.")
    ] = ""
    method: Annotated[
        str,
        typer.Option(
            help="auto, supervised, forward_kl, reverse_kl, nudge, icpo or none: how the library "
            "gets into the weights."
        ),
    ] = "auto"
    grpo_steps: Annotated[
        int | None, typer.Option(help="Steps of GRPO after that; 0 leaves it out.", min=0)
    ] = None
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Further settings as name=value.")
    ] = None

    def settings(self) -> EscalateSettings:
        """Return them checked, `--set` included."""
        values = {"model": self.model, "method": self.method, "grpo_steps": self.grpo_steps}
        return EscalateSettings.of(**values, **_extra(self.set_ or []))


@dataclass(frozen=True)
class Places:
    """Where things are read and written."""

    folder: Annotated[str, typer.Option(help="Where to write; else RUN/escalate.")] = ""
    tasks: Annotated[
        Path | None, typer.Option(help="The run's task file, where it drew no groups of some.")
    ] = None
    modules: Annotated[
        Path | None,
        typer.Option(help="Folder of the verifier's module; else where the run's config lay."),
    ] = None


_TRAINING, _PLACES = TrainingOptions(), Places()


@flat
def escalate(
    run: Annotated[
        Path, typer.Argument(help="A finished learning run's folder or address.", metavar="RUN")
    ],
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Plan, reasons and cost; train nothing.")
    ] = False,
    training: TrainingOptions = _TRAINING,
    places: Places = _PLACES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train a local model on what a learning run found, and compare base and trained with and
    without the library on its test tasks.

    The same command goes on after a stop. Exit code 0: the trained model beats the base.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError.of("rl", "training", exc.name or "torch") from exc
    from tfgrpo.escalate import pipeline as verb

    add_module_folder(places.modules or noted_module_folder(place_of(run).folder) or Path("."))
    settings = training.settings()
    given = None if places.tasks is None else read_tasks(places.tasks)
    if dry:
        if not quiet:
            _say("loading the model and measuring how fast this machine reads and makes tokens …")
        found = verb.preview(run, settings, tasks=given)
        typer.echo(json.dumps(found.to_dict()) if as_json else printable("\n".join(found.lines())))
        return
    result = verb.escalate(
        run, settings, folder=places.folder, say=_quiet if quiet else _say, tasks=given
    )
    typer.echo(json.dumps(result.to_dict()) if as_json else printable("\n".join(result.lines())))
    raise typer.Exit(result.exit_code)


def _extra(pairs: list[str]) -> dict[str, object]:
    """Read `name=value` pairs; a value is TOML, else a text."""
    from tfgrpo.config.sections import apply_override

    values: dict[str, object] = {}
    for pair in pairs:
        apply_override(values, pair)
    return values


def _say(line: str) -> None:
    typer.echo(printable(line), err=True)


def _quiet(line: str) -> None:
    """Show nothing."""
    del line
