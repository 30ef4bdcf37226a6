"""Options that the verbs of `tfgrpo route` share, and how their data are read.

Does not know formats; `tfgrpo.routing` reads. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    "MODEL_READING",
    "ModelReading",
    "READING",
    "Reading",
    "SuccessAt",
    "read_data",
]

Data = Annotated[
    list[Path], typer.Argument(help="Outcome files, groups files, result or run folders.")
]
Folder = Annotated[Path, typer.Argument(help="Folder of a fitted router.")]
SuccessAt = Annotated[
    float | None, typer.Option(help="Reward from which a rollout counts as a success.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
EmbedderOption = Annotated[
    str,
    typer.Option(
        "--embedder", help="hashed, minilm, sentence:NAME, or several such as minilm+length."
    ),
]


@dataclass(frozen=True)
class Reading:
    """How recorded outcomes are read."""

    format: Annotated[
        str,
        typer.Option(
            "--format", help="auto, jsonl, csv, groups, run, routerbench, llmrouterbench."
        ),
    ] = "auto"
    success_at: SuccessAt = None


@dataclass(frozen=True)
class ModelReading(Reading):
    """How recorded outcomes are read, and what is known of the models."""

    models: Annotated[
        Path | None, typer.Option("--models", help="JSON list of names, families and prices.")
    ] = None


READING, MODEL_READING = Reading(), ModelReading()


def read_data(paths: list[Path], reading: Reading) -> tuple[list[SuccessCount], list[ModelInfo]]:
    """Return the outcomes of files and folders, and what is known of the models."""
    kind: Format = reading.format  # type: ignore[assignment]  # checked by read_outcomes
    at = reading.success_at
    outcomes = [o for p in paths for o in read_outcomes(p, format=kind, success_at=at)]
    models = reading.models if isinstance(reading, ModelReading) else None
    return outcomes, read_models(models) if models is not None else []
