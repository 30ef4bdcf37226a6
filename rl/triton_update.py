# mypy: ignore-errors
"""Triton forms of two steps of an update; imported only where a CUDA device is used.

Both work in place. Same results as the torch forms, `attention.merge` and `logprob`'s, up to
rounding. Does not know models or losses. Source: own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, tokens, heads, a_lse_stride, b_lse_stride,
    D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    keep = token < tokens
    a_lse = tl.load(a_lse_ptr + head * a_lse_stride + token, mask=keep, other=0.0)
    b_lse = tl.load(b_lse_ptr + head * b_lse_stride + token, mask=keep, other=0.0)
    top = tl.maximum(a_lse, b_lse)
    both = top + tl.log(tl.exp(a_lse - top) + tl.exp(b_lse - top))
    part = tl.arange(0, PAD)
    at = (token * heads + head)[:, None] * D + part[None, :]
    inside = keep[:, None] & (part < D)[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mixed = a.to(tl.float32) * tl.exp(a_lse - both)[:, None] + b * tl.exp(b_lse - both)[:, None]
    tl.store(a_ptr + at, mixed.to(a.dtype), mask=inside)
    tl.store(a_lse_ptr + head * a_lse_stride + token, both, mask=keep)


def merge_into(a_THd: Tensor, a_lse_HT: Tensor, b_THd: Tensor, b_lse_HT: Tensor) -> None:
    """Make `a` and its log-sum-exp those of both; outputs are contiguous, log-sum-exps by rows."""
    tokens, heads, size = a_THd.shape
    rows = 16
    _merge[(triton.cdiv(tokens, rows), heads)](
        a_THd, a_lse_HT, b_THd, b_lse_HT, tokens, heads, a_lse_HT.stride(0), b_lse_HT.stride(0),
        size, triton.next_power_of_2(size), rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _logits_gradient(
    logits_ptr, lse_ptr, target_ptr, d_logp_ptr, entropy_ptr, d_entropy_ptr, inv_temperature,
    vocab, HAS_ENTROPY: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    keep = column < vocab
    at = logits_ptr + row * vocab + column
    logits = tl.load(at, mask=keep, other=0.0)
    logp = logits.to(tl.float32) * inv_temperature - tl.load(lse_ptr + row)
    d_logp = tl.load(d_logp_ptr + row)
    slope = tl.zeros((B,), tl.float32) + d_logp
    if HAS_ENTROPY:
        slope += tl.load(d_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    at_target = tl.where(column == tl.load(target_ptr + row), d_logp, 0.0)
    gradient = (at_target - tl.exp(logp) * slope) * inv_temperature
    tl.store(at, gradient.to(logits.dtype), mask=keep)


def logits_gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    d_logp: Tensor,
    entropy: Tensor | None,
    d_entropy: Tensor | None,
    inv_temperature: float,
) -> Tensor:
    """Turn logits into ∂loss/∂logits where they lie."""
    rows, vocab = logits.shape
    has_entropy = entropy is not None and d_entropy is not None
    spare = (entropy, d_entropy) if has_entropy else (lse, lse)
    block = 4096
    _logits_gradient[(rows, triton.cdiv(vocab, block))](
        logits, lse, target, d_logp.contiguous(), *spare, inv_temperature, vocab,
        has_entropy, block, num_warps=8,
    )  # fmt: skip
    return logits
