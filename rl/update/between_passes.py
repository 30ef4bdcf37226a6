"""What rows are given between the passes over their batch, and a step that is taken back.

Does not know losses. Sources: the half step is that of mirror prox (Nemirovski, 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tfgrpo.rl.optim.adamw import AdamW
from tfgrpo.rl.update.accumulate import TrainRow, UpdateResult
from tfgrpo.rl.update.token_stats import Tokens


class Kept:
    """A copy of what an optimiser moves."""

    def __init__(self, optimiser: AdamW) -> None:
        self._optimiser = optimiser
        self._tensors = {name: tensor.clone() for name, tensor in optimiser.state()}
        self._steps = optimiser.steps

    def restore(self) -> None:
        """Put it back, bit by bit; the model's weights with it."""
        self._optimiser.load(self._tensors, self._steps)


def with_half_gap(
    rows: Sequence[TrainRow],
    before: Mapping[int, tuple[float, ...]],
    after: Mapping[int, tuple[float, ...]],
) -> list[TrainRow]:
    """Return the rows with the column `half_gap`: what a step did to each token's log-prob."""
    found = []
    for r in rows:
        gap_T = np.subtract(after[r.row.index], before[r.row.index])
        found.append(replace(r, columns={**r.columns, "half_gap": tuple(gap_T.tolist())}))
    return found


def carried_on(part: Sequence[TrainRow], result: UpdateResult) -> list[TrainRow]:
    """Return the rows with what a pass over them left for the next."""
    spread = {
        i: {name: (value,) * len(result.logp[i]) for name, value in values.items()}
        for i, values in result.carried.items()
    }
    return [replace(r, columns={**r.columns, **spread.get(r.row.index, {})}) for r in part]


class Gaps:
    """For losses that regress to the next position's mean of log π − log π_old (`next_gap`).

    The target is advantage + gap, so the gap travels inside the advantage and the loss itself is
    given 0. Both means are measured where the next loss-bearing token is predicted.
    """

    def __init__(
        self, measure: Callable[[Sequence[TrainRow]], Tokens], rows: Sequence[TrainRow]
    ) -> None:
        self._measure = measure
        self._before = measure(rows)

    def added(self, part: Sequence[TrainRow]) -> list[TrainRow]:
        """Return the rows with the gap as it is now."""
        now = self._measure(part)
        return [replace(r, advantage=self._of(r, now[r.row.index])) for r in part]

    def _of(self, r: TrainRow, now_T: tuple[float, ...]) -> tuple[float, ...]:
        a = r.advantage
        own_T = a if isinstance(a, tuple) else (a,) * len(now_T)
        gap_T = [n - b for n, b in zip(now_T, self._before[r.row.index], strict=True)]
        return tuple(x + g for x, g in zip(own_T, [*gap_T[1:], 0.0], strict=True))
