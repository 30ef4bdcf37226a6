"""`tfgrpo handover RUN --to NAME --out DIR`: a finished run in the form that another trainer reads.

Does not know the forms. Source: own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.config.sections import apply_override
from tfgrpo.errors import ConfigError
from tfgrpo.runtime.import_string import add_module_folder, noted_module_folder
from tfgrpo.runtime.terminal import printable
from tfgrpo.store.postgres.places import place_of
from tfgrpo.tasks.files import read_tasks


def handover(
    run: Annotated[
        Path, typer.Argument(help="A finished learning run's folder or address.", metavar="RUN")
    ],
    to: Annotated[str, typer.Option(help="trl, verl, skyrl, verifiers or slime.")],
    out: Annotated[Path, typer.Option(help="A new folder to write into.")],
    library: Annotated[
        bool, typer.Option("--library/--bare", help="Prompts with the kept library, or bare.")
    ] = True,
    tasks: Annotated[
        Path | None, typer.Option(help="The run's task file, where it drew no groups of some.")
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="Settings of the verifier as TOML, for a run given one in Python.")
    ] = "",
) -> None:
    """Write a run's tasks, verifier and library for TRL, verl, SkyRL, verifiers or slime.

    Practice tasks become training rows, gate tasks the validation file; test tasks stay behind.
    """
    from tfgrpo.handover import hand_over, read_bundle

    add_module_folder(noted_module_folder(place_of(run).folder) or Path("."))
    bundle = read_bundle(
        run,
        library=library,
        tasks=None if tasks is None else read_tasks(tasks),
        verifier=_table(verifier) if verifier else None,
    )
    folder = hand_over(bundle, to, out)
    n_practice, n_gate = len(bundle.material.practice), len(bundle.material.gate)
    typer.echo(printable(f"{folder}: {n_practice} training rows, {n_gate} for validation"))
    typer.echo(printable(f"next: {folder / 'README.md'}"))


def _table(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    apply_override(found, f"verifier={text}")
    if not isinstance(found["verifier"], dict):
        raise ConfigError(f'--verifier {text!r} is no table, such as {{kind = "exact"}}')
    return found["verifier"]
