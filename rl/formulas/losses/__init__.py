"""The registry of policy losses: pure functions of a `TokenBatch`, one value a token."""

from tfgrpo.rl.formulas.losses.table import LOSSES

__all__ = ["LOSSES"]
