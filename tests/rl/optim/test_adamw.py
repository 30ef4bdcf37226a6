"""AdamW against torch's own, clipping, schedules."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.rl.tiny import tiny_decoder
from tfgrpo.errors import ConfigError
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW, learning_rate
from tfgrpo.rl.optim.master_weights import FullWeights


def test_updates_equal_torch_adamw_with_clipping_and_decay() -> None:
    ours, theirs = tiny_decoder(), tiny_decoder()
    mine = AdamW(FullWeights(ours), AdamSettings(weight_decay=0.1, max_norm=0.5))
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()
        peer.step()
        assert mine.step(1e-3) == pytest.approx(want, rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_without_gradients_moves_nothing_and_counts_as_none() -> None:
    decoder = tiny_decoder()
    optimiser = AdamW(FullWeights(decoder), AdamSettings(weight_decay=0.1))
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step(1e-3)  # leaves momentum behind
    before = [p.detach().clone() for p in decoder.parameters()]
    assert optimiser.step(1e-3) == 0.0
    assert optimiser.steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.parameters(), strict=True))


def test_half_precision_gradients_are_summed_in_float32() -> None:
    decoder = tiny_decoder(dtype=torch.bfloat16)
    weights = FullWeights(decoder)
    for value in (1.0, 1 / 512, 1 / 512):
        (decoder.norm.float() * value).sum().backward()
    total = weights.gradients()["norm"]
    assert total.dtype == torch.float32
    assert torch.all(total == 1 + 2 / 512)  # in bfloat16 the small ones would be lost
    assert decoder.norm.grad is None


def test_cosine_and_constant_schedules() -> None:
    def at(step, schedule):
        return learning_rate(step, peak=2.0, warmup=0, total=10, schedule=schedule)

    assert at(7, "constant") == 2.0
    assert at(5, "cosine") == pytest.approx(1.0)
    assert at(10, "cosine") == pytest.approx(0.0, abs=1e-6)


def test_a_later_owner_of_the_same_weights_gets_all_gradients() -> None:
    module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    first = FullWeights(module)
    module(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert first.gradients()["weight"].tolist() == [[1.0] * 3] * 2
    del first
    gc.collect()
    second = FullWeights(module)
    module(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert second.gradients()["weight"].tolist() == [[1.0] * 3] * 2


def test_two_owners_at_a_time_are_refused() -> None:
    module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    owners = FullWeights(module), FullWeights(module)
    with pytest.raises(ConfigError, match="two trainers"):
        module(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert len(owners) == 2
