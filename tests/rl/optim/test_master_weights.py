"""Masters in halves of a float, against float32 itself; moments rounded by chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from tests.rl.tiny import tiny_decoder
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW, chances, round_by
from tfgrpo.rl.optim.master_weights import FullWeights, Master, join, split


@given(st.lists(st.tuples(st.integers(0, 0x7F61_0000), st.sampled_from([1.0, -1.0])), min_size=1))
def test_halves_give_back_every_bit_and_the_upper_one_is_the_nearest(drawn) -> None:
    """Any float32 up to 3e38, subnormal ones too, given by its bits."""
    bits, signs = zip(*drawn, strict=True)
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32) * torch.tensor(signs)
    high, low = split(x)
    assert torch.equal(join(high, low).view(torch.int32), x.view(torch.int32))
    near, other = high.view(torch.bfloat16).double(), x.to(torch.bfloat16).double()
    assert torch.equal((near - x.double()).abs(), (other - x.double()).abs())


def test_every_tail_survives_ties_included() -> None:
    tails = torch.arange(2**16, dtype=torch.int32)
    for head in (0x3F80, 0x3F81, 0x0000, -0x4080):
        bits = (torch.tensor(head, dtype=torch.int32) << 16) + tails
        assert torch.equal(join(*split(bits.view(torch.float32))).view(torch.int32), bits)


def trained(dtype: torch.dtype, moments: torch.dtype, steps: int) -> tuple[AdamW, dict]:
    """The same gradients for every type; starts at numbers that bfloat16 holds."""
    decoder = tiny_decoder(dtype=torch.bfloat16).to(dtype)
    weights = FullWeights(decoder)
    optimiser = AdamW(weights, AdamSettings(moments=moments, weight_decay=0.01))
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in decoder.parameters():
            grad = torch.randn(parameter.shape, generator=draw).bfloat16() + 0.25
            (parameter * grad.to(dtype)).sum().backward()
        optimiser.step(1e-4)
    return optimiser, {n: m.value() for n, m in weights.masters().items()}


def test_bfloat16_weights_with_halves_train_bit_by_bit_like_float32_ones() -> None:
    _, wide = trained(torch.float32, torch.float32, 6)
    _, halves = trained(torch.bfloat16, torch.float32, 6)
    for name, value in wide.items():
        torch.testing.assert_close(halves[name], value, rtol=1e-6, atol=1e-8, msg=name)


def test_state_returns_bit_by_bit() -> None:
    for moments in (torch.float32, torch.bfloat16):
        first, _ = trained(torch.bfloat16, moments, 3)
        saved = {n: t.clone() for n, t in first.state()}
        second, _ = trained(torch.bfloat16, moments, 1)
        second.load(saved, 3)
        for name, tensor in second.state():
            assert torch.equal(tensor, saved[name]), name


def test_a_master_keeps_the_weight_beside_it() -> None:
    weight = torch.zeros(3, dtype=torch.bfloat16)
    master = Master.of(weight)
    master.set(torch.tensor([1.001, -2.5, 3e-5]))
    assert torch.equal(weight, torch.tensor([1.001, -2.5, 3e-5]).bfloat16())
    assert torch.equal(master.value(), torch.tensor([1.001, -2.5, 3e-5]))


@pytest.mark.parametrize("value", [1.0001, -0.37, 1e-12, 5.003e4])
def test_rounding_by_chance_is_right_on_average(value) -> None:
    n = 200_000
    x = torch.full((n,), value)
    for cut in (lambda c: c & 0xFFFF, lambda c: c >> 16):
        rounded = round_by(x, cut(chances(n, torch.tensor(7)))).double()
        low, high = rounded.min(), rounded.max()
        assert low <= x[0].double() <= high and len(rounded.unique()) == 2
        share = float((x[0].double() - low) / (high - low))
        ups = int((rounded == high).sum())
        assert stats.binomtest(ups, n, share).pvalue > 1e-4


def test_chances_are_even_and_differ_by_place_and_salt() -> None:
    one, other = (chances(100_000, torch.tensor(s)).numpy() for s in (1, 2))
    for part in (one & 0xFFFF, one >> 16):
        counts = np.bincount(part >> 8, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    assert abs(stats.pearsonr(one, other).statistic) < 0.02
    assert abs(stats.pearsonr(one[1:], one[:-1]).statistic) < 0.02


def test_exact_numbers_are_never_rounded_away() -> None:
    x = torch.tensor([0.0, 1.0, -2.5, 3e38]).bfloat16().float()
    for chance in (0, 1, 2**16 - 1):
        assert torch.equal(round_by(x, torch.full((4,), chance)).float(), x)


def test_moments_in_bfloat16_stay_with_those_in_float32() -> None:
    """Rounded to the nearest the second moment would stop at about half of its limit."""
    exact, _ = trained(torch.float32, torch.float32, 300)
    rough, _ = trained(torch.float32, torch.bfloat16, 300)
    ratios = torch.cat([(rough.second[n].float() / t).flatten() for n, t in exact.second.items()])
    assert float(ratios.mean()) == pytest.approx(1, abs=0.005)
    assert float(ratios.std()) < 0.05
    nearest = torch.tensor(0.0)
    for _ in range(2000):
        nearest = (0.999 * nearest + 0.001).bfloat16().float()
    assert nearest < 0.6  # exact: 0.86


def test_moments_take_half_the_memory() -> None:
    module = nn.Linear(8, 8, dtype=torch.bfloat16)
    for moments, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        made = AdamW(FullWeights(module), AdamSettings(moments=moments))
        assert {t.element_size() for t in (*made.first.values(), *made.second.values())} == {size}
        del made
