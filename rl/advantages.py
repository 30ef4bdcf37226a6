"""Advantage estimators as pure functions of a `RewardBatch`.

numpy in double precision; no model, no tokens' texts. Each returns `advantage_R` (one value a
rollout). Groups of equal rewards give exactly 0 under every mean-centred rule.
"""

from __future__ import annotations

import numpy as np

from tfgrpo.rl.batch import Floats, RewardBatch
from tfgrpo.rl.registry import Entry, register

ADVANTAGES: dict[str, Entry] = {}


@register(
    ADVANTAGES,
    "grpo",
    source="GRPO (arXiv 2402.03300, section 4.1.2)",
    formula="(R - mean) / (std + eps) in each group, std with ddof",
    certainty="code",
    test="tests/rl/registry/test_advantages.py::test_grpo_matches_hand_computed_groups",
)
def grpo(batch: RewardBatch, *, eps: float = 1e-4, ddof: int = 1) -> Floats:
    """Return group-standardised rewards: R.

    `ddof` 1 is the sample standard deviation (TRL, verl), 0 the population's. A group of one
    rollout gets 0.
    """
    advantage_R = np.zeros_like(batch.reward_R)
    for rows in batch.groups():
        rewards_G = batch.reward_R[rows]
        if len(rows) > ddof and np.ptp(rewards_G) > 0:
            centred_G = rewards_G - rewards_G.mean()
            advantage_R[rows] = centred_G / (rewards_G.std(ddof=ddof) + eps)
    return advantage_R
