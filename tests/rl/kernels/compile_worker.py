"""Compiles every Triton kernel for a Hopper GPU, on a machine without one, and prints their names.

The launchers are called as they are on a GPU, with tensors that nothing is read from; a driver that
only names the target stands in for the real one, and nothing is launched.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tfgrpo.rl.generation.decode_ops import Slots
from tfgrpo.rl.kernels import block as triton_block
from tfgrpo.rl.kernels import decode as triton_kernels
from tfgrpo.rl.kernels import update as triton_update
from tfgrpo.rl.model.shape import Shape

COMPILED: set[str] = set()
RUN = JITFunction.run


class Target:
    """What is asked of a driver when a kernel is compiled."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile in place of running."""
    kernel = RUN(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    COMPILED.add(self.__name__)


def decode(dtype: torch.dtype, shape: Shape) -> None:
    """The kernels of a decode step."""
    rows, length = 4, 40

    def empty(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind)

    x, weight = empty(rows, shape.hidden), empty(shape.hidden)
    for delta in (x, None, empty(2, rows, shape.hidden, kind=torch.float32)):
        triton_kernels.add_rms_norm(x, delta, weight, 1e-5)
    triton_kernels.silu_mul(empty(rows, 2 * shape.intermediate))
    cache = empty(rows, shape.kv_heads, length, shape.head_dim)
    slots = Slots.empty(rows, 8, 2, torch.device("cpu"))
    angles = tuple(empty(length, shape.head_dim // 2, kind=torch.float32) for _ in range(2))
    norms = (empty(shape.head_dim),) * 2 if shape.has_qk_norm else None
    qkv = empty(rows, shape.q_size + 2 * shape.kv_size)
    for parts in (0, 4):
        triton_kernels.decode_attention(qkv, cache, cache, slots, angles, norms, shape, parts)
    triton_kernels.pick_and_advance(empty(rows, shape.vocab), slots)


def update(dtype: torch.dtype, shape: Shape) -> None:
    """The kernels of an update."""
    tokens, d = 24, shape.head_dim

    def empty(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind)

    x, weight = empty(tokens, shape.hidden), empty(shape.hidden)
    for rest in (None, x):
        for normed in (None, x):
            triton_block.norm_back(x, weight, x, rest, 1e-5, normed)
    parts = tuple(empty(tokens, n, d) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    angle = empty(tokens, 1, d // 2, kind=torch.float32)
    for back in (False, True):
        fused = empty(tokens, shape.q_size + 2 * shape.kv_size)
        triton_block.rotate(fused, parts, angle, angle, back)
    gates = empty(tokens, 2 * shape.intermediate)
    triton_block.gate_back(gates, empty(tokens, shape.intermediate))
    places = empty(tokens + 1, kind=torch.int32)
    triton_update.sum_copies(parts[1], parts[2], places, places)
    logits, target = empty(tokens, shape.vocab), empty(tokens, kind=torch.int64)
    for with_entropy in (False, True):
        one, other, entropy = triton_update.token_stats(logits, target, 1.0, with_entropy)
        rest = (entropy, entropy)
        triton_update.logits_gradient(logits, one, target, other, *rest, 1 / 0.7)
    triton_update.add_to(empty(5000, kind=torch.float32), empty(5000))


def optimiser() -> None:
    """AdamW over both kinds of masters and of moments."""
    n = 5000

    def empty(kind: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=kind)

    constants, salt = torch.empty(8), torch.empty((), dtype=torch.int64)
    for kind in (torch.float32, torch.bfloat16):
        for low in (None, empty(torch.int16)):
            high = empty(torch.float32 if low is None else torch.int16)
            moments = (empty(kind), empty(kind))
            triton_update.adam(high, low, empty(torch.float32), *moments, constants, salt)


def main() -> None:
    """Compile everything."""
    driver.set_active(Target())
    with patch.object(JITFunction, "run", compiled):
        for dtype in (torch.bfloat16, torch.float32):
            for heads, kv, size, has_norm in ((9, 3, 64, False), (12, 2, 128, True)):
                shape = Shape(
                    "x", 9000, 576, 1, heads, kv, size, 1536, 256, 1e-5, True, False, has_norm
                )
                decode(dtype, shape)
                update(dtype, shape)
        optimiser()
    print("\n".join(sorted(COMPILED)))


if __name__ == "__main__":
    main()
