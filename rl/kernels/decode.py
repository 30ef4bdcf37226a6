# mypy: ignore-errors
"""Triton forms of the decode steps; imported only where a CUDA device is used.

Same results as the torch forms in `kernels.py` up to rounding. Does not know models or schedules.
Sources: online softmax (FlashAttention, arXiv 2205.14135) for attention; the rest is own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 4096
"""Vocabulary entries a program looks at."""


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, w_ptr, y_ptr, eps, n, size, PARTS: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, B)
    keep = col < n
    x = tl.load(x_ptr + row * n + col, mask=keep, other=0.0)
    if PARTS > 0:
        delta = tl.load(delta_ptr + row * n + col, mask=keep, other=0.0)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_ptr + part * size + row * n + col, mask=keep, other=0.0)
        x = x + delta.to(x.dtype)
        tl.store(x_ptr + row * n + col, x, mask=keep)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / n + eps)
    w = tl.load(w_ptr + col, mask=keep, other=0.0)
    tl.store(y_ptr + row * n + col, (wide * scale).to(x.dtype) * w, mask=keep)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add in place, norm, scale: one program a row. `delta` may be a stack of parts."""
    rows, n = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    _add_rms_norm[(rows,)](
        x, x if delta is None else delta, weight, y, eps, n, rows * n,
        0 if delta is None else delta.numel() // (rows * n), block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return y


@triton.jit
def _silu_mul(gu_ptr, out_ptr, n, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * B + tl.arange(0, B)
    keep = col < n
    gate = tl.load(gu_ptr + row * 2 * n + col, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gu_ptr + row * 2 * n + n + col, mask=keep, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype)
    tl.store(out_ptr + row * n + col, silu * up, mask=keep)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    rows, both = gate_up.shape
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(both // 2, 1024))](gate_up, out, both // 2, 1024)
    return out


@triton.jit
def _normed(lo, hi, w_ptr, half, eps, D: tl.constexpr):
    """Root-mean-square norm of rows given as two halves."""
    h: tl.constexpr = D // 2
    scale = tl.rsqrt((tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)) / D + eps)[:, None]
    w_lo = tl.load(w_ptr + half)[None, :].to(tl.float32)
    w_hi = tl.load(w_ptr + h + half)[None, :].to(tl.float32)
    return lo * scale * w_lo, hi * scale * w_hi


@triton.jit
def _attended(
    q_lo, q_hi, k_ptr, v_ptr, place, seen, scale, top, total, acc, D: tl.constexpr
):  # fmt: skip
    """Online softmax's maximum, sum and weighted values after one more block of keys.

    Queries are rotated, in halves; `place` tells where each key and value begins, `seen` which are
    there.
    """
    H: tl.constexpr = D // 2
    half = tl.arange(0, H)
    full = tl.arange(0, D)
    place = tl.multiple_of(place, D)
    kt_at = k_ptr + place[None, :] + half[:, None]
    kt_lo = tl.load(kt_at, mask=seen[None, :], other=0.0)
    kt_hi = tl.load(kt_at + H, mask=seen[None, :], other=0.0)
    s = (tl.dot(q_lo, kt_lo) + tl.dot(q_hi, kt_hi)) * scale
    s = tl.where(seen[None, :], s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    shrink = tl.exp(top - new_top)
    p = tl.exp(s - new_top[:, None])
    v = tl.load(v_ptr + place[:, None] + full[None, :], mask=seen[:, None], other=0.0)
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
    return new_top, total, acc


@triton.jit
def _prompt_attention(
    qkv_ptr, k_ptr, v_ptr, pos_ptr, members_ptr, shared_ptr, cos_ptr, sin_ptr, qn_ptr,
    top_ptr, total_ptr, acc_ptr, T, qkv_stride, scale, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, REP: tl.constexpr,
    PAD: tl.constexpr, MEMBERS: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    if tl.load(members_ptr + slot * MEMBERS) < 0:
        return
    H: tl.constexpr = D // 2
    half = tl.arange(0, H)
    full = tl.arange(0, D)
    member = tl.arange(0, M) // PAD
    rep = tl.arange(0, M) % PAD
    row = tl.load(members_ptr + slot * MEMBERS + member, mask=member < MEMBERS, other=-1)
    keep = (row >= 0) & (rep < REP)
    row = tl.where(keep, row, 0).to(tl.int64)
    pos = tl.load(pos_ptr + row)[:, None]
    cos = tl.load(cos_ptr + pos * H + half[None, :])
    sin = tl.load(sin_ptr + pos * H + half[None, :])
    head = kv * REP + rep
    q_at = qkv_ptr + row[:, None] * qkv_stride + head[:, None] * D + half[None, :]
    q_lo = tl.load(q_at, mask=keep[:, None], other=0.0)
    dtype = q_lo.dtype
    q_lo = q_lo.to(tl.float32)
    q_hi = tl.load(q_at + H, mask=keep[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        q_lo, q_hi = _normed(q_lo, q_hi, qn_ptr, half, eps, D)
        q_lo, q_hi = q_lo.to(dtype).to(tl.float32), q_hi.to(dtype).to(tl.float32)
    rq_lo = (q_lo * cos - q_hi * sin).to(dtype)
    rq_hi = (q_hi * cos + q_lo * sin).to(dtype)

    shared = tl.load(shared_ptr + slot)
    span = tl.cdiv(tl.cdiv(shared, PARTS), BLOCK) * BLOCK
    base = (slot * KV + kv) * T * D
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, shared), BLOCK):
        n = start + tl.arange(0, BLOCK)
        top, total, acc = _attended(
            rq_lo, rq_hi, k_ptr, v_ptr, base + n * D, n < shared, scale, top, total, acc, D
        )
    at = (row * HEADS + head) * PARTS + part
    tl.store(top_ptr + at, top, mask=keep)
    tl.store(total_ptr + at, total, mask=keep)
    tl.store(acc_ptr + at[:, None] * D + full[None, :], acc, mask=keep[:, None])


@triton.jit
def _decode_attention(
    qkv_ptr, k_ptr, v_ptr, pos_ptr, home_ptr, shared_ptr, cos_ptr, sin_ptr, qn_ptr, kn_ptr,
    top_ptr, total_ptr, acc_ptr, out_ptr, T, qkv_stride, scale, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, REP: tl.constexpr,
    PAD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    pos = tl.load(pos_ptr + row)
    H: tl.constexpr = D // 2
    half = tl.arange(0, H)
    full = tl.arange(0, D)
    rep = tl.arange(0, PAD)
    keep = (rep < REP)[:, None]
    cos = tl.load(cos_ptr + pos * H + half)[None, :]
    sin = tl.load(sin_ptr + pos * H + half)[None, :]

    q_at = qkv_ptr + row * qkv_stride + (kv * REP + rep)[:, None] * D + half[None, :]
    q_lo = tl.load(q_at, mask=keep, other=0.0).to(tl.float32)
    q_hi = tl.load(q_at + H, mask=keep, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)[:, None]
    k_at = qkv_ptr + row * qkv_stride + (HEADS + kv) * D + one * 0 + half[None, :]
    k_lo = tl.load(k_at).to(tl.float32)
    k_hi = tl.load(k_at + H).to(tl.float32)
    v_new = tl.load(qkv_ptr + row * qkv_stride + (HEADS + KV + kv) * D + full)
    dtype = v_new.dtype
    if HAS_NORM:
        q_lo, q_hi = _normed(q_lo, q_hi, qn_ptr, half, eps, D)
        k_lo, k_hi = _normed(k_lo, k_hi, kn_ptr, half, eps, D)
        q_lo, q_hi = q_lo.to(dtype).to(tl.float32), q_hi.to(dtype).to(tl.float32)
        k_lo, k_hi = k_lo.to(dtype).to(tl.float32), k_hi.to(dtype).to(tl.float32)
    rq_lo = (q_lo * cos - q_hi * sin).to(dtype)
    rq_hi = (q_hi * cos + q_lo * sin).to(dtype)
    rk_lo = (k_lo * cos - k_hi * sin).to(dtype)
    rk_hi = (k_hi * cos + k_lo * sin).to(dtype)

    base = (row * KV + kv) * T * D
    tl.store(k_ptr + base + pos * D + one * 0 + half[None, :], rk_lo)
    tl.store(k_ptr + base + pos * D + H + one * 0 + half[None, :], rk_hi)
    tl.store(v_ptr + base + pos * D + full, v_new)

    # the new token comes from registers, so nothing written above is read again
    top = tl.sum(rq_lo.to(tl.float32) * rk_lo.to(tl.float32), axis=1)
    top += tl.sum(rq_hi.to(tl.float32) * rk_hi.to(tl.float32), axis=1)
    top = top * scale
    shared = tl.load(shared_ptr + row)
    theirs = (tl.load(home_ptr + row).to(tl.int64) * KV + kv) * T * D
    total = tl.full((PAD,), 1.0, tl.float32)
    acc = tl.zeros((PAD, D), tl.float32) + v_new.to(tl.float32)[None, :]
    begin = 0
    if PARTS > 0:
        begin = shared
        if shared > 0:  # else nobody has read a prompt for this row
            for part in tl.static_range(PARTS):
                at = (row * HEADS + kv * REP + rep) * PARTS + part
                part_top = tl.load(top_ptr + at, mask=rep < REP, other=-float("inf"))
                part_total = tl.load(total_ptr + at, mask=rep < REP, other=0.0)
                part_acc = tl.load(acc_ptr + at[:, None] * D + full[None, :], mask=keep, other=0.0)
                new_top = tl.maximum(top, part_top)
                shrink = tl.exp(top - new_top)
                share = tl.exp(part_top - new_top)
                total = total * shrink + part_total * share
                acc = acc * shrink[:, None] + part_acc * share[:, None]
                top = new_top
    for start in range(begin, pos, BLOCK):
        n = start + tl.arange(0, BLOCK)
        place = tl.where(n < shared, theirs, base) + n * D
        top, total, acc = _attended(
            rq_lo, rq_hi, k_ptr, v_ptr, place, n < pos, scale, top, total, acc, D
        )
    out_at = out_ptr + row * HEADS * D + (kv * REP + rep)[:, None] * D + full[None, :]
    tl.store(out_at, (acc / total[:, None]).to(dtype), mask=keep)


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Any,
    angles: tuple[Tensor, Tensor], qk_norms: tuple[Tensor, Tensor] | None, shape: Any,
    parts: int = 0,
) -> Tensor:  # fmt: skip
    """One program a row and KV head: rotate, append, attend; each key is read once.

    Rows of one prompt read one copy of it, so that all but the first find it in the L2 cache. With
    `parts` a kernel before reads each prompt once for up to eight rows, in that many parts at a
    time; long prompts only, since it is one launch more.
    """
    rows = len(qkv)
    out = torch.empty(rows, shape.q_size, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = qk_norms if qk_norms is not None else (qkv, qkv)
    rep = shape.heads // shape.kv_heads
    sizes = (
        k_cache.shape[2], qkv.stride(0), shape.head_dim**-0.5, shape.eps,
        shape.heads, shape.kv_heads, shape.head_dim, rep,
    )  # fmt: skip
    tops = totals = sums = qkv
    members, pad = slots.members.shape[1], triton.next_power_of_2(rep)
    if members * pad > 128:  # more queries than a program's registers hold
        parts = 0
    if parts:
        size = (rows, shape.heads, parts)
        tops, totals = torch.empty(2, *size, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(*size, shape.head_dim, dtype=torch.float32, device=qkv.device)
        _prompt_attention[(rows, shape.kv_heads, parts)](
            qkv, k_cache, v_cache, slots.position, slots.members, slots.shared, *angles, q_norm,
            tops, totals, sums, *sizes, pad, members, max(16, members * pad), parts, 64,
            qk_norms is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
    _decode_attention[(rows, shape.kv_heads)](
        qkv, k_cache, v_cache, slots.position, slots.home, slots.shared, *angles, q_norm, k_norm,
        tops, totals, sums, out, *sizes, max(16, triton.next_power_of_2(rep)), parts, 64,
        qk_norms is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _pick_split(
    logits_ptr, inv_t_ptr, top_ptr, arg_ptr, mass_ptr, raw_ptr, vocab, splits, S: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    col = part * S + tl.arange(0, S)
    keep = col < vocab
    x = tl.load(logits_ptr + row * vocab + col, mask=keep, other=-float("inf")).to(tl.float32)
    inv_t = tl.load(inv_t_ptr + row)
    top = tl.max(x, axis=0)
    e = tl.where(keep, tl.exp(x - top), 0.0)
    scaled = tl.where(keep, tl.exp((x - top) * inv_t), 0.0)
    at = row * splits + part
    tl.store(top_ptr + at, top)
    tl.store(arg_ptr + at, part * S + tl.argmax(x, axis=0))
    tl.store(raw_ptr + at, tl.sum(e, axis=0))
    tl.store(mass_ptr + at, tl.sum(scaled, axis=0))


@triton.jit
def _pick_row(
    logits_ptr, inv_t_ptr, top_ptr, arg_ptr, mass_ptr, raw_ptr,
    uniform_ptr, token_ptr, position_ptr, count_ptr, limit_ptr, alive_ptr,
    out_token_ptr, out_logp_ptr, eos_ptr, vocab, splits, new,
    S: tl.constexpr, P: tl.constexpr, EOS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(alive_ptr + row)
    if alive == 0:
        return
    count = tl.load(count_ptr + row)
    inv_t = tl.load(inv_t_ptr + row)
    part = tl.arange(0, P)
    keep = part < splits
    at = row * splits + part
    tops = tl.load(top_ptr + at, mask=keep, other=-float("inf"))
    top = tl.max(tops, axis=0)
    raw = tl.load(raw_ptr + at, mask=keep, other=0.0)
    raw_total = tl.sum(tl.where(keep, raw * tl.exp(tops - top), 0.0), axis=0)
    mass = tl.load(mass_ptr + at, mask=keep, other=0.0)
    mass = tl.where(keep, mass * tl.exp((tops - top) * inv_t), 0.0)
    cumulated = tl.cumsum(mass.to(tl.float64), axis=0)
    total = tl.max(cumulated, axis=0)
    threshold = tl.load(uniform_ptr + row * new + count) * total
    chosen = tl.sum(((cumulated <= threshold) & keep).to(tl.int32), axis=0)
    last = tl.max(tl.where(mass > 0, part, 0), axis=0)
    chosen = tl.minimum(chosen, last)
    before = tl.sum(tl.where(part < chosen, mass, 0.0).to(tl.float64), axis=0)
    # rounding below 0 would lead to the part's first token, whatever its mass
    residual = tl.maximum((threshold - before).to(tl.float32), 0.0)
    col = tl.arange(0, S)
    inside = chosen * S + col < vocab
    x = tl.load(logits_ptr + row * vocab + chosen * S + col, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    e = tl.where(inside, tl.exp((x - top) * inv_t), 0.0)
    running = tl.cumsum(e, axis=0)
    offset = tl.sum(((running <= residual) & inside).to(tl.int32), axis=0)
    offset = tl.minimum(offset, tl.max(tl.where(e > 0, col, 0), axis=0))
    token = chosen * S + offset
    if inv_t == 0.0:
        winner = tl.argmax(tops, axis=0)
        token = tl.load(arg_ptr + row * splits + winner)
    picked = tl.load(logits_ptr + row * vocab + token).to(tl.float32)
    logp = picked - top - tl.log(raw_total)
    tl.store(out_token_ptr + row * new + count, token.to(tl.int64))
    tl.store(out_logp_ptr + row * new + count, logp)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(count_ptr + row, count + 1)
    tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)
    ended = count + 1 >= tl.load(limit_ptr + row)
    for i in tl.static_range(EOS):
        ended = ended | (tl.load(eos_ptr + i) == token)
    tl.store(alive_ptr + row, 1 - ended.to(tl.int32))


def pick_and_advance(logits: Tensor, slots: Any) -> None:
    """Draw and move on, in two launches: partial sums over splits, then one program a row."""
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, SPLIT)
    partial = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    _pick_split[(rows, splits)](
        logits, slots.inv_temperature, partial[0], best, partial[1], partial[2],
        vocab, splits, SPLIT, num_warps=8,
    )  # fmt: skip
    _pick_row[(rows,)](
        logits, slots.inv_temperature, partial[0], best, partial[1], partial[2],
        slots.uniform, slots.token, slots.position, slots.count, slots.limit, slots.alive,
        slots.out_token, slots.out_logp, slots.eos, vocab, splits, slots.uniform.shape[1],
        SPLIT, triton.next_power_of_2(splits), len(slots.eos), num_warps=8,
    )  # fmt: skip
