"""The registry of credit: advantages finer than a rollout, one value per token (D)."""

from tfgrpo.rl.formulas.credit.table import CREDIT, rows_of

__all__ = ["CREDIT", "rows_of"]
