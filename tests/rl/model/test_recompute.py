"""Activations made again give the gradients of activations that are kept."""

from __future__ import annotations

import pytest
import torch

from tests.rl.tiny import random_rows, tiny_decoder
from tfgrpo.rl.model.decoder import Block
from tfgrpo.rl.optim.lora import LoraWeights
from tfgrpo.rl.optim.master_weights import FullWeights
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate

ROWS = [TrainRow(r, 1.0 - r.index % 3, group=r.index // 3) for r in random_rows()]


def gradients(kind: str, dtype: torch.dtype, again: bool) -> dict[str, torch.Tensor]:
    """Of all weights, or of adapters on `kind` and values."""
    decoder = tiny_decoder(dtype=dtype)
    decoder.checkpoint_blocks = again
    if kind == "full":
        weights = FullWeights(decoder)
    else:
        weights = LoraWeights(decoder, rank=2, targets=(kind, "v_proj"))
        for name, master in weights.masters().items():
            if "lora_B" in name:
                master.high.fill_(0.1)
        weights.publish()
    accumulate(decoder, ROWS, UpdateSettings(micro_batch_tokens=40))
    return {n: g.clone() for n, g in weights.gradients().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "down_proj", "k_proj"])
def test_gradients_are_bit_equal(kind, dtype) -> None:
    kept, again = (gradients(kind, dtype, a) for a in (False, True))
    assert kept.keys() == again.keys()
    for name, wanted in kept.items():
        assert torch.count_nonzero(wanted), name
        assert torch.equal(again[name], wanted), name


def test_every_block_runs_twice_and_keeps_nothing_in_between(monkeypatch) -> None:
    calls = []
    forward = Block.forward

    def counted(self: Block, *args: object, **options: object) -> object:
        calls.append(self)
        return forward(self, *args, **options)

    monkeypatch.setattr(Block, "forward", counted)
    gradients("full", torch.float32, again=False)
    once, first = len(calls), [block is calls[0] for block in calls].count(True)
    calls.clear()
    gradients("full", torch.float32, again=True)
    assert len(calls) == 2 * once > 0
    for at in range(0, len(calls), len(calls) // first):
        ran = calls[at : at + len(calls) // first]
        assert len(set(ran)) * 2 == len(ran)
        assert ran == ran[::-1]  # the whole forward comes before the first recompute
