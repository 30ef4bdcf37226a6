"""Advantages that move a group's by likelihood, behaviour, context or staleness.

One value a rollout, R. Columns that `RewardBatch.extra` must hold are named in each docstring.
Does not know how such columns are measured. Sources are named at each entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.group_stats import (
    centred,
    column,
    deviation_of,
    filled_groups,
    is_flat,
    mean_of,
)
from tfgrpo.rl.formulas.inputs import Floats, Ints, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required
from tfgrpo.rl.formulas.rewards.group import unlikeliness

WEIGHTED_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_weighted.py::"


@register(
    WEIGHTED_ADVANTAGES,
    "unlikeliness_grpo",
    source="Rewarding the Unlikely, released code AndreHe02/rewarding-unlikely-release",
    formula="grpo of R (1 - beta rank/G), rank by log pi_old per token, likeliest highest",
    certainty="code",
    checked=(
        "read in AndreHe02/rewarding-unlikely-release ray_lean_trainer.py: equal, but ties "
        "there are broken by order"
    ),
    test=TESTS + "test_unlikeliness_prefers_the_rare_right_answer",
    needs=("logp",),
)
def unlikeliness_grpo(batch: RewardBatch, *, beta: float = 0.25, eps: float = 1e-4) -> Floats:
    """Return group-standardised rewards after the reward `unlikeliness`: R.

    A group of equal positive rewards gets a signal, on purpose. The paper takes two updates a
    batch and a KL weight of 0.1.
    """
    return grpo(replace(batch, reward_R=unlikeliness(batch, beta=beta)), eps=eps)


@register(
    WEIGHTED_ADVANTAGES,
    "xrpo",
    source="XRPO, abstract and summary; novelty form recalled",
    formula="grpo; right answers + min(lam exp(group mean - own of log pi per token), cap |A|)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_xrpo_sharpens_right_answers_only",
    needs=("logp",),
)
def xrpo(batch: RewardBatch, *, lam: float = 0.1, cap: float = 0.5, eps: float = 1e-4) -> Floats:
    """Return group advantages raised for right answers of low likelihood: R.

    Approximation: novelty form recalled, constants ours. An answer is right where A > 0.
    """
    advantage_R = grpo(batch, eps=eps)
    per_token_R = required(batch.logp_R, "xrpo", "logp_R") / np.maximum(batch.length_R, 1)
    for rows in filled_groups(batch):
        novelty_G = np.exp(mean_of(per_token_R[rows]) - per_token_R[rows])
        own_G = advantage_R[rows]
        bonus_G = np.minimum(lam * novelty_G, cap * np.abs(own_G))
        advantage_R[rows] = own_G + np.where(own_G > 0, bonus_G, 0.0)
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "aspo",
    source="ASPO (Understanding Tool-Integrated Reasoning), abstract; formula recalled",
    formula="grpo; right answers + clip(delta (mean - own of stat) / scale, -k|A|, k|A|)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_aspo_never_flips_a_sign_and_leaves_wrong_answers",
    needs=("extra:statistic_R",),
)
def aspo(
    batch: RewardBatch, *, delta: float = 1.0, scale: float = 1.0, k: float = 0.5, eps: float = 1e-4
) -> Floats:
    """Return group advantages moved by a behaviour statistic, `extra["statistic_R"]`: R.

    Approximation: formula recalled. Smaller statistics gain (the paper's is where the first code
    call stands); `k` < 1 keeps every sign. An answer is right where A > 0.
    """
    statistic_R = column(batch, "aspo", "statistic_R")
    advantage_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        own_G = advantage_R[rows]
        push_G = delta * (mean_of(statistic_R[rows]) - statistic_R[rows]) / scale
        bound_G = k * np.abs(own_G)
        advantage_R[rows] = own_G + np.where(own_G > 0, np.clip(push_G, -bound_G, bound_G), 0.0)
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "canon",
    source="CANON (Conditional Advantage Estimation), abstract; combination recalled",
    formula="mu (R - mean of the other half) + (1-mu) (R - mean of the own half), halves by metric",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_canon_ignores_the_direction_of_its_metric",
    needs=("extra:metric_R",),
)
def canon(batch: RewardBatch, *, mu: float = 0.5) -> Floats:
    """Return advantages within and between the halves of a metric, `extra["metric_R"]`: R.

    Approximation: combination recalled. Rollouts at the group's median metric are compared with
    the whole group, which keeps the rule symmetric in the metric's direction.
    """
    metric_R = column(batch, "canon", "metric_R")
    advantage_R = dr_grpo(batch)
    for rows in filled_groups(batch):
        rewards_G, metric_G = batch.reward_R[rows], metric_R[rows]
        middle = float(np.median(metric_G))
        halves = metric_G > middle, metric_G < middle
        if is_flat(rewards_G) or not (halves[0].any() and halves[1].any()):
            continue
        means = [mean_of(rewards_G[half]) for half in halves]
        for own, half in enumerate(halves):
            base = mu * means[1 - own] + (1 - mu) * means[own]
            advantage_R[rows[half]] = rewards_G[half] - base
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "dagrpo",
    source="DaGRPO, abstract and summary",
    formula="grpo; 0 for a rollout all of whose opposite-sign siblings are nearer than delta",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_dagrpo_silences_near_duplicates_of_opposite_label",
    needs=("extra:score_R",),
)
def dagrpo(batch: RewardBatch, *, delta: float = 0.1, eps: float = 1e-4) -> Floats:
    """Return group advantages without indistinct rollouts; fine scores `extra["score_R"]`: R.

    Approximation: the scorer and the mask rule are unknown. The off-policy anchors of hard prompts
    are a matter of rollouts, not of advantages.
    """
    score_R = column(batch, "dagrpo", "score_R")
    advantage_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        sign_G, score_G = np.sign(advantage_R[rows]), score_R[rows]
        far_GG = np.abs(score_G[:, None] - score_G[None, :]) >= delta
        opposite_GG = sign_G[:, None] * sign_G[None, :] < 0
        advantage_R[rows] *= (far_GG & opposite_GG).any(1)
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "d3s",
    source="D3S (Learning More with Less), abstract",
    formula="grpo; only the `keep` rollouts of each group whose advantages vary most, others 0",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_d3s_keeps_the_subset_of_largest_variance",
)
def d3s(batch: RewardBatch, *, keep: float = 4, eps: float = 1e-4) -> Floats:
    """Return group advantages of the most varied subset, 0 elsewhere: R.

    Approximation: the rule is the abstract's, `keep` and its growth over training are ours; the
    selection of tokens is the credit `largest_signal`. Of all subsets, some lowest with some
    highest members vary most.
    """
    advantage_R = grpo(batch, eps=eps)
    for rows in filled_groups(batch):
        kept = most_varied(advantage_R[rows], int(keep))
        advantage_R[np.delete(rows, kept)] = 0.0
    return advantage_R


def most_varied(value_G: Floats, size: int) -> Ints:
    """Return the places of the `size` values that vary most; all where there are not more."""
    n = len(value_G)
    if n <= size:
        return np.arange(n)
    order = np.argsort(value_G, kind="stable")
    ranked_G = value_G[order]
    subsets = [[*range(low), *range(n - size + low, n)] for low in range(size + 1)]
    best = max(subsets, key=lambda s: deviation_of(ranked_G[s], 0))
    return np.asarray(np.sort(order[best]))


@register(
    WEIGHTED_ADVANTAGES,
    "nudge",
    source="NudgeRL, released code tally0818/NudgeRL",
    formula="z of (R - mean_c) + lam (mean_c - mean), or R - mean without context; population z",
    certainty="code",
    checked="read in tally0818/NudgeRL src/train/NudgeRLTrainer.py: equal, population deviation",
    test=TESTS + "test_nudge_matches_its_two_levels",
    needs=("extra:context_R",),
)
def nudge(batch: RewardBatch, *, lam: float = 0.1, eps: float = 1e-4) -> Floats:
    """Return advantages within and between strategy contexts, whitened by group: R.

    `extra["context_R"]` numbers the context of each rollout, −1 for none. The method's
    distillation term is the loss `reinforce` on rows under the bare prompt, aggregated by
    `row_mean`.
    """
    context_R = column(batch, "nudge", "context_R")
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        rewards_G, context_G = batch.reward_R[rows], context_R[rows]
        if is_flat(rewards_G):
            continue
        whole = mean_of(rewards_G)
        raw_G = rewards_G - whole
        for context in np.unique(context_G[context_G >= 0]):
            mine = context_G == context
            own = mean_of(rewards_G[mine])
            raw_G[mine] = rewards_G[mine] - own + lam * (own - whole)
        advantage_R[rows] = centred(raw_G) / (deviation_of(raw_G, 0) + eps)
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "opmd_soft",
    source="OPMD; Trinity-RFT opmd_advantage (log-average-exp baseline)",
    formula="R - tau log mean exp(R / tau) in each group",
    certainty="code",
    checked=(
        "read in shiweijiezero/R3L opmd_advantage.py (logavgexp): equal; a group of one "
        "keeps its reward there, gets 0 here"
    ),
    test=TESTS + "test_opmd_soft_and_asymre_move_the_baseline",
)
def opmd_soft(batch: RewardBatch, *, tau: float = 1.0) -> Floats:
    """Return rewards above the group's soft maximum: R. `tau` > 0; large is the mean."""
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        rewards_G = batch.reward_R[rows]
        if not is_flat(rewards_G):
            top = float(rewards_G.max())
            soft = tau * math.log(mean_of(np.exp((rewards_G - top) / tau))) + top
            advantage_R[rows] = rewards_G - soft
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "asymre_baseline",
    source="AsymRE (arXiv 2506.20520); Trinity-RFT asymre_advantage",
    formula="R - (mean + shift) in each group, shift -0.1",
    certainty="code",
    checked="read in shiweijiezero/R3L asymre_advantage.py: shift -0.1",
    test=TESTS + "test_opmd_soft_and_asymre_move_the_baseline",
)
def asymre_baseline(batch: RewardBatch, *, shift: float = -0.1) -> Floats:
    """Return rewards above a shifted mean: R. A flat group gets −shift, on purpose.

    With the loss `reinforce` it equals the loss `asymre` with `dr_grpo`; do not use both.
    """
    return dr_grpo(batch) - shift


@register(
    WEIGHTED_ADVANTAGES,
    "r3l",
    source="R3L, released code shiweijiezero/R3L",
    formula="1 where R is full, 3 (R - mean) where that is positive, else R - mean",
    certainty="code",
    checked=(
        "read in shiweijiezero/R3L multi_step_grpo_advantage.py: alpha 3, reward >= 1 gives 1"
    ),
    test=TESTS + "test_r3l_amplifies_positives",
)
def r3l(batch: RewardBatch, *, r_max: float = 1.0, amplification: float = 3.0) -> Floats:
    """Return centred rewards with amplified positives: R.

    A full reward counts 1 even in a flat group. Meant for the loss `opmd`.
    """
    raw_R = dr_grpo(batch)
    amplified_R = np.where(raw_R > 0, amplification * raw_R, raw_R)
    return np.where(batch.reward_R >= r_max - 1e-9, 1.0, amplified_R)


def _lr_scale(
    state: Mapping[str, float], batch: RewardBatch, options: Mapping[str, Any]
) -> dict[str, float]:
    """√(min(1, (ESS/rollouts)/base)), ESS = (Σw)²/Σw² of the rollouts' ratios."""
    del state
    ratio_R = column(batch, "vcpo", "ratio_R")
    total = math.fsum(ratio_R**2)
    share = math.fsum(ratio_R) ** 2 / total / len(ratio_R) if total else 0.0
    return {"lr_scale": math.sqrt(min(1.0, share / options.get("base", 1.0)))}


@register(
    WEIGHTED_ADVANTAGES,
    "vcpo",
    source="VCPO (arXiv 2602.17616), released code mit-han-lab/vcpo",
    formula="(R - sum(w^2 g^2 R)/sum(w^2 g^2)) / population std in each group",
    certainty="code",
    checked=(
        "read in mit-han-lab/vcpo recipe/fully_async_policy/staleness_utils.py: W = g^2 "
        "ratio^2, population std; g is a logit-gradient proxy here"
    ),
    test=TESTS + "test_vcpo_baseline_has_the_least_variance",
    needs=("extra:ratio_R", "extra:score_norm_R"),
    after_step=_lr_scale,
)
def vcpo(batch: RewardBatch, *, scaled: float = 1, base: float = 1.0) -> Floats:
    """Return rewards above the minimum-variance off-policy baseline: R.

    `extra["ratio_R"]` is π/π_behaviour of the whole rollout, `extra["score_norm_R"]` the norm of
    its score ∇log π (or of its last layer's, a proxy). `scaled` 0 leaves out the division. The
    step's learning rate is multiplied by √(min(1, ESS share/`base`)), the state `lr_scale`.
    """
    del base  # of `_lr_scale`
    ratio_R = column(batch, "vcpo", "ratio_R")
    norm_R = column(batch, "vcpo", "score_norm_R")
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        rewards_G = batch.reward_R[rows]
        weight_G = (ratio_R[rows] * norm_R[rows]) ** 2
        total = math.fsum(weight_G)
        if is_flat(rewards_G) or total == 0:
            continue
        gap_G = rewards_G - math.fsum(weight_G * rewards_G) / total
        advantage_R[rows] = gap_G / deviation_of(rewards_G, 0) if scaled else gap_G
    return advantage_R


@register(
    WEIGHTED_ADVANTAGES,
    "grounded",
    source="MedScope, abstract: advantages weighed by the evidence that a reply cites",
    formula="A (1 + c overlap) where A > 0",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_grounded_raises_right_answers_by_their_evidence",
    needs=("extra:overlap_R",),
)
def grounded(batch: RewardBatch, *, c: float = 0.5, eps: float = 1e-4) -> Floats:
    """Return group advantages raised by how much of the evidence is met, `extra["overlap_R"]`: R.

    Approximation: c is ours, and so is that a wrong answer's evidence changes nothing.
    """
    overlap_R = column(batch, "grounded", "overlap_R")
    advantage_R = grpo(batch, eps=eps)
    return np.where(advantage_R > 0, advantage_R * (1 + c * overlap_R), advantage_R)
