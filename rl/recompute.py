"""Activations made again in the backward pass: a block's input is kept, nothing inside it.

One process recomputes by a nested backward pass, which costs the processor half of what torch's
checkpoint with hooks on saved tensors does; a small model's update is bound by that. The block's
last product is not made again, since only its gradients are needed. Sharded weights need torch's
hooks. A block must draw no random numbers.

Does not know what a block computes up to its gates. Source: activation checkpointing (Chen et al.,
arXiv 1604.06174).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from tfgrpo.rl.block_steps import gated_down, gated_down_back
from tfgrpo.rl.distributed import world

if TYPE_CHECKING:
    from tfgrpo.rl.model import Block


def recomputed(block: Block, x: Tensor, *rest: Any) -> Tensor:
    """Return the first result of `block(x, *rest)`.

    Gradients reach `x` and the block's parameters; nothing in `rest` may need one.
    """
    out: Tensor
    if world()[1] > 1:
        out, *_ = torch.utils.checkpoint.checkpoint(
            block, x, *rest, use_reentrant=False, preserve_rng_state=False
        )
        return out
    # where neither x nor the last weight needs a gradient, as after frozen embeddings, others may
    anchor = x.new_empty(0).requires_grad_()
    out = _Again.apply(block, x, block.down, rest, anchor)
    return out


class _Again(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any, block: Block, x: Tensor, down: Tensor, rest: tuple[Any, ...], anchor: Tensor
    ) -> Tensor:
        ctx.block, ctx.rest = block, rest
        ctx.save_for_backward(x, down)
        past, gate_up, *_ = block.until_gate(x, *rest)
        return gated_down(past, gate_up, down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        x, down = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            past, gate_up, *_ = ctx.block.until_gate(x, *ctx.rest)
        needs_down = ctx.needs_input_grad[2]
        d_gate_up, d_down = gated_down_back(gate_up.detach(), down, grads[0], needs_down)
        torch.autograd.backward((past, gate_up), (grads[0], d_gate_up))
        return None, x.grad, d_down, None, None
