"""Losses by entropy and by segment against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.rl.formulas.batches import flat, rewards, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.losses.clip import clip, dapo
from tfgrpo.rl.formulas.losses.sequence import gspo
from tfgrpo.rl.formulas.losses.spans import (
    dhpo_entropy,
    hapo,
    heat,
    heat_column,
    segment_clip,
)

GAPS = [[0.3, -0.4, 0.05], [0.2, -0.1]]


def test_hapo_widens_and_shares_out_by_heat() -> None:
    """r = 1.4 at heat 1: upper bound .28 · 2; r = .7 at heat −1: lower bound .2 · 2."""
    batch = tokens(
        [[math.log(1.4), math.log(0.7), 0.0], [0.0]],
        [1.0, -1.0],
        columns={"heat": torch.tensor([1.0, -1.0, 1.0, -0.5], dtype=torch.float64)},
    )
    # 1.4 is beyond half of .56: A doubles. .7 lies beyond half of .4: a sure token keeps A there,
    # at ratio 1 it gets A (1 − .5) = −.5, while an uncertain one keeps its own
    assert values(hapo, batch) == pytest.approx([-2.8, -0.7, -1.0, 0.5])
    assert values(hapo, batch, share=0.0) == pytest.approx([-1.4, -0.7, -1.0, 1.0])
    negative = tokens([[math.log(0.7)]], [-1.0], columns={"heat": flat([[-1.0]])})
    assert slopes(hapo, negative) == pytest.approx([0.7])  # .7 is inside 1 − .4
    assert slopes(hapo, negative, widen=0.0) == [0.0]
    with pytest.raises(ConfigError, match="heat"):
        hapo(tokens([[0.0]], [1.0]))


def test_hapo_with_both_switches_off_is_dapo_bit_by_bit() -> None:
    heat_D = flat([[0.7, -0.3, 1.0], [-1.0, 0.2]])
    batch = tokens(GAPS, [1.5, -0.5], columns={"heat": heat_D})
    off = {"widen": 0.0, "share": 0.0}
    assert values(hapo, batch, **off) == values(dapo, batch)
    assert slopes(hapo, batch, **off) == slopes(dapo, batch)


def test_heat_is_zero_at_the_median_and_reaches_both_ends() -> None:
    entropy_D = np.exp(np.array([-4.0, -1.0, 0.0, 1.0, 2.0]))
    assert heat(entropy_D).tolist() == pytest.approx([-1.0, -0.25, 0.0, 0.5, 1.0])
    assert heat(np.full(3, 0.5)).tolist() == [0.0, 0.0, 0.0]
    batch = rewards([1.0, 0.0], lengths=[2, 3], entropy_D=entropy_D)
    assert heat_column(batch, {})["heat"].tolist() == heat(entropy_D).tolist()


def test_dhpo_entropy_is_gspo_where_sure_and_clip_where_uniform() -> None:
    sure = tokens(GAPS, [1.0, -1.0], entropy_D=flat([[0.0] * 3, [0.0] * 2]), vocabulary=8)
    assert values(dhpo_entropy, sure) == pytest.approx(values(gspo, sure))
    assert slopes(dhpo_entropy, sure) == pytest.approx(slopes(gspo, sure))
    most = math.log(8)
    wide = tokens(GAPS, [1.0, -1.0], entropy_D=flat([[most] * 3, [most] * 2]), vocabulary=8)
    same = {"eps_low": 0.2, "eps_high": 0.28}
    assert values(dhpo_entropy, wide) == pytest.approx(values(clip, wide, **same))
    assert slopes(dhpo_entropy, wide) == pytest.approx(slopes(clip, wide, **same))


def test_segment_clip_takes_the_geometric_mean_of_each_item() -> None:
    """Log-ratios .1 and .3 of one item: e^.2 = 1.2214 for both, beyond 1.2 and so silent."""
    batch = tokens(
        [[0.1, 0.3, -0.1], [0.2, 0.2, 0.2]],
        [1.0, 1.0],
        columns={"segment": flat([[0.0, 0.0, 1.0], [0.0, 1.0, 2.0]])},
    )
    assert values(segment_clip, batch, eps_high=0.3) == pytest.approx(
        [-1.221403, -1.221403, -0.904837, -1.221403, -1.221403, -1.221403], abs=1e-6
    )
    slope = slopes(segment_clip, batch, eps_high=0.3)
    assert slope[:3] == pytest.approx([-1.221403, -1.221403, -0.904837], abs=1e-6)
    assert slopes(segment_clip, batch)[:3] == pytest.approx([0.0, 0.0, -0.904837], abs=1e-6)


def test_segment_clip_without_segments_is_gspo() -> None:
    batch = tokens(GAPS, [1.0, -1.0])
    wide = {"eps_low": 0.2, "eps_high": 0.2}
    assert values(segment_clip, batch) == pytest.approx(values(gspo, batch, **wide))
