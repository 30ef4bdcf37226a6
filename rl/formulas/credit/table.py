"""The registry of credit: advantages finer than a rollout, one value a token (D), rows end to end.

Pure functions of a `RewardBatch`, by step or segment of an agent's rollout or by token; `rows_of`
cuts the result to fill `TrainRow.advantage`. Does not know how any of them works.
"""

from __future__ import annotations

from tfgrpo.rl.formulas.credit.entropy import ENTROPY_CREDIT
from tfgrpo.rl.formulas.credit.segments import SEGMENT_CREDIT
from tfgrpo.rl.formulas.credit.steps import STEP_CREDIT
from tfgrpo.rl.formulas.credit.tokens import TOKEN_CREDIT, tokens_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, merged

__all__ = ["CREDIT", "rows_of"]

CREDIT: dict[str, Entry] = merged(STEP_CREDIT, SEGMENT_CREDIT, TOKEN_CREDIT, ENTROPY_CREDIT)


def rows_of(batch: RewardBatch, advantage_D: Floats) -> list[tuple[float, ...]]:
    """Cut a credit's result into one tuple a row, as `TrainRow.advantage` takes it."""
    return [tuple(float(x) for x in row_T) for row_T in tokens_of(batch, advantage_D)]
