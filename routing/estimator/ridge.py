"""Ridge regression with the penalty picked by closed-form leave-one-out.

Works on the smaller of the two Gram matrices, so that many rows cost no more than the width.
Does not know what the rows are. Source: Allen 1974 (PRESS); Golub, Heath & Wahba 1979.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RidgeFit", "fit_ridge"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RidgeFit:
    """A fitted line through the rows."""

    slope: Array
    """Shape (width,)."""
    intercept: float
    left_out: Array
    """Prediction of each row from the others."""
    freedom: float
    """Effective number of parameters."""
    loss: float
    """Mean squared error of `left_out`."""

    def predict(self, rows: Array) -> Array:
        """Return predictions for new rows."""
        return np.asarray(rows @ self.slope + self.intercept)


def fit_ridge(rows: Array, y: Array, penalties: Sequence[float]) -> RidgeFit:
    """Return the fit whose leave-one-out error is least; `rows` has shape (n, width), n ≥ 1."""
    centre, level = rows.mean(axis=0), float(y.mean())
    a, target = rows - centre, y - level
    wide = a.shape[1] > len(a)
    values, basis = np.linalg.eigh(a @ a.T if wide else a.T @ a)
    values = np.maximum(values, 1e-9)
    roots = np.sqrt(values)
    left = basis if wide else a @ basis / roots
    right = a.T @ basis / roots if wide else basis
    along = left.T @ target
    squares = left**2
    best: RidgeFit | None = None
    for penalty in penalties:
        shrink = values / (values + penalty)
        hat = np.minimum(squares @ shrink + 1.0 / len(a), 1 - 1e-3)
        out = y - (target - left @ (shrink * along)) / (1 - hat)
        loss = float(np.mean((out - y) ** 2))
        if best is None or loss < best.loss:
            slope = right @ (along * roots / (values + penalty))
            best = RidgeFit(slope, level - float(centre @ slope), out, float(hat.sum()), loss)
    assert best is not None
    return best
