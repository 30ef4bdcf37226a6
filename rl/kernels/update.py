# mypy: ignore-errors
"""Triton forms of an update's steps; imported only where a CUDA device is used.

Same results as the torch forms in `logprob`, `masters` and `optimiser` up to rounding.
Does not know models or losses. Source: own; online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_copies(
    k_ptr, v_ptr, order_ptr, start_ptr, k_out_ptr, v_out_ptr, width, B: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, B)
    keep = col < width
    k = tl.zeros((B,), tl.float32)
    v = tl.zeros((B,), tl.float32)
    for i in range(tl.load(start_ptr + token), tl.load(start_ptr + token + 1)):
        at = tl.load(order_ptr + i).to(tl.int64) * width + col
        k += tl.load(k_ptr + at, mask=keep, other=0.0).to(tl.float32)
        v += tl.load(v_ptr + at, mask=keep, other=0.0).to(tl.float32)
    at = token * width + col
    kind = k_out_ptr.dtype.element_ty
    tl.store(k_out_ptr + at, k.to(kind), mask=keep)
    tl.store(v_out_ptr + at, v.to(kind), mask=keep)


def sum_copies(k: Tensor, v: Tensor, order_K: Tensor, start_T: Tensor) -> tuple[Tensor, Tensor]:
    """Add up each token's copies, K × heads × size to T × heads × size, in a fixed order.

    Args:
        k, v: contiguous.
        order_K: the copies sorted by token.
        start_T: where each token's copies begin in it, and their number.
    """
    tokens, width = len(start_T) - 1, k[0].numel()
    found = tuple(x.new_empty(tokens, *x.shape[1:]) for x in (k, v))
    _sum_copies[(tokens,)](
        k, v, order_K, start_T, *found, width, triton.next_power_of_2(width), num_warps=4
    )
    return found


@triton.jit
def _token_stats(
    logits_ptr, target_ptr, lse_ptr, logp_ptr, entropy_ptr, inv_temperature, vocab,
    HAS_ENTROPY: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocab
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, B):
        column = start + tl.arange(0, B)
        keep = column < vocab
        x = tl.load(base + column, mask=keep, other=-float("inf")).to(tl.float32) * inv_temperature
        new_top = tl.maximum(top, tl.max(x, axis=0))
        shrink = tl.exp(top - new_top)
        e = tl.exp(x - new_top)
        total = total * shrink + tl.sum(e, axis=0)
        if HAS_ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(keep, e * x, 0.0), axis=0)
        top = new_top
    lse = top + tl.log(total)
    picked = tl.load(base + tl.load(target_ptr + row)).to(tl.float32) * inv_temperature
    tl.store(lse_ptr + row, lse)
    tl.store(logp_ptr + row, picked - lse)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row, lse - weighted / total)


def token_stats(
    logits: Tensor, target: Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sum-exp, the target's log-prob and on demand the entropy of every row, in one reading."""
    rows, vocab = logits.shape
    lse, logp, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _token_stats[(rows,)](
        logits, target, lse, logp, entropy, inv_temperature, vocab, with_entropy, 4096, num_warps=8
    )
    return lse, logp, entropy if with_entropy else None


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


@triton.jit
def _add(total_ptr, value_ptr, n, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    keep = at < n
    total = tl.load(total_ptr + at, mask=keep, other=0.0)
    total += tl.load(value_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(total_ptr + at, total, mask=keep)


def add_to(total: Tensor, value: Tensor) -> None:
    """Add contiguous numbers of any type to a float32 sum; twice as fast as `add_` over types."""
    n, block = total.numel(), 4096
    _add[(triton.cdiv(n, block),)](total, value, n, block, num_warps=8)


@triton.jit
def _wide(bits):
    """float32 numbers from the upper halves of their bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _by_chance(value, chance):
    """The upper half of a float32 number's bits, one more where the rest exceeds the chance."""
    return ((value.to(tl.int32, bitcast=True) + chance.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def _adam(
    high_ptr, low_ptr, grad_ptr, first_ptr, second_ptr, constants_ptr, salt_ptr, n,
    HALVES: tl.constexpr, ROUGH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    keep = at < n
    clip = tl.load(constants_ptr)
    decay = tl.load(constants_ptr + 1)
    rest1 = tl.load(constants_ptr + 2)
    beta2 = tl.load(constants_ptr + 3)
    rest2 = tl.load(constants_ptr + 4)
    rate = tl.load(constants_ptr + 5)
    unbias2 = tl.load(constants_ptr + 6)
    eps = tl.load(constants_ptr + 7)
    value = tl.load(high_ptr + at, mask=keep, other=0)
    if HALVES:
        low = tl.load(low_ptr + at, mask=keep, other=0).to(tl.int32)
        value = ((value.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + at, mask=keep, other=0.0) * clip
    m = tl.load(first_ptr + at, mask=keep, other=0)
    v = tl.load(second_ptr + at, mask=keep, other=0)
    if ROUGH:
        m, v = _wide(m), _wide(v)
    m = m + rest1 * (grad - m)
    v = beta2 * v + rest2 * grad * grad
    value = decay * value - tl.div_rn(rate * m, tl.sqrt_rn(v) * unbias2 + eps)
    if HALVES:
        bits = value.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(low_ptr + at, (bits - (high << 16)).to(tl.int16), mask=keep)
        tl.store(high_ptr + at, high.to(tl.int16), mask=keep)
    else:
        tl.store(high_ptr + at, value, mask=keep)
    if ROUGH:
        x = at.to(tl.uint32) * 0x9E3779B1 + tl.load(salt_ptr).to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) * 0xC2B2AE35
        x = x ^ (x >> 16)
        m, v = _by_chance(m, x & 0xFFFF), _by_chance(v, x >> 16)
    tl.store(first_ptr + at, m, mask=keep)
    tl.store(second_ptr + at, v, mask=keep)


def adam(
    high: Tensor,
    low: Tensor | None,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    constants: Tensor,
    salt: Tensor,
) -> None:
    """One step over flat tensors; 16-bit numbers are handled by their bits."""
    is_rough = first.dtype == torch.bfloat16
    if is_rough:
        first, second = first.view(torch.int16), second.view(torch.int16)
    n, block = len(grad), 1024
    _adam[(triton.cdiv(n, block),)](
        high, high if low is None else low, grad, first, second, constants, salt, n,
        low is not None, is_rough, block, num_warps=4,
    )  # fmt: skip
