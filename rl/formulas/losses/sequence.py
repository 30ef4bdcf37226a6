"""Losses on a whole row's probability ratio.

A row's value is repeated on each of its tokens, so that `row_mean` (mean over rows of token means)
gives the mean of the rows' values. s = exp(mean over the row of log r) unless said otherwise.
Does not know aggregation. Idea: GSPO (arXiv 2507.18071).
"""

from __future__ import annotations

import math

import torch

from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.clip import clipped_surrogate, log_ratio, siblings
from tfgrpo.rl.formulas.registry import Entry, register, required

SEQUENCE_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_sequence.py::"


@register(
    SEQUENCE_LOSSES,
    "gspo",
    source="GSPO (arXiv 2507.18071); TRL `importance_sampling_level=sequence`, verl",
    formula="-min(s A, clip(s, 1-eps_low, 1+eps_high) A); aggregate with row_mean",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_gspo_matches_hand_computed_rows",
    needs=("sequence", "ratio"),
    aggregation="row_mean",
)
def gspo(batch: TokenBatch, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> torch.Tensor:
    """Return the surrogate clipped on the length-normalised row ratio: D."""
    ratio_D = batch.row_mean(log_ratio(batch)).exp()[batch.row_D]
    return clipped_surrogate(ratio_D, batch.advantage_D, 1 - eps_low, 1 + eps_high)


@register(
    SEQUENCE_LOSSES,
    "gspo_token",
    source="GSPO-token (arXiv 2507.18071); verl",
    formula="clip on s_t = sg(s) pi / sg(pi): the values of gspo, the gradient of each token alone",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_gspo_token_has_the_values_of_gspo_and_token_gradients",
    needs=("sequence", "ratio"),
    aggregation="row_mean",
)
def gspo_token(batch: TokenBatch, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> torch.Tensor:
    """Return the row-clipped surrogate with per-token gradients (advantages may vary): D."""
    row_D = batch.row_mean(log_ratio(batch)).exp()[batch.row_D].detach()
    ratio_D = row_D * (batch.logp_D - batch.logp_D.detach()).exp()
    return clipped_surrogate(ratio_D, batch.advantage_D, 1 - eps_low, 1 + eps_high)


@register(
    SEQUENCE_LOSSES,
    "gmpo",
    source="GMPO (arXiv 2507.20673); verl `geo_mean`, TRL experimental",
    formula="-A exp(mean_t q_t): q = min(log r, eps_high) if A > 0, max(log r, -eps_low) if < 0",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_gmpo_matches_the_clipped_geometric_mean",
    needs=("sequence", "ratio"),
    aggregation="row_mean",
)
def gmpo(batch: TokenBatch, *, eps_low: float = 0.4, eps_high: float = 0.4) -> torch.Tensor:
    """Return the geometric-mean surrogate with log-ratios clipped on the harmful side: D.

    The clip is sgn(A) min(sgn(A) log r, sgn(A) clip(log r, -eps_low, eps_high)); the advantage is
    the row's mean.
    """
    gap_D = log_ratio(batch)
    sign_D = batch.advantage_D.sign()
    clipped_D = gap_D.clamp(-eps_low, eps_high)
    worse_D = sign_D * torch.minimum(sign_D * gap_D, sign_D * clipped_D)
    ratio_R = batch.row_mean(worse_D).exp()
    advantage_R = batch.row_mean(batch.advantage_D)
    return -(ratio_R * advantage_R)[batch.row_D]


@register(
    SEQUENCE_LOSSES,
    "luspo",
    source="LUSPO; TRL loss type `luspo`",
    formula="row length * gspo loss; aggregate with row_mean",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_luspo_is_gspo_times_length",
    needs=("sequence", "ratio"),
    aggregation="row_mean",
)
def luspo(batch: TokenBatch, *, eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> torch.Tensor:
    """Return the row-clipped surrogate times the row's length: D."""
    length_R = batch.row_sum(torch.ones_like(batch.logp_D.detach()))
    return length_R[batch.row_D] * gspo(batch, eps_low=eps_low, eps_high=eps_high)


@register(
    SEQUENCE_LOSSES,
    "vespo",
    source="VESPO; TRL loss type `vespo`",
    formula="-sg(phi(w)) A log pi, phi(w) = e^lam w^k e^(-lam w), w = exp(sum of row's log r)",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_vespo_weight_is_one_on_policy_and_follows_the_closed_form",
    needs=("sequence", "ratio"),
)
def vespo(
    batch: TokenBatch,
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
) -> torch.Tensor:
    """Return a score-function loss under a smooth weight of the whole row's ratio: D.

    (k, lam) differ by the advantage's sign. As released, a token's log-ratio is cut at ±20 and the
    row's at log 1e-8 and 20.
    """
    gap_R = batch.row_sum(log_ratio(batch).detach().clamp(-20.0, 20.0))
    log_w_D = gap_R.clamp(math.log(1e-8), 20.0)[batch.row_D]
    positive_D = batch.advantage_D > 0
    k_D = torch.where(positive_D, k_positive, k_negative)
    lam_D = torch.where(positive_D, lam_positive, lam_negative)
    weight_D = (lam_D + k_D * log_w_D - lam_D * log_w_D.exp()).exp()
    return -weight_D * batch.advantage_D * batch.logp_D


@register(
    SEQUENCE_LOSSES,
    "p3o",
    source="P3O (Pairwise PPO), abstract; formula recalled",
    formula="mean over pairs of a group of -1/2 (R1-R2)(lr1-lr2), lr = row sum of log r, clipped",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_p3o_matches_the_sum_over_pairs_and_ignores_a_reward_shift",
    needs=("sequence", "group", "every_row", "ratio", "rewards"),
    aggregation="row_mean",
)
def p3o(batch: TokenBatch, *, eps: float = 0.2) -> torch.Tensor:
    """Return each row's mean pair loss against its siblings, on every token: D.

    Approximation: the difference of the two summed log-ratios is clipped jointly to ±`eps` in the
    pessimistic minimum; the paper's clip is recalled only. Advantages are not used, so the reward
    may be shifted by any amount a group. Aggregate with row_mean; a row without siblings gives 0.
    """
    sibling_RR = siblings(batch, "p3o")
    reward_R = required(batch.reward_R, "p3o", "reward_R")
    gap_R = batch.row_sum(log_ratio(batch))
    gap_RR = gap_R[:, None] - gap_R[None, :]
    reward_RR = (reward_R[:, None] - reward_R[None, :]).to(gap_R.dtype)
    pair_RR = -0.5 * torch.minimum(reward_RR * gap_RR, reward_RR * gap_RR.clamp(-eps, eps))
    sibling_RR = sibling_RR - torch.eye(len(gap_R), dtype=gap_R.dtype, device=gap_R.device)
    loss_R = (pair_RR * sibling_RR).sum(1) / sibling_RR.sum(1).clamp_min(1)
    return loss_R[batch.row_D]
