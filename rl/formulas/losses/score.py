"""Score-function losses: a stop-gradient weight times −A log π, so that clipping never silences.

Masks that drop a token's loss altogether stand here too. sg = stop-gradient, r = exp(log π − log
π_old). Does not know aggregation. Idea: REINFORCE (Williams, 1992).
"""

from __future__ import annotations

import torch

from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.clip import log_ratio
from tfgrpo.rl.formulas.registry import Entry, register

SCORE_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_score.py::"


def _ratio(batch: TokenBatch) -> torch.Tensor:
    """r without a gradient: D."""
    return log_ratio(batch).detach().exp()


def _score(batch: TokenBatch, weight_D: torch.Tensor) -> torch.Tensor:
    return -weight_D * batch.advantage_D * batch.logp_D


@register(
    SCORE_LOSSES,
    "reinforce",
    source="REINFORCE (Williams, 1992); GPG's loss; verl, Trinity, ROLL, SkyRL, prime-rl",
    formula="-A log pi",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer) as gpg",
    test=TESTS + "test_reinforce_matches_the_closed_form",
)
def reinforce(batch: TokenBatch) -> torch.Tensor:
    """Return the plain score-function loss: D."""
    return -batch.advantage_D * batch.logp_D


@register(
    SCORE_LOSSES,
    "importance_sampling",
    source="Importance-weighted REINFORCE; SkyRL, Trinity, tinker, prime-rl",
    formula="-sg(r) A log pi, the gradient of -r A",
    certainty="code",
    checked="the gradient of r A, shown by test",
    test=TESTS + "test_importance_sampling_has_the_gradient_of_the_ratio",
    needs=("ratio",),
)
def importance_sampling(batch: TokenBatch) -> torch.Tensor:
    """Return the unclipped off-policy correction by token: D."""
    return _score(batch, _ratio(batch))


@register(
    SCORE_LOSSES,
    "cispo",
    source="CISPO (MiniMax-M1, arXiv 2506.13585); TRL, verl, SkyRL, Trinity, ROLL",
    formula="-sg(min(r, eps_max)) A log pi",
    certainty="code",
    checked="run beside TRL's GRPOTrainer on equal inputs (test_trl_peer)",
    test=TESTS + "test_cispo_and_dispo_match_their_four_regimes",
    needs=("ratio",),
)
def cispo(batch: TokenBatch, *, eps_max: float = 5.0) -> torch.Tensor:
    """Return the score-function loss under a ratio capped from above: D.

    `eps_max` > 0 caps the ratio itself, not its distance from 1.
    """
    return _score(batch, _ratio(batch).clamp(max=eps_max))


@register(
    SCORE_LOSSES,
    "dispo",
    source="DISPO, abstract: four bounds, by side and by correctness",
    formula="-sg(clip(r, low, high)) A log pi, own (low, high) for A > 0 and for A <= 0",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_cispo_and_dispo_match_their_four_regimes",
    needs=("ratio",),
)
def dispo(
    batch: TokenBatch,
    *,
    low_right: float = 0.0,
    high_right: float = 5.0,
    low_wrong: float = 0.0,
    high_wrong: float = 2.0,
) -> torch.Tensor:
    """Return the score-function loss with separate ratio bounds for right and wrong answers: D.

    Approximation: the rule is the abstract's, the bounds are ours, and an answer counts as right
    where its advantage is positive.
    """
    ratio_D = _ratio(batch)
    right_D = ratio_D.clamp(low_right, high_right)
    wrong_D = ratio_D.clamp(low_wrong, high_wrong)
    return _score(batch, torch.where(batch.advantage_D > 0, right_D, wrong_D))


@register(
    SCORE_LOSSES,
    "sapo",
    source="SAPO (Qwen, 2025); TRL `sapo`, verl, SkyRL, AReaL, Trinity",
    formula="-A (4/tau) sigmoid(tau (r-1)), tau by the sign of A",
    certainty="code",
    checked="run beside TRL and verl on equal inputs (test_trl_peer, test_verl_peer)",
    test=TESTS + "test_sapo_has_slope_one_on_policy_and_matches_the_sigmoid",
    needs=("ratio",),
    aggregation="row_mean",
)
def sapo(
    batch: TokenBatch, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> torch.Tensor:
    """Return the softly gated surrogate: D. Temperatures are above 0."""
    tau_D = torch.where(batch.advantage_D > 0, tau_positive, tau_negative)
    gate_D = torch.sigmoid(tau_D * (log_ratio(batch).exp() - 1)) * 4 / tau_D
    return -gate_D * batch.advantage_D


@register(
    SCORE_LOSSES,
    "topr",
    source="TOPR (arXiv 2503.14286); Trinity-RFT topr_policy_loss, ROLL",
    formula="A > threshold: -A log pi; else -sg(min(r, 1)) A log pi",
    certainty="code",
    checked=(
        "read in alibaba/ROLL agentic_actor_pg_worker.py: equal, but positives there are "
        "those of reward > 0, here of A > threshold"
    ),
    test=TESTS + "test_topr_tapers_negatives_only",
    needs=("ratio",),
)
def topr(batch: TokenBatch, *, threshold: float = 0.0) -> torch.Tensor:
    """Return the tapered off-policy loss: D. The paper's A is the reward itself."""
    tapered_D = _ratio(batch).clamp(max=1.0)
    weight_D = torch.where(batch.advantage_D > threshold, torch.ones_like(tapered_D), tapered_D)
    return _score(batch, weight_D)


@register(
    SCORE_LOSSES,
    "opmd",
    source="OPMD; Trinity-RFT opmd_policy_loss",
    formula="-A log pi / (1 + tau); advantages dr_grpo or opmd_soft",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) opmd_policy_loss.py: equal",
    test=TESTS + "test_opmd_divides_reinforce_by_one_plus_tau",
)
def opmd(batch: TokenBatch, *, tau: float = 1.0) -> torch.Tensor:
    """Return the mirror-descent form of group-relative REINFORCE: D. `tau` >= 0."""
    return reinforce(batch) / (1 + tau)


@register(
    SCORE_LOSSES,
    "asymre",
    source="AsymRE (arXiv 2506.20520) as Trinity-RFT writes it in the REC family (forward KL)",
    formula="-A log pi - coef log pi: a baseline shifted by -coef",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) rec_policy_loss.py, forward-kl: equal",
    test=TESTS + "test_asymre_equals_reinforce_with_a_shifted_advantage",
    needs=("every_row",),
)
def asymre(batch: TokenBatch, *, coef: float = 0.1) -> torch.Tensor:
    """Return REINFORCE plus an extra log-likelihood of every token: D.

    Equal to `reinforce` with the advantage `asymre_baseline` at shift -coef; do not use both.
    """
    return -(batch.advantage_D + coef) * batch.logp_D


def _rec(batch: TokenBatch, keep_D: torch.Tensor, importance: float, k2: float) -> torch.Tensor:
    """The REC family's shared form: D."""
    weight_D = _ratio(batch) if importance else torch.ones_like(batch.logp_D.detach())
    loss_D = _score(batch, weight_D * keep_D.to(weight_D.dtype))
    return loss_D + k2 * log_ratio(batch) ** 2 if k2 else loss_D


@register(
    SCORE_LOSSES,
    "rec_one_side",
    source="REC (Group-Relative REINFORCE Is Secretly Off-Policy); Trinity-RFT rec_policy_loss",
    formula="-w A log pi where (A >= 0 and r <= 1+eps_high) or (A <= 0 and r >= 1-eps_low)",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) rec_policy_loss.py; clip's gradient by test",
    test=TESTS + "test_rec_one_side_has_the_gradient_of_clip",
    needs=("ratio",),
)
def rec_one_side(
    batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, importance: float = 1.0
) -> torch.Tensor:
    """Return REINFORCE with the tokens dropped that PPO's clip would silence: D.

    `importance` 1 weighs by sg(r), 0 not at all.
    """
    ratio_D, advantage_D = _ratio(batch), batch.advantage_D
    keep_D = (advantage_D >= 0) & (ratio_D <= 1 + eps_high)
    keep_D = keep_D | ((advantage_D <= 0) & (ratio_D >= 1 - eps_low))
    return _rec(batch, keep_D, importance, 0.0)


@register(
    SCORE_LOSSES,
    "rec_two_side",
    source="REC; Trinity-RFT rec_policy_loss, clip_mode two-side",
    formula="-w A log pi where 1-eps_low <= r <= 1+eps_high",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) rec_policy_loss.py: equal",
    test=TESTS + "test_rec_two_side_and_ring_keep_the_stated_tokens",
    needs=("ratio",),
)
def rec_two_side(
    batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, importance: float = 1.0
) -> torch.Tensor:
    """Return REINFORCE on the tokens whose ratio is inside the band: D."""
    ratio_D = _ratio(batch)
    keep_D = (ratio_D >= 1 - eps_low) & (ratio_D <= 1 + eps_high)
    return _rec(batch, keep_D, importance, 0.0)


@register(
    SCORE_LOSSES,
    "rec_ring",
    source="REC; Trinity-RFT rec_policy_loss, clip_mode ring",
    formula="two-side, or (A >= 0 and r <= 1-outer_low), or (A <= 0 and r >= 1+outer_high)",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) rec_policy_loss.py: equal",
    test=TESTS + "test_rec_two_side_and_ring_keep_the_stated_tokens",
    needs=("ratio",),
)
def rec_ring(
    batch: TokenBatch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    outer_low: float = 0.6,
    outer_high: float = 2.0,
    importance: float = 0.0,
) -> torch.Tensor:
    """Return REINFORCE without the tokens between the inner and the outer bounds: D."""
    ratio_D, advantage_D = _ratio(batch), batch.advantage_D
    keep_D = (ratio_D >= 1 - eps_low) & (ratio_D <= 1 + eps_high)
    keep_D = keep_D | ((advantage_D >= 0) & (ratio_D <= 1 - outer_low))
    keep_D = keep_D | ((advantage_D <= 0) & (ratio_D >= 1 + outer_high))
    return _rec(batch, keep_D, importance, 0.0)


@register(
    SCORE_LOSSES,
    "rec_k2",
    source="Kimi's OPMD in the REC family; Trinity-RFT rec_policy_loss, regularizer k2",
    formula="-A log pi + coef (log r)^2",
    certainty="code",
    checked="read in shiweijiezero/R3L (a Trinity-RFT) rec_policy_loss.py: equal",
    test=TESTS + "test_rec_k2_pulls_back_to_the_old_policy",
    needs=("every_row", "ratio"),
)
def rec_k2(batch: TokenBatch, *, coef: float = 0.1) -> torch.Tensor:
    """Return REINFORCE with a squared pull to π_old: D."""
    return _rec(batch, torch.ones_like(batch.logp_D.detach()), 0.0, coef)


def _outside_total_variation(batch: TokenBatch, low: float, high: float) -> torch.Tensor:
    """1 where a token may still move under DPPO's total-variation test: D."""
    moved_D = batch.logp_D.detach().exp() - batch.old_logp_D.exp()
    keep_D = torch.where(batch.advantage_D > 0, moved_D <= high, moved_D >= -low)
    return keep_D.to(moved_D.dtype)


@register(
    SCORE_LOSSES,
    "dppo_tv",
    source="DPPO, binary total variation (arXiv 2602.04879); verl, SkyRL, prime-rl's default mask",
    formula="-sg(min(r, cap)) A log pi where pi-pi_old <= d_high (A > 0) or >= -d_low (A <= 0)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_dppo_masks_match_the_closed_forms",
    needs=("ratio",),
)
def dppo_tv(
    batch: TokenBatch, *, d_low: float = 0.2, d_high: float = 0.2, cap: float = 20.0
) -> torch.Tensor:
    """Return the score-function loss inside a bound on the probability's change: D."""
    keep_D = _outside_total_variation(batch, d_low, d_high)
    return _score(batch, _ratio(batch).clamp(max=cap) * keep_D)


@register(
    SCORE_LOSSES,
    "dppo_kl",
    source="DPPO, binary KL (arXiv 2602.04879); verl",
    formula="as dppo_tv with KL(Bern(pi_old) || Bern(pi)) <= d, or moved against the advantage",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_dppo_masks_match_the_closed_forms",
    needs=("ratio",),
)
def dppo_kl(
    batch: TokenBatch, *, d_low: float = 0.05, d_high: float = 0.05, cap: float = 20.0
) -> torch.Tensor:
    """Return the score-function loss inside a bound on the two-outcome KL divergence: D."""
    logp_D, old_D = batch.logp_D.detach(), batch.old_logp_D
    new_D, before_D = logp_D.exp(), old_D.exp()
    rest_D = (1 - before_D) * ((1 - before_D + 1e-8) / (1 - new_D + 1e-8)).log()
    kl_D = before_D * (old_D - logp_D) + rest_D
    up_D = (kl_D <= d_high) | (new_D <= before_D)
    down_D = (kl_D <= d_low) | (new_D >= before_D)
    keep_D = torch.where(batch.advantage_D > 0, up_D, down_D).to(logp_D.dtype)
    return _score(batch, _ratio(batch).clamp(max=cap) * keep_D)


@register(
    SCORE_LOSSES,
    "minpro",
    source="MinPRO (A Step Back: Prefix Importance Ratio), abstract",
    formula="-sg(min(r_t min_(s<t) r_s, cap)) A log pi; the first token has its own ratio",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_minpro_uses_the_smallest_earlier_ratio",
    needs=("sequence", "ratio"),
)
def minpro(batch: TokenBatch, *, cap: float = 5.0) -> torch.Tensor:
    """Return the score-function loss weighted by the token's ratio and the prefix's smallest: D.

    Approximation: the abstract names the smallest ratio of the prefix; multiplying it with the
    token's own ratio, the cap and the stop-gradient on the whole weight are our reading.
    """
    ratio_D = _ratio(batch)
    weight_D = torch.empty_like(ratio_D)
    for row in range(batch.n_rows):
        mine_D = batch.row_D == row
        ratio_T = ratio_D[mine_D]
        least_T = torch.cummin(ratio_T, 0).values if len(ratio_T) else ratio_T
        before_T = torch.cat([torch.ones_like(ratio_T[:1]), least_T[:-1]])
        weight_D[mine_D] = ratio_T * before_T
    return _score(batch, weight_D.clamp(max=cap))
