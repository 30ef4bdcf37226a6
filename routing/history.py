"""What is known of every model as arrays: prompts once, outcomes as numbers beside them.

A prompt's vector is computed once, however many models have answered it. Rows are only ever added,
so that a reader of the first n rows never sees them change. Does not know states or rules.
Source: own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.prompt_features import embed_prompts
from tfgrpo.routing.records import SuccessCount
from tfgrpo.runtime.embedders import Embedder, Floats

__all__ = ["Ground", "History", "Merged"]

Array = NDArray[Any]


class Ground:
    """Unit vectors of all known prompts, in one matrix that grows."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((256, width), np.float32)
        self._lengths = np.zeros(256, np.int64)
        self.keys: list[str] = []
        self._line: dict[str, int] = {}

    @classmethod
    def restore(cls, keys: Sequence[str], vectors: Floats, lengths: Array) -> Ground:
        """Return a ground of known rows."""
        ground = cls(vectors.shape[1])
        ground._rows, ground._lengths = vectors, lengths
        ground.keys, ground._line = list(keys), {k: i for i, k in enumerate(keys)}
        return ground

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def vectors(self) -> Floats:
        """The rows so far; they do not change when more come."""
        return self._rows[: len(self.keys)]

    @property
    def lengths(self) -> Array:
        """Characters of each prompt."""
        return self._lengths[: len(self.keys)]

    def add(self, outcomes: Sequence[SuccessCount], embedder: Embedder) -> list[int]:
        """Return the row of each outcome's prompt; new prompts are embedded together."""
        keys = [o.key for o in outcomes]
        fresh = {k: o for k, o in zip(keys, outcomes, strict=True) if k not in self._line}
        if fresh:
            first = list(fresh.values())
            vectors = embed_prompts(embedder, [o.prompt for o in first], [o.tags for o in first])
            n = len(self.keys)
            if n + len(fresh) > len(self._rows):
                size = max(2 * len(self._rows), n + len(fresh))
                grown = np.zeros((size, self._rows.shape[1]), np.float32)
                lengths = np.zeros(size, np.int64)
                grown[:n], lengths[:n] = self._rows[:n], self._lengths[:n]
                self._rows, self._lengths = grown, lengths
            self._rows[n : n + len(fresh)] = vectors
            self._lengths[n : n + len(fresh)] = [len(o.prompt) for o in first]
            for i, key in enumerate(fresh):
                self._line[key] = n + i
            self.keys += fresh
        return [self._line[k] for k in keys]


@dataclass(frozen=True, slots=True)
class Merged:
    """One model's outcomes, a row a prompt, ordered by prompt key."""

    rows: Array
    counts: Array
    trials: Array
    tokens: Array
    """Mean output tokens; NaN unknown."""
    dollars: Array
    """Mean dollars a trial; NaN unknown."""

    def digest(self, keys: Sequence[str]) -> str:
        """Return a digest of the outcomes: equal outcomes, in any order, give an equal one."""
        found = hashlib.sha256("\n".join(keys[i] for i in self.rows).encode("utf-8", "replace"))
        for array in (self.counts, self.trials, self.tokens, self.dollars):
            found.update(np.ascontiguousarray(array, np.float64).tobytes())
        return found.hexdigest()[:24]


_NAMES = ("counts", "trials", "tokens", "dollars")


@dataclass
class History:
    """One model's outcomes in the order they came."""

    old: Merged | None = None
    rows: list[int] = field(default_factory=list)
    values: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Successes, trials, output tokens, dollars of each newer outcome."""

    def add(self, rows: Iterable[int], outcomes: Iterable[SuccessCount]) -> None:
        """Append outcomes of known prompts."""
        for row, o in zip(rows, outcomes, strict=True):
            self.rows.append(row)
            tokens = np.nan if o.output_tokens is None else o.output_tokens
            dollars = np.nan if o.cost_usd is None else o.cost_usd
            self.values.append((o.successes, o.trials, tokens, dollars))

    def total(self) -> tuple[float, float]:
        """Return successes and trials of all outcomes."""
        k, n = sum(v[0] for v in self.values), sum(v[1] for v in self.values)
        if self.old is not None:
            k, n = k + float(self.old.counts.sum()), n + float(self.old.trials.sum())
        return float(k), float(n)

    def merged(self, keys: Sequence[str]) -> Merged:
        """Return the sums a prompt, in the order of the prompts' keys."""
        rows = np.array(self.rows, np.int64)
        values = np.array(self.values, np.float64).reshape(-1, 4)
        if self.old is not None:
            rows = np.concatenate([self.old.rows, rows])
            before = np.column_stack([getattr(self.old, name) for name in _NAMES])
            values = np.vstack([before, values])
        # Sums in a fixed order: the same outcomes in another order give the same bits.
        values = values[np.lexsort((*values.T, rows))]
        rows = np.sort(rows)
        unique, at = np.unique(rows, return_inverse=True)
        sums = np.zeros((4, len(unique)))
        weights = np.zeros((4, len(unique)))
        for i in range(4):
            known = np.isfinite(values[:, i])
            scale = values[known, 1] if i > 1 else 1.0
            np.add.at(sums[i], at[known], values[known, i] * scale)
            np.add.at(weights[i], at[known], scale)
        with np.errstate(invalid="ignore"):
            means = sums[2:] / weights[2:]
        order = np.array(sorted(range(len(unique)), key=lambda i: keys[int(unique[i])]), np.int64)
        return Merged(unique[order], sums[0][order], sums[1][order], *means[:, order])
