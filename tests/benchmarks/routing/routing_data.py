"""The shared routing sets as tables, with cached sentence vectors."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.backtest.backtest import hash_split
from tfgrpo.routing.estimator.prompt_features import PromptFeatures
from tfgrpo.routing.records import ModelInfo, OutcomeTable, tags_of
from tfgrpo.runtime.embedders import Floats, VectorCache, open_embedder

ROOT = Path(__file__).resolve().parents[3]
FOLDER = (ROOT / os.environ.get("TFGRPO_SHARED", "../shared")).resolve() / "data" / "routing"
VECTORS = ROOT / ".scratch" / "vectors"


@dataclass(frozen=True)
class RoutingSet:
    """One shared set."""

    name: str
    table: OutcomeTable
    vectors: Floats
    split: NDArray[np.intp]
    """0 to 9 a prompt; 0–5 train, 6–7 calibration, 8–9 test."""
    prompts: list[dict[str, Any]]
    models: list[dict[str, Any]]
    roles: NDArray[np.int8] | None
    """Shape (prompts, models), −1 where absent; `v0_sample` only."""


def embedder() -> VectorCache:
    """MiniLM in bfloat16 (cosines move by 1e-4) behind the cache of this checkout."""
    return VectorCache(open_embedder("minilm:bf16"), VECTORS)


def read_table(
    name: str,
) -> tuple[OutcomeTable, list[dict[str, Any]], list[dict[str, Any]], NDArray[np.int8] | None]:
    """Read one set whole: table, prompt rows, model rows, roles (prompts, models)."""
    folder = FOLDER / name
    with gzip.open(folder / "prompts.jsonl.gz", "rt", encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    models = json.loads((folder / "models.json").read_text())
    cells = np.load(folder / "outcomes.npz", allow_pickle=False)
    shape = (len(prompts), len(models))
    at = cells["prompt"], cells["model"]
    successes, trials, tokens = np.zeros(shape), np.zeros(shape), np.full(shape, np.nan)
    successes[at], trials[at] = cells["successes"], cells["trials"]
    if "output_chars" in cells.files:
        tokens[at] = cells["output_chars"] / 4.0
    if "output_tokens" in cells.files:
        tokens[at] = np.where(cells["output_tokens"] > 0, cells["output_tokens"], np.nan)
    roles = None
    if "role" in cells.files:
        roles = np.full(shape, -1, dtype=np.int8)
        roles[at] = cells["role"]
    table = OutcomeTable(
        keys=tuple(p["id"] for p in prompts),
        prompts=tuple("\n".join([p["prompt"], p.get("functions", "")]).strip() for p in prompts),
        datasets=tuple(p.get("category") or p["dataset"] for p in prompts),
        models=tuple(
            ModelInfo(
                m["name"], m["family"], m.get("input_usd_per_mtok"), m.get("output_usd_per_mtok")
            )
            for m in models
        ),
        successes=successes,
        trials=trials,
        output_tokens=tokens,
    )
    return table, prompts, models, roles


def load(name: str, *, complete: bool = True) -> RoutingSet:
    """Read one set with vectors; `complete` keeps the models that have (nearly) every cell.

    Vectors are of the question alone; `bfcl` offers some questions with several sets of functions.
    """
    table, prompts, models, roles = read_table(name)
    keep = np.arange(len(models))
    if complete:
        keep = np.flatnonzero((table.trials > 0).mean(axis=0) > 0.99)
    table = table.of_models(keep)
    return RoutingSet(
        name,
        table,
        embedder().embed([p["prompt"] for p in prompts]),
        hash_split([p.get("same_as") or p["id"] for p in prompts]),
        prompts,
        [models[j] for j in keep],
        None if roles is None else roles[:, keep],
    )


def with_metadata(
    data: RoutingSet, known: NDArray[np.intp], *, weights: tuple[float, float] = (0.25, 0.5)
) -> tuple[Floats, PromptFeatures]:
    """Vectors with lengths and the category beside the text, as a router fitted on `known` has."""
    tags = [tags_of(d, {}) for d in data.table.datasets]
    counts: dict[str, int] = {}
    for i in known:
        for tag in tags[i]:
            counts[tag] = counts.get(tag, 0) + 1
    shares = {t: n / len(known) for t, n in sorted(counts.items())}
    encoder = PromptFeatures(embedder(), tags=shares, weights=weights)
    return encoder.embed([p["prompt"] for p in data.prompts], tags), encoder
