"""Which model folders are loaded: weights in safetensors, no code, nothing that points elsewhere.

A model from a hub is somebody else's data. Pickled weights run code when they are read, `auto_map`
asks for code beside the weights to be run, an adapter's config names a further model to fetch.
All three are refused before anything is loaded. Does not know models. Source: own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".msgpack", ".h5")
_CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json")


def check_folder(folder: Path) -> None:
    """Refuse a model folder that could run code or load what lies elsewhere.

    Raises:
        ConfigError: what was found, and what to do.
    """
    where = f"model folder {str(folder)!r}"
    for name in _CONFIGS:
        values = _json(folder / name, where)
        if isinstance(values, dict) and "auto_map" in values:
            raise ConfigError(
                f"{where}: {name} asks for the model's own Python code to be run (auto_map "
                f"{values['auto_map']!r:.120}); tfgrpo runs none: use a model of a built-in family"
            )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{where} holds an adapter, which names another model to load; merge it into its base "
            "model first (PEFT: merge_and_unload, then save_pretrained)"
        )
    index = _json(folder / "model.safetensors.index.json", where)
    if index is not None:
        _check_index(folder, index, where)
    elif not (folder / "model.safetensors").is_file():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
        found = f"only {pickled[0]!r}, a pickle, which could run code" if pickled else "no weights"
        raise ConfigError(
            f"{where} has {found}; model.safetensors is needed: convert it where you trust it "
            "(from_pretrained, then save_pretrained)"
        )


def _check_index(folder: Path, index: Any, where: str) -> None:
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{where}: model.safetensors.index.json has no weight_map")
    for name in sorted(set(map(str, names.values()))):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{where}: the index names {name!r}; weights must be .safetensors files of the "
                "folder itself"
            )
        if not (folder / name).is_file():
            raise ConfigError(f"{where}: the index names {name!r}, which is missing")


def _json(path: Path, where: str) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{where}: {path.name} is not JSON: {exc}") from exc
