"""A fitted router on disk: one folder a version, and a pointer that is replaced at once.

    current.json    name of the version, SHA-256 of each of its files
    v-…/            pool.npz (reference models), states.npz (fitted states, outcomes as numbers),
                    router.json (names, rule, features), outcomes.jsonl (texts)

A reader follows the pointer and checks every digest, so it sees one whole version or an error; a
version that a later save has cleared away is looked up anew. No pickle: arrays are read with
`allow_pickle=False`. Texts of outcomes and the reference pool are read when something is refitted.
Does not know how a router decides. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tfgrpo.errors import ConfigError, StoreError, boundary
from tfgrpo.routing.calibration import Gate
from tfgrpo.routing.costs import CostModel
from tfgrpo.routing.estimator.bank import Scores
from tfgrpo.routing.estimator.compact import Compact
from tfgrpo.routing.estimator.prompt_features import (
    TAG_WEIGHT,
    PromptFeatures,
    embed_prompts,
    shared_ends,
)
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, Layer, ValueModel
from tfgrpo.routing.history import Ground, History, Merged
from tfgrpo.routing.outcome_files import parse_outcomes
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount
from tfgrpo.routing.served import Saved, StateKeeper
from tfgrpo.runtime.embedders import LENGTH, LENGTH_WEIGHT, Embedder, open_embedder

__all__ = ["LEAST_REFERENCE", "RouterFiles", "fit_files"]

_FORMAT = 2
_POINTER = "current.json"
_POOL = ("vectors", "scores", "residuals", "coefficients", "intercepts")
_MERGED = ("rows", "counts", "trials", "tokens", "dollars")
_KEPT = 3
"""Versions that stay: readers may still be in the older ones."""
LEAST_REFERENCE = 100
"""Outcomes that make a model a reference by default."""
_MOST_TAGS = 256


class RouterFiles:
    """What `tfgrpo route fit` writes and the other commands read."""

    def __init__(
        self,
        value: ValueModel,
        embedder_spec: str,
        models: Sequence[ModelInfo],
        outcomes: Sequence[SuccessCount],
        gates: Mapping[str, Gate] | None = None,
    ) -> None:
        self.gates: dict[str, Gate] = {}
        self._hold(value.embedder, embedder_spec, models, lambda: value, lambda: outcomes)
        self.gates = dict(gates or {})

    def _hold(
        self,
        embedder: Embedder,
        embedder_spec: str,
        models: Sequence[ModelInfo],
        value: Callable[[], ValueModel],
        outcomes: Callable[[], Sequence[SuccessCount]],
    ) -> None:
        self.embedder, self.embedder_spec = embedder, embedder_spec
        self.models = list(models)
        self.gates = {}
        self.saved: Saved | None = None
        self._make_value, self._make_outcomes = value, outcomes

    @classmethod
    def lazy(
        cls,
        embedder: Embedder,
        embedder_spec: str,
        models: Sequence[ModelInfo],
        value: Callable[[], ValueModel],
        outcomes: Callable[[], Sequence[SuccessCount]],
    ) -> RouterFiles:
        """Return files whose value model and outcomes are made when they are needed."""
        files = cls.__new__(cls)
        files._hold(embedder, embedder_spec, models, value, outcomes)
        return files

    @cached_property
    def value(self) -> ValueModel:
        """The value model with its reference pool."""
        return self._make_value()

    @cached_property
    def outcomes(self) -> list[SuccessCount]:
        """All outcomes."""
        return list(self._make_outcomes())

    def save(self, folder: str | Path) -> None:
        """Write a version and point to it; states that are missing are fitted first.

        Raises:
            StoreError: the folder cannot be written.
        """
        if self.saved is None:
            keeper = StateKeeper(lambda: self.value, self.models, refit="wait")
            keeper.record(self.outcomes)
            self.saved = keeper.saved()
        folder = Path(folder)
        with boundary(StoreError, f"router folder {str(folder)!r}"):
            folder.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
            try:
                self._write(part, self.saved)
                digests = {p.name: _sha(p) for p in sorted(part.iterdir())}
                name = f"v-{time.time_ns():x}-{digests['outcomes.jsonl'][:8]}"
                part.rename(folder / name)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            pointer = folder / f".{_POINTER}-{os.getpid()}-{time.time_ns()}"
            row = {"format": _FORMAT, "version": name, "files": digests}
            pointer.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            pointer.replace(folder / _POINTER)
            for old in sorted(folder.glob("v-*"))[:-_KEPT]:
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)

    def _write(self, folder: Path, saved: Saved) -> None:
        pool = self.value.pool
        arrays = {name: getattr(pool, name).astype(np.float32) for name in _POOL}
        arrays["vectors"] = arrays["vectors"].astype(np.float16)
        with (folder / "pool.npz").open("wb") as file:
            np.savez_compressed(file, **arrays)
        with (folder / "states.npz").open("wb") as file:
            np.savez(file, **_pack(_states(saved, [m.name for m in self.models])))
        features = self.embedder if isinstance(self.embedder, PromptFeatures) else None
        meta = {
            "format": _FORMAT,
            "embedder": self.embedder_spec,
            "embedder_id": self.embedder.embedder_id,
            "features": None
            if features is None
            else {
                "tags": features.tags,
                "shared": list(features.shared),
                "weights": list(features.weights),
            },
            "layers": list(self.value.layers),
            "penalty": pool.penalty,
            "pool_models": list(pool.model_names),
            "pool_families": list(pool.families),
            "pool_keys": list(pool.keys),
            "keys": saved.ground.keys,
            "models": [asdict(m) for m in self.models],
            "gates": {name: gate.to_dict() for name, gate in self.gates.items()},
        }
        (folder / "router.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
        with (folder / "outcomes.jsonl").open("w", encoding="utf-8") as text:
            text.writelines(json.dumps(o.to_dict()) + "\n" for o in self.outcomes)

    @classmethod
    def load(cls, folder: str | Path) -> RouterFiles:
        """Read the version that the folder points to.

        Raises:
            StoreError: files are missing, damaged or of another version.
        """
        folder = Path(folder)
        for attempt in range(8):
            pointer = _pointer(folder)
            try:
                return cls._load(folder, pointer)
            except FileNotFoundError as exc:
                # A later save may have cleared this version away: then the pointer has moved on.
                if attempt and _pointer(folder) == pointer:
                    raise StoreError(
                        f"router in {str(folder)!r}: {exc.filename} is missing: fit again"
                    ) from exc
        raise StoreError(f"router in {str(folder)!r} is saved faster than it can be read: retry")

    @classmethod
    def _load(cls, folder: Path, pointer: Mapping[str, Any]) -> RouterFiles:
        at = folder / pointer["version"]
        paths = {name: at / name for name in pointer["files"]}
        for name, path in paths.items():
            if _sha(path) != pointer["files"][name]:
                raise StoreError(f"{str(path)!r} is not the file that was saved: fit again")
        outcomes = paths["outcomes.jsonl"].open("rb")
        raw = {name: paths[name].open("rb") for name in ("states.npz", "pool.npz", "router.json")}
        with boundary(StoreError, f"router folder {str(folder)!r}"):
            with raw["router.json"] as file:
                meta = json.loads(file.read())
            with raw["pool.npz"] as file, np.load(file, allow_pickle=False) as data:
                arrays = {name: data[name] for name in _POOL}
            with raw["states.npz"] as file, np.load(file, allow_pickle=False) as data:
                states = _unpack(data)
            embedder = _embedder(meta["embedder"], folder, meta["features"])
            if embedder.embedder_id != meta["embedder_id"]:
                raise StoreError(
                    f"router in {str(folder)!r} was fitted on {meta['embedder_id']!r}, "
                    f"{meta['embedder']!r} is now {embedder.embedder_id!r}: fit again"
                )
            models = [ModelInfo(**m) for m in meta["models"]]
            layers: list[Layer] = [name for name in LAYERS if name in meta["layers"]]

            def value() -> ValueModel:
                return ValueModel(embedder, _pool(meta, arrays), layers=layers)

            def texts() -> Sequence[SuccessCount]:
                with outcomes:
                    outcomes.seek(0)
                    return parse_outcomes(outcomes.read().decode("utf-8"), str(at))

            files = cls.lazy(embedder, meta["embedder"], models, value, texts)
            weakref.finalize(files, outcomes.close)  # where nobody asks for the texts
            files.saved = _saved(states, meta["keys"], models)
            files.gates = {name: Gate.from_dict(row) for name, row in meta["gates"].items()}
        return files


def _pointer(folder: Path) -> dict[str, Any]:
    path = folder / _POINTER
    if not path.is_file():
        older = " (its router.json is of an older version)" * (folder / "router.json").is_file()
        raise StoreError(
            f"there is no router in {str(folder)!r}{older}: run 'tfgrpo route fit' first"
        )
    with boundary(StoreError, f"router folder {str(folder)!r}"):
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if row.get("format") != _FORMAT:
            raise StoreError(
                f"router in {str(folder)!r} has format {row.get('format')!r}, not {_FORMAT}: fit "
                f"again"
            )
    return row


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _states(saved: Saved, names: Sequence[str]) -> dict[str, Any]:
    """All arrays of the states, `MODEL NUMBER/PART/NAME` to array."""
    arrays: dict[str, Any] = {
        "vectors": saved.ground.vectors,
        "lengths": saved.ground.lengths,
        "coefficients": saved.scores.coefficients,
        "intercepts": saved.scores.intercepts,
        "floor": np.array([saved.floor, saved.scores.text_width]),
    }
    for i, name in enumerate(names):
        state, costs = saved.states[name], saved.costs[name]
        merged = saved.histories[name].old
        assert merged is not None
        arrays |= {f"{i}/state/{k}": v for k, v in state.arrays.items()}
        arrays |= {f"{i}/history/{k}": getattr(merged, k) for k in _MERGED}
        slope = np.zeros(0) if costs.coefficients is None else costs.coefficients
        arrays |= {
            f"{i}/costs/slope": slope,
            f"{i}/costs/centre": costs.centre,
            f"{i}/costs/rest": np.array([costs.in_dollars, costs.level, costs.spread], float),
        }
    return arrays


def _pack(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Join many arrays to one a type: thousands of small entries take a second to read."""
    index: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    parts: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        index.setdefault(array.dtype.str, []).append((name, array.shape))
        parts.setdefault(array.dtype.str, []).append(array.ravel())
    packed = {kind: np.concatenate(found) for kind, found in parts.items()}
    text = json.dumps(index).encode("utf-8")
    return {**packed, "index": np.frombuffer(text, dtype=np.uint8)}


def _unpack(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of `_pack`, as views."""
    arrays = {}
    for kind, rows in json.loads(data["index"].tobytes()).items():
        whole, start = data[kind], 0
        for name, shape in rows:
            size = int(np.prod(shape))
            arrays[name] = whole[start : start + size].reshape(shape)
            start += size
    return arrays


def _saved(arrays: Mapping[str, Any], keys: Sequence[str], models: Sequence[ModelInfo]) -> Saved:
    parts: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        place, _, rest = name.rpartition("/")
        parts.setdefault(place, {})[rest] = array
    states, histories, costs = {}, {}, {}
    for i, info in enumerate(models):
        states[info.name] = Compact(info.name, parts[f"{i}/state"])
        histories[info.name] = History(Merged(**parts[f"{i}/history"]))
        c = parts[f"{i}/costs"]
        in_dollars, level, spread = (float(v) for v in c["rest"])
        slope = c["slope"] if len(c["slope"]) else None
        costs[info.name] = CostModel(info, bool(in_dollars), slope, c["centre"], level, spread)
    return Saved(
        Ground.restore(keys, arrays["vectors"], arrays["lengths"]),
        histories, states, costs,
        Scores(arrays["coefficients"], arrays["intercepts"], int(arrays["floor"][1])),
        float(arrays["floor"][0]),
    )  # fmt: skip


def _pool(meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> ReferencePool:
    pool = ReferencePool(
        embedder_id=meta["embedder_id"],
        model_names=tuple(meta["pool_models"]),
        families=tuple(meta["pool_families"]),
        keys=tuple(meta["pool_keys"]),
        penalty=meta["penalty"],
        **{name: array.astype(np.float64) for name, array in arrays.items()},
    )
    return pool.of_models(range(pool.size))


def _embedder(spec: str, folder: Path, features: Mapping[str, Any] | None) -> Embedder:
    base = open_embedder(spec, cache=folder / "vectors")
    if features is None:
        return base
    shared, weights = features["shared"], features["weights"]
    return PromptFeatures(
        base, tags=features["tags"], shared=(shared[0], shared[1]),
        weights=(weights[0], weights[1]),
    )  # fmt: skip


def features_of(outcomes: Sequence[SuccessCount], spec: str = "") -> dict[str, Any]:
    """Return what `PromptFeatures` needs to know of the prompts: tags and what all share."""
    first = {o.key: o for o in outcomes}
    counts: dict[str, int] = {}
    for o in first.values():
        for tag in o.tags:
            counts[tag] = counts.get(tag, 0) + 1
    common = sorted(counts, key=lambda t: (-counts[t], t))[:_MOST_TAGS]
    # A tag of one prompt, or of all of them, tells nothing.
    tags = {t: counts[t] / len(first) for t in sorted(common) if 1 < counts[t] < len(first)}
    shared = shared_ends([o.prompt for o in first.values()])
    # Lengths stand once in a row, whether the spec asks for them or not.
    lengths = 0.0 if LENGTH in spec.split("+") else LENGTH_WEIGHT
    return {"tags": tags, "shared": list(shared), "weights": [lengths, TAG_WEIGHT]}


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
    embedder = _embedder(embedder_spec, Path(folder), features_of(outcomes, embedder_spec))
    counts = (table.trials > 0).sum(axis=0)
    columns = np.flatnonzero(counts >= max(least_reference, 10))
    pool = None
    if len(columns):
        reference = table.of_models(columns)
        reference = reference.take(np.flatnonzero((reference.trials > 0).any(axis=1)))
        tags = {o.key: o.tags for o in outcomes}
        vectors = embed_prompts(embedder, reference.prompts, [tags[k] for k in reference.keys])
        pool = ReferencePool.fit(reference, vectors, embedder_id=embedder.embedder_id)
    value = ValueModel(embedder, pool, layers=layers)
    return RouterFiles(value, embedder_spec, table.models, outcomes)
