"""Worlds that the search benchmarks act in, and where their data lies."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def shared(*parts: str) -> Path:
    """Return a path in the shared data folder; it may be absent."""
    base = Path(os.environ.get("TFGRPO_SHARED", "../shared"))
    return (base if base.is_absolute() else ROOT / base).joinpath(*parts)
