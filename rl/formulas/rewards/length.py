"""Rewards that depend on how long a rollout is.

Each returns new rewards, R; the batch's own are never changed. `length_R` counts loss-bearing
tokens. Does not know texts. Sources are named at each entry.
"""

from __future__ import annotations

import math

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.group_stats import column, deviation_of, filled_groups, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register

LENGTH_REWARDS: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/rewards/test_length.py::"


@register(
    LENGTH_REWARDS,
    "overlong_soft",
    source="DAPO soft overlong punishment (arXiv 2503.14476, eq. 13); verl",
    formula="R + min(0, (max_tokens - buffer - length) / buffer) * factor, at least R - factor",
    certainty="code",
    checked="the paper's equation 13",
    test=TESTS + "test_overlong_soft_falls_linearly_inside_the_buffer",
)
def overlong_soft(
    batch: RewardBatch, *, max_tokens: float, buffer: float, factor: float = 1.0
) -> Floats:
    """Return rewards minus a penalty that grows over the last `buffer` tokens: R.

    Raises:
        ConfigError: the buffer is not in (0, max_tokens].
    """
    if not 0 < buffer <= max_tokens:
        raise ConfigError(
            f"'overlong_soft': buffer is {buffer}, allowed is above 0 and at most max_tokens "
            f"{max_tokens}"
        )
    excess_R = np.clip((max_tokens - buffer - batch.length_R) / buffer, -1.0, 0.0)
    result: Floats = batch.reward_R + factor * excess_R
    return result


@register(
    LENGTH_REWARDS,
    "length_in_group",
    source="Kimi k1.5 length reward (arXiv 2501.12599, section 2.3.3)",
    formula="R + weight lam, lam = 1/2 - (length-min)/(max-min) if right, min(0, lam) if wrong",
    certainty="paper",
    checked="the paper's section 2.3.3",
    test=TESTS + "test_length_in_group_rewards_the_short_and_never_the_wrong",
)
def length_in_group(batch: RewardBatch, *, weight: float = 1.0, right: float = 1.0) -> Floats:
    """Return rewards plus a bonus for being short among siblings: R.

    An answer is right where R >= `right`. A group of equal lengths gets nothing.
    """
    reward_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        length_G = batch.length_R[rows].astype(np.float64)
        span = float(np.ptp(length_G))
        if span:
            lam_G = 0.5 - (length_G - length_G.min()) / span
            is_right_G = batch.reward_R[rows] >= right
            reward_R[rows] += weight * np.where(is_right_G, lam_G, np.minimum(0.0, lam_G))
    return reward_R


@register(
    LENGTH_REWARDS,
    "length_cosine",
    source="Cosine length reward (arXiv 2502.03373); open-r1 cosine_scaled_reward",
    formula="long + (short-long) (1 + cos(pi length/max)) / 2; right 1 to 0.5, wrong -1 to -0.5",
    certainty="code",
    checked="open-r1's cosine_scaled_reward, as noted",
    test=TESTS + "test_length_cosine_meets_its_ends_and_middle",
)
def length_cosine(
    batch: RewardBatch,
    *,
    max_tokens: float,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    right: float = 1.0,
) -> Floats:
    """Return a reward by correctness and length: short right answers and long wrong ones gain: R.

    Lengths beyond `max_tokens` count as it.
    """
    half_R = (1 + np.cos(np.pi * np.minimum(batch.length_R, max_tokens) / max_tokens)) / 2
    right_R = right_long + (right_short - right_long) * half_R
    wrong_R = wrong_long + (wrong_short - wrong_long) * half_R
    return np.where(batch.reward_R >= right, right_R, wrong_R)


@register(
    LENGTH_REWARDS,
    "length_sigmoid",
    source="Training LMs to Reason Efficiently (arXiv 2502.04463)",
    formula="R (1 - alpha sigmoid((length - mean) / std)), mean and std over right siblings",
    certainty="paper",
    checked="the paper's text",
    test=TESTS + "test_length_sigmoid_scales_right_answers",
)
def length_sigmoid(batch: RewardBatch, *, alpha: float = 0.2, right: float = 1.0) -> Floats:
    """Return rewards of right answers reduced by relative length: R. `alpha` in [0, 1).

    One right answer, or right answers of one length, count as average.
    """
    reward_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        mine = rows[batch.reward_R[rows] >= right]
        if not len(mine):
            continue
        length_G = batch.length_R[mine].astype(np.float64)
        deviation = deviation_of(length_G, 0)
        gap_G = (length_G - mean_of(length_G)) / deviation if deviation else 0 * length_G
        reward_R[mine] *= 1 - alpha / (1 + np.exp(-gap_G))
    return reward_R


@register(
    LENGTH_REWARDS,
    "length_target",
    source="L1-Exact (arXiv 2503.04697)",
    formula="R - alpha |target - length|",
    certainty="paper",
    checked="the paper's text",
    test=TESTS + "test_length_target_penalises_both_sides",
    needs=("extra:target_R",),
)
def length_target(batch: RewardBatch, *, alpha: float = 0.0003) -> Floats:
    """Return rewards minus the distance from the asked length, `extra["target_R"]` tokens: R."""
    target_R = column(batch, "length_target", "target_R")
    result: Floats = batch.reward_R - alpha * np.abs(target_R - batch.length_R)
    return result


@register(
    LENGTH_REWARDS,
    "length_outlier",
    source="DOT (Anti-Length Shift), abstract",
    formula="in groups all right: 0 where length > mean + k std, else R",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_length_outlier_touches_all_right_groups_only",
)
def length_outlier(batch: RewardBatch, *, k: float = 2.0, right: float = 1.0) -> Floats:
    """Return rewards without those of extreme lengths in fully right groups: R.

    Approximation: the cut rule is unknown; an answer beyond the cut counts as truncated and earns
    0. Population deviation.
    """
    reward_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        if (batch.reward_R[rows] < right).any():
            continue
        length_G = batch.length_R[rows].astype(np.float64)
        limit = mean_of(length_G) + k * deviation_of(length_G, 0)
        reward_R[rows[length_G > limit]] = 0.0
    return reward_R


@register(
    LENGTH_REWARDS,
    "length_budget",
    source="HBPO (Hierarchical Budget Policy Optimization), abstract",
    formula="R - slope max(0, length - budget) / budget for right answers, at least floor",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_length_budget_is_free_inside_the_budget",
    needs=("extra:budget_R",),
)
def length_budget(
    batch: RewardBatch, *, slope: float = 0.5, floor: float = 0.0, right: float = 1.0
) -> Floats:
    """Return right answers' rewards minus what exceeds their budget, `extra["budget_R"]`: R.

    Approximation: the paper's formula is unknown. An answer inside its budget is never worse than
    one beyond it.
    """
    budget_R = column(batch, "length_budget", "budget_R")
    over_R = np.maximum(0.0, batch.length_R - budget_R) / budget_R
    cut_R = np.maximum(np.minimum(floor, batch.reward_R), batch.reward_R - slope * over_R)
    return np.where(batch.reward_R >= right, cut_R, batch.reward_R)


def cosine_schedule(step: float, steps: float, *, floor: float = 0.0) -> float:
    """Return a weight that falls from 1 to `floor` along half a cosine.

    >>> cosine_schedule(0, 10), round(cosine_schedule(5, 10), 6), cosine_schedule(20, 10)
    (1.0, 0.5, 0.0)
    """
    share = min(1.0, max(0.0, step / steps))
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
