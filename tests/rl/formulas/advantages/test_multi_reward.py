"""Advantages from several rewards and from ranks."""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.advantages.multi_reward import (
    arena_rank,
    dvao,
    gdpo,
    hop_baseline,
    rank,
    rank_normal,
)


def parts(columns: list[list[float]], groups: list[int], names: tuple[str, ...]) -> object:
    part_RM = np.array(columns, dtype=np.float64)
    edges = np.cumsum([0, *groups])
    return rewards(
        *[part_RM[a:b].sum(1) for a, b in pairwise(edges)],
        part_RM=part_RM,
        part_names=names,
    )


def test_gdpo_tells_apart_what_a_sum_merges() -> None:
    """Sums 1, 1, 1, 0 in the second group, whose first part is the rarer one."""
    columns = [[1, 0], [0, 1], [0, 0], [1, 0], [0, 1], [0, 1], [0, 0]]
    batch = parts(columns, [3, 4], ("format", "right"))
    z = np.zeros((7, 2))
    for rows in (slice(0, 3), slice(3, 7)):
        part = np.array(columns, dtype=float)[rows]
        z[rows] = (part - part.mean(0)) / part.std(0, ddof=1)
    total = z @ [1.0, 2.0]
    expected = (total - total.mean()) / total.std(ddof=1)
    assert gdpo(batch, eps=0, weight_right=2.0).tolist() == pytest.approx(expected.tolist())
    plain = gdpo(batch, eps=0)
    merged = grpo(batch)
    assert merged[3] == merged[4]
    assert plain[3] > plain[4] + 0.1
    assert plain.std(ddof=1) == pytest.approx(1.0)
    constant = parts([[1, 5], [0, 5], [0, 5]], [3], ("format", "right"))
    alone = parts([[1], [0], [0]], [3], ("format",))
    assert gdpo(constant).tolist() == pytest.approx(gdpo(alone).tolist())
    with pytest.raises(ConfigError, match="weight_rihgt"):
        gdpo(batch, weight_rihgt=2.0)
    with pytest.raises(ConfigError, match="part_RM"):
        gdpo(rewards([1, 0]))


def test_dvao_is_a_convex_mixture_by_variance() -> None:
    columns = [[1, 10], [0, 10], [0, 30], [1, 30]]
    batch = parts(columns, [4], ("a", "b"))
    array = np.array(columns, dtype=float)
    z = (array - array.mean(0)) / array.std(0)
    share = array.var(0) / array.var(0).sum()
    assert dvao(batch).tolist() == pytest.approx((z @ share).tolist())
    assert share[1] > 0.99  # the part of larger variance leads, as the abstract has it
    flat = parts([[1, 3], [0, 3], [0, 3]], [3], ("a", "b"))
    only = np.array([1.0, 0, 0])
    assert dvao(flat).tolist() == pytest.approx(((only - 1 / 3) / only.std()).tolist())
    draw = np.random.default_rng(0)
    for _ in range(50):
        random = parts(draw.normal(size=(5, 3)).tolist(), [5], ("a", "b", "c"))
        assert np.abs(dvao(random)).max() <= 2.0 + 1e-9  # √(5 − 1)
    prior = dvao(batch, weight_b=0.0)
    assert prior.tolist() == pytest.approx(z[:, 0].tolist())


def test_ranks_are_centred_and_share_ties() -> None:
    batch = rewards([0.0, 100.0, 0.5], [1.0, 1.0, 0.0, 0.0], [2.0, 2.0])
    assert rank(batch).tolist() == pytest.approx([-1, 1, 0, 2 / 3, 2 / 3, -2 / 3, -2 / 3, 0, 0])
    normal = NormalDist().inv_cdf
    expected = [normal(1 / 6), normal(5 / 6), normal(0.5)]
    assert rank_normal(batch)[:3].tolist() == pytest.approx(expected)
    assert rank_normal(batch)[3:7].tolist() == pytest.approx(
        [normal(0.75)] * 2 + [normal(0.25)] * 2
    )


def test_arena_rank_orders_by_round_and_then_reward() -> None:
    rounds = np.array([0.0, 2.0, 0.0, 1.0])
    batch = rewards([0.4, 0.1, 0.2, 0.9], extra={"round_R": rounds})
    assert arena_rank(batch).tolist() == pytest.approx([-1 / 3, 1.0, -1.0, 1 / 3])
    tie = rewards([0.4, 0.1, 0.4, 0.9], extra={"round_R": rounds})
    assert arena_rank(tie).tolist() == pytest.approx([-2 / 3, 1.0, -2 / 3, 1 / 3])


def test_hop_baseline_shares_a_mean_by_class() -> None:
    classes = np.array([1.0, 2.0, 1.0, 2.0, 3.0])
    batch = rewards([1.0], [0.0], [0.0], [0.5], [9.0], extra={"class_R": classes})
    assert hop_baseline(batch).tolist() == [0.5, -0.25, -0.5, 0.25, 0.0]
