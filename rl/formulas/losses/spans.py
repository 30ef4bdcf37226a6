"""Losses that treat tokens by their entropy, or all tokens of a turn, line or item as one.

Does not know aggregation. Sources: named at each entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tfgrpo.rl.formulas.inputs import Floats, RewardBatch, TokenBatch
from tfgrpo.rl.formulas.losses.clip import clipped_surrogate, log_ratio, turns
from tfgrpo.rl.formulas.registry import Entry, register, required

SPAN_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_spans.py::"


def heat(entropy_D: Floats, eps: float = 1e-6) -> Floats:
    """Return log-entropies in [-1, 1]: 0 at the median, 1 and -1 at the two ends: D."""
    if not len(entropy_D):
        return np.zeros(0)
    level_D = np.log(np.maximum(entropy_D, eps))
    h_D: Floats = level_D - np.median(level_D)
    top, bottom = float(h_D.max()), float(-h_D.min())
    return np.where(h_D > 0, h_D / max(top, eps), h_D / max(bottom, eps))


def heat_column(batch: RewardBatch, options: Mapping[str, Any]) -> dict[str, Floats]:
    """Return the column `heat` of the batch's tokens, from entropies under π_old."""
    return {"heat": heat(required(batch.entropy_D, "hapo", "entropy_D"))}


@register(
    SPAN_LOSSES,
    "hapo",
    source="HAPO, released notes starriver030515/HAPO recipe/train.md",
    formula="dapo; eps_high (1 + a h) if h > 0, eps_low (1 - a h) if h < 0; A (1 + b h) by region",
    certainty="code",
    checked=(
        "read in starriver030515/HAPO recipe/train.md; how h is scaled to [-1, 1] is not told "
        "there: its two ends are the batch's here"
    ),
    test=TESTS + "test_hapo_widens_and_shares_out_by_heat",
    needs=("ratio", "entropy_tokens"),
    columns=heat_column,
)
def hapo(
    batch: TokenBatch,
    *,
    widen: float = 1.0,
    share: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> torch.Tensor:
    """Return a surrogate whose clip and advantage follow each token's entropy: D.

    `columns["heat"]` is h. Tokens of high entropy get a higher upper bound, those of low entropy a
    lower lower one (`widen`). The advantage is A (1 + `share` h) for h > 0 outside half of the
    bounds, and for h <= 0 inside them. With both at 0 this is `dapo`. Its mean over the group's
    tokens is the advantage `token_average`; its sampling temperature by entropy is not offered.
    """
    heat_D = required(batch.columns.get("heat"), "hapo", "columns['heat']")
    ratio_D = log_ratio(batch).exp()
    low_D = torch.where(heat_D <= 0, eps_low * (1 - widen * heat_D), eps_low)
    high_D = torch.where(heat_D > 0, eps_high * (1 + widen * heat_D), eps_high)
    seen_D = ratio_D.detach()
    near_D = (seen_D > 1 - low_D / 2) & (seen_D < 1 + high_D / 2)
    moved_D = torch.where(heat_D > 0, ~near_D, near_D)
    advantage_D = batch.advantage_D * torch.where(moved_D, 1 + share * heat_D, 1.0)
    return clipped_surrogate(ratio_D, advantage_D, 1 - low_D.clamp(max=0.99), 1 + high_D)


@register(
    SPAN_LOSSES,
    "dhpo_entropy",
    source="DHPO, abstract: token and sequence ratios mixed by the token's entropy",
    formula="dhpo with w_t = H_t / log V in place of a constant",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_dhpo_entropy_is_gspo_where_sure_and_clip_where_uniform",
    needs=("sequence", "entropy", "ratio"),
)
def dhpo_entropy(
    batch: TokenBatch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    row_eps_low: float = 3e-4,
    row_eps_high: float = 4e-4,
) -> torch.Tensor:
    """Return the surrogate of `dhpo` in which uncertain tokens count by their own ratio: D.

    The weight carries no gradient. Approximation as in `dhpo`.
    """
    entropy_D = required(batch.entropy_D, "dhpo_entropy", "entropy_D").detach()
    weight_D = (entropy_D / math.log(max(2, batch.vocabulary))).clamp(0.0, 1.0)
    gap_D = log_ratio(batch)
    ratio_D = gap_D.exp()
    row_D = batch.row_mean(gap_D).exp()[batch.row_D]
    plain_D = weight_D * ratio_D + (1 - weight_D) * row_D
    inside_D = ratio_D.clamp(1 - eps_low, 1 + eps_high)
    inside_row_D = row_D.clamp(1 - row_eps_low, 1 + row_eps_high)
    clipped_D = weight_D * inside_D + (1 - weight_D) * inside_row_D
    return -torch.minimum(plain_D * batch.advantage_D, clipped_D * batch.advantage_D)


@register(
    SPAN_LOSSES,
    "segment_clip",
    source="Rank-GRPO (arXiv 2510.20150), released code yaochenzhu/Rank-GRPO, item level",
    formula="-min(s A, clip(s, 1-eps_low, 1+eps_high) A), s = exp(mean log r of the token's item)",
    certainty="code",
    checked=(
        "read in yaochenzhu/Rank-GRPO libs/trl/rank_grpo_trainer.py: geometric mean an item; the "
        "tokens between items bear no loss there"
    ),
    test=TESTS + "test_segment_clip_takes_the_geometric_mean_of_each_item",
    needs=("sequence", "ratio"),
    uses=("steps",),
    columns=turns,
)
def segment_clip(batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> torch.Tensor:
    """Return the surrogate clipped on the ratio of each turn, line or item: D.

    Segments are turns, or the lines that `credit.separator` cuts; a row without any is one. Made
    for `credit.name = "rank_grpo"`.
    """
    segment_D, n = batch.segments()
    gap_D = log_ratio(batch)
    total = gap_D.new_zeros(n).index_add(0, segment_D, gap_D)
    count = gap_D.new_zeros(n).index_add(0, segment_D, torch.ones_like(gap_D.detach()))
    ratio_D = (total / count.clamp_min(1))[segment_D].exp()
    return clipped_surrogate(ratio_D, batch.advantage_D, 1 - eps_low, 1 + eps_high)
