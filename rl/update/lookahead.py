"""A step that is taken to look from, and taken back: masters and moments as they were.

Does not know losses. Idea: the half step of mirror prox (Nemirovski, 2004).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tfgrpo.rl.optim.adamw import AdamW
from tfgrpo.rl.update.accumulate import TrainRow


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
