"""Transformers weights and their tokenizer, from the embedded model, a folder or the hub.

Weights are read from safetensors only, and no code that lies beside them is run. Where nobody says
which, a GPU is taken if there is one, and the number type that the device multiplies natively.

Does not know requests, decoding or training. Source: own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.lm.local.embedded import NAME as EMBEDDED
from tfgrpo.lm.local.embedded import embedded_folder
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.openmp import bound_waiting
from tfgrpo.runtime.redaction import redact


def bf16_is_native() -> bool:
    """True when this processor multiplies bfloat16 in hardware (Linux tells)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(f" {name}" in flags for name in ("amx_bf16", "avx512_bf16"))


def default_threads() -> int:
    """Threads that may run here: more than free cores make every CPU engine crawl."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class LocalModel:
    """Weights, tokenizer and where they came from."""

    model: Any
    tokenizer: Any
    source: str
    dtype: str
    context_tokens: int
    eos_ids: tuple[int, ...]


def load_model(
    name: str, *, device: str | None = None, dtype: str | None = None, threads: int | None = None
) -> LocalModel:
    """Load weights: the embedded model, a folder, or a name on the hub (only when so named).

    Args:
        name: `smollm2-135m`, a path, or `ORG/NAME`.
        device: `cpu`, `cuda`, …; None takes a GPU where there is one.
        dtype: `bfloat16`, `float32`, `float16`; None is bfloat16 where the device multiplies it.
        threads: of torch, for this process; None leaves torch's own choice.

    Raises:
        ConfigError: no such folder, device or dtype.
        MissingExtraError: torch or transformers is not installed.
        ProviderError: the hub has no such model, or cannot be reached (kind `not_found`).
    """
    bound_waiting()  # as the command line does, for programs that load a model first thing
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as exc:
        raise MissingExtraError.of("local", "the local backend", exc.name or "torch") from exc
    if threads:
        torch.set_num_threads(min(threads, default_threads()))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = _dtype(torch, name, device, dtype)
    place = model_place(name)
    try:
        # without an explicit False, transformers asks on the terminal whether to run foreign code
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        with _without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=kind, trust_remote_code=False, use_safetensors=True
            )
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as exc:
        raise ProviderError(
            redact(f"local model {name!r} cannot be loaded: {type(exc).__name__}: {exc!s:.300}"),
            kind="not_found",
        ) from exc
    model.requires_grad_(False)
    return LocalModel(
        model,
        tokenizer,
        name,
        str(kind).removeprefix("torch."),
        _context_tokens(model.config),
        _eos_ids(model, tokenizer),
    )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on standard error while it reads weights."""
    from transformers.utils import logging as progress

    showed_bars = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if showed_bars:
            progress.enable_progress_bar()


def _dtype(torch: Any, name: str, device: str, dtype: str | None) -> Any:
    allowed = ("bfloat16", "float32", "float16")
    if dtype is not None and dtype not in allowed:
        raise ConfigError(f"local model {name!r}: dtype {dtype!r} must be one of {allowed}")
    if dtype is not None:
        return getattr(torch, dtype)
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if bf16_is_native() else torch.float32


def model_place(name: str) -> str:
    """Return what transformers loads for a name: a folder, or a name on the hub.

    Raises:
        ConfigError: the name is neither.
    """
    if name == EMBEDDED:
        return str(embedded_folder())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"local model {name!r}: the folder has no config.json")
        return str(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name  # named, hence wanted: the hub
    raise ConfigError(
        f"local model {name!r} is neither 'smollm2-135m', nor a folder, nor ORG/NAME of the hub"
    )


def _context_tokens(config: Any) -> int:
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found: list[int] = []
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found += value if isinstance(value, (list, tuple)) else [value]
    return tuple(sorted({v for v in found if v is not None}))


def folder_mark(name: str) -> str:
    """A cheap mark of a folder's weights: names, sizes and times of its weight files."""
    path = Path(name).expanduser()
    if name == EMBEDDED or not path.is_dir():
        return ""
    rows = sorted(
        (p.name, p.stat().st_size, p.stat().st_mtime_ns)
        for p in path.iterdir()
        if p.suffix in (".safetensors", ".bin", ".gguf", ".json", ".jinja")
    )
    return digest([list(r) for r in rows], 16)
