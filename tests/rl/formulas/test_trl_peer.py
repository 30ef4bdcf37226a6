"""TRL's own loss on identical log-probs, advantages and masks: equal values and gradients.

`GRPOTrainer._compute_loss` is called as it is, on a trainer whose model is replaced by a table of
log-probs. Skipped where TRL is not installed.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses import LOSSES

pytestmark = pytest.mark.real

LENGTHS = [4, 1, 6, 3, 5, 2]
ADVANTAGES = [1.3, -0.7, 0.4, -1.5, 0.0, 0.9]
MAX_TOKENS = 8
EPS = {"eps_low": 0.2, "eps_high": 0.28}

CASES = {
    # name: (our loss, its options, our aggregation, TRL's settings)
    "grpo": ("clip", EPS, "row_mean", {"loss_type": "grpo"}),
    "bnpo as a token mean of one whole batch": ("clip", EPS, "token_mean", {"loss_type": "bnpo"}),
    "dr_grpo": ("clip", EPS, "fixed_length", {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", EPS, "token_mean", {"loss_type": "dapo"}),
    "delta": ("delta_clip", EPS | {"delta": 1.5}, "row_mean", {"loss_type": "grpo", "delta": 1.5}),
    "cispo": ("cispo", {"eps_max": 1.2}, "token_mean", {"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": ("sapo", {}, "row_mean", {"loss_type": "sapo"}),
    "gspo": ("gspo", EPS, "row_mean", {"loss_type": "grpo", "level": "sequence"}),
    "luspo": ("luspo", EPS, "row_mean", {"loss_type": "luspo", "level": "sequence"}),
    "vespo": ("vespo", {}, "token_mean", {"loss_type": "vespo"}),
}


@pytest.fixture(scope="module")
def trainer_class() -> Any:
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl import GRPOTrainer

    return GRPOTrainer


@pytest.fixture
def table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log π, log π_old, mask), padded to the right, with ratios on both sides of every bound."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -torch.rand(shape, generator=draw, dtype=torch.float64) * 3
    new = old + 0.4 * torch.randn(shape, generator=draw, dtype=torch.float64)
    mask = (torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]).to(torch.float64)
    return new, old, mask


def theirs(trainer_class: Any, table: Any, settings: dict[str, Any]) -> tuple[float, torch.Tensor]:
    new, old, mask = table
    leaf = new.clone().requires_grad_()
    trainer = trainer_class.__new__(trainer_class)
    options = {
        "delta": settings.get("delta"),
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    parts = {
        "args": SimpleNamespace(**options),
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": settings.get("level", "token"),
        "beta": 0.0,
        "loss_type": settings["loss_type"],
        "epsilon_low": EPS["eps_low"],
        "epsilon_high": settings.get("epsilon_high", EPS["eps_high"]),
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (leaf, torch.ones_like(leaf), None),
    }
    for name, value in parts.items():
        object.__setattr__(trainer, name, value)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach().item(), grad[mask.bool()]


def ours(
    table: Any, loss: str, options: dict[str, float], aggregation: str
) -> tuple[float, torch.Tensor]:
    new, old, mask = table
    keep = mask.bool()
    length = torch.tensor(LENGTHS)
    leaf = new[keep].clone().requires_grad_()
    batch = TokenBatch(
        logp_D=leaf,
        old_logp_D=old[keep],
        advantage_D=torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(length),
        row_D=torch.arange(len(LENGTHS)).repeat_interleave(length),
        n_rows=len(LENGTHS),
    )
    weight_R = AGGREGATIONS[aggregation].fn(np.array(LENGTHS), max_tokens=MAX_TOKENS)
    weight_D = torch.from_numpy(weight_R).repeat_interleave(length)
    total = (LOSSES[loss].fn(batch, **options) * weight_D).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    return total.detach().item(), grad


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(trainer_class: Any, table: Any, case: str) -> None:
    loss, options, aggregation, settings = CASES[case]
    their_loss, their_grad = theirs(trainer_class, table, settings)
    our_loss, our_grad = ours(table, loss, options, aggregation)
    assert our_loss == pytest.approx(their_loss, rel=1e-12, abs=1e-12)
    assert their_grad.abs().max() > 1e-3
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-10, atol=1e-12)
