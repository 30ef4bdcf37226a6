# mypy: ignore-errors
"""Triton forms of a block's element-wise steps and their gradients; imported only on CUDA.

Same results as the torch forms in `block_steps` up to rounding. Does not know models as wholes.
Source: own; derivatives of root-mean-square norms as in arXiv 1910.07467.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 1056
"""Most programs that share the rows of a norm's gradient, eight a multiprocessor of a large GPU."""


@triton.jit
def _norm_back(
    x_ptr, w_ptr, dy_ptr, rest_ptr, dx_ptr, dw_ptr, y_ptr, rows, eps, n, parts,
    B: tl.constexpr, HAS_REST: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    col = tl.arange(0, B)
    keep = col < n
    plain = tl.load(w_ptr + col, mask=keep, other=0.0)
    w = plain.to(tl.float32)
    dw = tl.zeros((B,), tl.float32)
    for row in range(part, rows, parts):
        at = (tl.zeros((B,), tl.int64) + row) * n + col
        x = tl.load(x_ptr + at, mask=keep, other=0.0)
        dy = tl.load(dy_ptr + at, mask=keep, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / n + eps)
        unit = wide * scale
        dw += dy * unit
        if HAS_Y:
            tl.store(y_ptr + at, unit.to(x.dtype) * plain, mask=keep)
        dy = dy * w
        dx = scale * (dy - unit * (tl.sum(dy * unit, axis=0) / n))
        if HAS_REST:
            dx += tl.load(rest_ptr + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(x.dtype), mask=keep)
    tl.store(dw_ptr + part * n + col, dw, mask=keep)


def norm_back(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    rest: Tensor | None,
    eps: float,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of a norm's input, R × n, and of its weight, n in float32; `rest` joins the
    input's. `normed` takes the norm made again."""
    rows, n = x.shape
    dx = torch.empty_like(x)
    parts = min(PARTS, rows)
    dw = torch.empty(parts, n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n)
    _norm_back[(parts,)](
        x, weight, dy, dy if rest is None else rest, dx, dw, dx if normed is None else normed,
        rows, eps, n, parts, block, rest is not None, normed is not None,
        num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return dx, dw.sum(0)


@triton.jit
def _rotate(
    fused_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    ALL: tl.constexpr, H: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ALL)[:, None]
    half = tl.arange(0, H)[None, :]
    inside = (head < HEADS + 2 * KV) & (half < D // 2)
    is_q = inside & (head < HEADS)
    is_k = inside & (head >= HEADS) & (head < HEADS + KV)
    is_v = inside & (head >= HEADS + KV)
    turns = is_q | is_k
    cos = tl.load(cos_ptr + token * (D // 2) + half, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + token * (D // 2) + half, mask=turns, other=0.0)
    fused_at = fused_ptr + token * (HEADS + 2 * KV) * D + head * D + half
    q_at = q_ptr + token * HEADS * D + head * D + half
    k_at = k_ptr + token * KV * D + (head - HEADS) * D + half
    v_at = v_ptr + token * KV * D + (head - HEADS - KV) * D + half
    other: tl.constexpr = D // 2
    if BACK:
        low = tl.load(q_at, mask=is_q, other=0.0).to(tl.float32)
        low += tl.load(k_at, mask=is_k, other=0.0).to(tl.float32)
        low += tl.load(v_at, mask=is_v, other=0.0).to(tl.float32)
        high = tl.load(q_at + other, mask=is_q, other=0.0).to(tl.float32)
        high += tl.load(k_at + other, mask=is_k, other=0.0).to(tl.float32)
        high += tl.load(v_at + other, mask=is_v, other=0.0).to(tl.float32)
        kind = fused_ptr.dtype.element_ty
        tl.store(fused_at, (low * cos + high * sin).to(kind), mask=inside)
        tl.store(fused_at + other, (high * cos - low * sin).to(kind), mask=inside)
    else:
        first = tl.load(fused_at, mask=inside, other=0.0)
        low = first.to(tl.float32)
        high = tl.load(fused_at + other, mask=inside, other=0.0).to(tl.float32)
        new_low = (low * cos - high * sin).to(first.dtype)
        new_high = (high * cos + low * sin).to(first.dtype)
        tl.store(q_at, new_low, mask=is_q)
        tl.store(q_at + other, new_high, mask=is_q)
        tl.store(k_at, new_low, mask=is_k)
        tl.store(k_at + other, new_high, mask=is_k)
        tl.store(v_at, new_low, mask=is_v)
        tl.store(v_at + other, new_high, mask=is_v)


def rotate(
    fused: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, back: bool
) -> None:
    """From fused projections, T × all, to rotated queries, keys and plain values; `back` takes
    gradients the other way. One program a token."""
    q, k, v = parts
    tokens, heads, size = q.shape
    kv = k.shape[1]
    _rotate[(tokens,)](
        fused, q, k, v, cos, sin, heads, kv, size,
        triton.next_power_of_2(heads + 2 * kv), triton.next_power_of_2(size // 2), back,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate_back(gu_ptr, d_ptr, n, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * B + tl.arange(0, B)
    keep = col < n
    gate_at = gu_ptr + row * 2 * n + col
    out_at = d_ptr + row * n + col
    gate = tl.load(gate_at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_at + n, mask=keep, other=0.0)
    d = tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = (gate * share).to(up.dtype)
    d_gate = d * up.to(tl.float32) * share * (1 + gate * (1 - share))
    tl.store(gate_at, d_gate.to(up.dtype), mask=keep)
    tl.store(gate_at + n, (d * silu.to(tl.float32)).to(up.dtype), mask=keep)
    tl.store(out_at, silu * up, mask=keep)


def gate_back(gate_up: Tensor, d_out: Tensor) -> None:
    """Write silu(gate) · up over its gradient, and over gate and up theirs."""
    rows, n = d_out.shape
    _gate_back[(rows, triton.cdiv(n, 1024))](gate_up, d_out, n, 1024)
