"""Losses that clip the token's probability ratio, and terms added to such a loss.

One differentiable value a token. r = exp(log π − log π_old), A advantage, ε the clip's widths.
Does not know aggregation, KL to a reference or entropy bonuses. Idea: PPO (arXiv 1707.06347).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tfgrpo.rl.formulas.inputs import Floats, RewardBatch, TokenBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

CLIP_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_clip.py::"


def log_ratio(batch: TokenBatch) -> torch.Tensor:
    """Return log π − log π_old: D."""
    return batch.logp_D - batch.old_logp_D


def clipped_surrogate(
    ratio_D: torch.Tensor,
    advantage_D: torch.Tensor,
    low: float | torch.Tensor,
    high: float | torch.Tensor,
) -> torch.Tensor:
    """Return −min(r A, clip(r, low, high) A): D."""
    clipped_D = torch.minimum(torch.maximum(ratio_D, _like(low, ratio_D)), _like(high, ratio_D))
    return -torch.minimum(ratio_D * advantage_D, clipped_D * advantage_D)


def _like(bound: float | torch.Tensor, ratio_D: torch.Tensor) -> torch.Tensor:
    return bound if isinstance(bound, torch.Tensor) else ratio_D.new_full((), bound)


def turns(batch: RewardBatch, options: Mapping[str, Any]) -> dict[str, Floats]:
    """Return the turn, line or item of each token as the column `segment`, where there are some."""
    if batch.step_R is None:
        return {}
    return {"segment": np.concatenate([s.astype(np.float64) for s in batch.step_R])}


def group_of_tokens(batch: TokenBatch, entry: str) -> torch.Tensor:
    """Return each token's group number: D."""
    return required(batch.group_R, entry, "group_R")[batch.row_D]


def siblings(batch: TokenBatch, entry: str) -> torch.Tensor:
    """Return 1 where two rows are of one group, a row and itself included, else 0: R × R."""
    group_R = required(batch.group_R, entry, "group_R")
    return (group_R[:, None] == group_R[None, :]).to(batch.logp_D.dtype)


@register(
    CLIP_LOSSES,
    "clip",
    source="PPO (arXiv 1707.06347, eq. 7), GRPO (arXiv 2402.03300); verl, TRL and most trainers",
    formula="-min(r A, clip(r, 1-eps_low, 1+eps_high) A)",
    certainty="code",
    checked="run beside TRL and verl on equal inputs (test_trl_peer, test_verl_peer)",
    test=TESTS + "test_clip_and_dapo_match_hand_computed_cases",
    needs=("ratio",),
    uses=("width",),
)
def clip(batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> torch.Tensor:
    """Return the clipped surrogate, negated: D.

    `eps_low` in [0, 1) and `eps_high` >= 0 bound the probability ratio. NGRPO trains with
    0.16 and 0.24.
    """
    ratio_D = log_ratio(batch).exp()
    width_D = batch.columns.get("width")
    low: float | torch.Tensor = eps_low
    high: float | torch.Tensor = eps_high
    if width_D is not None:
        low, high = (eps_low * width_D).clamp(max=0.99), eps_high * width_D
    return clipped_surrogate(ratio_D, batch.advantage_D, 1 - low, 1 + high)


@register(
    CLIP_LOSSES,
    "dapo",
    source="DAPO (arXiv 2503.14476, eq. 10); TRL, verl",
    formula="clip with eps_high above eps_low: 0.2 and 0.28; aggregate with token_mean",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_clip_and_dapo_match_hand_computed_cases",
    needs=("ratio",),
    uses=("width",),
)
def dapo(batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.28) -> torch.Tensor:
    """Return DAPO's clipped surrogate, negated: D. The rest of DAPO is chosen elsewhere:
    `token_mean`, the `overlong_soft` reward, no KL."""
    return clip(batch, eps_low=eps_low, eps_high=eps_high)


@register(
    CLIP_LOSSES,
    "dual_clip",
    source="Dual-clip PPO (arXiv 1912.09729); verl and SkyRL `clip_ratio_c`",
    formula="clip; where A < 0 the loss is at most -c A",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_dual_clip_bounds_the_loss_of_negative_advantages",
    needs=("ratio",),
    uses=("width",),
)
def dual_clip(
    batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, c: float = 3.0
) -> torch.Tensor:
    """Return the clipped surrogate with a ceiling of c|A| for negative advantages: D.

    `c` > 1 + eps_high.
    """
    loss_D = clip(batch, eps_low=eps_low, eps_high=eps_high)
    bounded_D = torch.minimum(loss_D, -c * batch.advantage_D)
    return torch.where(batch.advantage_D < 0, bounded_D, loss_D)


@register(
    CLIP_LOSSES,
    "delta_clip",
    source="INTELLECT-2 two-sided clip (arXiv 2505.07291); TRL `delta`",
    formula="-min(min(r, delta) A, clip(r, 1-eps_low, 1+eps_high) A)",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_delta_clip_caps_the_ratio_in_the_plain_arm",
    needs=("ratio",),
)
def delta_clip(
    batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, delta: float = 4.0
) -> torch.Tensor:
    """Return the clipped surrogate whose unclipped arm uses min(r, delta): D.

    `delta` > 1 + eps_high.
    """
    ratio_D = log_ratio(batch).exp()
    clipped_D = ratio_D.clamp(1 - eps_low, 1 + eps_high)
    capped_D = ratio_D.clamp(max=delta)
    return -torch.minimum(capped_D * batch.advantage_D, clipped_D * batch.advantage_D)


@register(
    CLIP_LOSSES,
    "decoupled_clip",
    source="Decoupled PPO (arXiv 2110.00641); AReaL, OpenRLHF's truncated sampling weights",
    formula="sg(min(exp(log pi_old - log pi_behaviour), cap)) * clip loss",
    certainty="code",
    checked="the paper's rule; weight capped as in OpenRLHF; no peer run",
    test=TESTS + "test_decoupled_clip_weighs_by_the_capped_behaviour_ratio",
    needs=("behaviour", "ratio"),
    uses=("width",),
)
def decoupled_clip(
    batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = 2.0
) -> torch.Tensor:
    """Return the clipped surrogate around π_old, corrected for what the engine sampled from: D.

    `cap` > 0 bounds the correction from above.
    """
    behaviour_D = required(batch.behaviour_logp_D, "decoupled_clip", "behaviour_logp_D")
    weight_D = (batch.old_logp_D - behaviour_D).exp().clamp(max=cap).detach()
    return weight_D * clip(batch, eps_low=eps_low, eps_high=eps_high)


@register(
    CLIP_LOSSES,
    "etr",
    source="ETR (arXiv 2601.03723), abstract",
    formula="clip with eps_i = eps0 (1 + k1 g(|A|)) (1 + k2 h(var)), g(x) = x/(1+x), h(v) = v/vmax",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_etr_widens_with_advantage_and_group_variance",
    needs=("group", "ratio"),
)
def etr(
    batch: TokenBatch, *, eps: float = 0.2, k1: float = 0.5, k2: float = 0.5, vmax: float = 0.25
) -> torch.Tensor:
    """Return a surrogate clipped wider for larger |A| and for groups of larger variance: D.

    Approximation: the paper's g and h are unknown; these are increasing and bounded by 1. `vmax`
    is the largest possible variance of a reward (0.25 on [0, 1]); larger variances count as it.
    The lower width stays below 1.
    """
    variance_R = _group_variance(batch)
    size_D = batch.advantage_D.abs()
    g_D = size_D / (1 + size_D)
    h_D = (variance_R / vmax).clamp(max=1.0)[batch.row_D]
    width_D = eps * (1 + k1 * g_D) * (1 + k2 * h_D)
    ratio_D = log_ratio(batch).exp()
    low_D = 1 - width_D.clamp(max=0.99)
    return clipped_surrogate(ratio_D, batch.advantage_D, low_D, 1 + width_D)


def _group_variance(batch: TokenBatch) -> torch.Tensor:
    """Population variance of the rewards of each row's group: R."""
    reward_R = required(batch.reward_R, "etr", "reward_R")
    same_RR = siblings(batch, "etr").to(reward_R.dtype)
    count_R = same_RR.sum(1)
    mean_R = same_RR @ reward_R / count_R
    square_R = same_RR @ (reward_R**2) / count_R
    return (square_R - mean_R**2).clamp_min(0)


@register(
    CLIP_LOSSES,
    "dhpo",
    source="DHPO, abstract: token and sequence ratios clipped apart, then mixed",
    formula="-min(m A, m' A): m = w r + (1-w) s, m' the same of both clipped, s = exp(mean log r)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_dhpo_is_clip_at_weight_one_and_gspo_at_weight_zero",
    needs=("sequence", "ratio"),
)
def dhpo(
    batch: TokenBatch,
    *,
    weight: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    row_eps_low: float = 3e-4,
    row_eps_high: float = 4e-4,
) -> torch.Tensor:
    """Return a surrogate of the mixed ratio, each part clipped in its own range first: D.

    Approximation: mixing after clipping is stated in the abstract, the widths are ours (those of
    DAPO and GSPO) and so is the surrogate's minimum with the unclipped mixture. `weight` in [0, 1]
    belongs to the token ratio.
    """
    gap_D = log_ratio(batch)
    ratio_D = gap_D.exp()
    row_D = batch.row_mean(gap_D).exp()[batch.row_D]
    plain_D = weight * ratio_D + (1 - weight) * row_D
    clipped_D = weight * ratio_D.clamp(1 - eps_low, 1 + eps_high) + (1 - weight) * row_D.clamp(
        1 - row_eps_low, 1 + row_eps_high
    )
    return -torch.minimum(plain_D * batch.advantage_D, clipped_D * batch.advantage_D)


def _covariance(batch: TokenBatch, entry: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(A − mean A)(log π − mean log π) with means over the group's tokens: D, and groups: D."""
    group_D = group_of_tokens(batch, entry)
    logp_D = batch.logp_D.detach()
    n_groups = int(group_D.max()) + 1 if len(group_D) else 0
    count_P = logp_D.new_zeros(n_groups).index_add(0, group_D, torch.ones_like(logp_D))

    def centred(value_D: torch.Tensor) -> torch.Tensor:
        sum_P = logp_D.new_zeros(n_groups).index_add(0, group_D, value_D)
        return value_D - (sum_P / count_P.clamp_min(1))[group_D]

    return centred(batch.advantage_D.to(logp_D.dtype)) * centred(logp_D), group_D


@register(
    CLIP_LOSSES,
    "clip_cov",
    source="Clip-Cov (arXiv 2505.22617); verl and SkyRL `clip_cov`; statistics by group are ours",
    formula="clip; a random `share` of the unclipped tokens with low < cov < high gets no loss",
    certainty="code",
    checked=(
        "run beside verl's core_algos.py on equal inputs (test_verl_peer); statistics by "
        "group, not by micro-batch"
    ),
    test=TESTS + "test_clip_cov_silences_tokens_inside_the_bounds_only",
    needs=("group", "ratio"),
)
def clip_cov(
    batch: TokenBatch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: float = 0.0,
) -> torch.Tensor:
    """Return the clipped surrogate without some tokens of high covariance: D.

    max(1, share · tokens) tokens a group are silenced. Means, shares and the draw (a permutation
    fixed by `seed` and the group's size) belong to a group, not to a micro-batch as in the
    released code, so that cutting the batch differently changes nothing.
    """
    loss_D = clip(batch, eps_low=eps_low, eps_high=eps_high)
    cov_D, group_D = _covariance(batch, "clip_cov")
    ratio_D = log_ratio(batch).detach().exp()
    pushed_up_D = (ratio_D > 1 + eps_high) & (batch.advantage_D > 0)
    pushed_down_D = (ratio_D < 1 - eps_low) & (batch.advantage_D < 0)
    open_D = (cov_D > cov_low) & (cov_D < cov_high) & ~pushed_up_D & ~pushed_down_D
    keep_D = torch.ones_like(loss_D)
    for group in group_D.unique().tolist():
        mine_D = group_D == group
        candidates = torch.nonzero(open_D & mine_D).squeeze(-1)
        count = max(1, int(share * int(mine_D.sum())))
        draw = torch.Generator().manual_seed(int(seed))
        order = torch.randperm(len(candidates), generator=draw)[:count]
        keep_D[candidates[order.to(candidates.device)]] = 0.0
    return loss_D * keep_D


@register(
    CLIP_LOSSES,
    "kl_cov",
    source="KL-Cov (arXiv 2505.22617); verl and SkyRL `kl_cov`; statistics by group are ours",
    formula="-r A; on the `share` of tokens of largest cov: + coef |log r|",
    certainty="code",
    checked=(
        "run beside verl's core_algos.py on equal inputs (test_verl_peer); statistics by "
        "group, not by micro-batch"
    ),
    test=TESTS + "test_kl_cov_penalises_the_tokens_of_largest_covariance",
    needs=("group", "ratio"),
)
def kl_cov(batch: TokenBatch, *, share: float = 2e-4, coef: float = 1.0) -> torch.Tensor:
    """Return the unclipped surrogate with a penalty on max(1, share · tokens) tokens a group: D.

    As in `clip_cov`, statistics belong to a group instead of a micro-batch.
    """
    gap_D = log_ratio(batch)
    loss_D = -gap_D.exp() * batch.advantage_D
    cov_D, group_D = _covariance(batch, "kl_cov")
    chosen_D = torch.zeros_like(loss_D)
    for group in group_D.unique().tolist():
        mine = torch.nonzero(group_D == group).squeeze(-1)
        count = max(1, int(share * len(mine)))
        chosen_D[mine[cov_D[mine].topk(count).indices]] = 1.0
    return loss_D + coef * chosen_D * gap_D.abs()


@register(
    CLIP_LOSSES,
    "llds",
    source="LLDS (On GRPO Collapse in Search-R1), released code",
    formula="clip + lam max(0, -log r) where A >= 0 and log r summed over the row (or turn) < 0",
    certainty="code",
    checked=(
        "its repository is not among the public snapshots; the rule as noted, gates by row and turn"
    ),
    test=TESTS + "test_llds_adds_nothing_unless_the_rows_likelihood_fell",
    needs=("sequence", "every_row", "ratio"),
    uses=("steps", "width"),
    columns=turns,
)
def llds(
    batch: TokenBatch,
    *,
    lam: float = 0.2,
    lam_last: float = -1.0,
    gate: str = "row",
    threshold: float = 0.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> torch.Tensor:
    """Return the clipped surrogate plus a penalty on falling likelihood of good rows: D.

    The penalty is on for a row whose summed log-prob fell by more than `threshold` nats, or with
    `gate = "turn"` for a turn whose own did. `lam_last` is the weight on the last turn's tokens,
    where the answer stands; below 0 it is `lam`.
    """
    gap_D = log_ratio(batch)
    part_D, n = batch.segments() if gate == "turn" else (batch.row_D, batch.n_rows)
    fell = gap_D.new_zeros(n).index_add(0, part_D, gap_D.detach()) < -threshold
    gate_D = fell[part_D] & (batch.advantage_D >= 0)
    penalty_D = torch.where(gate_D, (-gap_D).clamp_min(0), torch.zeros_like(gap_D))
    weight_D = torch.full_like(penalty_D, lam)
    turn_D = batch.columns.get("segment")
    if lam_last >= 0 and turn_D is not None:
        last_R = turn_D.new_zeros(batch.n_rows).scatter_reduce(0, batch.row_D, turn_D, "amax")
        weight_D = torch.where(turn_D == last_R[batch.row_D], lam_last, weight_D)
    return clip(batch, eps_low=eps_low, eps_high=eps_high) + weight_D * penalty_D
