"""Advantages that need nothing but the rewards of a group (or of the batch).

numpy in double precision; each returns one value a rollout, R. Means are summed exactly, so a
permutation of rollouts permutes the advantages and changes no digit; a group of equal rewards, or
of one rollout, gives exactly 0 unless its entry says otherwise. Does not know tokens' texts,
models or tasks. Sources are named at each entry.
"""

from __future__ import annotations

import math

import numpy as np

from tfgrpo.advantage import TOLERANCE
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.group_stats import (
    by_group,
    centred,
    deviation_of,
    filled_groups,
    is_flat,
    mean_of,
)
from tfgrpo.rl.formulas.inputs import Floats, Ints, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

GROUP_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_group.py::"


@register(
    GROUP_ADVANTAGES,
    "grpo",
    source="GRPO (arXiv 2402.03300, section 4.1.2); TRL, verl and most trainers",
    formula="(R - mean) / (std + eps) in each group, std with ddof",
    certainty="code",
    checked=(
        "run beside verl's core_algos.py on equal inputs (test_verl_peer); sample deviation in both"
    ),
    test=TESTS + "test_grpo_matches_hand_computed_groups",
)
def grpo(batch: RewardBatch, *, eps: float = 1e-4, ddof: float = 1) -> Floats:
    """Return group-standardised rewards: R.

    `ddof` 1 is the sample standard deviation (TRL, verl), 0 the population's.
    """
    return by_group(batch, lambda r_G: centred(r_G) / (deviation_of(r_G, ddof) + eps))


@register(
    GROUP_ADVANTAGES,
    "dr_grpo",
    source="Dr. GRPO (arXiv 2503.20783); TRL scale_rewards=none, verl, prime-rl's default",
    formula="R - mean in each group",
    certainty="code",
    checked="TRL scale_rewards none; by definition",
    test=TESTS + "test_dr_grpo_and_rloo_match_their_definitions",
)
def dr_grpo(batch: RewardBatch) -> Floats:
    """Return group-centred rewards: R. OPMD's mean baseline is the same value."""
    return by_group(batch, centred)


@register(
    GROUP_ADVANTAGES,
    "rloo",
    source="RLOO (arXiv 2402.14740); verl, OpenRLHF, SkyRL, Trinity",
    formula="R - mean of the others in the group = G/(G-1) (R - mean)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_dr_grpo_and_rloo_match_their_definitions",
)
def rloo(batch: RewardBatch) -> Floats:
    """Return rewards against the mean of their siblings: R."""
    return by_group(batch, lambda r_G: centred(r_G) * len(r_G) / (len(r_G) - 1))


@register(
    GROUP_ADVANTAGES,
    "batch_std",
    source="TRL scale_rewards=batch (arXiv 2508.08221)",
    formula="(R - group mean) / (std of all rewards of the batch + eps)",
    certainty="code",
    checked="TRL scale_rewards batch, as noted",
    test=TESTS + "test_batch_std_divides_by_the_deviation_of_all_rewards",
)
def batch_std(batch: RewardBatch, *, eps: float = 1e-4, ddof: float = 1) -> Floats:
    """Return group-centred rewards over the batch's deviation: R."""
    return dr_grpo(batch) / (deviation_of(batch.reward_R, ddof) + eps)


def whitened(value_R: Floats, length_R: Ints, eps: float = 1e-8) -> Floats:
    """Return (value − mean)/√(variance + eps), each row counted once a token: R.

    The variance is the sample's. Values that are all equal give exactly 0.
    """
    weight_R = np.maximum(length_R, 0).astype(np.float64)
    total = math.fsum(weight_R)
    if total < 2 or is_flat(value_R[weight_R > 0]):
        return np.zeros(len(value_R))
    mean = math.fsum(weight_R * value_R) / total
    variance = math.fsum(weight_R * (value_R - mean) ** 2) / (total - 1)
    result: Floats = (value_R - mean) / math.sqrt(variance + eps)
    return result


@register(
    GROUP_ADVANTAGES,
    "reinforce_pp",
    source="REINFORCE++ (arXiv 2501.03262); verl, OpenRLHF, SkyRL (outcome reward, no discount)",
    formula="(R - mean) / std over all loss-bearing tokens of the batch, no group baseline",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_reinforce_pp_whitens_over_tokens",
)
def reinforce_pp(batch: RewardBatch) -> Floats:
    """Return rewards whitened over the batch's tokens: R. A flat group is not 0 here."""
    return whitened(batch.reward_R, batch.length_R)


@register(
    GROUP_ADVANTAGES,
    "reinforce_pp_baseline",
    source="REINFORCE++-baseline (arXiv 2501.03262); verl, OpenRLHF",
    formula="whiten over tokens of (R - group mean)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_reinforce_pp_whitens_over_tokens",
)
def reinforce_pp_baseline(batch: RewardBatch) -> Floats:
    """Return group-centred rewards whitened over the batch's tokens: R.

    As released, whitening subtracts the batch's token mean once more, so a flat group may get a
    small value when lengths and rewards go together.
    """
    return whitened(dr_grpo(batch), batch.length_R)


@register(
    GROUP_ADVANTAGES,
    "remax",
    source="ReMax (arXiv 2310.10505); verl, Trinity",
    formula="R - reward of the greedy rollout of the same task",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_remax_subtracts_the_greedy_reward",
    needs=("baseline",),
)
def remax(batch: RewardBatch) -> Floats:
    """Return rewards above the greedy rollout's: R. A flat group is not 0 here."""
    result: Floats = batch.reward_R - required(batch.baseline_R, "remax", "baseline_R")
    return result


@register(
    GROUP_ADVANTAGES,
    "opo",
    source="OPO (arXiv 2505.23585); verl",
    formula="R - sum(length R) / sum(length) in each group",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_opo_weighs_the_baseline_by_length",
)
def opo(batch: RewardBatch) -> Floats:
    """Return rewards above the length-weighted mean of the group: R."""
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        rewards_G, length_G = batch.reward_R[rows], batch.length_R[rows]
        if not is_flat(rewards_G) and length_G.sum():
            advantage_R[rows] = rewards_G - math.fsum(length_G * rewards_G) / int(length_G.sum())
    return advantage_R


@register(
    GROUP_ADVANTAGES,
    "gpg",
    source="GPG (arXiv 2504.02546); verl",
    formula="rollouts / rollouts of non-zero reward in the batch * (R - group mean) / f_norm",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_gpg_scales_by_the_share_of_non_zero_rewards",
)
def gpg(batch: RewardBatch, *, f_norm: float = 1.0) -> Floats:
    """Return group-centred rewards, larger where few rollouts of the batch earned anything: R."""
    scale = len(batch.reward_R) / max(1, int(np.count_nonzero(batch.reward_R)))
    return dr_grpo(batch) * scale / f_norm


@register(
    GROUP_ADVANTAGES,
    "maxrl",
    source="MaxRL; prime-rl, SkyRL",
    formula="(R - mean) / mean in each group; 0 where the mean is not above 0",
    certainty="code",
    checked=(
        "read in PrimeIntellect-ai/prime-rl orchestrator/algo/max_rl.py: (R - mean)/mean, 0"
        " where the mean is not above 0"
    ),
    test=TESTS + "test_maxrl_divides_by_the_success_rate",
)
def maxrl(batch: RewardBatch) -> Floats:
    """Return group-centred rewards over the group's mean: R. Rewards are at least 0."""

    def rule(r_G: Floats) -> Floats:
        mean = mean_of(r_G)
        return centred(r_G) / mean if mean > TOLERANCE else np.zeros(len(r_G))

    return by_group(batch, rule)


@register(
    GROUP_ADVANTAGES,
    "pass_at_k",
    source="Pass@k estimator (arXiv 2503.19595); verl `grpo_passk`",
    formula="best rollout only: (largest R - second largest R) / (std + eps)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_pass_at_k_credits_the_single_best_rollout",
)
def pass_at_k(batch: RewardBatch, *, eps: float = 1e-6, ddof: float = 1) -> Floats:
    """Return the lead of the best rollout over the second best, 0 for all others: R."""

    def rule(r_G: Floats) -> Floats:
        advantage_G = np.zeros(len(r_G))
        second, best = np.sort(r_G)[-2:]
        advantage_G[int(np.argmax(r_G))] = (best - second) / (deviation_of(r_G, ddof) + eps)
        return advantage_G

    return by_group(batch, rule)


@register(
    GROUP_ADVANTAGES,
    "bnpo",
    source="BNPO (arXiv 2506.02864), released code changyi7231/BNPO; not TRL's aggregation `bnpo`",
    formula="(R - p) / Beta(p; max(1,1+a/3), max(1,1+b/3)), p group mean, Beta(a,b) fits all p",
    certainty="code",
    checked=(
        "read in changyi7231/BNPO recipe/bnpo/src/bnpo_ray_trainer.py: sample variance, "
        "clamps, weight at most 1e6; one group there is fixed 1 and 1"
    ),
    test=TESTS + "test_bnpo_matches_the_beta_density",
)
def bnpo(
    batch: RewardBatch, *, alpha: float = 0.0, beta: float = 0.0, fallback: float = 1.0
) -> Floats:
    """Return centred rewards over a Beta density at the group's success rate: R.

    Rewards are in [0, 1]. The density's parameters follow the batch's success rates by their
    moments; `alpha` and `beta` above 0 fix them (1 and 1 is REINFORCE with a baseline, 1.5 and 1.5
    is proportional to GRPO). Where the rates do not vary, both are `fallback`. The weight
    1/density is at most 1e6.

    Raises:
        ConfigError: a success rate is outside [0, 1].
    """
    rates_P = np.array([mean_of(batch.reward_R[rows]) for rows in filled_groups(batch)])
    if len(rates_P) and (rates_P.min() < -TOLERANCE or rates_P.max() > 1 + TOLERANCE):
        raise ConfigError(
            f"'bnpo' needs rewards in [0, 1]; a group's mean is {rates_P.min():g} to "
            f"{rates_P.max():g}: rescale them"
        )
    a, b = (alpha, beta) if alpha > 0 and beta > 0 else _beta_parameters(rates_P, fallback)
    log_norm = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    def rule(r_G: Floats) -> Floats:
        p = min(max(mean_of(r_G), 0.0), 1.0)
        if not 0 < p < 1:
            return np.zeros(len(r_G))
        log_density = (a - 1) * math.log(p) + (b - 1) * math.log(1 - p) - log_norm
        return centred(r_G) * min(math.exp(-log_density), 1e6)

    return by_group(batch, rule)


def _beta_parameters(rates_P: Floats, fallback: float) -> tuple[float, float]:
    """BNPO's α and β from the moments of the success rates."""
    if is_flat(rates_P):
        return fallback, fallback
    mean, variance = mean_of(rates_P), deviation_of(rates_P) ** 2  # torch var: n - 1
    strength = mean * (1 - mean) / variance - 1
    return max(1.0, 1 + mean * strength / 3), max(1.0, 1 + (1 - mean) * strength / 3)


@register(
    GROUP_ADVANTAGES,
    "ngrpo",
    source="NGRPO (arXiv 2509.18851), released code nangongrui-ngr/NGRPO",
    formula="(R - mean) / (std + eps), mean and std over the group and k virtual rewards r_max",
    certainty="code",
    checked=(
        "read in nangongrui-ngr/NGRPO verl/trainer/ppo/core_algos.py: max_reward 1, one "
        "virtual, torch.std"
    ),
    test=TESTS + "test_ngrpo_matches_the_published_values",
)
def ngrpo(
    batch: RewardBatch, *, r_max: float = 1.0, k: float = 1, eps: float = 1e-6, ddof: float = 1
) -> Floats:
    """Return rewards standardised with virtual best siblings: R.

    A group of equal rewards below `r_max` is negative, one of equal rewards at `r_max` is 0. The
    paper clips at 0.16 and 0.24.
    """
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        with_virtual = np.concatenate([batch.reward_R[rows], np.full(int(k), r_max)])
        if not is_flat(with_virtual):
            deviation = deviation_of(with_virtual, ddof) + eps
            advantage_R[rows] = (batch.reward_R[rows] - mean_of(with_virtual)) / deviation
    return advantage_R


@register(
    GROUP_ADVANTAGES,
    "mc_grpo",
    source="MC-GRPO, released code lotusroot-kim/MC-GRPO, its scale mended",
    formula="(R - median) / (std + eps) in each group (the release divides by the MAD)",
    certainty="code",
    checked=(
        "read in lotusroot-kim/MC-GRPO grpo_trainer_gsm.py: median of an odd group; divides"
        " by MAD + 1e-3, here by the deviation"
    ),
    test=TESTS + "test_mc_grpo_keeps_binary_rewards_finite",
)
def mc_grpo(
    batch: RewardBatch,
    *,
    eps: float = 1e-3,
    ddof: float = 1,
    scaled: float = 1,
    refill: float = 0,
) -> Floats:
    """Return rewards above the group's median: R.

    Sample G + 1 rollouts with G + 1 odd: the median one gets 0 and drops out. The release divides
    by the median absolute deviation, which is 0 for binary rewards in every odd group and makes
    the rest about ±1000; here the standard deviation divides (`scaled` 1) or nothing (0).
    `refill` 1 multiplies by rollouts / rollouts that are not 0, as one of the two trainers does.
    """

    def rule(r_G: Floats) -> Floats:
        advantage_G = r_G - float(np.median(r_G))
        if scaled:
            advantage_G = advantage_G / (deviation_of(r_G, ddof) + eps)
        if refill:
            advantage_G = advantage_G * len(r_G) / max(1, int(np.count_nonzero(advantage_G)))
        return advantage_G

    return by_group(batch, rule)


@register(
    GROUP_ADVANTAGES,
    "median_centred",
    source="Bounded Ratio RL, GBPO (arXiv 2604.18578), abstract and summary",
    formula="R - median in each group",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_median_centred_and_win_rate_match_hand_computed_groups",
)
def median_centred(batch: RewardBatch) -> Floats:
    """Return rewards above the group's median: R.

    Approximation: the group-relative form is known from a summary. Meant for the loss `gbpo`.
    """
    return by_group(batch, lambda r_G: r_G - float(np.median(r_G)))


@register(
    GROUP_ADVANTAGES,
    "win_rate",
    source="SPPO (Self-Play Preference Optimization), abstract; formula recalled",
    formula="mean over siblings j of [R_i > R_j] + 1/2 [R_i = R_j], minus 1/2",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_median_centred_and_win_rate_match_hand_computed_groups",
)
def win_rate(batch: RewardBatch) -> Floats:
    """Return how often a rollout beats its siblings, minus one half: R, in [−1/2, 1/2].

    Approximation: the preference is read off the rewards. A rollout ties with itself, so the rates
    of a group sum to half its size.
    """

    def rule(r_G: Floats) -> Floats:
        wins_GG = (r_G[:, None] > r_G[None, :]) + 0.5 * (r_G[:, None] == r_G[None, :])
        result: Floats = wins_GG.mean(1) - 0.5
        return result

    return by_group(batch, rule)
