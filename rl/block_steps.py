"""A block's steps around its matrix products: norm, rotation, gated feed-forward.

On CUDA each is an autograd function over Triton kernels, which keep no more than their inputs;
elsewhere plain torch. Does not know blocks as wholes, nor attention. Source: own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl import device

if TYPE_CHECKING:
    from tfgrpo.rl.model import Shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32 and scale."""
    return norm_beside(x, weight, eps)[0]


def norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x and x itself, for what goes past the norm: on CUDA both gradients join
    in the norm's own."""
    if device.uses_kernels(x):
        both: tuple[Tensor, Tensor] = _Norm.apply(x, weight, eps)
        return both
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight, x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate T × heads × d by angles given as T × 1 × d/2 cosines and sines."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def rotated_parts(
    fused: Tensor, cos: Tensor, sin: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, each T × heads × d, of fused projections."""
    if device.uses_kernels(fused):
        parts: tuple[Tensor, Tensor, Tensor] = _Rotate.apply(fused, cos, sin, shape)
        return parts
    q, k, v = split_heads(fused, shape)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


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


def gated_down(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return x + (silu(gate) · up) · downᵀ: T × hidden.

    Args:
        x: T × hidden.
        gate_up: T × 2 · intermediate, the gates first.
        down: hidden × intermediate.
    """
    if device.uses_kernels(x):
        out: Tensor = _GatedDown.apply(x, gate_up, down)
        return out
    return torch.addmm(x, gated(gate_up), down.t())


def gated_down_back(
    gate_up: Tensor, down: Tensor, d_out: Tensor, needs_down: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `gate_up`, over which it is written on CUDA, and of `down`."""
    if device.uses_kernels(d_out):
        from tfgrpo.rl.triton_block import gate_back

        d_out = d_out.contiguous()
        mixed = d_out @ down
        gate_back(gate_up, mixed)
        torch.autograd.graph.increment_version(gate_up)  # a second backward pass is refused
        return gate_up, d_out.t() @ mixed if needs_down else None
    with torch.enable_grad():
        leaves = [gate_up.detach().requires_grad_()]
        weight = down.detach().requires_grad_(needs_down)
        out = gated(leaves[0]) @ weight.t()
        found = torch.autograd.grad(out, [*leaves, weight] if needs_down else leaves, d_out)
    return found[0], found[1] if needs_down else None


class _Norm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from tfgrpo.rl.triton_kernels import add_rms_norm

        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return add_rms_norm(flat, None, weight, eps).view_as(x), x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        from tfgrpo.rl.triton_block import norm_back

        flat, weight = ctx.saved_tensors
        normed, past = grads
        if normed is None:
            return past, None, None
        rest = None if past is None else past.reshape(flat.shape)
        dx, dw = norm_back(flat, weight, normed.reshape(flat.shape), rest, ctx.eps)
        return dx.view_as(normed), dw, None


class _Rotate(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor, Tensor]:
        from tfgrpo.rl.triton_block import rotate as kernel

        tokens = len(fused)
        q = fused.new_empty(tokens, shape.heads, shape.head_dim)
        k = fused.new_empty(tokens, shape.kv_heads, shape.head_dim)
        v = torch.empty_like(k)
        kernel(fused, (q, k, v), cos, sin, back=False)
        ctx.save_for_backward(cos, sin)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        from tfgrpo.rl.triton_block import rotate as kernel

        cos, sin = ctx.saved_tensors
        q, k, v = (g.contiguous() for g in grads)
        fused = q.new_empty(len(q), (q.shape[1] + 2 * k.shape[1]) * q.shape[2])
        kernel(fused, (q, k, v), cos, sin, back=True)
        return fused, None, None, None


class _GatedDown(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        from tfgrpo.rl.triton_kernels import silu_mul

        ctx.save_for_backward(gate_up, down)
        return torch.addmm(x, silu_mul(gate_up), down.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate_up, down = ctx.saved_tensors
        return grads[0], *gated_down_back(gate_up, down, grads[0], ctx.needs_input_grad[2])
