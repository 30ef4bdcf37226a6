"""How per-token losses become one number: constant weights fixed for the whole optimiser batch.

A rule maps the rows' token counts to one weight a row; every token of the row carries it, and the
loss is the weighted sum. Weights are computed before the first micro-batch, so no rule can depend
on how the batch is split. Names say what is done; the same words mean other things elsewhere
(TRL's `bnpo` is a token normaliser, the BNPO paper an advantage). Does not know losses.
"""

from __future__ import annotations

import numpy as np

from tfgrpo.rl.batch import Floats, Ints
from tfgrpo.rl.registry import Entry, register

AGGREGATIONS: dict[str, Entry] = {}


@register(
    AGGREGATIONS,
    "token_mean",
    source="DAPO (arXiv 2503.14476, section 3.3)",
    formula="sum of all token losses / number of loss-bearing tokens in the optimiser batch",
    certainty="code",
    test="tests/rl/registry/test_aggregations.py::test_token_mean_matches_brute_force",
)
def token_mean(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 / sum of lengths for every row."""
    del max_tokens
    return np.full(len(length_R), 1.0 / max(1, int(length_R.sum())))
