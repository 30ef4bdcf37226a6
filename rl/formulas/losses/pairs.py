"""Losses on pairs of a group's rows, the better against the worse by reward.

Where the reward is a judge's verdict (verifier `win_rate`), so is the pair. Rows of equal reward
form no pair, and a group without a pair gives 0. Aggregate with `row_mean`: the result is the mean
over groups of the mean over a group's pairs. log π of a row is summed over its tokens.

Does not know aggregation, nor where rewards come from. Idea: DPO (arXiv 2305.18290).
"""

from __future__ import annotations

from math import inf

import torch
from torch.nn.functional import softplus

from tfgrpo.advantage import TOLERANCE
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.clip import siblings
from tfgrpo.rl.formulas.registry import ABOVE_0, Entry, register, required, within

PAIR_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_pairs.py::"


def pair_shares(batch: TokenBatch, entry: str, pairs: str = "ends") -> torch.Tensor:
    """Return what each pair (better row i, worse row j) counts on each of its rows, 0 for no pair.

    A group of G rows with n pairs gives each G / 2n, so that the mean over its rows of what
    `on_rows` makes of a loss is the mean over its pairs.

    Args:
        batch: whole groups.
        entry: who asks, for the message.
        pairs: `ends` for the best row and the worst (the first of equals), `all` for every two.

    Returns:
        R × R.

    Raises:
        ConfigError: another word, or a batch without groups or rewards.
    """
    same = siblings(batch, entry)
    reward_R = required(batch.reward_R, entry, "reward_R")
    same_RR = same > 0
    better_RR = same_RR & (reward_R[:, None] > reward_R[None, :] + TOLERANCE)
    if pairs == "ends":
        best_R = _first(~better_RR.any(0), same_RR)
        worst_R = _first(~better_RR.any(1), same_RR)
        better_RR = better_RR & best_R[:, None] & worst_R[None, :]
    elif pairs != "all":
        raise ConfigError(f"loss {entry!r}: pairs is {pairs!r}; allowed are 'ends' and 'all'")
    size_R, pairs_R = same.sum(1), same @ better_RR.to(same.dtype).sum(1)
    return better_RR * (size_R / (2 * pairs_R.clamp_min(1)))[:, None]


def _first(is_R: torch.Tensor, same_RR: torch.Tensor) -> torch.Tensor:
    """The first row of each group among those marked: R."""
    earlier_RR = (same_RR & is_R[None, :]).tril(-1)
    return is_R & ~earlier_RR.any(1)


def on_rows(loss_RR: torch.Tensor, share_RR: torch.Tensor) -> torch.Tensor:
    """Return what each row carries of its pairs' losses: R."""
    part_RR = loss_RR * share_RR
    return part_RR.sum(1) + part_RR.sum(0)


def differences(value_R: torch.Tensor) -> torch.Tensor:
    """Return value i − value j: R × R."""
    return value_R[:, None] - value_R[None, :]


@register(
    PAIR_LOSSES,
    "rpo",
    source="RPO (arXiv 2405.16436), released code YSLIU627/Regularized-Preference-Optimization",
    formula="-log sigmoid(beta (dlog pi - dlog ref)) - eta mean log pi(better), d: better - worse",
    certainty="code",
    checked=(
        "read in YSLIU627/Regularized-Preference-Optimization OpenRLHF/openrlhf/trainer/"
        "dpo_trainer.py: mean over tokens, then rows, beta 0.5, eta 0.2; pairs are people's there"
    ),
    test=TESTS + "test_rpo_is_dpo_with_the_better_rows_likelihood",
    needs=("sequence", "group", "reference", "rewards"),
    aggregation="row_mean",
)
def rpo(
    batch: TokenBatch, *, beta: float = 0.5, eta: float = 0.2, pairs: str = "ends"
) -> torch.Tensor:
    """Return DPO's loss and the better row's negative mean log-probability, by row: D.

    Args:
        batch: whole groups, with the reference's log-probs.
        beta: > 0, scales the difference of the summed log-ratios to the reference.
        eta: >= 0, weight of the likelihood; 0 is DPO.
        pairs: `ends` or `all`, see `pair_shares`.
    """
    within("rpo", beta=(beta, ABOVE_0, inf), eta=(eta, 0.0, inf))
    ref_D = required(batch.ref_logp_D, "rpo", "ref_logp_D")
    margin_RR = beta * differences(batch.row_sum(batch.logp_D - ref_D))
    likely_R = batch.row_mean(batch.logp_D)
    loss_RR = softplus(-margin_RR) - eta * likely_R[:, None]
    return on_rows(loss_RR, pair_shares(batch, "rpo", pairs))[batch.row_D]


@register(
    PAIR_LOSSES,
    "inpo",
    source="INPO (arXiv 2407.00617), abstract; formula recalled",
    formula="(h - 1/(2 eta))^2, h = dlog pi - tau/eta dlog ref - (eta-tau)/eta dlog pi_old",
    certainty="approximation",
    checked="no released code of its authors was found; others' implementations have this formula",
    test=TESTS + "test_inpo_matches_the_hand_value_and_a_swapped_pair_flips_h",
    needs=("sequence", "group", "reference", "ratio", "own_start", "rewards"),
    aggregation="row_mean",
)
def inpo(
    batch: TokenBatch, *, eta: float = 7.5e-3, tau: float = 2.5e-3, pairs: str = "ends"
) -> torch.Tensor:
    """Return the squared error of a pair's log-ratio difference, by row: D.

    Approximation: the formula is recalled. π_old, the weights at the batch's start, stands for the
    earlier iterate.

    Args:
        batch: whole groups, with the reference's log-probs.
        eta: > 0; the inverse of twice it is where h rests.
        tau: 0 to `eta`, pull to the reference; 0 leaves it out.
        pairs: `ends` or `all`, see `pair_shares`.

    Raises:
        ConfigError: `eta` or `tau` out of range.
    """
    within("inpo", eta=(eta, ABOVE_0, inf), tau=(tau, 0.0, eta))
    ref_D = required(batch.ref_logp_D, "inpo", "ref_logp_D")
    anchor_D = tau / eta * ref_D + (eta - tau) / eta * batch.old_logp_D
    h_RR = differences(batch.row_sum(batch.logp_D - anchor_D))
    loss_RR = (h_RR - 1 / (2 * eta)) ** 2
    return on_rows(loss_RR, pair_shares(batch, "inpo", pairs))[batch.row_D]


def _power_margins(batch: TokenBatch, beta: float) -> torch.Tensor:
    """beta (w log π + w), better less worse, w the inverse length: R × R."""
    count_R = batch.row_sum(torch.ones_like(batch.logp_D.detach())).clamp_min(1)
    return beta * differences(batch.row_mean(batch.logp_D) + 1 / count_R)


def _labels(batch: TokenBatch) -> torch.Tensor:
    """How sure it is that a row's pair is the right way round: R, 1 before any pass."""
    return batch.row_mean(batch.columns.get("label", torch.ones_like(batch.advantage_D)))


def moved_labels(
    batch: TokenBatch, *, beta: float = 2.0, eta: float = 0.01, gamma: float = 0.1
) -> dict[str, torch.Tensor]:
    """Return labels a step nearer to where their pair has no slope, sigmoid(margin): R."""
    del eta  # of `power_dl`
    with torch.no_grad():
        label_R = _labels(batch)
        margin_RR = _power_margins(batch, beta)
        next_RR = label_R[:, None] + gamma * (margin_RR.sigmoid() - label_R[:, None])
        pair_RR = (pair_shares(batch, "power_dl") > 0).to(next_RR.dtype)
        in_pair_R = pair_RR.sum(1) + pair_RR.sum(0)
        return {"label": torch.where(in_pair_R > 0, on_rows(next_RR, pair_RR), label_R)}


@register(
    PAIR_LOSSES,
    "power_dl",
    source="POWER-DL (arXiv 2412.09544), abstract; formula recalled",
    formula="-l log sig(m) - (1-l) log sig(-m) - eta beta w log pi, m = beta d(w log pi + w)",
    certainty="approximation",
    checked="no released code was found; the abstract alone; constants are ours",
    test=TESTS + "test_power_dl_lets_go_of_a_pair_that_the_policy_holds_for_wrong",
    needs=("sequence", "group", "passes", "rewards"),
    aggregation="row_mean",
    carry=moved_labels,
)
def power_dl(
    batch: TokenBatch, *, beta: float = 2.0, eta: float = 0.01, gamma: float = 0.1
) -> torch.Tensor:
    """Return the loss of each group's best row against its worst under a moving label, by row: D.

    `columns["label"]` is l, 1 at first; after each pass over the batch it goes the share `gamma` of
    the way to sigmoid(m), where the pair has no slope. w is the inverse of a row's length.

    Approximation: the weighted entropy and the label's rule are recalled. Labels live as long as
    their batch (`optimiser.epochs_per_batch` passes): offline pairs are given as `tasks.groups`.

    Args:
        batch: whole groups.
        beta: > 0, scales the margin.
        eta: >= 0, weight of the better row's likelihood, the robust term.
        gamma: 0 to 1; 0 keeps every label.
    """
    within("power_dl", beta=(beta, ABOVE_0, inf), eta=(eta, 0.0, inf), gamma=(gamma, 0.0, 1.0))
    label_RR = _labels(batch)[:, None]
    margin_RR = _power_margins(batch, beta)
    loss_RR = label_RR * softplus(-margin_RR) + (1 - label_RR) * softplus(margin_RR)
    loss_RR = loss_RR - eta * beta * batch.row_mean(batch.logp_D)[:, None]
    return on_rows(loss_RR, pair_shares(batch, "power_dl"))[batch.row_D]
