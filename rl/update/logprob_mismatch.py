"""Training–inference mismatch: an engine's log-probs against the trainer's, a stop beyond limits.

It catches stale weights, a wrong number type or another tokenizer in the first step, where a metric
alone would be noticed too late. Does not know engines. Idea: engine mismatch metrics (TRL, verl,
prime-rl) turned into a gate (own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far an engine's log-probs lie from the trainer's, in nats."""

    mean_abs: float
    """Mean of |Δ| over tokens."""
    max_row: float
    """Largest |ΣΔ| of one row."""
    n_tokens: int


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """When training stops. Defaults allow bfloat16's noise on short rows."""

    mean_abs: float = 0.03
    max_row_per_root_token: float = 0.25
    """A row's |ΣΔ| may grow with the root of its length: independent noise does."""


def measure_mismatch(
    engine_logps: Sequence[Sequence[float]], trainer_logps: Sequence[Sequence[float]]
) -> Mismatch:
    """Compare two scorings of the same tokens.

    Raises:
        ValueError: rows or lengths differ.
    """
    if [len(x) for x in engine_logps] != [len(y) for y in trainer_logps]:
        raise ValueError("both scorings must have the same rows of the same lengths")
    lengths = [len(x) for x in engine_logps]
    gap_D = _flat(engine_logps) - _flat(trainer_logps)
    row_D = np.repeat(np.arange(len(lengths)), lengths)
    row_gap_R = np.bincount(row_D, weights=gap_D, minlength=len(lengths))
    return Mismatch(
        mean_abs=float(np.abs(gap_D).sum()) / max(1, len(gap_D)),
        max_row=float(np.abs(row_gap_R).max(initial=0.0)),
        n_tokens=len(gap_D),
    )


def _flat(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.fromiter(chain.from_iterable(rows), dtype=np.float64)


def check_mismatch(found: Mismatch, longest: int, limits: MismatchLimits, where: str) -> None:
    """Raise when an engine and the trainer disagree beyond the limits.

    Raises:
        ConfigError: names the figures, the limits and the usual causes.
    """
    row_limit = limits.max_row_per_root_token * max(1, longest) ** 0.5
    is_good = found.mean_abs <= limits.mean_abs and found.max_row <= row_limit
    if is_good:
        return
    raise ConfigError(
        f"{where}: the engine's log-probs differ from the trainer's by {found.mean_abs:.4f} nat a "
        f"token (rollout.mismatch_mean allows {limits.mean_abs}) and {found.max_row:.2f} nat a row "
        f"(rollout.mismatch_row allows {row_limit:.2f} at {longest} tokens) over {found.n_tokens} "
        "tokens; usual causes: weights not synced, another number type, another tokenizer or chat "
        "template, a sampler that truncates"
    )
