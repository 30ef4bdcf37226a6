"""Advantages that weigh a group by how hard or how uncertain its task is.

One value a rollout, R. Does not know how answers are compared. Sources are named at each entry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.group_stats import centred, deviation_of, filled_groups, is_flat, mean_of
from tfgrpo.rl.formulas.inputs import Floats, Ints, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

DIFFICULTY_ADVANTAGES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/advantages/test_difficulty.py::"


@register(
    DIFFICULTY_ADVANTAGES,
    "dgpo",
    source="MathForge DGPO, released code AMAP-ML/MathForge",
    formula="G (R-mean)/(sum|R-mean|+eps) * n_mixed softmax(-mean/T) * tokens / tokens of mixed",
    certainty="code",
    checked=(
        "read in AMAP-ML/MathForge trl-0.20.0 grpo_trainer.py: MAD-like scale, softmax "
        "temperature, token ratio"
    ),
    test=TESTS + "test_dgpo_gives_every_mixed_group_the_same_total",
)
def dgpo(batch: RewardBatch, *, temperature: float = 2.0, eps: float = 1e-4) -> Floats:
    """Return advantages of equal total size a group, larger for harder groups: R.

    The groups' weights average 1 over the groups that are not flat. All is multiplied by (tokens of
    all groups)/(tokens of mixed groups), so that flat groups do not shrink a `token_mean`.
    """
    advantage_R = np.zeros(len(batch.reward_R))
    mixed = [rows for rows in filled_groups(batch) if not is_flat(batch.reward_R[rows])]
    if not mixed:
        return advantage_R
    logit_P = np.array([-mean_of(batch.reward_R[rows]) / temperature for rows in mixed])
    weight_P = np.exp(logit_P - logit_P.max())
    weight_P *= len(mixed) / math.fsum(weight_P)
    kept_tokens = sum(int(batch.length_R[rows].sum()) for rows in mixed)
    weight_P *= int(batch.length_R.sum()) / max(1, kept_tokens)
    for rows, weight in zip(mixed, weight_P, strict=True):
        centred_G = centred(batch.reward_R[rows])
        size = math.fsum(np.abs(centred_G)) + eps
        advantage_R[rows] = weight * len(rows) * centred_G / size
    return advantage_R


def semantic_entropy(answers_G: list[object]) -> float:
    """Return the mean of −log share over the clusters of equal answers, in nats.

    >>> semantic_entropy(["a", "a", "a"]), round(semantic_entropy(["a", "b", "c", "d"]), 4)
    (0.0, 1.3863)
    """
    counts = Counter(answers_G).values()
    size = len(answers_G)
    return math.fsum(math.log(size / n) for n in counts) / len(counts)


def _seed(batch: RewardBatch, entry: str, shape: str, alpha: float, power: float) -> Floats:
    answers = required(batch.answer_R, entry, "answer_R")
    advantage_R = dr_grpo(batch)
    for rows in filled_groups(batch):
        most = math.log(len(rows)) if len(rows) > 1 else 1.0
        x = alpha * semantic_entropy([answers[i] for i in rows]) / most
        if shape == "exponential":
            factor = math.exp(-x)
        else:
            factor = max(0.0, 1 - x) ** (power if shape == "focal" else 1.0)
        advantage_R[rows] *= factor
    return advantage_R


_SEED_SOURCE = "SEED-GRPO (arXiv 2505.12346), summary; no code released"


@register(
    DIFFICULTY_ADVANTAGES,
    "seed_linear",
    source=_SEED_SOURCE,
    formula="(R - mean) max(0, 1 - alpha SE / log G), SE semantic entropy of the answers",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_seed_shrinks_uncertain_groups",
    needs=("answers",),
)
def seed_linear(batch: RewardBatch, *, alpha: float = 1.0) -> Floats:
    """Return centred rewards, smaller where a group's answers disagree: R.

    Approximation: which shape and `alpha` are the default is unknown; clusters are equal final
    answers by their share of the group.
    """
    return _seed(batch, "seed_linear", "linear", alpha, 1.0)


@register(
    DIFFICULTY_ADVANTAGES,
    "seed_exponential",
    source=_SEED_SOURCE,
    formula="(R - mean) exp(-alpha SE / log G)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_seed_shrinks_uncertain_groups",
    needs=("answers",),
)
def seed_exponential(batch: RewardBatch, *, alpha: float = 1.0) -> Floats:
    """As `seed_linear` with an exponential shape: R. Approximation likewise."""
    return _seed(batch, "seed_exponential", "exponential", alpha, 1.0)


@register(
    DIFFICULTY_ADVANTAGES,
    "seed_focal",
    source=_SEED_SOURCE,
    formula="(R - mean) max(0, 1 - alpha SE / log G)^power",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_seed_shrinks_uncertain_groups",
    needs=("answers",),
)
def seed_focal(batch: RewardBatch, *, alpha: float = 1.0, power: float = 2.0) -> Floats:
    """As `seed_linear` with a focal shape: R. Approximation likewise."""
    return _seed(batch, "seed_focal", "focal", alpha, power)


@register(
    DIFFICULTY_ADVANTAGES,
    "a_grae",
    source="A-GRAE (Unveiling Implicit Advantage Symmetry), abstract",
    formula="grpo, positives times factor, groups times 2((1-t) p + t (1-p)), p mean, t progress",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_a_grae_damps_positives_and_crosses_over",
)
def a_grae(
    batch: RewardBatch, *, factor: float = 0.5, progress: float = 0.0, eps: float = 1e-4
) -> Floats:
    """Return asymmetric advantages that favour easy groups first and hard ones last: R.

    Approximation: both schedules are unknown; these are linear. `factor` in (0, 1), `progress` in
    [0, 1], rewards in [0, 1].
    """
    advantage_R = grpo(batch, eps=eps)
    advantage_R = np.where(advantage_R > 0, factor * advantage_R, advantage_R)
    for rows in filled_groups(batch):
        p = mean_of(batch.reward_R[rows])
        advantage_R[rows] *= 2 * ((1 - progress) * p + progress * (1 - p))
    return advantage_R


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Some consecutive groups; a paper is the j-th rollout of each of them."""

    papers: list[Ints]
    score_J: Floats
    """ΣR of each paper."""


def _bundles(batch: RewardBatch, size: int) -> list[_Bundle]:
    if size < 1:
        raise ConfigError(f"'riskpo': bundle is {size}; a bundle has 1 group or more")
    groups = filled_groups(batch)
    found = []
    for start in range(0, len(groups), size):
        part = groups[start : start + size]
        papers = [
            np.array([rows[j] for rows in part]) for j in range(min(len(rows) for rows in part))
        ]
        score_J = np.array([math.fsum(batch.reward_R[paper]) for paper in papers])
        found.append(_Bundle(papers, score_J))
    return found


def _track_quantiles(
    state: Mapping[str, float], batch: RewardBatch, options: Mapping[str, Any]
) -> dict[str, float]:
    """Start where the options say, else at the batch's quantiles of all paper scores; then follow
    the pinball loss's slope."""
    score_J = np.concatenate([b.score_J for b in _bundles(batch, int(options.get("bundle", 5)))])
    found = {}
    for name, level in (("q_low", options.get("d", 0.2)), ("q_high", options.get("u", 0.8))):
        now = state.get(name, options.get(name))
        if now is None:
            found[name] = float(np.quantile(score_J, level))
        else:
            below = float(np.mean(score_J < now))
            found[name] = now + options.get("lr", 0.1) * (level - below)
    return found


@register(
    DIFFICULTY_ADVANTAGES,
    "riskpo",
    source="RiskPO, released code RTkenny/RiskPO (quantile tracking; recipe levels 0.2 and 0.8)",
    formula="((S-q_d)+ - (S-q_u)+ + q_d-q_u)/(u-d) and -(q_d-S)+/d, mixed 1 : w, S sum of a bundle",
    certainty="code",
    checked=(
        "read in RTkenny/RiskPO verl/trainer/ppo/core_algos.py: bundles, track/batch/mix, "
        "std, credit; the upper-tail variant is left out"
    ),
    test=TESTS + "test_riskpo_matches_the_mixed_value_at_risk",
    after_step=_track_quantiles,
)
def riskpo(  # every option is a switch of the release
    batch: RewardBatch,
    *,
    bundle: float = 5,
    d: float = 0.2,
    u: float = 0.8,
    w: float = 1.5,
    natural_baseline: float = 1,
    scaled: float = 0,
    credit: str = "uniform",
    quantiles: str = "track",
    lr: float = 0.1,
    q_low: float | None = None,
    q_high: float | None = None,
) -> Floats:
    """Return the mixed value-at-risk of bundles of `bundle` consecutive groups: R.

    The j-th rollouts of a bundle's groups make one paper of score S = ΣR. A group's surplus
    rollouts (more than the bundle's smallest) get 0. Denominators are levels, not quantiles.
    `scaled` 1 divides by the sample deviation of the bundle's paper scores, as both recipes do.

    `credit` spreads a paper's value: `uniform`, `std` (over the group's sample deviation, 1 where
    it is below 0.001) or `share` ((R − mean)/Σ(R − mean) of the paper; equal parts where that sum
    is 0). `quantiles`: `track` follows the scores over training (state `q_low`, `q_high`, moved by
    `lr`; the first step takes the bundle's), `batch` takes the bundle's, `mix` their mean.
    """
    del lr  # of `_track_quantiles`
    if credit not in ("uniform", "std", "share") or quantiles not in ("track", "batch", "mix"):
        raise ConfigError(
            f"'riskpo': credit {credit!r} and quantiles {quantiles!r}; allowed are uniform, std, "
            "share and track, batch, mix"
        )
    advantage_R = np.zeros(len(batch.reward_R))
    divisor_R, above_R = np.ones(len(advantage_R)), np.zeros(len(advantage_R))
    for rows in filled_groups(batch):
        deviation = deviation_of(batch.reward_R[rows])
        divisor_R[rows] = deviation if deviation > 1e-3 else 1.0
        above_R[rows] = centred(batch.reward_R[rows])
    for one in _bundles(batch, int(bundle)):
        own = float(np.quantile(one.score_J, d)), float(np.quantile(one.score_J, u))
        low, high = own
        if quantiles != "batch" and q_low is not None and q_high is not None:
            tracked = q_low, q_high
            low, high = tracked if quantiles == "track" else np.add(own, tracked) / 2
        band_J = np.maximum(one.score_J - low, 0) - np.maximum(one.score_J - high, 0)
        if natural_baseline:
            band_J = band_J + low - high
        tail_J = -np.maximum(low - one.score_J, 0) / d if d > 0 else 0 * one.score_J
        risk_J = (w * tail_J + band_J / (u - d)) / (w + 1)
        if scaled and len(one.papers) > 1:
            risk_J = risk_J / (deviation_of(one.score_J) + 1e-6)
        for paper, risk in zip(one.papers, risk_J, strict=True):
            share = above_R[paper].sum()
            if credit == "std":
                advantage_R[paper] = risk / divisor_R[paper]
            elif credit == "share":
                even = abs(share) <= 1e-6
                advantage_R[paper] = risk * (1 / len(paper) if even else above_R[paper] / share)
            else:
                advantage_R[paper] = risk
    return advantage_R
