"""A fitted router on disk: `pool.npz` (numbers), `router.json` (names, rule), `outcomes.jsonl`.

No pickle: arrays are read with `allow_pickle=False`. `router.json` holds the digest of the pool, so
that a damaged or exchanged file is refused. Vectors of the pool's prompts are kept in float16.
Does not know how a router decides. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tfgrpo.errors import ConfigError, StoreError, boundary
from tfgrpo.routing.calibration import Gate
from tfgrpo.routing.estimator.embedders import Embedder, VectorCache, open_embedder
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, Layer, ValueModel
from tfgrpo.routing.outcome_files import read_outcomes
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount

__all__ = ["RouterFiles", "fit_files"]

_FORMAT = 1
_ARRAYS = ("vectors", "scores", "residuals", "coefficients", "intercepts")
LEAST_REFERENCE = 100
"""Outcomes that make a model a reference by default."""


class RouterFiles:
    """What `tfgrpo route fit` writes and the other commands read."""

    def __init__(
        self,
        value: ValueModel,
        embedder_spec: str,
        models: Sequence[ModelInfo],
        outcomes: Sequence[SuccessCount],
        gates: dict[str, Gate] | None = None,
    ) -> None:
        self.value, self.embedder_spec = value, embedder_spec
        self.models, self.outcomes = list(models), list(outcomes)
        self.gates = gates or {}

    def save(self, folder: str | Path) -> None:
        """Write the three files; each is replaced whole.

        Raises:
            StoreError: the folder cannot be written.
        """
        folder = Path(folder)
        pool = self.value.pool
        with boundary(StoreError, f"router folder {str(folder)!r}"):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".pool-{os.getpid()}.part"
            with part.open("wb") as file:
                arrays = {name: getattr(pool, name) for name in _ARRAYS}
                arrays["vectors"] = arrays["vectors"].astype(np.float16)
                arrays["scores"] = arrays["scores"].astype(np.float32)
                arrays["residuals"] = arrays["residuals"].astype(np.float32)
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            digest = hashlib.sha256(part.read_bytes()).hexdigest()
            part.replace(folder / "pool.npz")
            meta = {
                "format": _FORMAT,
                "embedder": self.embedder_spec,
                "embedder_id": pool.embedder_id,
                "layers": list(self.value.layers),
                "penalty": pool.penalty,
                "pool_sha256": digest,
                "pool_models": list(pool.model_names),
                "pool_families": list(pool.families),
                "pool_keys": list(pool.keys),
                "models": [asdict(m) for m in self.models],
                "gates": {name: gate.to_dict() for name, gate in self.gates.items()},
            }
            _replace(folder / "router.json", json.dumps(meta, indent=1) + "\n")
            lines = [json.dumps(o.to_dict()) for o in self.outcomes]
            _replace(folder / "outcomes.jsonl", "".join(f"{line}\n" for line in lines))

    @classmethod
    def load(cls, folder: str | Path) -> RouterFiles:
        """Read a fitted router.

        Raises:
            StoreError: files are missing, damaged or of another version.
        """
        folder = Path(folder)
        if not (folder / "router.json").is_file():
            raise StoreError(
                f"there is no router in {str(folder)!r} (no router.json): run 'tfgrpo route fit' "
                f"first"
            )
        with boundary(StoreError, f"router folder {str(folder)!r}"):
            meta = json.loads((folder / "router.json").read_text(encoding="utf-8"))
            raw = (folder / "pool.npz").read_bytes()
            if meta.get("format") != _FORMAT:
                raise StoreError(
                    f"router in {str(folder)!r} has format {meta.get('format')!r}, not 1"
                )
            if hashlib.sha256(raw).hexdigest() != meta["pool_sha256"]:
                raise StoreError(
                    f"{str(folder / 'pool.npz')!r} is not the file that was saved: fit again"
                )
            with np.load(folder / "pool.npz", allow_pickle=False) as data:
                arrays = {name: data[name].astype(np.float64) for name in _ARRAYS}
            embedder = _embedder(meta["embedder"], folder)
            if embedder.embedder_id != meta["embedder_id"]:
                raise StoreError(
                    f"router in {str(folder)!r} was fitted on {meta['embedder_id']!r}, "
                    f"{meta['embedder']!r} is now {embedder.embedder_id!r}: fit again"
                )
            models = [ModelInfo(**m) for m in meta["models"]]
            pool = _pool(meta, arrays)
            layers: list[Layer] = [name for name in LAYERS if name in meta["layers"]]
            path = folder / "outcomes.jsonl"
            outcomes = read_outcomes(path, format="jsonl") if path.stat().st_size else []
            gates = {name: Gate.from_dict(row) for name, row in meta["gates"].items()}
        return cls(
            ValueModel(embedder, pool, layers=layers), meta["embedder"], models, outcomes, gates
        )


def _pool(meta: dict[str, Any], arrays: dict[str, Any]) -> ReferencePool:
    pool = ReferencePool(
        embedder_id=meta["embedder_id"],
        model_names=tuple(meta["pool_models"]),
        families=tuple(meta["pool_families"]),
        keys=tuple(meta["pool_keys"]),
        penalty=meta["penalty"],
        **arrays,
    )
    return pool.of_models(range(pool.size))


def _embedder(spec: str, folder: Path) -> Embedder:
    embedder = open_embedder(spec)
    return embedder if spec.startswith("hashed") else VectorCache(embedder, folder / "vectors")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}-{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def fit_files(
    outcomes: Sequence[SuccessCount],
    models: Sequence[ModelInfo] = (),
    *,
    embedder_spec: str = "hashed",
    folder: str | Path = ".",
    least_reference: int = LEAST_REFERENCE,
    layers: Sequence[Layer] = LAYERS,
) -> RouterFiles:
    """Fit the reference pool on the models with at least `least_reference` outcomes.

    All outcomes are kept as context. With no such model the pool is empty and every model stands on
    its own outcomes.

    Raises:
        ConfigError: no outcomes.
    """
    if not outcomes:
        raise ConfigError("there are no outcomes to fit on: give a file with at least one row")
    table = OutcomeTable.from_outcomes(outcomes, models)
    embedder = _embedder(embedder_spec, Path(folder))
    counts = (table.trials > 0).sum(axis=0)
    columns = np.flatnonzero(counts >= max(least_reference, 10))
    pool = None
    if len(columns):
        reference = table.of_models(columns)
        reference = reference.take(np.flatnonzero((reference.trials > 0).any(axis=1)))
        pool = ReferencePool.fit(
            reference, embedder.embed(reference.prompts), embedder_id=embedder.embedder_id
        )
    value = ValueModel(embedder, pool, layers=layers)
    return RouterFiles(value, embedder_spec, table.models, outcomes)
