"""The first pass over a batch: its weights are those that the ratio is taken to."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl.trainer import Trainer


def test_the_first_of_two_passes_has_the_gradient_of_one(tmp_path: Path) -> None:
    """Reg-GRPO makes one of any spread of log-ratios, that of bfloat16's rounding too."""
    norms = []
    for passes in (1, 2):
        config = tiny_config(
            tmp_path / str(passes),
            loss={"name": "reg_grpo"},
            rollout={"mismatch_mean": 1.0, "mismatch_row": 9.0},
            optimiser={"epochs_per_batch": passes, "micro_batch_tokens": 30},
        )
        run = Trainer(config, tiny_parts(dtype=torch.bfloat16), tiny_tasks(), EvenTokens())
        groups = run._roller.roll(0).groups
        rows, stale = run._row_maker.rows(groups, 0)
        norms.append(run.updater.update(rows, 0, stale).norms)
    (only,), (first, second) = norms
    assert only == first != second
