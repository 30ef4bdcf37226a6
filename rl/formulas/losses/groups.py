"""Losses on a whole group's rows at once: implied advantages, right answers against wrong ones.

Statistics are of the row's group, so that cutting the batch changes nothing. Does not know
aggregation. Sources: named at each entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import torch

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch, TokenBatch
from tfgrpo.rl.formulas.losses.clip import log_ratio, siblings
from tfgrpo.rl.formulas.registry import ABOVE_0, Entry, register, required, within

GROUP_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_groups.py::"
_NONE = -1e30
"""Stands for −∞ where a group may have no member: exp of it is 0, and no gradient is NaN."""


def _standardised(value_R: torch.Tensor, same_RR: torch.Tensor, eps: float) -> torch.Tensor:
    """(value − mean) / (sample deviation + eps) in each group: R."""
    size_R = same_RR.sum(1)
    centred_R = value_R - same_RR @ value_R / size_R
    variance_R = same_RR @ centred_R**2 / (size_R - 1).clamp_min(1)
    # a root has no slope at 0, where every group is before its first update
    return centred_R / (variance_R.clamp_min(1e-20).sqrt() + eps)


@register(
    GROUP_LOSSES,
    "reg_grpo",
    source="Reg-GRPO, DeepVideo-R1 (arXiv 2506.07464), section 3.2",
    formula="(z - A)^2, z: row sum of log r standardised in its group, A: the group's advantage",
    certainty="paper",
    checked=(
        "no released code was to be had; the paper's words say what is standardised and regressed, "
        "its displayed equations could not be read: the square and eps (that of advantage 'grpo') "
        "are taken from a summary; its KL term is loss.kl; its data augmentation is not here"
    ),
    test=TESTS + "test_reg_grpo_rests_where_the_implied_advantage_is_the_advantage",
    needs=("sequence", "group", "every_row", "ratio"),
    aggregation="row_mean",
)
def reg_grpo(batch: TokenBatch, *, eps: float = 1e-4) -> torch.Tensor:
    """Return the squared error of the advantage that a row's log-ratio implies: D.

    Made for advantage `grpo`. Nothing is clipped; while all log-ratios of a group are 0 the
    gradient is that of `reinforce` on rows times 2 / `eps`, which `optimiser.max_norm` bounds.
    `eps` > 0 is added to the deviation.
    """
    within("reg_grpo", eps=(eps, ABOVE_0, inf))
    same_RR = siblings(batch, "reg_grpo")
    implied_R = _standardised(batch.row_sum(log_ratio(batch)), same_RR, eps)
    return ((implied_R - batch.row_mean(batch.advantage_D)) ** 2)[batch.row_D]


def length_weights(
    right_R: torch.Tensor, length_R: torch.Tensor, same_RR: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return exp(−length/scale) of the right rows, normalised in each group; 0 elsewhere: R."""
    level_R = -length_R / scale
    level_RR = torch.where((same_RR * right_R[None, :]) > 0, level_R[None, :], _NONE)
    return right_R * (level_R - level_RR.logsumexp(1)).clamp_max(0.0).exp()


@register(
    GROUP_LOSSES,
    "drpo",
    source="DRPO (arXiv 2510.04474), released code Optimization-AI/DRPO",
    formula="sum over right w (tau log mean over wrong exp(s/tau) - s), s = mean log pi of a row",
    certainty="code",
    checked=(
        "read in Optimization-AI/DRPO verl/verl/trainer/ppo/core_algos.py: w = softmax((1 - "
        "length/longest)/lam), tau 10, lam 0.1, delta 1e-4, beta 1e3; equal gradient; its KL is of "
        "the micro-batch's tokens, ours of the group's; its right is reward 1, wrong reward 0"
    ),
    test=TESTS + "test_drpo_weighs_right_answers_by_length_against_the_hardest_wrong_ones",
    needs=("sequence", "group", "ratio", "own_start", "rewards"),
    aggregation="row_mean",
)
def drpo(
    batch: TokenBatch,
    *,
    lam: float = 0.1,
    tau: float = 10.0,
    delta: float = 1e-4,
    beta: float = 1e3,
    right: float = 1.0,
    max_tokens: float = 256,
) -> torch.Tensor:
    """Return the decoupled loss of right rows against the wrong ones of their group, by row: D.

    No right row is ever pushed down. Groups of right rows alone, or of wrong ones, give 0. The
    weight max(0, `beta` (KL - `delta`)) of the KL to π_old carries no gradient. Advantages are not
    used.

    Args:
        batch: whole groups.
        lam: > 0, temperature of the length reward 1 − length/`max_tokens`; large is uniform.
        tau: > 0, temperature of the wrong rows' scores; small takes the likeliest alone.
        delta: >= 0, nats a token that are free.
        beta: >= 0, what more costs.
        right: reward from which a row is right; every other one is wrong.
        max_tokens: longest reply, filled in.

    Raises:
        ConfigError: an option out of range.
    """
    within("drpo", lam=(lam, ABOVE_0, inf), tau=(tau, ABOVE_0, inf))
    within("drpo", delta=(delta, 0.0, inf), beta=(beta, 0.0, inf))
    reward_R = required(batch.reward_R, "drpo", "reward_R")
    same_RR = siblings(batch, "drpo")
    score_R = batch.row_mean(batch.logp_D)
    right_R = (reward_R >= right).to(score_R.dtype)
    length_R = batch.row_sum(torch.ones_like(batch.logp_D.detach()))
    weight_R = length_weights(right_R, length_R, same_RR, lam * max_tokens)
    wrong_RR = same_RR * (1 - right_R)[None, :]
    n_wrong_R = wrong_RR.sum(1)
    level_RR = torch.where(wrong_RR > 0, score_R[None, :] / tau, _NONE)
    hard_R = tau * (level_RR.logsumexp(1) - n_wrong_R.clamp_min(1).log())
    is_mixed_R = (n_wrong_R > 0).to(score_R.dtype)
    loss_R = same_RR.sum(1) * weight_R * torch.where(is_mixed_R > 0, hard_R - score_R, 0.0)
    return loss_R[batch.row_D] + _kl_barrier(batch, same_RR, delta, beta)


def _kl_barrier(
    batch: TokenBatch, same_RR: torch.Tensor, delta: float, beta: float
) -> torch.Tensor:
    """max(0, beta (KL − delta)) KL, KL of the group's tokens to π_old, its weight constant: D."""
    gap_D = log_ratio(batch)
    kl_D = gap_D.exp() - 1 - gap_D
    count_R = batch.row_sum(torch.ones_like(kl_D.detach()))
    mean_R = same_RR @ batch.row_sum(kl_D.detach()) / (same_RR @ count_R).clamp_min(1)
    return (beta * (mean_R - delta)).clamp_min(0.0)[batch.row_D] * kl_D


@register(
    GROUP_LOSSES,
    "grao",
    source="GRAO (arXiv 2508.07750), equation 3",
    formula="-mean over i of A_i J_i + beta A_y J_y + lam A_i (J_i - J_y), J: row mean of log pi",
    certainty="paper",
    checked=(
        "no released code was found; beta 0.5 and lam 0.6 are the paper's; its reference is judged "
        "by a reward model, here it has the verifier's best reward"
    ),
    test=TESTS + "test_grao_imitates_explores_and_compares",
    needs=("group", "sequence", "given"),
    aggregation="row_mean",
)
def grao(batch: TokenBatch, *, beta: float = 0.5, lam: float = 0.6) -> torch.Tensor:
    """Return the policy gradient with the reference answer y as a row of its group: D.

    `columns["given"]` is 1 on the reference's tokens, which are the group's only row that the
    policy did not draw; without one this is (1 + `lam`) times `reinforce`. The mean is over the
    drawn rows.

    Args:
        batch: whole groups, advantages taken over drawn rows and reference together.
        beta: >= 0, weight of imitation.
        lam: >= 0, weight of the pairs (drawn, reference).
    """
    within("grao", beta=(beta, 0.0, inf), lam=(lam, 0.0, inf))
    same_RR = siblings(batch, "grao")
    given_D = batch.columns.get("given", torch.zeros_like(batch.advantage_D))
    advantage_R = batch.row_mean(batch.advantage_D)
    drawn_RR = same_RR * (1 - batch.row_mean(given_D))[None, :]
    n_drawn_R = drawn_RR.sum(1).clamp_min(1)
    pull_R = n_drawn_R * beta * advantage_R - lam * (drawn_RR @ advantage_R)
    weight_D = torch.where(given_D > 0, pull_R[batch.row_D], (1 + lam) * batch.advantage_D)
    scale_R = same_RR.sum(1) / n_drawn_R  # the aggregation counts the reference as a row
    return -scale_R[batch.row_D] * weight_D * batch.logp_D


VERDICT = "beats_"
"""Begins the score's parts and the loss's columns with a row's verdicts against its siblings."""
PLACE = "place"
"""The part and column that say which of those judged together a row is."""


def verdict_columns(batch: RewardBatch, options: Mapping[str, Any]) -> dict[str, Floats]:
    """Return each row's `place` among those that were judged together, and its verdicts against
    each place: D each. Without a part `place` all that were judged must be rows.

    Raises:
        ConfigError: the scores have no verdicts.
    """
    names = {n: i for i, n in enumerate(batch.part_names) if n.startswith(VERDICT)}
    if batch.part_RM is None or not names:
        raise ConfigError(
            "loss 'nash_mp': the scores have no parts beats_0, beats_1, …: set verifier.verdicts = "
            "true for kind 'win_rate', or let a function that scores a group give them"
        )
    place_R = np.zeros(len(batch.reward_R))
    for rows in batch.groups():
        place_R[rows] = np.arange(len(rows))
    if PLACE in batch.part_names:  # one of them may have no tokens, and so no row
        place_R = batch.part_RM[:, batch.part_names.index(PLACE)]
    found_R = {PLACE: place_R} | {n: batch.part_RM[:, i] for n, i in names.items()}
    return {name: np.repeat(value_R, batch.length_R) for name, value_R in found_R.items()}


def rates(verdict_RR: torch.Tensor, weight_RR: torch.Tensor) -> torch.Tensor:
    """Return how often each row wins against opponents of these weights: R."""
    return (verdict_RR * weight_RR).sum(1) / weight_RR.sum(1).clamp_min(1e-30)


@register(
    GROUP_LOSSES,
    "nash_mp",
    source="Nash-MP (arXiv 2505.19731), abstract",
    formula="-(P(y beats pi') - 1/2) log pi; pi' = pi_k in a step that is undone, then its result",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_nash_mp_settles_rock_paper_scissors_where_one_step_does_not",
    needs=("sequence", "group", "verdicts", "half_step", "rewards"),
    aggregation="row_sum",
    columns=verdict_columns,
)
def nash_mp(batch: TokenBatch) -> torch.Tensor:
    """Return the policy gradient of a group's win rate against the policy half a step ahead: D.

    The update takes a step against the group itself, measures what it did (`columns["half_gap"]`,
    log π_(k+½) − log π_k a token), takes it back and steps again from the same weights: opponents
    count by exp of their row's gap, normalised in the group. `loss.kl` is the game's KL to the
    start. Verdicts stand in `columns["beats_J"]`, J a sibling's `columns["place"]`. Advantages are
    not used.

    Approximation: one optimiser step takes the place of each proximal step, and opponents are the
    group's own members, reweighted.
    """
    same_RR = siblings(batch, "nash_mp")
    names = sorted((n for n in batch.columns if n.startswith(VERDICT)), key=_place_of)
    if not names:  # an empty turn of a process that keeps the others company
        return 0.0 * batch.logp_D
    verdict_RG = torch.stack([batch.row_mean(batch.columns[n]) for n in names], 1)
    place_R = batch.row_mean(batch.columns[PLACE]).round().long()
    gap_D = batch.columns.get("half_gap", torch.zeros_like(batch.advantage_D))
    weight_R = batch.row_sum(gap_D).clamp(-20.0, 20.0).exp()
    rate_R = rates(verdict_RG[:, place_R], same_RR * weight_R[None, :])
    return -(rate_R - 0.5)[batch.row_D] * batch.logp_D


def _place_of(name: str) -> int:
    return int(name.removeprefix(VERDICT))
