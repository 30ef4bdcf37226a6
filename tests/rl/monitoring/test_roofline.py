"""Floors of a step against hand-counted bytes and operations."""

from __future__ import annotations

import pytest
import torch

from tests.rl.test_trainer import make
from tests.rl.tiny import tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.requests import Counters
from tfgrpo.rl.monitoring.roofline import (
    Roofline,
    decode_floor_s,
    measure_roofline,
    parameter_count,
    training_tflop,
)


def test_parameters_are_those_of_the_decoder() -> None:
    for kind in ("llama", "mistral"):
        decoder = tiny_parts(kind=kind).decoder
        small = sum(p.numel() for n, p in decoder.named_parameters() if n == "norm" or "bias" in n)
        total = sum(p.numel() for p in decoder.parameters())
        assert parameter_count(decoder.shape) == total - small


def test_floors_are_bytes_over_bandwidth_or_operations_over_their_rate() -> None:
    shape = tiny_parts().decoder.shape
    weights = parameter_count(shape)
    work = Counters(prefill_tokens=0, steps=10, new_tokens=40, cache_tokens=300)
    row = 2 * shape.layers * shape.kv_size
    slow_memory = Roofline(tb_s=1e-9, tflop_s=1e9)
    moved = 4 * (10 * weights + 300 * row)
    assert decode_floor_s(shape, slow_memory, work, 4) == pytest.approx(moved / 1e3)
    slow_products = Roofline(tb_s=1e9, tflop_s=1e-9)
    assert decode_floor_s(shape, slow_products, work, 4) == pytest.approx(2 * weights * 40 / 1e3)
    head = shape.vocab * shape.hidden
    read = Counters(prefill_tokens=7)
    wanted = 2 * (weights - head) * 7 / 1e3
    assert decode_floor_s(shape, slow_products, read, 4) == pytest.approx(wanted)
    assert training_tflop(shape, 5, 0) == pytest.approx(6 * (weights - head) * 5 / 1e12)
    assert training_tflop(shape, 0, 5) == pytest.approx(6 * head * 5 / 1e12)


def test_the_generator_counts_cached_tokens_and_a_group_s_prompt_once_a_step() -> None:
    from tfgrpo.protocols import Sampling

    generator = GroupGenerator(tiny_parts().decoder, eos_ids=(), poll_steps=4)
    sampling = Sampling(max_tokens=10, extra={"ignore_eos": True})
    generator.generate([(5, 6, 7), (8, 9)], 2, sampling, [[1, 2], [3, 4]])
    # the token at place i looks at all before it and itself
    wanted = 2 * sum(3 + i for i in range(10)) + 2 * sum(2 + i for i in range(10))
    wanted -= 10 * (2 + 1)  # all of the prompts but their last tokens, by the second rows
    assert generator.counters.cache_tokens == wanted


def test_a_step_tells_its_floors_and_an_evaluation_is_no_part_of_it(tmp_path, monkeypatch) -> None:
    limits = Roofline(tb_s=1e-6, tflop_s=1e-6)
    monkeypatch.setattr("tfgrpo.rl.trainer.measure_roofline", lambda *_: limits)
    plain, asked = (
        make(tiny_config(tmp_path / name), held_out=tiny_tasks(2, "h")) for name in ("a", "b")
    )
    asked.evaluate()
    first, second = plain.step().figures, asked.step().figures
    assert first["decode_steps"] == second["decode_steps"] > 0
    shape = tiny_parts().decoder.shape
    tflop = training_tflop(shape, first["input_tokens"], first["trained_tokens"])
    assert first["update_floor_seconds"] == pytest.approx(tflop / 1e-6)
    floors = first["update_floor_seconds"] + first["rollout_floor_seconds"]
    assert first["floor_share"] == pytest.approx(floors / first["seconds"])
    idle = 1 - first["completion_tokens"] / first["decode_row_steps"]
    assert first["idle_row_share"] == pytest.approx(idle)
    rate = first["rollout_floor_seconds"] * 1e-6 / first["rollout_seconds"]
    assert first["rollout_tb_s"] <= rate  # the floor is traffic or products, and prompts on top
    assert first["score_seconds"] == 0.0  # on-policy, nothing is only measured


def test_passes_that_only_measure_are_timed(tmp_path) -> None:
    figures = make(tiny_config(tmp_path, loss={"kl": 0.1})).step().figures
    assert 0 < figures["score_seconds"] < figures["update_seconds"]


def test_measuring_a_device_leaves_the_draws_of_a_run_alone() -> None:
    measure_roofline.cache_clear()
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    found = measure_roofline(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.rand(4), wanted)
    assert found.tb_s > 0 and found.tflop_s > 0
