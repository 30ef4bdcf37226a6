"""Advantages that use what is known of a task besides its group: predictions, earlier visits.

One value a rollout, R. Does not know who predicts or remembers. Sources are named at each entry.
"""

from __future__ import annotations

import numpy as np

from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.group_stats import column, filled_groups, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register

HISTORY_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_history.py::"


@register(
    HISTORY_ADVANTAGES,
    "shrunk",
    source="own, after V_0 (arXiv 2602.03584): a predicted rate in the baseline",
    formula="R_i - ((G-1) mean of the others + kappa prior) / (G-1 + kappa)",
    certainty="own",
    checked="a rule of ours; against the group mean's error by simulation",
    test=TESTS + "test_shrunk_leans_on_the_prior_as_a_bayesian_would",
    needs=("extra:prior_R",),
)
def shrunk(batch: RewardBatch, *, kappa: float = 0.0) -> Floats:
    """Return rewards above a mean of the others that is shrunk to a prior: R.

    `extra["prior_R"]` is the expected reward of the row's task (a top-up rule's prediction, or NaN
    where nothing predicts: then the mean of the other groups). A rollout's own reward is in neither
    part, so the gradient stays unbiased; a flat group keeps a signal. `kappa` counts the prior in
    rollouts; 0 takes it from the batch: the variance within groups over that of the groups' true
    means around the prior.
    """
    prior_R = column(batch, "shrunk", "prior_R")
    groups = filled_groups(batch)
    if not groups:
        return np.zeros(0)
    means = np.array([mean_of(batch.reward_R[rows]) for rows in groups])
    baseline_R = np.zeros(len(batch.reward_R))
    prior_P = np.empty(len(groups))
    for p, rows in enumerate(groups):
        told = prior_R[rows[0]]
        others = np.delete(means, p)
        fallback = mean_of(others) if len(others) else float(means[p])
        prior_P[p] = fallback if np.isnan(told) else told
    weight = kappa or _kappa(batch, groups, means, prior_P)
    for p, rows in enumerate(groups):
        total, n = float(batch.reward_R[rows].sum()), len(rows)
        others_R = total - batch.reward_R[rows]
        below = n - 1 + weight
        if below > 0:
            baseline_R[rows] = (others_R + weight * prior_P[p]) / below
        else:
            baseline_R[rows] = prior_P[p]
    return np.asarray(batch.reward_R - baseline_R)


def _kappa(batch: RewardBatch, groups: list[np.ndarray], means: Floats, prior_P: Floats) -> float:
    """Rollouts that the prior counts as: the noise of one over the spread of the true means."""
    sizes = np.array([len(rows) for rows in groups])
    within = [float(batch.reward_R[rows].var(ddof=1)) for rows in groups if len(rows) > 1]
    noise = mean_of(np.array(within)) if within else 0.0
    around = float(((means - prior_P) ** 2).mean())
    spread = around - noise * float((1 / sizes).mean())
    if noise <= 0:
        return 0.0
    return float(min(noise / spread, 64.0)) if spread > 0 else 64.0


@register(
    HISTORY_ADVANTAGES,
    "adora",
    source="ADORA (advantage dynamics), abstract; its two weights are not named",
    formula="grpo times w_rising where the task's success share rose since its last visit, else "
    "w_other; 1 at a first visit",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_adora_weighs_tasks_whose_share_rose",
    needs=("extra:past_share_R",),
)
def adora(
    batch: RewardBatch,
    *,
    rising: float = 1.5,
    other: float = 1.0,
    above: float = 0.0,
    longer: float = 0.0,
    eps: float = 1e-4,
) -> Floats:
    """Return group advantages weighed by how the task has been going: R.

    `extra["past_share_R"]` is the share of rewards larger than `above` at the task's last visit,
    NaN at the first. With `longer` 1 a task also counts as rising where its right rollouts are
    longer on average than its wrong ones (the paper's rule for tasks of long reasoning).
    Approximation: the weights are ours.
    """
    past_R = column(batch, "adora", "past_share_R")
    advantage_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        right = batch.reward_R[rows] > above
        past = past_R[rows[0]]
        is_rising = not np.isnan(past) and bool(right.mean() > past)
        if longer and right.any() and not right.all():
            length_G = batch.length_R[rows]
            is_rising |= bool(length_G[right].mean() > length_G[~right].mean())
            advantage_R[rows] *= rising if is_rising else other
        elif not np.isnan(past):
            advantage_R[rows] *= rising if is_rising else other
    return advantage_R


@register(
    HISTORY_ADVANTAGES,
    "pc_grpo",
    source="PC-GRPO, summary: groups weighed by a peak at one half",
    formula="grpo times 4p(1-p), p the group's share of successes",
    certainty="approximation",
    checked="no released code was found; a summary alone",
    test=TESTS + "test_pc_grpo_peaks_at_one_half",
)
def pc_grpo(batch: RewardBatch, *, above: float = 0.0, eps: float = 1e-4) -> Floats:
    """Return group advantages, largest where half of the group succeeds: R.

    Approximation: the shape of the peak is ours.
    """
    advantage_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        p = float((batch.reward_R[rows] > above).mean())
        advantage_R[rows] *= 4 * p * (1 - p)
    return advantage_R


@register(
    HISTORY_ADVANTAGES,
    "vgpo",
    source="VGPO, abstract: absolute values in the group's normaliser",
    formula="(R - (1-a) mean) / (mean |R| + eps)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_vgpo_keeps_a_signal_in_a_flat_group",
)
def vgpo(batch: RewardBatch, *, a: float = 0.1, eps: float = 1e-4) -> Floats:
    """Return rewards over their mean size, so that a flat group keeps a signal: R.

    Approximation: the abstract says that absolute values normalise; `a`, the share of the mean that
    is left in, is ours.
    """
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        reward_G = batch.reward_R[rows]
        size = mean_of(np.abs(reward_G)) + eps
        advantage_R[rows] = (reward_G - (1 - a) * mean_of(reward_G)) / size
    return advantage_R
