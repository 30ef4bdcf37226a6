"""Advantages by token: weights, masks and baselines inside a rollout.

Each returns one value a token, rows end to end: D. Columns that `RewardBatch.extra` must hold are
named in each docstring. Does not know how log-probs or entropies are made. Sources are named at
each entry.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.advantages.weighted import most_varied
from tfgrpo.rl.formulas.group_stats import column, filled_groups, is_flat, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

TOKEN_CREDIT: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/credit/test_tokens.py::"


def repeated(batch: RewardBatch, value_R: Floats) -> Floats:
    """Return each row's value on each of its tokens: D."""
    return np.repeat(value_R, batch.length_R)


def tokens_of(batch: RewardBatch, value_D: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut a per-token array into rows: R arrays of T."""
    return np.split(value_D, np.cumsum(batch.length_R)[:-1])


@register(
    TOKEN_CREDIT,
    "discounted",
    source="REINFORCE++ (arXiv 2501.03262) with token discount; verl",
    formula="whiten over all tokens of gamma^(tokens left) R",
    certainty="code",
    checked="verl's discounted return by its definition",
    test=TESTS + "test_discounted_whitens_the_discounted_return",
)
def discounted(batch: RewardBatch, *, gamma: float = 0.99, eps: float = 1e-8) -> Floats:
    """Return whitened discounted outcomes: D. Sample variance over the batch's tokens."""
    left_D = (
        np.concatenate([np.arange(n)[::-1] for n in batch.length_R])
        if len(batch.length_R)
        else np.zeros(0)
    )
    return_D = gamma**left_D * repeated(batch, batch.reward_R)
    if is_flat(return_D):
        return np.zeros(len(return_D))
    mean = mean_of(return_D)
    variance = math.fsum((return_D - mean) ** 2) / (len(return_D) - 1)
    result: Floats = (return_D - mean) / math.sqrt(variance + eps)
    return result


@register(
    TOKEN_CREDIT,
    "optimal_token_baseline",
    source="OTB (arXiv 2602.07078); verl optimal_token_baseline",
    formula="R - sum_i R_i W_it / sum_i W_it over the group at token t, W = cumsum(1-2pi+sum pi^2)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_optimal_token_baseline_weighs_by_realised_energy",
    needs=("logp_tokens", "extra:sum_square_D"),
)
def optimal_token_baseline(
    batch: RewardBatch, *, zero_tail: float = 1, eps: float = 1e-8
) -> Floats:
    """Return outcomes above a baseline of their own at each token: D.

    `extra["sum_square_D"]` is Σπ² over the vocabulary at each token. Tokens are numbered among the
    loss-bearing ones, as in the multi-turn form of the release. Where a rollout is longer than all
    its siblings, no baseline is left: 0 as released, or its own outcome (advantage 0) with
    `zero_tail` 0. A flat group gives 0.
    """
    logp_D = required(batch.logp_D, "optimal_token_baseline", "logp_D")
    square_D = column(batch, "optimal_token_baseline", "sum_square_D")
    energy = [np.cumsum(e_T) for e_T in tokens_of(batch, 1 - 2 * np.exp(logp_D) + square_D)]
    value = [np.zeros(len(e_T)) for e_T in energy]
    for rows in filled_groups(batch):
        if is_flat(batch.reward_R[rows]):
            continue
        for t in range(max(len(energy[r]) for r in rows)):
            mine = [r for r in rows if t < len(energy[r])]
            weight_G = np.array([energy[r][t] for r in mine])
            base = math.fsum(weight_G * batch.reward_R[mine]) / (math.fsum(weight_G) + eps)
            if zero_tail and len(mine) == 1:
                base = 0.0
            for row in mine:
                value[row][t] = batch.reward_R[row] - base
    return np.concatenate(value) if value else np.zeros(0)


def _shared_runs(
    ids: list[NDArray[Any]], row: int, others: list[int]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Unbroken runs, from the first token and up to the last, of tokens that some other row has at
    the same place counted from that end: 2 × T."""
    own_T = ids[row]
    runs = []
    for way in (1, -1):
        met_T = np.zeros(len(own_T), dtype=bool)
        for other in others:
            n = min(len(own_T), len(ids[other]))
            met_T[:n] |= own_T[::way][:n] == ids[other][::way][:n]
        runs.append(np.cumprod(met_T).astype(bool)[::way])
    return runs[0], runs[1]


@register(
    TOKEN_CREDIT,
    "gtpo_trajectory",
    source="GTPO (trajectory, arXiv 2508.03772), released code; not the other GTPO, 2508.04349",
    formula="w (A - gamma mean H) / n; w = 0 (A < 0) or 2 (A > 0) a shared run; 0 if mean H > ln 2",
    certainty="code",
    checked=(
        "read in winstonsmith1897/GTPO gtpo/gtpo_training.py: cumprod runs over the group, "
        "weights 2 and 0, divided by conflicts"
    ),
    test=TESTS + "test_gtpo_trajectory_spares_tokens_that_both_kinds_share",
    needs=("token_ids", "entropy_tokens"),
    aggregation="row_mean",
)
def gtpo_trajectory(
    batch: RewardBatch,
    *,
    gamma: float = 0.1,
    amplify: float = 2.0,
    limit: float = math.log(2),
    eps: float = 1e-4,
) -> Floats:
    """Return advantages that leave shared ends alone in wrong rollouts and double them in right: D.

    A shared token equals, at the same place from the start, a token of a sibling whose advantage
    has the opposite sign, and so do all tokens before it; likewise from the end. A token of both
    runs gets both weights (4 in a right rollout). A row is divided by its number n of shared
    tokens, at least 1. Rollouts of mean entropy above `limit` nats are dropped. No KL and no
    reference model belong to it.
    """
    ids = tokens_of(batch, required(batch.token_D, "gtpo_trajectory", "token_D"))
    entropy_D = required(batch.entropy_D, "gtpo_trajectory", "entropy_D")
    mean_R = np.array([mean_of(h_T) if len(h_T) else 0.0 for h_T in tokens_of(batch, entropy_D)])
    advantage_R = grpo(batch, eps=eps)
    value = [np.zeros(len(t)) for t in ids]
    for rows in filled_groups(batch):
        for row in rows:
            sign = np.sign(advantage_R[row])
            if sign == 0 or mean_R[row] > limit:
                continue
            others = [r for r in rows if np.sign(advantage_R[r]) == -sign]
            head_T, tail_T = _shared_runs(ids, row, others)
            factor = amplify if sign > 0 else 0.0
            weight_T = np.where(head_T, factor, 1.0) * np.where(tail_T, factor, 1.0)
            shared = max(1, int((head_T | tail_T).sum()))
            value[row] = weight_T * (advantage_R[row] - gamma * mean_R[row]) / shared
    return np.concatenate(value) if value else np.zeros(0)


@register(
    TOKEN_CREDIT,
    "dcpo_distribution",
    source="DCPO, distribution-centric, released code 597358816/DCPO, guarded against no positives",
    formula="(1-a) A + a [positive] exp(logp_T - logp), a = x/(1+x), x = min(|H*-H|, cap)/share",
    certainty="code",
    checked=(
        "read in 597358816/DCPO verl/trainer/ray_trainer.py: equal; without positives it "
        "divides by 0 there"
    ),
    test=TESTS + "test_dcpo_distribution_mixes_in_the_tempered_ratio",
    needs=("logp_tokens", "entropy_tokens", "extra:tempered_logp_D"),
)
def dcpo_distribution(
    batch: RewardBatch,
    *,
    target: float = 0.5,
    threshold: float = 0.05,
    cap: float = 0.1,
    eps: float = 1e-4,
) -> Floats:
    """Return advantages mixed with a ratio to the tempered policy on positive answers: D.

    `extra["tempered_logp_D"]` is log π_old at temperature 1.2 where the batch's mean entropy is at
    most `target`, else at 0.8. A positive answer has R > `threshold`. Without one, nothing is
    mixed in (the release divides by zero).
    """
    logp_D = required(batch.logp_D, "dcpo_distribution", "logp_D")
    entropy_D = required(batch.entropy_D, "dcpo_distribution", "entropy_D")
    ratio_D = np.exp(column(batch, "dcpo_distribution", "tempered_logp_D") - logp_D)
    positive_R = batch.reward_R > threshold
    advantage_D = repeated(batch, grpo(batch, eps=eps))
    share = float(positive_R.mean()) if len(positive_R) else 0.0
    if share == 0 or not len(entropy_D):
        return advantage_D
    x = min(abs(target - mean_of(entropy_D)), cap) / share
    a = x / (1 + x)
    return (1 - a) * advantage_D + a * repeated(batch, positive_R.astype(np.float64)) * ratio_D


@register(
    TOKEN_CREDIT,
    "top_entropy",
    source="High-entropy minority tokens (arXiv 2506.01939); TRL top_entropy_quantile",
    formula="A on tokens whose entropy is in the top share of the batch, else 0",
    certainty="code",
    checked="TRL's top_entropy_quantile, as noted; over the batch here",
    test=TESTS + "test_top_entropy_keeps_the_uncertain_share",
    needs=("entropy_tokens",),
)
def top_entropy(batch: RewardBatch, *, share: float = 0.2, eps: float = 1e-4) -> Floats:
    """Return group advantages on the most uncertain `share` of all tokens: D."""
    entropy_D = required(batch.entropy_D, "top_entropy", "entropy_D")
    advantage_D = repeated(batch, grpo(batch, eps=eps))
    if not len(entropy_D):
        return advantage_D
    return np.where(entropy_D >= np.quantile(entropy_D, 1 - share), advantage_D, 0.0)


@register(
    TOKEN_CREDIT,
    "largest_signal",
    source="D3S token level (Learning More with Less), abstract",
    formula="A on the `share` of tokens of largest |A| H, else 0",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_largest_signal_ranks_by_advantage_times_entropy",
    needs=("entropy_tokens",),
)
def largest_signal(batch: RewardBatch, *, share: float = 0.5, eps: float = 1e-4) -> Floats:
    """Return group advantages on the tokens of largest |A|·entropy: D.

    Approximation: the rule is the abstract's; `share` and its growth are ours. Ties at the cut are
    all kept.
    """
    entropy_D = required(batch.entropy_D, "largest_signal", "entropy_D")
    advantage_D = repeated(batch, grpo(batch, eps=eps))
    signal_D = np.abs(advantage_D) * entropy_D
    keep = max(1, round(share * len(signal_D)))
    if keep >= len(signal_D):
        return advantage_D
    return np.where(signal_D >= np.sort(signal_D)[-keep], advantage_D, 0.0)


@register(
    TOKEN_CREDIT,
    "d3s_dual",
    source="D3S (Learning More with Less), abstract: both levels, growing over training",
    formula="largest_signal of d3s; the kept shares of a group and of tokens grow to their ends",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_d3s_dual_grows_to_plain_advantages",
    needs=("entropy_tokens",),
)
def d3s_dual(
    batch: RewardBatch,
    *,
    keep: float = 0.5,
    keep_end: float = 1.0,
    share: float = 0.5,
    share_end: float = 1.0,
    progress: float = 0.0,
    eps: float = 1e-4,
) -> Floats:
    """Return group advantages of the most varied rollouts, on the tokens of largest |A|·entropy: D.

    `keep` and `share` are of the rollouts of a group (at least two) and of all tokens at the start,
    the others at the end. Approximation: the rules are the abstract's, the straight lines ours.
    """
    entropy_D = required(batch.entropy_D, "d3s_dual", "entropy_D")
    advantage_R = grpo(batch, eps=eps)
    part = keep + (keep_end - keep) * progress
    for rows in filled_groups(batch):
        size = max(2, math.ceil(part * len(rows) - 1e-9))
        advantage_R[np.delete(rows, most_varied(advantage_R[rows], size))] = 0.0
    advantage_D = repeated(batch, advantage_R)
    tokens = share + (share_end - share) * progress
    n = max(1, round(tokens * len(entropy_D)))
    if n >= len(entropy_D):
        return advantage_D
    signal_D = np.abs(advantage_D) * entropy_D
    return np.where(signal_D >= np.sort(signal_D)[-n], advantage_D, 0.0)


@register(
    TOKEN_CREDIT,
    "hicra",
    source="HICRA (Emergent Hierarchical Reasoning), abstract; formula recalled",
    formula="A + alpha |A| on planning tokens",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_hicra_moves_planning_tokens_up",
    needs=("extra:planning_D",),
)
def hicra(batch: RewardBatch, *, alpha: float = 0.2, eps: float = 1e-4) -> Floats:
    """Return group advantages raised on planning tokens, `extra["planning_D"]` above 0: D.

    Approximation: `alpha` is recalled and how phrases are mined is unknown.
    """
    planning_D = column(batch, "hicra", "planning_D") > 0
    advantage_D = repeated(batch, grpo(batch, eps=eps))
    return advantage_D + alpha * np.abs(advantage_D) * planning_D


@register(
    TOKEN_CREDIT,
    "temporal",
    source="Temporal scheduling (Not only where, But when), abstract",
    formula="A w, w = 1 + k on tokens of the first `head` share of their row, scaled to mean 1",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_temporal_fades_to_plain_advantages",
)
def temporal(
    batch: RewardBatch,
    *,
    k: float = 1.0,
    head: float = 0.2,
    progress: float = 0.0,
    eps: float = 1e-4,
) -> Floats:
    """Return group advantages that stress early tokens, less as training goes on: D.

    Approximation: which tokens and how the stress fades are unknown; the first `head` share of each
    row and a linear fade over `progress` in [0, 1]. Weights average 1 in each row.
    """
    stress = k * (1 - progress)
    value = []
    for n, a in zip(batch.length_R.tolist(), grpo(batch, eps=eps).tolist(), strict=True):
        weight_T = 1 + stress * (np.arange(n) < head * n)
        value.append(a * weight_T / weight_T.mean() if n else weight_T)
    return np.concatenate(value) if value else np.zeros(0)
