"""Every loss in the packed update: cutting and skipping change no gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.tiny import random_rows, tiny_decoder
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate, score_rows

NAMES = sorted(set(LOSSES) - {"rover"})
"""All but the one that needs a tensor which the update does not make."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = tiny_decoder(dtype=torch.float64)
    made.inv_freq = made.inv_freq.double()
    return made


@pytest.fixture(scope="module")
def rows(decoder: Decoder) -> list[TrainRow]:
    """Three groups of three; the middle group has no advantage."""
    plain = random_rows(3, 3)
    logps = score_rows(decoder, plain, temperature=1.0, max_tokens=10_000)
    noise, other = np.random.default_rng(0), np.random.default_rng(1)
    made = []
    for row in plain:
        old = tuple(p + 0.3 * noise.normal() for p in logps[row.index])
        group = row.index // 3
        advantage = 0.0 if group == 1 else (-1.0, 0.25, 0.75)[row.index % 3]
        made.append(
            TrainRow(
                row,
                advantage,
                reward=0.5 if group == 1 else (0.0, 0.5, 1.0)[row.index % 3],
                group=group,
                old_logp=old,
                ref_logp=tuple(p + 0.2 * other.normal() for p in old),
                engine_logp=tuple(p + 0.1 * noise.normal() for p in old),
                columns={
                    "heat": tuple(noise.uniform(-1, 1, len(old)).tolist()),
                    "place": (row.index % 3.0,) * len(old),
                    **{f"beats_{j}": (float(row.index % 3 > j),) * len(old) for j in range(3)},
                },
            )
        )
    return made


def gradients(
    decoder: Decoder, rows: list[TrainRow], settings: UpdateSettings
) -> tuple[float, dict[str, torch.Tensor]]:
    decoder.zero_grad(set_to_none=True)
    loss = accumulate(decoder, rows, settings).loss
    return loss, {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_cut_nor_skipping_changes_a_gradient(
    name: str, decoder: Decoder, rows: list[TrainRow]
) -> None:
    settings = UpdateSettings(
        loss=name, aggregation="row_mean", micro_batch_tokens=10_000, chunk=10_000
    )
    _, expected = gradients(decoder, rows, replace(settings, skip_zero_advantage=False))
    assert any(g.abs().max() > 0 for g in expected.values())
    _, found = gradients(decoder, rows, replace(settings, micro_batch_tokens=25, chunk=7))
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-8, atol=1e-11)


def test_rows_without_advantage_are_kept_for_losses_that_pull_them(
    decoder: Decoder, rows: list[TrainRow]
) -> None:
    still = [replace(r, advantage=0.0) for r in rows]
    for name, entry in LOSSES.items():
        if name == "rover":
            continue
        skipped = accumulate(decoder, still, UpdateSettings(loss=name)).skipped_tokens
        kept = bool({"every_row", "group"} & set(entry.needs))
        assert (skipped == 0) == kept, name
