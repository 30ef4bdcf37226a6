"""Options that the verbs of `tfgrpo route` share, and how their data are read.

Does not know formats; `tfgrpo.routing` reads. Source: own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfgrpo.routing.outcome_files import Format, read_models, read_outcomes
from tfgrpo.routing.records import ModelInfo, SuccessCount

__all__ = [
    "AsJson",
    "Data",
    "EmbedderOption",
    "Folder",
    "FormatOption",
    "Models",
    "SuccessAt",
    "read_data",
]

Data = Annotated[
    list[Path], typer.Argument(help="Outcome files, groups files, result or run folders.")
]
Folder = Annotated[Path, typer.Argument(help="Folder of a fitted router.")]
FormatOption = Annotated[
    str,
    typer.Option("--format", help="auto, jsonl, csv, groups, run, routerbench, llmrouterbench."),
]
SuccessAt = Annotated[
    float | None, typer.Option(help="Reward from which a rollout counts as a success.")
]
Models = Annotated[
    Path | None, typer.Option("--models", help="JSON list of names, families and prices.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
EmbedderOption = Annotated[
    str,
    typer.Option(
        "--embedder", help="hashed, minilm, sentence:NAME, or several such as minilm+length."
    ),
]


def read_data(
    paths: list[Path], format: str, success_at: float | None, models: Path | None = None
) -> tuple[list[SuccessCount], list[ModelInfo]]:
    """Return the outcomes of files and folders, and what is known of the models."""
    kind: Format = format  # type: ignore[assignment]  # checked by read_outcomes
    outcomes = [o for p in paths for o in read_outcomes(p, format=kind, success_at=success_at)]
    return outcomes, read_models(models) if models is not None else []
