"""Advantages by step (turn) of an agent's rollout, spread on the step's tokens.

Each returns one value a token, rows end to end: D. `step_R` numbers the step of each loss-bearing
token; a step's discounted return counts its own reward and the later ones. States are equal where
their keys are, within one group only. Does not know environments. Sources are named at each entry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.group_stats import deviation_of, filled_groups, is_flat, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

STEP_CREDIT: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/credit/test_steps.py::"

Place = tuple[int, int]
"""(row, step)."""


def spread(batch: RewardBatch, entry: str, value: Mapping[Place, float]) -> Floats:
    """Return each token's step value, rows end to end: D."""
    step_R = required(batch.step_R, entry, "step_R")
    return np.array(
        [value[row, int(step)] for row, step_T in enumerate(step_R) for step in step_T],
        dtype=np.float64,
    )


def discounted_returns(batch: RewardBatch, entry: str, gamma: float) -> list[Floats]:
    """Return Σ_(s≥t) γ^(s−t) r_s of each step: step rewards, and the outcome on top of the last's.

    The number of steps is that of `step_reward_R`, else of `state_keys_R`, else of `step_R`.
    """
    returns = []
    for row, reward in enumerate(batch.reward_R.tolist()):
        if batch.step_reward_R is not None:
            reward_S = np.array(batch.step_reward_R[row], dtype=np.float64)
        else:
            reward_S = np.zeros(_n_steps(batch, entry, row))
        reward_S[-1:] += reward
        total_S, total = np.zeros(len(reward_S)), 0.0
        for t in reversed(range(len(reward_S))):
            total = float(reward_S[t]) + gamma * total
            total_S[t] = total
        returns.append(total_S)
    return returns


def _n_steps(batch: RewardBatch, entry: str, row: int) -> int:
    if batch.state_keys_R is not None:
        return len(batch.state_keys_R[row])
    step_T = required(batch.step_R, entry, "step_R")[row]
    return int(step_T.max()) + 1 if len(step_T) else 0


def normalised(
    clusters: Iterable[Sequence[Place]],
    returns: Sequence[Floats],
    scaled: bool,
    eps: float,
    ddof: float = 1,
) -> dict[Place, float]:
    """(return − mean)/(std + eps) in each cluster of places; singletons and flat ones give 0."""
    value: dict[Place, float] = {}
    for places in clusters:
        return_S = np.array([returns[row][step] for row, step in places])
        flat = is_flat(return_S)
        mean = mean_of(return_S)
        scale = deviation_of(return_S, ddof) + eps if scaled and not flat else 1.0
        for place, total in zip(places, return_S, strict=True):
            value[place] = 0.0 if flat else (float(total) - mean) / scale
    return value


def clusters_of(
    batch: RewardBatch, keys: Sequence[Sequence[Hashable]]
) -> dict[tuple[int, Hashable], list[Place]]:
    """Places of equal (group, key)."""
    found: dict[tuple[int, Hashable], list[Place]] = defaultdict(list)
    for row, row_keys in enumerate(keys):
        for step, key in enumerate(row_keys):
            found[int(batch.group_R[row]), key].append((row, step))
    return found


@register(
    STEP_CREDIT,
    "gigpo",
    source="GiGPO (arXiv 2505.10978), released code verl-agent as ported to alibaba/ROLL",
    formula="A_episode + w A_step; A_step normalises discounted returns over equal states",
    certainty="code",
    checked=(
        "read in alibaba/ROLL pipeline/agentic/utils.py: sample deviation; a lone state "
        "gets no step part; verl-agent's scripts centre only (scaled 0)"
    ),
    test=TESTS + "test_gigpo_adds_the_step_part_of_equal_states",
    needs=("steps", "states"),
    uses=("step_rewards",),
)
def gigpo(
    batch: RewardBatch, *, gamma: float = 0.95, w: float = 1.0, scaled: float = 1, eps: float = 1e-6
) -> Floats:
    """Return episode plus step advantages: D.

    The episode part is normalised over rollouts (not over steps); `scaled` 0 centres only. A state
    that only one step of the group starts from gives no step part.
    """
    keys = required(batch.state_keys_R, "gigpo", "state_keys_R")
    episode_R = grpo(batch, eps=eps) if scaled else dr_grpo(batch)
    returns = discounted_returns(batch, "gigpo", gamma)
    step = normalised(clusters_of(batch, keys).values(), returns, bool(scaled), eps)
    return spread(batch, "gigpo", {p: float(episode_R[p[0]]) + w * v for p, v in step.items()})


@register(
    STEP_CREDIT,
    "hgpo",
    source="HGPO, released (anonymous) code CazeroZ/hgpo, re-derived",
    formula="sum_k (k+1)^a A_k / sum_k (k+1)^a, A_k: return - mean at k + 1 equal states",
    certainty="code",
    checked=(
        "its repository is not among the public snapshots; deviation, depth and default as noted"
    ),
    test=TESTS + "test_hgpo_at_depth_zero_is_the_step_part_of_gigpo",
    needs=("steps", "states"),
    uses=("step_rewards",),
)
def hgpo(
    batch: RewardBatch,
    *,
    depth: float = 2,
    a: float = 1.0,
    gamma: float = 0.95,
    scaled: float = 0,
    count_zeros: float = 0,
    episode: float = 0.0,
) -> Floats:
    """Return the mean of nested step advantages, deeper histories weighing more: D.

    As released, a layer only centres (`scaled` 1 divides by the population deviation), a step has
    no layer deeper than its number of earlier steps, and terms that are 0 are left out of the
    weighted mean (`count_zeros` 1 keeps them). `episode` weighs GRPO's rollout advantage on top (0:
    whether the final version has it is open).
    """
    keys = required(batch.state_keys_R, "hgpo", "state_keys_R")
    returns = discounted_returns(batch, "hgpo", gamma)
    top: dict[Place, float] = defaultdict(float)
    below: dict[Place, float] = defaultdict(float)
    for k in range(int(depth) + 1):
        histories = [
            [tuple(row_keys[t - k : t + 1]) if t >= k else None for t in range(len(row_keys))]
            for row_keys in keys
        ]
        clusters = clusters_of(batch, histories)
        same = [places for (_, history), places in clusters.items() if history is not None]
        layer = normalised(same, returns, bool(scaled), 1e-9, ddof=0)
        for place, value in layer.items():
            if value or count_zeros:
                top[place] += (k + 1) ** a * value
                below[place] += (k + 1) ** a
    episode_R = grpo(batch) * episode if episode else np.zeros(len(batch.reward_R))
    return spread(
        batch,
        "hgpo",
        {
            (row, t): float(episode_R[row])
            + (top[row, t] / below[row, t] if below[row, t] else 0.0)
            for row, row_keys in enumerate(keys)
            for t in range(len(row_keys))
        },
    )


@register(
    STEP_CREDIT,
    "igpo",
    source="IGPO, released code GuoqingWang1/IGPO, centred by turn instead of by token offset",
    formula="sum_(s>=t) gamma^(s-t) r_s minus its mean over the group at turn t",
    certainty="code",
    checked=(
        "read in GuoqingWang1/IGPO verl/trainer/ppo/core_algos.py: centred, not divided; "
        "there at token positions, and a return stops at masked tokens"
    ),
    test=TESTS + "test_igpo_centres_returns_at_equal_turns",
    needs=("steps", "step_rewards"),
)
def igpo(batch: RewardBatch, *, gamma: float = 1.0) -> Floats:
    """Return turn returns above their siblings' at the same turn: D.

    `step_reward_R` holds each turn's gain of the true answer's probability, 0 for the last turn,
    whose reward is the outcome. The release centres at equal token positions, which
    compares different turns; and it does not divide by a deviation.
    """
    required(batch.step_reward_R, "igpo", "step_reward_R")
    returns = discounted_returns(batch, "igpo", gamma)
    turns = [list(range(len(r))) for r in returns]
    value = normalised(clusters_of(batch, turns).values(), returns, False, 0.0)
    return spread(batch, "igpo", value)


def turn_scores(batch: RewardBatch, eps: float) -> dict[Place, float]:
    """Return the step rewards standardised over the group at equal turns."""
    gains = required(batch.step_reward_R, "a2tgpo", "step_reward_R")
    turns = [list(range(len(g))) for g in gains]
    return normalised(clusters_of(batch, turns).values(), gains, True, eps)


def turn_widths(batch: RewardBatch, options: Mapping[str, Any]) -> dict[str, Floats]:
    """Return the factor of a loss's clip widths at each token; nothing where it is 1."""
    k = float(options.get("widen", 0.0))
    if not k:
        return {}
    z = turn_scores(batch, float(options.get("eps", 1e-6)))
    return {"width": spread(batch, "a2tgpo", {p: 1 + k * math.tanh(v) for p, v in z.items()})}


@register(
    STEP_CREDIT,
    "a2tgpo",
    source="A2TGPO, abstract (nearly complete)",
    formula="sum_(s>=t) gamma^(s-t) z_s / sqrt(T-t+1), z over the group at equal turns",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_a2tgpo_scales_by_the_root_of_the_terms",
    needs=("steps", "step_rewards"),
    columns=turn_widths,
)
def a2tgpo(
    batch: RewardBatch, *, gamma: float = 1.0, widen: float = 0.0, eps: float = 1e-6
) -> Floats:
    """Return accumulated normalised information gains: D.

    With `widen` k in (0, 1), a loss that clips does so at ε(1 + k tanh z) on a turn's tokens.
    Approximation: the mix with the outcome is unknown and left out, and so are k and the form of
    the width. A turn that only one rollout reached gives z = 0.
    """
    z = turn_scores(batch, eps)
    value: dict[Place, float] = {}
    for row, gain_S in enumerate(required(batch.step_reward_R, "a2tgpo", "step_reward_R")):
        total = 0.0
        for t in reversed(range(len(gain_S))):
            total = z[row, t] + gamma * total
            value[row, t] = total / math.sqrt(len(gain_S) - t)
    return spread(batch, "a2tgpo", value)


@register(
    STEP_CREDIT,
    "rank_grpo",
    source="Rank-GRPO (arXiv 2510.20150), released code yaochenzhu/Rank-GRPO",
    formula="z over the group at equal ranks of sum_(j>=k) gain_j d_j, d_j = 1 or 1/log2(j+2)",
    certainty="code",
    checked=(
        "read in yaochenzhu/Rank-GRPO libs/reward_funcs.py: gains to come at each rank, in two "
        "forms of discount; items over the list's end are not told apart here"
    ),
    test=TESTS + "test_rank_grpo_pays_a_rank_for_itself_and_the_later_ones",
    needs=("steps", "step_rewards"),
)
def rank_grpo(batch: RewardBatch, *, discount: str = "none", eps: float = 1e-4) -> Floats:
    """Return advantages by item of a list, each of the gains from it on: D.

    Items are turns, or the lines that `credit.separator` cuts, and gains their step rewards, such
    as the score's parts `step_0`, `step_1`, …. `discount` is `none` or `log` (as in DCG). Meant for
    `loss.name = "segment_clip"`. The rollout's own reward has no effect.
    """
    gains = required(batch.step_reward_R, "rank_grpo", "step_reward_R")
    returns = []
    for gain_S in gains:
        d_S = 1 / np.log2(np.arange(len(gain_S)) + 2) if discount == "log" else 1.0
        returns.append(np.cumsum((gain_S * d_S)[::-1])[::-1])
    ranks = [list(range(len(g))) for g in gains]
    return spread(
        batch,
        "rank_grpo",
        normalised(clusters_of(batch, ranks).values(), returns, True, eps),
    )


@register(
    STEP_CREDIT,
    "mapo",
    source="MAPO (mixed advantage), abstract (nearly complete)",
    formula="a z(return, group at turn t) + (1-a) z(return, whole batch)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_mapo_meets_its_two_extremes",
    needs=("steps", "step_rewards"),
)
def mapo(batch: RewardBatch, *, a: float = 0.5, gamma: float = 1.0, eps: float = 1e-6) -> Floats:
    """Return a blend of turn-level and batch-level normalised returns: D.

    Approximation: constants are ours; both parts divide by the sample deviation.
    """
    required(batch.step_reward_R, "mapo", "step_reward_R")
    returns = discounted_returns(batch, "mapo", gamma)
    turns = [list(range(len(r))) for r in returns]
    by_turn = normalised(clusters_of(batch, turns).values(), returns, True, eps)
    everywhere = [(row, t) for row, row_turns in enumerate(turns) for t in row_turns]
    by_batch = normalised([everywhere] if everywhere else [], returns, True, eps)
    return spread(batch, "mapo", {p: a * by_turn[p] + (1 - a) * by_batch[p] for p in everywhere})


@register(
    STEP_CREDIT,
    "eapo",
    source="IterResearch / EAPO, abstract (nearly complete)",
    formula="z over all rounds of the group of gamma^(T-t) R",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_eapo_discounts_by_the_distance_to_the_end",
    needs=("steps",),
)
def eapo(batch: RewardBatch, *, gamma: float = 0.995, eps: float = 1e-6) -> Floats:
    """Return normalised geometrically discounted outcomes of each round: D.

    Approximation: how rounds are normalised is our reading. Round T is the last and has R itself.
    """
    outcome_only = RewardBatch(
        batch.reward_R,
        batch.group_R,
        batch.length_R,
        step_R=batch.step_R,
        state_keys_R=batch.state_keys_R,
    )
    returns = discounted_returns(outcome_only, "eapo", gamma)
    clusters = [
        [(int(row), t) for row in rows for t in range(len(returns[row]))]
        for rows in filled_groups(batch)
    ]
    return spread(batch, "eapo", normalised([c for c in clusters if c], returns, True, eps))
