"""Advantages from several named rewards, from ranks and from tournaments.

One value a rollout, R. `part_RM` holds the named rewards; an option `weight_NAME` weighs the part
NAME (1 unless given). Does not know how parts are judged. Sources are named at each entry.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from tfgrpo.rl.formulas.group_stats import (
    average_ranks,
    centred,
    column,
    deviation_of,
    filled_groups,
    is_flat,
    mean_of,
    part_weights,
)
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

SEVERAL_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_multi_reward.py::"


@register(
    SEVERAL_ADVANTAGES,
    "gdpo",
    source="GDPO, released code NVlabs/GDPO; TRL `normalize_then_sum`, verl",
    formula="whiten over the batch of sum_m w_m (r_m - group mean) / (group std + eps)",
    certainty="code",
    checked=(
        "read in NVlabs/GDPO trl-0.18.0-gdpo grpo_trainer.py: sample deviations, eps 1e-4 twice"
    ),
    test=TESTS + "test_gdpo_tells_apart_what_a_sum_merges",
    needs=("parts",),
)
def gdpo(batch: RewardBatch, *, eps: float = 1e-4, **weights: float) -> Floats:
    """Return the whitened sum of separately standardised parts, any number of them: R.

    Standard deviations are the sample's. A part that is flat in a group adds nothing there.
    """
    part_RM = required(batch.part_RM, "gdpo", "part_RM")
    weight_M = part_weights(batch, "gdpo", weights)
    total_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        for m, weight in enumerate(weight_M):
            part_G = part_RM[rows, m]
            if not is_flat(part_G):
                total_R[rows] += weight * centred(part_G) / (deviation_of(part_G) + eps)
    if is_flat(total_R):
        return np.zeros(len(total_R))
    return (total_R - mean_of(total_R)) / (deviation_of(total_R) + eps)


@register(
    SEVERAL_ADVANTAGES,
    "dvao",
    source="DVAO, abstract and a summary that disagree; the abstract's direction",
    formula="sum_m w_m (r_m - mean)/std by group, w_m = prior_m var_m / sum(prior var), population",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_dvao_is_a_convex_mixture_by_variance",
    needs=("parts",),
)
def dvao(batch: RewardBatch, **weights: float) -> Floats:
    """Return a mixture of standardised parts, weighted by their variance in the group: R.

    Approximation: variance (not deviation) is our choice. Scaling one part changes the mixture;
    |A| is at most √(G − 1).
    """
    part_RM = required(batch.part_RM, "dvao", "part_RM")
    prior_M = part_weights(batch, "dvao", weights)
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        parts = [part_RM[rows, m] for m in range(len(prior_M))]
        std_M = np.array([0.0 if is_flat(p_G) else deviation_of(p_G, 0) for p_G in parts])
        share_M = prior_M * std_M**2
        if share_M.sum() > 0:
            for part_G, share, std in zip(parts, share_M / share_M.sum(), std_M, strict=True):
                if std > 0:
                    advantage_R[rows] += share * centred(part_G) / std
    return advantage_R


def _scaled_ranks(value_G: Floats) -> Floats:
    """Average ranks from −1 (lowest) to 1 (highest): G."""
    return 2 * average_ranks(value_G) / (len(value_G) - 1) - 1


@register(
    SEVERAL_ADVANTAGES,
    "rank",
    source="Average ranks (Wilcoxon, 1945)",
    formula="2 rank / (G-1) - 1 in each group, ties share their average rank",
    certainty="paper",
    checked="by definition",
    test=TESTS + "test_ranks_are_centred_and_share_ties",
)
def rank(batch: RewardBatch) -> Floats:
    """Return centred ranks: R, in [−1, 1]. Only the order of rewards matters."""
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        if not is_flat(batch.reward_R[rows]):
            advantage_R[rows] = _scaled_ranks(batch.reward_R[rows])
    return advantage_R


@register(
    SEVERAL_ADVANTAGES,
    "rank_normal",
    source="G2RPO (quantile map to a normal), abstract",
    formula="standard normal quantile at (rank + 1/2) / G in each group",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_ranks_are_centred_and_share_ties",
)
def rank_normal(batch: RewardBatch) -> Floats:
    """Return normal scores of the ranks: R.

    Approximation: where the quantiles are taken is ours. Heavy-tailed rewards count by order only.
    """
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        if not is_flat(batch.reward_R[rows]):
            level_G = (average_ranks(batch.reward_R[rows]) + 0.5) / len(rows)
            advantage_R[rows] = [NormalDist().inv_cdf(float(x)) for x in level_G]
    return advantage_R


@register(
    SEVERAL_ADVANTAGES,
    "arena_rank",
    source="ArenaRL (tournament-based relative ranking), abstract",
    formula="2 rank / (G-1) - 1 by (tournament round reached, then reward)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_arena_rank_orders_by_round_and_then_reward",
    needs=("extra:round_R",),
)
def arena_rank(batch: RewardBatch) -> Floats:
    """Return centred ranks of a tournament, `extra["round_R"]` (verifier `arena`): R.

    Approximation: the map from ranks to advantages and the seeding are unknown; linear ranks, ties
    of a round broken by reward.
    """
    round_R = column(batch, "arena_rank", "round_R")
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        keys = list(zip(round_R[rows].tolist(), batch.reward_R[rows].tolist(), strict=True))
        place_G = np.array([sorted(set(keys)).index(k) for k in keys], dtype=np.float64)
        if not is_flat(place_G):
            advantage_R[rows] = _scaled_ranks(place_G)
    return advantage_R


@register(
    SEVERAL_ADVANTAGES,
    "hop_baseline",
    source="HRPO of Dr. Zero, abstract (not MasHost's HRPO)",
    formula="R - mean over all rollouts of the batch with the same class",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_hop_baseline_shares_a_mean_by_class",
    needs=("extra:class_R",),
)
def hop_baseline(batch: RewardBatch) -> Floats:
    """Return rewards above the mean of their class, `extra["class_R"]` (hop counts): R.

    Approximation: whether the paper divides by a deviation is unknown. Groups do not matter, so
    one rollout a task suffices; a class of one rollout gives 0.
    """
    class_R = column(batch, "hop_baseline", "class_R")
    advantage_R = np.zeros(len(batch.reward_R))
    for label in np.unique(class_R):
        rows = np.flatnonzero(class_R == label)
        if not is_flat(batch.reward_R[rows]):
            advantage_R[rows] = centred(batch.reward_R[rows])
    return advantage_R
