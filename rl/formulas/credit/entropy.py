"""Advantages by token that follow entropies: gated, by turn, or before a call.

Each returns one value a token, rows end to end: D. Does not know how entropies are made. Sources
are named at each entry.
"""

from __future__ import annotations

import numpy as np

from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.credit.steps import Place, spread
from tfgrpo.rl.formulas.credit.tokens import repeated, tokens_of
from tfgrpo.rl.formulas.group_stats import column, deviation_of, filled_groups, is_flat, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

ENTROPY_CREDIT: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/credit/test_entropy.py::"


@register(
    ENTROPY_CREDIT,
    "erpo",
    source="ERPO (arXiv 2603.28204), abstract",
    formula="z of R g a bucket of positions over the group, times 1 + anchor where R > mean",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_erpo_centres_each_bucket_and_without_a_gate_is_grpo",
    needs=("entropy_tokens",),
)
def erpo(
    batch: RewardBatch,
    *,
    gate: float = 1.5,
    share: float = 0.2,
    buckets: float = 4,
    anchor: float = 0.0,
    eps: float = 1e-4,
) -> Floats:
    """Return outcome signals, raised at uncertain tokens, standardised by place in the reply: D.

    A token's signal is its row's reward, times `gate` where its entropy is in the batch's top
    `share`. Rows are cut into `buckets` parts of like length; a bucket's mean and sample deviation
    are over the group's rows, each by the mean of its tokens there. `anchor` raises the result on
    rows above the group's mean reward. Approximation: all constants and the form of each of the
    three parts are ours.
    """
    entropy_D = required(batch.entropy_D, "erpo", "entropy_D")
    if not len(entropy_D):
        return np.zeros(0)
    pivot_D = entropy_D >= np.quantile(entropy_D, 1 - share)
    signal = tokens_of(batch, repeated(batch, batch.reward_R) * np.where(pivot_D, gate, 1.0))
    n = max(1, round(buckets))
    bucket = [np.arange(len(s_T)) * n // max(1, len(s_T)) for s_T in signal]
    value = [np.zeros(len(s_T)) for s_T in signal]
    for rows in filled_groups(batch):
        if is_flat(batch.reward_R[rows]):
            continue
        mean_reward = mean_of(batch.reward_R[rows])
        for b in range(n):
            here = {int(r): signal[r][bucket[r] == b] for r in rows}
            means_G = np.array([mean_of(s_T) for s_T in here.values() if len(s_T)])
            if is_flat(means_G):
                continue
            mean, scale = mean_of(means_G), deviation_of(means_G) + eps
            for row, s_T in here.items():
                lift = 1 + anchor * (batch.reward_R[row] > mean_reward)
                value[row][bucket[row] == b] = lift * (s_T - mean) / scale
    return np.concatenate(value)


@register(
    ENTROPY_CREDIT,
    "turn_entropy",
    source="DART-GUI, abstract: training on the turns of highest entropy",
    formula="A on turns whose mean entropy is in the batch's top share, else 0",
    certainty="approximation",
    checked="no released code of this rule was found; the abstract alone",
    test=TESTS + "test_turn_entropy_keeps_the_most_uncertain_turns",
    needs=("steps", "entropy_tokens"),
)
def turn_entropy(batch: RewardBatch, *, share: float = 0.8, eps: float = 1e-4) -> Floats:
    """Return group advantages on the turns of largest mean entropy: D.

    `share` is of the turns of each group. Approximation: the pool of turns is ours.
    """
    entropy_D = required(batch.entropy_D, "turn_entropy", "entropy_D")
    steps = required(batch.step_R, "turn_entropy", "step_R")
    if not len(entropy_D):
        return np.zeros(0)
    mean: dict[Place, float] = {}
    for row, (h_T, step_T) in enumerate(zip(tokens_of(batch, entropy_D), steps, strict=True)):
        for step in np.unique(step_T).tolist():
            mean[row, step] = mean_of(h_T[step_T == step])
    advantage_R = grpo(batch, eps=eps)
    value: dict[Place, float] = {}
    for rows in filled_groups(batch):
        places = [p for p in mean if p[0] in set(rows.tolist())]
        places.sort(key=lambda p: (-mean[p], p))
        kept = max(1, round(share * len(places)))
        for i, place in enumerate(places):
            value[place] = float(advantage_R[place[0]]) if i < kept else 0.0
    return spread(batch, "turn_entropy", value)


@register(
    ENTROPY_CREDIT,
    "call_entropy",
    source="Function-call RL (entropy), abstract",
    formula="A + min(alpha mean H, |A| / k) on tokens before a call; at most 0 with a broken call",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_call_entropy_never_turns_a_sign_and_pays_no_broken_call",
    needs=("steps", "entropy_tokens", "extra:reasoning_D", "extra:invalid_R"),
)
def call_entropy(
    batch: RewardBatch, *, alpha: float = 0.4, k: float = 2.0, eps: float = 1e-4
) -> Floats:
    """Return group advantages raised on what is thought before a call: D.

    `extra["reasoning_D"]` is 1 on a turn's tokens before its first phrase of `credit.phrases`, such
    as `Action:`; H is their mean entropy in the turn. A row with an invalid action is never raised
    nor positive. `k` > 1 keeps every sign. Approximation: constants and pooling are ours.
    """
    entropy_D = required(batch.entropy_D, "call_entropy", "entropy_D")
    thought_D = column(batch, "call_entropy", "reasoning_D") > 0
    invalid_R = column(batch, "call_entropy", "invalid_R")
    if not len(entropy_D):
        return np.zeros(0)
    advantage_R = grpo(batch, eps=eps)
    value = []
    parts = zip(
        tokens_of(batch, entropy_D),
        tokens_of(batch, thought_D),
        required(batch.step_R, "call_entropy", "step_R"),
        strict=True,
    )
    for row, (h_T, thought_T, step_T) in enumerate(parts):
        a = float(advantage_R[row])
        if invalid_R[row] > 0:
            value.append(np.full(len(h_T), min(a, 0.0)))
            continue
        whole_T = np.full(len(h_T), a)
        for step in np.unique(step_T).tolist():
            here_T = thought_T & (step_T == step)
            if here_T.any():
                whole_T[here_T] += min(alpha * mean_of(h_T[here_T]), abs(a) / k)
        value.append(whole_T)
    return np.concatenate(value)
