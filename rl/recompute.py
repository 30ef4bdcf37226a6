"""Activations made again in the backward pass: a block's input is kept, nothing inside it.

One process recomputes by a nested backward pass, which costs the processor half of what torch's
checkpoint with hooks on saved tensors does; a small model's update is bound by that. Sharded
weights need those hooks. The block must draw no random numbers.

Does not know models. Source: activation checkpointing (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tfgrpo.rl.distributed import world


def recomputed(block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """Return the first result of `block(x, *rest)`.

    Gradients reach `x` and the block's parameters; nothing in `rest` may need one.
    """
    out: Tensor
    if world()[1] > 1:
        out, *_ = torch.utils.checkpoint.checkpoint(
            block, x, *rest, use_reentrant=False, preserve_rng_state=False
        )
        return out
    # where x needs no gradient, as after frozen embeddings, the block's weights may
    anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
    out = _Again.apply(block, x, rest, anchor)
    return out


class _Again(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any, block: nn.Module, x: Tensor, rest: tuple[Any, ...], anchor: Tensor | None
    ) -> Tensor:
        ctx.block, ctx.rest = block, rest
        ctx.save_for_backward(x)
        out: Tensor = block(x, *rest)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x, *ctx.rest)[0]
        torch.autograd.backward(out, grads[0])
        return None, x.grad, None, None
