"""How per-token losses become one number: constant weights fixed for the whole optimiser batch.

A rule maps the rows' token counts to one weight a row; every token of the row carries it, and the
loss is the weighted sum. Weights are computed before the first micro-batch, so no rule can depend
on how the batch is split. Names say what is done; the same words mean other things elsewhere
(TRL's `bnpo` divides by the tokens of a micro-batch, which we do not offer; the BNPO paper is an
advantage). Rows without loss-bearing tokens count as rows. Does not know losses.
"""

from __future__ import annotations

import numpy as np

from tfgrpo.rl.formulas.inputs import Floats, Ints
from tfgrpo.rl.formulas.registry import Entry, register

AGGREGATIONS: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/test_aggregations.py::"


@register(
    AGGREGATIONS,
    "token_mean",
    source="DAPO (arXiv 2503.14476, section 3.3); TRL `dapo`, verl `token-mean` counted globally",
    formula="sum of all token losses / number of loss-bearing tokens in the optimiser batch",
    certainty="code",
    checked="run beside TRL and verl on equal inputs (test_trl_peer, test_verl_peer)",
    test=TESTS + "test_every_aggregation_matches_brute_force",
)
def token_mean(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 / sum of lengths for every row."""
    del max_tokens
    return np.full(len(length_R), 1.0 / max(1, int(length_R.sum())))


@register(
    AGGREGATIONS,
    "row_mean",
    source="GRPO (arXiv 2402.03300, eq. 3); TRL `grpo`, verl `seq-mean-token-mean`",
    formula="mean over rows of the mean of their token losses",
    certainty="code",
    checked="run beside TRL and verl on equal inputs (test_trl_peer, test_verl_peer)",
    test=TESTS + "test_every_aggregation_matches_brute_force",
)
def row_mean(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 / (rows · length) for each row."""
    del max_tokens
    return 1.0 / (max(1, len(length_R)) * np.maximum(length_R, 1).astype(np.float64))


@register(
    AGGREGATIONS,
    "row_sum",
    source="verl `seq-mean-token-sum`",
    formula="mean over rows of the sum of their token losses",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_every_aggregation_matches_brute_force",
)
def row_sum(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 / rows for every row."""
    del max_tokens
    return np.full(len(length_R), 1.0 / max(1, len(length_R)))


@register(
    AGGREGATIONS,
    "fixed_length",
    source="Dr. GRPO (arXiv 2503.20783); TRL `dr_grpo`, verl `seq-mean-token-sum-norm`",
    formula="sum of all token losses / (rows * longest completion allowed)",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_every_aggregation_matches_brute_force",
)
def fixed_length(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 / (rows · max_tokens) for every row."""
    return np.full(len(length_R), 1.0 / (max(1, len(length_R)) * max(1, max_tokens)))


@register(
    AGGREGATIONS,
    "token_sum",
    source="verl `token-sum`",
    formula="sum of all token losses",
    certainty="code",
    checked="verl's token-sum by its definition",
    test=TESTS + "test_every_aggregation_matches_brute_force",
)
def token_sum(length_R: Ints, *, max_tokens: int) -> Floats:
    """Return 1 for every row."""
    del max_tokens
    return np.ones(len(length_R))
