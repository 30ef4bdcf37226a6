"""Checkpoints: safetensors and JSON in a folder that appears whole or not at all.

A checkpoint is a Hugging Face model folder (weights, config, tokenizer) with the optimiser's
tensors and the run's state beside it, so any of them loads as `local:PATH`. Every file's SHA-256
stands in `state.json`, which is written last; reading refuses a folder whose bytes differ. Nothing
here reads or writes pickle.

Does not know what the state means. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfgrpo.errors import StoreError
from tfgrpo.rl.model.decoder import Decoder, hf_views

STATE = "state.json"
WEIGHTS = "model.safetensors"
OPTIMISER = "optimiser.safetensors"
FORMAT = 1
_PREFIX = "step-"


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    write_model: Any,
    *,
    keep: int = 2,
) -> Path:
    """Write `folder/step-NNNNNN` in one rename and delete all but the newest `keep`.

    Args:
        folder: of all checkpoints of the run.
        step: optimiser steps done.
        state: JSON of everything but tensors.
        tensors: optimiser state.
        write_model: called with the temporary folder; writes the model into it.
        keep: newest checkpoints to keep, at least 1.

    Raises:
        StoreError: the disk refuses; older checkpoints are untouched.
    """
    final = folder / f"{_PREFIX}{step:06d}"
    temporary = folder / f".{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_model(temporary)
        write_tensors(temporary / OPTIMISER, tensors)
        paths = sorted(p for p in temporary.rglob("*"))
        files = [p for p in paths if p.is_file()]
        sums = {p.relative_to(temporary).as_posix(): sha256(p) for p in files}
        text = json.dumps({"format": FORMAT, "step": step, "files": sums, **state}, allow_nan=False)
        (temporary / STATE).write_text(text, encoding="utf-8")
        for path in (*paths, temporary / STATE, temporary):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(folder)
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StoreError(
            f"checkpoint {str(final)!r} cannot be written ({exc.strerror or exc}); older "
            "checkpoints are whole: free space or choose another run.folder, then resume"
        ) from exc
    for old in found(folder)[: -max(1, keep)]:
        shutil.rmtree(old)
    return final


def found(folder: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith(_PREFIX) and p.is_dir())


def load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return (state, model weights, optimiser tensors) of a checkpoint.

    Raises:
        StoreError: a file is missing or its bytes are not those that were written.
    """
    from safetensors.torch import load_file

    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        sums = state["files"]
        if state["format"] > FORMAT:
            raise StoreError(
                f"checkpoint {str(path)!r} has format {state['format']}; this version reads up "
                f"to {FORMAT}: update tfgrpo"
            )
        for name, expected in sums.items():
            if sha256(path / name) != expected:
                raise StoreError(
                    f"checkpoint {str(path)!r}: {name} is damaged (its SHA-256 differs); delete "
                    "the folder to resume from the one before"
                )
        return state, load_file(path / WEIGHTS), load_file(path / OPTIMISER)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        if isinstance(exc, StoreError):
            raise
        raise StoreError(
            f"checkpoint {str(path)!r} cannot be read ({type(exc).__name__}: {exc}); delete the "
            "folder to resume from the one before"
        ) from exc


def model_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Return the weights under Hugging Face names, each with storage of its own."""
    return {name: view.contiguous().clone() for name, view in hf_views(decoder).items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    from safetensors.torch import save_file

    whole = {name: t.detach().contiguous() for name, t in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def bits(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, to compare runs."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(flat).hexdigest()
