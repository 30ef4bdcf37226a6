"""How far a step was from the limits of the hardware that it ran on.

Decoding must read the weights once a step and what each row has cached, or multiply; reading a
prompt and training must multiply. Attention's own products, the optimiser and activations made
twice are left out, so the floors are lower than any program can reach. Source: the roofline model
(Williams et al., 2009); six operations a parameter and token of training (arXiv 2001.08361).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tfgrpo.rl.generation.requests import Counters
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.shape import Shape


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a device can do, measured."""

    tb_s: float
    """Copy bandwidth, bytes read plus written, 10^12 a second."""
    tflop_s: float
    """Rate of one large matrix product, 10^12 operations a second."""


@cache
def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Time large copies and matrix products in a type of number; once a process."""
    big = device.type == "cuda"
    length, size = (2**26, 8192) if big else (2**24, 1024)
    own = torch.Generator(device).manual_seed(0)  # a run's other draws stay what they are
    source = torch.randn(length, device=device, dtype=dtype, generator=own)
    target = torch.empty_like(source)
    a = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    copy = _median_seconds(lambda: target.copy_(source), device)
    product = _median_seconds(lambda: a @ a, device)
    moved = 2 * source.numel() * source.element_size()
    return Roofline(moved / copy / 1e12, 2 * size**3 / product / 1e12)


def _median_seconds(work: Callable[[], Any], device: torch.device, rounds: int = 5) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def parameter_count(shape: Shape) -> int:
    """Parameters, a tied head counted once."""
    return _body(shape) + shape.vocab * shape.hidden * (1 if shape.is_tied else 2)


def _body(shape: Shape) -> int:
    """Parameters of the blocks."""
    return shape.layers * (
        (shape.q_size + 2 * shape.kv_size) * shape.hidden
        + shape.q_size * shape.hidden
        + 3 * shape.intermediate * shape.hidden
        + 2 * shape.hidden
    )


def _multiplied(shape: Shape) -> int:
    """Parameters that a made token is multiplied with: the blocks and the head."""
    return _body(shape) + shape.vocab * shape.hidden


def training_tflop(shape: Shape, input_tokens: int, loss_tokens: int) -> float:
    """Operations of forward and backward, 10^12; the head counts for loss-bearing tokens only."""
    head = shape.vocab * shape.hidden
    return 6 * (_body(shape) * input_tokens + head * loss_tokens) / 1e12


def decode_tb(shape: Shape, work: Counters, element_bytes: int) -> float:
    """Weights read once a decode step, and what rows looked at in the cache: 10^12 bytes."""
    weights = _multiplied(shape) * element_bytes
    cached = 2 * shape.layers * shape.kv_size * element_bytes
    return (work.steps * weights + work.cache_tokens * cached) / 1e12


def decode_floor_s(shape: Shape, roofline: Roofline, work: Counters, element_bytes: int) -> float:
    """Least seconds of sampling: prompts' products, then weights and cache or the products."""
    products = 2 * _multiplied(shape) * work.new_tokens / 1e12
    prefill = 2 * _body(shape) * work.prefill_tokens / 1e12
    traffic_s = decode_tb(shape, work, element_bytes) / roofline.tb_s
    return prefill / roofline.tflop_s + max(traffic_s, products / roofline.tflop_s)


def budget_figures(
    decoder: Decoder, roofline: Roofline, work: Counters, figures: Mapping[str, Any]
) -> dict[str, float]:
    """Return a step's floors in seconds, and which share of its time they are.

    Args:
        decoder: what was trained.
        roofline: of its device and type of number.
        work: of the trainer's own sampler; without decode steps (another engine sampled) rollouts
            have no floor.
        figures: `seconds`, `rollout_seconds`, `update_seconds`, `input_tokens` and
            `trained_tokens` of the step.
    """
    shape = decoder.shape
    tflop = training_tflop(shape, figures["input_tokens"], figures["trained_tokens"])
    floors = {"update_floor_seconds": tflop / roofline.tflop_s}
    sampling = {}
    if work.steps:
        size = decoder.embed.element_size()
        floors["rollout_floor_seconds"] = decode_floor_s(shape, roofline, work, size)
        sampling = {
            "rollout_tb_s": decode_tb(shape, work, size) / max(1e-9, figures["rollout_seconds"]),
            "idle_row_share": 1 - work.new_tokens / work.row_steps,
        }
    return {
        **sampling,
        "update_tflop_s": tflop / max(1e-9, figures["update_seconds"]),
        "roofline_tb_s": roofline.tb_s,
        "roofline_tflop_s": roofline.tflop_s,
        **floors,
        "floor_share": sum(floors.values()) / max(1e-9, figures["seconds"]),
    }
