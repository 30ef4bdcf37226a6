"""Advantages of rollouts that weigh by their tokens: lengths, or how sure the policy was of them.

One value a rollout: R. Does not know how log-probs are made. Sources are named at each entry.
"""

from __future__ import annotations

import math

import numpy as np

from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.group_stats import column, filled_groups, is_flat
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

TOKEN_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_tokens.py::"


@register(
    TOKEN_ADVANTAGES,
    "token_average",
    source="HAPO (token level group average), released notes starriver030515/HAPO recipe/train.md",
    formula="(R - m)/(s + eps), m and s over the group's tokens; grpo where any |A| is 5 or more",
    certainty="code",
    checked="read in starriver030515/HAPO recipe/train.md: equal",
    test=TESTS + "test_token_average_weighs_rewards_by_length",
)
def token_average(batch: RewardBatch, *, most: float = 5.0, eps: float = 1e-6) -> Floats:
    """Return rewards standardised over the tokens of the group: R. Population deviation."""
    advantage_R = np.zeros(len(batch.reward_R))
    plain_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        reward_G, length_G = batch.reward_R[rows], batch.length_R[rows]
        total = int(length_G.sum())
        if is_flat(reward_G) or not total:
            continue
        mean = math.fsum(reward_G * length_G) / total
        scale = math.sqrt(math.fsum((reward_G - mean) ** 2 * length_G) / total)
        found_G = (reward_G - mean) / (scale + eps)
        advantage_R[rows] = plain_R[rows] if (np.abs(found_G) >= most).any() else found_G
    return advantage_R


@register(
    TOKEN_ADVANTAGES,
    "progrpo",
    source="ProGRPO (arXiv 2602.05281), formula as a review gives it",
    formula="A + a (c(prompt) - c(reply)) where something succeeded, c = exp(mean lowest log p)",
    certainty="approximation",
    checked="no released code was found; a review's formula, the weight is ours",
    test=TESTS + "test_progrpo_gives_more_to_the_less_likely_of_two_right_answers",
    needs=("logp_tokens", "extra:prompt_confidence_R"),
)
def progrpo(
    batch: RewardBatch, *, weight: float = 0.3, share: float = 0.2, eps: float = 1e-4
) -> Floats:
    """Return group advantages moved from what the policy was sure of to what it was not: R.

    `extra["prompt_confidence_R"]` is c of the prompt, of the same `share` of least likely tokens.
    Approximation: `weight` is ours.
    """
    logp_D = required(batch.logp_D, "progrpo", "logp_D")
    prompt_R = column(batch, "progrpo", "prompt_confidence_R")
    advantage_R = grpo(batch, eps=eps)
    cuts = np.cumsum(batch.length_R)[:-1]
    reply_R = np.array([confidence(p_T, share) for p_T in np.split(logp_D, cuts)])
    for rows in filled_groups(batch):
        if (batch.reward_R[rows] > 0).any():
            advantage_R[rows] += weight * (prompt_R[rows] - reply_R[rows])
    return advantage_R


def confidence(logp_T: Floats, share: float) -> float:
    """Return exp of the mean of the lowest `share` of log-probs, at least one; 1 for none.

    >>> round(float(confidence(np.array([-0.1, -1.0, 0.0, 0.0, 0.0]), 0.2)), 6)
    0.367879
    """
    if not len(logp_T):
        return 1.0
    n = max(1, round(share * len(logp_T)))
    return math.exp(math.fsum(np.sort(logp_T)[:n]) / n)
