"""Runs the Triton kernels in Triton's interpreter and writes how far they are from the torch forms.

Started with `TRITON_INTERPRET=1`, which has to be set before Triton is imported. In float32: the
interpreter does not calculate in bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.rl.tiny import random_rows, tiny_parts
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation import decode_ops as kernels
from tfgrpo.rl.generation import generator, kv_cache
from tfgrpo.rl.generation.decode_ops import Slots
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.kernels import block as triton_block
from tfgrpo.rl.kernels import decode as triton_kernels
from tfgrpo.rl.kernels import device
from tfgrpo.rl.kernels import update as triton_update
from tfgrpo.rl.model import fused_block as block_pass
from tfgrpo.rl.model.block_ops import rms_norm, rotate, split_heads
from tfgrpo.rl.model.grad_buffers import GradientSums
from tfgrpo.rl.model.packing import micro_batches
from tfgrpo.rl.model.shape import Shape
from tfgrpo.rl.optim import adamw as optimiser
from tfgrpo.rl.optim import master_weights as masters
from tfgrpo.rl.update import logprob
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate

CPU = torch.device("cpu")


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; infinite where shapes differ or a number is not one."""
    if a.shape != b.shape:
        return float("inf")
    gap = (a.double() - b.double()).abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


def norm(n: int) -> list[float]:
    """With something to add, whole or in parts, and without; the sum lands in place."""
    draw = torch.Generator().manual_seed(n)
    x, delta = (torch.randn(5, n, generator=draw) for _ in range(2))
    weight = torch.randn(n, generator=draw)
    found = []
    for added in (delta, None):
        ours, wanted = x.clone(), x.clone()
        normed = triton_kernels.add_rms_norm(ours, added, weight, 1e-5)
        found += [far(normed, kernels.add_rms_norm(wanted, added, weight, 1e-5)), far(ours, wanted)]
    parts = torch.randn(2, 5, n, generator=draw)
    ours, wanted = x.clone(), x.clone()
    normed = triton_kernels.add_rms_norm(ours, parts, weight, 1e-5)
    found += [far(normed, kernels.add_rms_norm(wanted, parts.sum(0), weight, 1e-5))]
    return [*found, far(ours, wanted)]


def silu(n: int) -> list[float]:
    """Gate times up."""
    both = torch.randn(3, 2 * n, generator=torch.Generator().manual_seed(n)) * 3
    return [far(triton_kernels.silu_mul(both), kernels.silu_mul(both))]


def attention(heads: int, kv: int, size: int, has_norm: bool) -> list[float]:
    """Output and what was appended to the cache; rows at starts, ends and edges of blocks.

    The kernels also with prompts read elsewhere: rows 3 and 4 have the first 63 tokens of row 5's,
    and their own copies are gone; and with these read for all three at once, in one part and more.
    """
    draw = torch.Generator().manual_seed(heads)
    position = torch.tensor([0, 1, 63, 64, 65, 149], dtype=torch.int32)
    rows, length = len(position), 150
    shape = Shape(
        "qwen3", 100, heads * size, 1, heads, kv, size, 8, 256, 1e-5, True, False, has_norm
    )
    cache = [torch.randn(rows, kv, length, size, generator=draw) for _ in range(2)]
    qkv = torch.randn(rows, (heads + 2 * kv) * size, generator=draw)
    angle = torch.rand(length, size // 2, generator=draw) * 6
    angles = (angle.cos(), angle.sin())
    norms = tuple(torch.rand(size, generator=draw) for _ in range(2)) if has_norm else None
    for layer in cache:
        layer[3:5, :, :63] = layer[5, :, :63]
    ours, wanted, apart = ([c.clone() for c in cache] for _ in range(3))
    slots = Slots.empty(rows, 4, 1, CPU)
    slots.position[:] = position
    out = triton_kernels.decode_attention(qkv, *ours, slots, angles, norms, shape)
    mask = (torch.arange(length) <= position[:, None])[:, None, None]
    plain = kernels.decode_attention(qkv, tuple(wanted), slots, angles, norms, shape, mask)
    slots.home[3:5], slots.shared[3:5] = 5, 63
    for layer in apart:
        layer[3:5, :, :63] = float("nan")
    slots.shared[5], slots.members[5, :3] = 63, torch.tensor([3, 5, 4])
    slots.shared[:3] = 0
    elsewhere = [
        far(triton_kernels.decode_attention(qkv, *apart, slots, angles, norms, shape, parts), plain)
        for parts in (0, 1, 2, 4)
    ]
    gaps = (far(a, b) for a, b in zip(ours, wanted, strict=True))
    return [far(out, plain), max(elsewhere), *gaps]


def pick(vocab: int) -> dict[str, float]:
    """Everything that a row carries after a draw, over temperatures, ends, limits and idle rows."""
    rows, new = 120, 8
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=draw) * 4
    numbers = torch.rand(rows, new, generator=draw, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)[:, None]
    before = Slots.empty(rows, new, 2, CPU)
    before.uniform[:] = numbers
    before.alive[:] = torch.arange(rows) % 5 != 3
    before.count[:] = torch.arange(rows) % 3
    before.limit[:] = before.count + torch.tensor([1, 4, 2]).repeat(rows // 3)
    before.position[:] = torch.arange(rows) + 3
    before.inv_temperature[:] = torch.tensor([1.0, 0.0, 0.7, 1.6]).repeat(rows // 4)
    before.eos[:] = torch.stack([logits[1].argmax(), logits[5].argmax()])
    ours, wanted = (copied(before) for _ in range(2))
    triton_kernels.pick_and_advance(logits, ours)
    kernels.pick_and_advance(logits, wanted, 1.0)
    names = ("token", "position", "count", "limit", "alive", "inv_temperature", "uniform",
             "out_token", "out_logp")  # fmt: skip
    pairs = zip(names, ours.per_row(), wanted.per_row(), strict=True)
    moved = int((ours.count - before.count).sum())
    return {name: far(a, b) for name, a, b in pairs} | {
        "moved": moved,
        "ended": int(before.alive.sum() - ours.alive.sum()),
        "ended_at_limit": int(((ours.count >= ours.limit) & (before.alive == 1)).sum()),
    }


def generated(through_kernels: bool, long_prompt: int = 256) -> list[list[int]]:
    """Tokens of groups whose rows join, end early and make room, decoded by either form; prompts
    from a length on are read once for their group.

    A long prompt comes late, so that the cache has to grow, and all is done twice. The kernels keep
    the cache in memory that others have written to.
    """
    decoder = tiny_parts(kind="qwen3").decoder
    memory = torch.empty(3 * 6 * 2 * 128 * 16)  # of four parts that the cache consists of
    sampling = Sampling(temperature=0.8, max_tokens=9)
    made: list[list[int]] = []

    def keep(request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        made.extend(list(row.token_ids) for row in rows)
        if request.key != 0:
            return []
        return [GroupRequest(9, tuple(range(4, 60)) * 2, (91, 92), 9)]

    with (
        patch.object(device, "uses_kernels", lambda x: through_kernels),
        patch.object(kv_cache, "LONG_PROMPT", long_prompt),
    ):
        sampler = generator.GroupGenerator(decoder, eos_ids=(2,), max_rows=6, poll_steps=3)
        sampler.lend(memory)
        for _ in range(2):
            memory.fill_(float("nan"))
            requests = [
                GroupRequest(i, tuple(range(5, 5 + n)), tuple(10 * i + j for j in range(3)), 9)
                for i, n in enumerate((1, 4, 9, 20))
            ]
            sampler.run(requests, sampling, keep)
    assert bool(memory.isnan().all()) != through_kernels
    return made


def copies(heads: int, size: int, tokens: int) -> list[float]:
    """Sums of copies; a token has one to several, in no order."""
    draw = torch.Generator().manual_seed(tokens)
    token = torch.cat([torch.arange(tokens), torch.randint(tokens, (9,), generator=draw)])
    token = token[torch.randperm(len(token), generator=draw)]
    k, v = (torch.randn(len(token), heads, size, generator=draw) for _ in range(2))
    start = torch.cat([torch.zeros(1, dtype=torch.int64), token.bincount().cumsum(0)])
    got = triton_update.sum_copies(k, v, token.argsort().int(), start.int())
    return [
        far(a, torch.zeros_like(a).index_add(0, token, b)) for a, b in zip(got, (k, v), strict=True)
    ]


def gradient(vocab: int, with_entropy: bool) -> list[float]:
    """What a row's logits tell, and ∂loss/∂logits; a temperature other than 1, targets at both
    ends."""
    draw = torch.Generator().manual_seed(vocab)
    rows, inv_temperature = 7, 1 / 0.7
    hidden, weight = torch.randn(rows, 5, generator=draw), torch.randn(vocab, 5, generator=draw)
    target = torch.randint(vocab, (rows,), generator=draw)
    target[0], target[1] = 0, vocab - 1
    logits = hidden @ weight.t()
    known = logprob._stats(logits, target, inv_temperature, with_entropy)
    lse, logp, entropy = triton_update.token_stats(logits, target, inv_temperature, with_entropy)
    d_logp, d_entropy = torch.randn(2, rows, generator=draw)
    rest = (lse, target, d_logp, entropy, d_entropy if with_entropy else None, inv_temperature)
    wanted = logprob._gradient(logits, *rest)
    pairs = zip((lse, logp, entropy), known, strict=True)
    gaps = [far(a, b) for a, b in pairs if a is not None and b is not None]
    assert len(gaps) == 2 + with_entropy
    return [*gaps, far(triton_update.logits_gradient(logits.clone(), *rest), wanted)]


def leaf(*size: int, draw: torch.Generator) -> torch.Tensor:
    """Numbers that want a gradient."""
    return torch.randn(*size, generator=draw).requires_grad_()


def norm_back(rows: int, n: int) -> list[float]:
    """A norm's gradients, with and without what joins them; more rows than programs and fewer."""
    draw = torch.Generator().manual_seed(n)
    x, weight = leaf(rows, n, draw=draw), leaf(n, draw=draw)
    dy = torch.randn(rows, n, generator=draw)
    past = torch.randn(rows, n, generator=draw)
    gaps = []
    for rest in (None, past):
        normed = rms_norm(x, weight, 1e-5)
        total = (normed * dy).sum() + (0.0 if rest is None else (x * rest).sum())
        wanted = torch.autograd.grad(total, (x, weight))
        again = None if rest is None else torch.empty_like(x)
        with patch.object(triton_block, "PARTS", 4):
            got = triton_block.norm_back(x.detach(), weight.detach(), dy, rest, 1e-5, again)
        gaps += [far(a, b) for a, b in zip(got, wanted, strict=True)]
        gaps += [] if again is None else [far(again, normed.detach())]
    return gaps


def rotated(heads: int, kv: int, size: int) -> list[float]:
    """Queries, keys and values of fused projections, and the gradient back."""
    draw = torch.Generator().manual_seed(size)
    tokens = 5
    shape = Shape("llama", 9, 8, 1, heads, kv, size, 8, 256, 1e-5, True, False, False)
    fused = leaf(tokens, (heads + 2 * kv) * size, draw=draw)
    angle = torch.rand(tokens, 1, size // 2, generator=draw) * 6
    cos, sin = angle.cos(), angle.sin()
    q, k, v = split_heads(fused, shape)
    wanted = (rotate(q, cos, sin), rotate(k, cos, sin), v)
    parts = tuple(torch.empty(w.shape) for w in wanted)
    triton_block.rotate(fused.detach(), parts, cos, sin, back=False)
    grads = tuple(torch.randn(w.shape, generator=draw) for w in wanted)
    (back,) = torch.autograd.grad(wanted, fused, grads)
    got = torch.empty_like(back)
    triton_block.rotate(got, grads, cos, sin, back=True)
    return [*(far(a, b) for a, b in zip(parts, wanted, strict=True)), far(got, back)]


def gated(n: int) -> list[float]:
    """Gradients of silu(gate) · up, and the product made again."""
    draw = torch.Generator().manual_seed(n)
    gate_up, d_out = leaf(3, 2 * n, draw=draw), torch.randn(3, n, generator=draw)
    gate, up = gate_up.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    (wanted,) = torch.autograd.grad(product, gate_up, d_out)
    ours, out = gate_up.detach().clone(), d_out.clone()
    triton_block.gate_back(ours, out)
    return [far(ours, wanted), far(out, product.detach())]


def added(n: int) -> list[float]:
    """A sum over numbers."""
    draw = torch.Generator().manual_seed(n)
    total, value = torch.randn(2, n, generator=draw)
    ours = total.clone()
    triton_update.add_to(ours, value)
    return [far(ours, total + value)]


def adam(halves: bool, rough: bool, n: int) -> list[float]:
    """Values, moments and what is left of them after three steps; bits, where halves are kept."""
    draw = torch.Generator().manual_seed(n)
    start = torch.randn(n, generator=draw)
    high, low = masters.split(start) if halves else (start, None)
    kind = torch.bfloat16 if rough else torch.float32
    before = [high, low, torch.zeros(n, dtype=kind), torch.zeros(n, dtype=kind)]
    ours, wanted = ([t if t is None else t.clone() for t in before] for _ in range(2))
    constants = torch.tensor([0.5, 0.99, 0.1, 0.999, 0.001, 0.01, 1.5, 1e-8])
    for step in range(3):
        grad = torch.randn(n, generator=draw)
        salt = torch.tensor(2**32 - 5 + step)
        for move, state in ((triton_update.adam, ours), (optimiser.move_flat, wanted)):
            move(*state[:2], grad.clone(), *state[2:], constants, salt)
    if halves:
        ours[:2], wanted[:2] = ([masters.join(*s[:2])] for s in (ours, wanted))
    return [far(a, b) for a, b in zip(ours, wanted, strict=True) if a is not None]


def trained(kind: str, activations: str) -> dict[str, float]:
    """How far an update through the kernels is from one through torch: gradients and masters.

    Groups of prompts and replies, the head in chunks with entropies, sums, two optimiser steps.
    Activations are kept or made again.
    """
    found = []
    settings = UpdateSettings(micro_batch_tokens=60, chunk=16, entropy=0.1, temperature=0.8)
    rows = [TrainRow(r, 1.0 - r.index % 3, group=r.index // 3) for r in random_rows()]
    for through_kernels in (True, False):
        decoder = tiny_parts(kind=kind).decoder
        decoder.checkpoint_blocks = activations != "kept"
        move = optimiser.AdamW(masters.FullWeights(decoder), optimiser.AdamSettings())
        with patch.object(device, "uses_kernels", lambda x, on=through_kernels: on):
            for _ in range(2):
                accumulate(decoder, rows, settings)
                gradients = {n: g.clone() for n, g in move.weights.gradients().items()}
                move.step(1e-3)
        found.append(gradients | {f"master.{n}": t for n, t in move.state()})
    assert found[0].keys() == found[1].keys()
    return {n: far(t, found[1][n]) / float(found[1][n].abs().max()) for n, t in found[0].items()}


def summed(kind: str, activations: str) -> dict[str, float]:
    """How far sums of all weights' gradients are from what autograd forms without sums."""
    settings = UpdateSettings(micro_batch_tokens=60, chunk=16)
    rows = [TrainRow(r, 1.0 - r.index % 3, group=r.index // 3) for r in random_rows()]
    plain, ours = (tiny_parts(kind=kind).decoder for _ in range(2))
    accumulate(plain, rows, settings)
    ours.checkpoint_blocks = activations != "kept"
    sums = GradientSums(dict(ours.named_parameters()))
    runs = []
    until_gate = block_pass._until_gate

    def counted(*args: Any) -> Any:
        runs.append(len(args))
        return until_gate(*args)

    with (
        patch.object(device, "uses_kernels", lambda x: True),
        patch.object(block_pass, "_until_gate", counted),
    ):
        for _ in range(2):
            sums.clear()
            accumulate(ours, rows, settings)
    once = 2 * 2 * len(micro_batches([r.row for r in rows if not r.is_zero], 60))
    assert len(runs) == once * (1 if activations == "kept" else 2)
    assert all(p.grad is None for p in ours.parameters())
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    return {n: far(sums.by_name[n], g) / float(g.abs().max()) for n, g in wanted.items()}


def copied(slots: Slots) -> Slots:
    """The same slots over memory of their own."""
    rest = (slots.eos, slots.home, slots.shared, slots.members)
    return Slots(*(t.clone() for t in (*slots.per_row(), *rest)))


def main(out: Path) -> None:
    """Write all differences."""
    found: dict[str, Any] = {
        "norm": {n: norm(n) for n in (1, 72, 576)},
        "silu": {n: silu(n) for n in (40, 1536)},
        "attention": {
            f"{heads}/{kv} heads of {size}, norms {has_norm}": attention(heads, kv, size, has_norm)
            for heads, kv, size, has_norm in (
                (6, 2, 16, False),
                (6, 2, 16, True),
                (9, 3, 64, False),
                (14, 2, 64, False),
                (4, 4, 32, True),
            )
        },
        "generated": [generated(False), generated(True), generated(True, long_prompt=4)],
        "copies": {str(case): copies(*case) for case in ((3, 16, 40), (2, 80, 16), (14, 64, 1))},
        "gradient": {
            f"{vocab} {entropy}": gradient(vocab, entropy)
            for vocab in (50, 4096, 9000)
            for entropy in (False, True)
        },
        "norm_back": {str(case): norm_back(*case) for case in ((3, 72), (11, 576), (1, 1))},
        "rotated": {str(case): rotated(*case) for case in ((9, 3, 64), (14, 2, 16), (4, 4, 80))},
        "gated": {n: gated(n) for n in (40, 1536)},
        "added": {n: added(n) for n in (1, 5000)},
        "adam": {
            f"{halves} {rough} {n}": adam(halves, rough, n)
            for halves in (False, True)
            for rough in (False, True)
            for n in (1, 1024, 5000)
        },
        "trained": {
            f"{kind} {activations}": trained(kind, activations)
            for kind, activations in (("qwen2", "kept"), ("qwen3", "kept"), ("qwen2", "again"))
        },
        "summed": {
            f"{kind} {activations}": summed(kind, activations)
            for kind, activations in (("qwen2", "kept"), ("qwen3", "again"), ("mistral", "kept"))
        },
        "pick": {vocab: pick(vocab) for vocab in (50, 4096, 4097, 30_000)},
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
