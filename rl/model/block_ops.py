"""A block's steps around its matrix products: norm, rotation, gate, in plain torch.

A norm by itself has a form over kernels too. Does not know blocks as wholes, nor attention; on CUDA
`block_pass` is the whole. Source: own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.kernels import device
from tfgrpo.rl.model.grad_buffers import hand_over

if TYPE_CHECKING:
    from tfgrpo.rl.model.shape import Shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32 and scale."""
    if device.uses_kernels(x):
        out: Tensor = _Norm.apply(x, weight, eps)
        return out
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate T × heads × d by angles given as T × 1 × d/2 cosines and sines."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def split_heads(fused: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of fused projections as views, each T × heads × d."""
    q, k, v = fused.split((shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    return (
        q.unflatten(-1, (shape.heads, shape.head_dim)),
        k.unflatten(-1, (shape.kv_heads, shape.head_dim)),
        v.unflatten(-1, (shape.kv_heads, shape.head_dim)),
    )


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Norm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from tfgrpo.rl.kernels.decode import add_rms_norm

        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.eps = eps
        return add_rms_norm(flat, None, weight, eps).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from tfgrpo.rl.kernels.block import norm_back

        flat, weight = ctx.saved_tensors
        dx, dw = norm_back(flat, weight, grads[0].reshape(flat.shape), None, ctx.eps)
        found = hand_over(weight, dw) if ctx.needs_input_grad[1] else None
        return dx.view_as(grads[0]), found, None
