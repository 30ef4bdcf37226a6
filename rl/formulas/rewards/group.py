"""Rewards from several parts, siblings, tools and steps.

Each returns new rewards, R; the batch's own are never changed. Columns that `RewardBatch.extra`
must hold are named in each docstring. Does not know how they are judged. Sources are named at
each entry.
"""

from __future__ import annotations

import math

import numpy as np

from tfgrpo.rl.formulas.group_stats import (
    average_ranks,
    column,
    filled_groups,
    mean_of,
    part_weights,
    refuse_negative,
)
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required
from tfgrpo.rl.formulas.rewards.length import cosine_schedule

GROUP_REWARDS: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/rewards/test_group.py::"


@register(
    GROUP_REWARDS,
    "unlikeliness",
    source="Rewarding the Unlikely, released code AndreHe02/rewarding-unlikely-release",
    formula="R (1 - beta rank/G), rank 0 … G-1 by log pi_old per token, likeliest highest",
    certainty="code",
    checked=(
        "read in AndreHe02/rewarding-unlikely-release ray_lean_trainer.py: rank_penalty "
        "0.25, ranks over G; rewards below 0 shrink too, as there"
    ),
    test=TESTS + "test_unlikeliness_scales_by_rank_of_likelihood",
    needs=("logp",),
)
def unlikeliness(batch: RewardBatch, *, beta: float = 0.25) -> Floats:
    """Return rewards that shrink with the rank of likelihood among siblings: R.

    Wrong answers (reward 0) stay 0; equal likelihoods share their average rank.
    """
    per_token_R = required(batch.logp_R, "unlikeliness", "logp_R") / np.maximum(batch.length_R, 1)
    reward_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        reward_R[rows] *= 1 - beta * average_ranks(per_token_R[rows]) / len(rows)
    return reward_R


@register(
    GROUP_REWARDS,
    "weighted_sum",
    source="Multi-objective GRPO (arXiv 2503.21819), abstract: a plain weighted sum",
    formula="sum_m weight_m part_m",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_weighted_sum_and_staged_combine_parts",
    needs=("parts",),
)
def weighted_sum(batch: RewardBatch, **weights: float) -> Floats:
    """Return the weighted sum of the parts, options `weight_NAME`, 1 unless given: R.

    Approximation: the paper's weights are unknown. The baseline beside `gdpo` and `dvao`.
    """
    part_RM = required(batch.part_RM, "weighted_sum", "part_RM")
    result: Floats = part_RM @ part_weights(batch, "weighted_sum", weights)
    return result


@register(
    GROUP_REWARDS,
    "staged",
    source="PRS (Progressive Reward Shaping), abstract",
    formula="sum of parts in order, stopping after the first part below its threshold",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_weighted_sum_and_staged_combine_parts",
    needs=("parts",),
)
def staged(batch: RewardBatch, *, threshold: float = 1.0) -> Floats:
    """Return the sum of the parts up to and with the first below `threshold`: R.

    Approximation: stages and thresholds are ours. Parts count in the order of `part_names`.
    """
    part_RM = required(batch.part_RM, "staged", "part_RM")
    met_RM = np.cumprod(part_RM >= threshold, axis=1)
    open_RM = np.concatenate([np.ones((len(part_RM), 1)), met_RM[:, :-1]], axis=1)
    result: Floats = (part_RM * open_RM).sum(1)
    return result


@register(
    GROUP_REWARDS,
    "structure_to_content",
    source="Datarus-R1, abstract",
    formula="a part_structure + (1-a) part_content, a falls along half a cosine",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_structure_to_content_moves_from_one_part_to_the_other",
    needs=("parts",),
)
def structure_to_content(
    batch: RewardBatch, *, step: float, steps: float, floor: float = 0.1
) -> Floats:
    """Return a mixture of the parts `structure` and `content` that moves to the second: R.

    Approximation: the schedule's floor is unknown.
    """
    part_RM = required(batch.part_RM, "structure_to_content", "part_RM")
    names = {name: i for i, name in enumerate(batch.part_names)}
    structure = required(names.get("structure"), "structure_to_content", "the part 'structure'")
    content = required(names.get("content"), "structure_to_content", "the part 'content'")
    a = cosine_schedule(step, steps, floor=floor)
    result: Floats = a * part_RM[:, structure] + (1 - a) * part_RM[:, content]
    return result


@register(
    GROUP_REWARDS,
    "tool_cost",
    source="own: a price a call",
    formula="R - cost max(0, calls - free)",
    certainty="own",
    checked="a rule of ours",
    test=TESTS + "test_tool_cost_and_invalid_actions_subtract_their_counts",
    needs=("extra:tool_calls_R",),
)
def tool_cost(batch: RewardBatch, *, cost: float = 0.05, free: float = 0.0) -> Floats:
    """Return rewards minus a price for each tool call, `extra["tool_calls_R"]`, over `free`: R."""
    calls_R = column(batch, "tool_cost", "tool_calls_R")
    result: Floats = batch.reward_R - cost * np.maximum(0.0, calls_R - free)
    return result


@register(
    GROUP_REWARDS,
    "invalid_actions",
    source="GiGPO's invalid-action penalty; verl-agent as ported to alibaba/ROLL",
    formula="R - penalty * invalid actions",
    certainty="code",
    checked="verl-agent's penalty as noted; alibaba/ROLL gives it inside its environments",
    test=TESTS + "test_tool_cost_and_invalid_actions_subtract_their_counts",
    needs=("extra:invalid_R",),
)
def invalid_actions(batch: RewardBatch, *, penalty: float = 0.1) -> Floats:
    """Return rewards minus a penalty for each action that could not be read: R.

    `extra["invalid_R"]` counts them.
    """
    result: Floats = batch.reward_R - penalty * column(batch, "invalid_actions", "invalid_R")
    return result


@register(
    GROUP_REWARDS,
    "otc",
    source="OTC-PO (Optimal Tool Calls), abstract; formula recalled",
    formula="R alpha sin(pi f/(2n)), f = 2mn/(m+n); n = 0: cos(pi m/(2m+c)); n least if right",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_otc_is_largest_at_the_least_number_of_calls",
    needs=("extra:tool_calls_R",),
)
def otc(batch: RewardBatch, *, alpha: float = 1.0, c: float = 1.0, right: float = 1.0) -> Floats:
    """Return rewards times a tool-efficiency term, `extra["tool_calls_R"]` calls m: R.

    Approximation: formula recalled. n is the least number of calls among the group's right
    answers; a group without one keeps its rewards. Wrong answers are worth 0.

    Raises:
        ConfigError: a reward below 0, which a factor below 1 would raise.
    """
    refuse_negative(batch, "otc")
    calls_R = column(batch, "otc", "tool_calls_R")
    reward_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        calls_G = calls_R[rows]
        is_right_G = batch.reward_R[rows] >= right
        if not is_right_G.any():
            continue
        least = float(calls_G[is_right_G].min())
        if least == 0:
            term_G = np.cos(np.pi * calls_G / (2 * calls_G + c))
        else:
            term_G = np.sin(np.pi * calls_G / (calls_G + least))
        reward_R[rows] *= alpha * term_G
    return reward_R


@register(
    GROUP_REWARDS,
    "gated_steps",
    source="G-RA (gated rewards), abstract",
    formula="R + [R >= tau] scale sum of step rewards",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_gated_steps_open_with_the_outcome",
    needs=("step_rewards",),
)
def gated_steps(batch: RewardBatch, *, tau: float = 1.0, scale: float = 1.0) -> Floats:
    """Return rewards plus the step rewards where the outcome passed: R.

    Approximation: the rule is the abstract's, threshold and scale are ours.
    """
    steps = required(batch.step_reward_R, "gated_steps", "step_reward_R")
    sum_R = np.array([math.fsum(s) for s in steps])
    return np.where(batch.reward_R >= tau, batch.reward_R + scale * sum_R, batch.reward_R)


@register(
    GROUP_REWARDS,
    "pear",
    source="PEAR (phase entropy), abstract; formula recalled",
    formula="R (1 - clip(mean entropy of thinking - alpha mean entropy of answer, 0, 1))",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_pear_falls_with_the_entropy_of_thinking",
    needs=("extra:think_entropy_R", "extra:answer_entropy_R"),
)
def pear(batch: RewardBatch, *, alpha: float = 1.0) -> Floats:
    """Return rewards reduced by the entropy of the thinking phase: R.

    Approximation: formula recalled. `extra["think_entropy_R"]` and `extra["answer_entropy_R"]` are
    means in nats, 0 for an absent phase.

    Raises:
        ConfigError: a reward below 0, which a factor below 1 would raise.
    """
    refuse_negative(batch, "pear")
    think_R = column(batch, "pear", "think_entropy_R")
    answer_R = column(batch, "pear", "answer_entropy_R")
    result: Floats = batch.reward_R * (1 - np.clip(think_R - alpha * answer_R, 0.0, 1.0))
    return result


@register(
    GROUP_REWARDS,
    "fapo",
    source="FAPO, released code yyDing1/FAPO",
    formula="1 right and sound, 0 right but flawed, -1 wrong",
    certainty="code",
    checked="read in yyDing1/FAPO fapo/fapo_reasoning/reward_fn.py: 1, 0, -1",
    test=TESTS + "test_fapo_turns_against_flawed_answers_as_sound_ones_spread",
    needs=("extra:flawed_R",),
)
def fapo(batch: RewardBatch, *, right: float = 1.0) -> Floats:
    """Return rewards that put flawed right answers between right and wrong: R.

    `extra["flawed_R"]` is above 0 where a judge found a wrong step; 0 where none was found or the
    judge failed. Ask the judge about right answers only.
    """
    flawed_R = column(batch, "fapo", "flawed_R") > 0
    return np.where(batch.reward_R >= right, np.where(flawed_R, 0.0, 1.0), -1.0)


_MARGIN, _KAPPA, _TEMPERATURE = (0.15, 0.25, 0.35), (2.0, 3.0, 4.0), (2.0, 2.5, 3.0)
_TARGET, _CAP, _GAIN = (0.35, 0.5, 0.65), (1.0, 1.0, 1.2), (0.6, 0.8, 1.0)


@register(
    GROUP_REWARDS,
    "entropy_rank",
    source="R3 (replay, reflection, ranking), abstract; its entropy pattern is not named",
    formula="failed rollouts of a group get above + s (rank + 1/2)/n by falling entropy of their "
    "last quarter; s at most `top` and half of what the smallest success lies above",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_entropy_rank_stays_below_every_success",
    needs=("entropy_tokens",),
)
def entropy_rank(batch: RewardBatch, *, top: float = 0.1, above: float = 0.0) -> Floats:
    """Return rewards in which failed rollouts of a group are ranked among themselves: R.

    Approximation: a surer ending ranks higher, which is ours. Ranks never reach a success.
    """
    entropy_D = required(batch.entropy_D, "entropy_rank", "entropy_D")
    ends = np.cumsum(batch.length_R)
    tail_R = np.array(
        [
            float(entropy_D[end - max(1, n // 4) : end].mean()) if n else 0.0
            for end, n in zip(ends, batch.length_R, strict=True)
        ]
    )
    right_R = batch.reward_R > above
    least = float(batch.reward_R[right_R].min()) - above if right_R.any() else 2 * top
    size = min(top, least / 2)
    shaped_R = batch.reward_R.copy()
    for rows in filled_groups(batch):
        failed = rows[~right_R[rows]]
        ranks = average_ranks(-tail_R[failed])
        shaped_R[failed] = above + size * (ranks + 0.5) / max(1, len(failed))
    return shaped_R


@register(
    GROUP_REWARDS,
    "ares",
    source="ARES, released code shawn0728/ARES (its reward is called AEPO there)",
    formula="R + s(count - target) by bucket: Huber penalties when right, sigmoid gains when wrong",
    certainty="code",
    checked=(
        "read in shawn0728/ARES examples/reward_function/aepo.py: margins, kappas, caps "
        "equal; its KL weight by bucket is not here"
    ),
    test=TESTS + "test_ares_matches_the_hand_computed_buckets",
    needs=("extra:trigger_count_R",),
)
def ares(batch: RewardBatch, *, cap: float = 0.5, right: float = 1.0) -> Floats:
    """Return rewards shaped by how often a rollout reasoned at uncertain points: R.

    `extra["trigger_count_R"]` counts trigger tokens followed by a window of high entropy. A group's
    bucket is easy from a success rate of 2/3, hard below 1/3. The target is min + 0.35, 0.5 or
    0.65 of the counts' span in the bucket. Margin 0.15, 0.25 or 0.35 of the target, at least 1.
    Right and easy: penalty above target + margin; right and medium: on both sides; right and hard:
    sigmoid bonus from target − margin up, half a penalty below; wrong: sigmoid gain. The KL weight
    by bucket of the release belongs to the trainer.
    """
    count_R = column(batch, "ares", "trigger_count_R")
    bucket_R = np.zeros(len(count_R), dtype=np.int64)
    for rows in filled_groups(batch):
        rate = mean_of((batch.reward_R[rows] >= right).astype(np.float64))
        bucket_R[rows] = 0 if rate >= 2 / 3 else 1 if rate >= 1 / 3 else 2
    reward_R = batch.reward_R.copy()
    for bucket in range(3):
        mine = np.flatnonzero(bucket_R == bucket)
        if len(mine):
            low, high = float(count_R[mine].min()), float(count_R[mine].max())
            target = low + _TARGET[bucket] * (high - low)
            for row in mine:
                is_right = bool(batch.reward_R[row] >= right)
                reward_R[row] += _ares_term(float(count_R[row]), target, bucket, is_right, cap)
    return reward_R


def _ares_term(count: float, target: float, bucket: int, is_right: bool, cap: float) -> float:
    """What a rollout's count earns."""
    gap = count - target
    margin = max(1.0, _MARGIN[bucket] * max(1.0, target))
    kappa, top = _KAPPA[bucket], cap * _CAP[bucket]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x / _TEMPERATURE[bucket]))

    def huber(x: float) -> float:
        return x * x / (2 * kappa) if x <= kappa else x - kappa / 2

    if not is_right:
        return sigmoid(max(0.0, gap - margin)) * top * _GAIN[bucket]
    if bucket == 2:
        if gap >= -margin:
            return sigmoid(gap + margin) * top
        return -min(top, 0.5 * huber(-gap - margin) / (margin + kappa) * top)
    away = gap if bucket == 0 else abs(gap)
    return -min(top, huber(max(0.0, away - margin)) / (margin + kappa) * top)
