"""A block's forward and backward pass over kernels, written out.

One autograd function a block in place of a dozen: a small model's update is bound by the processor,
not by the device. Weights' gradients go straight into their sums. What is kept for the backward
pass is what products need; norms and silu(gate) · up are made again where they are read anyway,
and with `keeps` False all but the input is. A block draws no random numbers.

Does not know losses or sums' owners; the torch form is `model.Block`. Sources: activation
checkpointing (Chen et al., arXiv 1604.06174); derivatives own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.model.attention import attend_back, attend_kept
from tfgrpo.rl.model.block_ops import split_heads
from tfgrpo.rl.model.grad_buffers import hand_over, product_gradient
from tfgrpo.rl.model.packing import Packed

if TYPE_CHECKING:
    from tfgrpo.rl.model.shape import Shape


class BlockWeights(NamedTuple):
    """A block's parameters; see `model.Block`."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Scene:
    """What all blocks of a pass share. No tuple: sharded modules cast tensors in tuples."""

    cos: Tensor
    sin: Tensor
    packed: Packed
    shape: Shape


class _Kept(NamedTuple):
    """What the backward pass reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    """Attention's output, T × heads × head size."""
    middle: Tensor
    """The residual stream between attention and feed-forward."""
    gate_up: Tensor
    raw: Tensor | None
    """Projections before the norms of queries and keys, where there are some."""
    told: tuple[Tensor, ...]
    """What attention itself keeps."""


def block_pass(x: Tensor, weights: BlockWeights, scene: Scene, *, keeps: bool) -> Tensor:
    """Return the block's output, T × hidden; its backward pass can run once."""
    out: Tensor = _Block.apply(x, *weights, scene, keeps)
    return out


def block_values(x: Tensor, weights: BlockWeights, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's output, rotated keys and values; for passes without gradients."""
    kept = _until_gate(x, weights, scene)
    return _finished(kept, weights), kept.k, kept.v


def _until_gate(x: Tensor, w: BlockWeights, scene: Scene) -> _Kept:
    """All but the last product."""
    from tfgrpo.rl.kernels.block import rotate
    from tfgrpo.rl.kernels.decode import add_rms_norm

    shape = scene.shape
    fused = F.linear(add_rms_norm(x, None, w.norm1, shape.eps), w.qkv, w.qkv_bias)
    raw = None
    if w.q_norm is not None and w.k_norm is not None:
        raw = fused
        q, k, v = split_heads(raw, shape)
        normed = [
            add_rms_norm(part.reshape(-1, shape.head_dim), None, norm, shape.eps)
            for part, norm in ((q, w.q_norm), (k, w.k_norm))
        ]
        fused = torch.cat([part.reshape(len(x), -1) for part in (*normed, v)], dim=-1)
    q = x.new_empty(len(x), shape.heads, shape.head_dim)
    k = x.new_empty(len(x), shape.kv_heads, shape.head_dim)
    v = torch.empty_like(k)
    rotate(fused, (q, k, v), scene.cos, scene.sin, back=False)
    mixed, told = attend_kept(q, k, v, scene.packed)
    middle = torch.addmm(x, mixed.flatten(-2), w.o.t())
    gate_up = F.linear(add_rms_norm(middle, None, w.norm2, shape.eps), w.gate_up)
    return _Kept(q, k, v, mixed, middle, gate_up, raw, told)


def _finished(kept: _Kept, w: BlockWeights) -> Tensor:
    from tfgrpo.rl.kernels.decode import silu_mul

    return torch.addmm(kept.middle, silu_mul(kept.gate_up), w.down.t())


class _Gradients:
    """Gradients of a block's weights that no sum has taken, in the weights' order."""

    def __init__(self, weights: BlockWeights, needed: tuple[bool, ...]) -> None:
        self._weights = weights
        self._needed = dict(zip(BlockWeights._fields, needed, strict=True))
        self.found: dict[str, Tensor | None] = dict.fromkeys(BlockWeights._fields)

    def product(self, name: str, d_out: Tensor, x: Tensor) -> None:
        """Of a weight that x was multiplied with."""
        if self._needed[name]:
            self.found[name] = product_gradient(getattr(self._weights, name), d_out, x)

    def ready(self, name: str, gradient: Tensor) -> None:
        """One that is known, in float32."""
        if self._needed[name]:
            self.found[name] = hand_over(getattr(self._weights, name), gradient)

    def bias(self, d_out: Tensor) -> None:
        """Of the projections' bias."""
        if self._needed["qkv_bias"]:
            self.ready("qkv_bias", d_out.sum(0, dtype=torch.float32))


class _Block(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, scene, keeps = rest
        w = BlockWeights(*weights)
        kept = _until_gate(x, w, scene)
        *tensors, told = kept
        ctx.scene = scene
        ctx.save_for_backward(x, *w, *((*tensors, *told) if keeps else ()))
        return _finished(kept, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        n = len(BlockWeights._fields)
        w, tensors = BlockWeights(*saved[:n]), saved[n:]
        m = len(_Kept._fields) - 1
        if tensors:
            kept = _Kept._make([*tensors[:m], tuple(tensors[m:])])
        else:
            kept = _until_gate(x, w, ctx.scene)
        of = _Gradients(w, ctx.needs_input_grad[1 : n + 1])
        dx = _back(x, w, kept, ctx.scene, grads[0].contiguous(), of)
        return dx, *of.found.values(), None, None


def _back(
    x: Tensor, w: BlockWeights, kept: _Kept, scene: Scene, d_out: Tensor, of: _Gradients
) -> Tensor:
    """The input's gradient; `kept.gate_up` is written over."""
    from tfgrpo.rl.kernels.block import gate_back, norm_back

    eps = scene.shape.eps
    product = d_out @ w.down
    gate_back(kept.gate_up, product)
    torch.autograd.graph.increment_version(kept.gate_up)  # a second backward pass is refused
    of.product("down", d_out, product)
    normed = torch.empty_like(x)
    d_middle, d_norm = norm_back(kept.middle, w.norm2, kept.gate_up @ w.gate_up, d_out, eps, normed)
    of.ready("norm2", d_norm)
    of.product("gate_up", kept.gate_up, normed)

    mixed = kept.mixed.flatten(-2)
    of.product("o", d_middle, mixed)
    d_fused = _back_through_attention((d_middle @ w.o).view_as(kept.mixed), w, kept, scene, of)
    dx, d_norm = norm_back(x, w.norm1, d_fused @ w.qkv, d_middle, eps, normed)
    of.ready("norm1", d_norm)
    of.product("qkv", d_fused, normed)
    of.bias(d_fused)
    return dx


def _back_through_attention(
    d_mixed: Tensor, w: BlockWeights, kept: _Kept, scene: Scene, of: _Gradients
) -> Tensor:
    """The gradient of the fused projections, T × all."""
    from tfgrpo.rl.kernels.block import norm_back, rotate

    shape, qkv = scene.shape, (kept.q, kept.k, kept.v)
    parts = attend_back(d_mixed, qkv, kept.mixed, kept.told, scene.packed)
    d_fused = kept.q.new_empty(len(kept.q), shape.q_size + 2 * shape.kv_size)
    rotate(d_fused, parts, scene.cos, scene.sin, back=True)
    if kept.raw is None or w.q_norm is None or w.k_norm is None:
        return d_fused
    d_q, d_k, d_v = split_heads(d_fused, shape)
    q, k, _ = split_heads(kept.raw, shape)
    found = []
    for name, raw, norm, d in (("q_norm", q, w.q_norm, d_q), ("k_norm", k, w.k_norm, d_k)):
        flat = (raw.reshape(-1, shape.head_dim), norm, d.reshape(-1, shape.head_dim))
        d_raw, d_norm = norm_back(*flat, None, shape.eps)
        of.ready(name, d_norm)
        found.append(d_raw)
    return torch.cat([part.reshape(len(d_fused), -1) for part in (*found, d_v)], dim=-1)
