"""Rollouts on one GPU: our generator beside vLLM's engine, on the same prompts and shapes.

Random weights, 256 forced new tokens, temperature 1, the drawn token's log-prob told, groups of
eight a prompt: short prompts (120 tokens) and long ones (1,500). Each arm is a process for each
model, runs every shape once to warm up and then three times, and tells the median. Rows of one
call are of one host; with two GPUs the arms run at the same time, each on its own.

    python -m tests.benchmarks.rl.rl_vllm --out rows.jsonl --seconds 400
    python -m tests.benchmarks.rl.rl_vllm --collect rows.jsonl

vLLM 0.24 must be importable there; it is no dependency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_job import GROUP, NEW, model_folder, prepare_vllm
from tests.benchmarks.runs.child import Child, tell

COMMAND = "python -m tests.benchmarks.rl.rl_vllm"
MODELS = ("smol", "qwen05", "qwen15")
SHAPES = [(rows, length) for length in (120, 1500) for rows in (8, 64, 512)]
"""Rows, and tokens of a prompt."""
ROUNDS = 3
ARMS = ("ours", "vllm")


def prompts(rows: int, length: int, round_: int) -> list[list[int]]:
    """Token ids of a prompt for each group; no two rounds share a prefix."""
    return [
        [5 + (7919 * round_ + 17 * i + j) % 40_000 for j in range(length)]
        for i in range(rows // GROUP)
    ]


def median_seconds(work: Callable[[int], int], rows: int) -> float:
    """Return the median seconds of some rounds after one to warm up.

    Raises:
        RuntimeError: not all tokens were made.
    """
    times = []
    for round_ in range(ROUNDS + 1):
        started = time.perf_counter()
        made = work(round_)
        times.append(time.perf_counter() - started)
        if made != rows * NEW:
            raise RuntimeError(f"{made} tokens were made, not {rows * NEW}")
    return statistics.median(times[1:])


def run_ours(model: str) -> dict[str, Any]:
    """Time our generator on every shape; `floor_s` is the roofline's bound of one round."""
    import torch

    from tfgrpo.rl.monitoring.roofline import measure_roofline
    from tfgrpo.rl.trainer import load_parts

    decoder = load_parts(f"local:{model_folder(model)}", dtype="bfloat16").decoder
    roofline = measure_roofline(decoder.embed.device, torch.bfloat16)
    found: dict[str, Any] = {}
    for rows, length in SHAPES:
        found[f"{rows} x {length}"] = _shape_of_ours(decoder, roofline, rows, length)
        torch.cuda.empty_cache()
    return {"shapes": found, "tb_s": roofline.tb_s, "tflop_s": roofline.tflop_s}


def _shape_of_ours(decoder: Any, roofline: Any, rows: int, length: int) -> dict[str, float]:
    import torch

    from tfgrpo.protocols import Sampling
    from tfgrpo.rl.generation.generator import GroupGenerator
    from tfgrpo.rl.monitoring.roofline import decode_floor_s

    sampling = Sampling(max_tokens=NEW, extra={"ignore_eos": True})
    generator = GroupGenerator(decoder, eos_ids=(), max_rows=rows, poll_steps=64)

    def work(round_: int) -> int:
        ids = prompts(rows, length, round_)
        seeds = [[100 * i + j for j in range(GROUP)] for i in range(len(ids))]
        made = generator.generate(ids, GROUP, sampling, seeds)
        torch.cuda.synchronize()
        return sum(len(one.token_ids) for group in made for one in group)

    seconds = median_seconds(work, rows)
    floor_s = decode_floor_s(decoder.shape, roofline, generator.counters, 2)
    return {"seconds": seconds, "floor_s": floor_s}


def run_vllm(model: str) -> dict[str, Any]:
    """Time vLLM's engine on every shape, as its users run it: asynchronous scheduling, prefix
    cache, CUDA graphs."""
    prepare_vllm()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model_folder(model)),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=512,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=True,
        disable_log_stats=True,
        generation_config="vllm",
        async_scheduling=True,
    )
    options = {"temperature": 1.0, "n": GROUP, "max_tokens": NEW, "ignore_eos": True}
    params = SamplingParams(**options, detokenize=False, logprobs=0)
    found: dict[str, Any] = {}
    for rows, length in SHAPES:

        def work(round_: int, rows: int = rows, length: int = length) -> int:
            asked = [{"prompt_token_ids": ids} for ids in prompts(rows, length, round_)]
            made = llm.generate(asked, params, use_tqdm=False)
            return sum(len(c.token_ids) for one in made for c in one.outputs)

        found[f"{rows} x {length}"] = {"seconds": median_seconds(work, rows)}
    return {"shapes": found}


def run_all(out: Path, seconds: float, models: list[str]) -> None:
    """Run both arms for each model, each arm on a GPU of its own where there are two."""
    import torch

    end = time.monotonic() + seconds
    cards = torch.cuda.device_count()
    call = str(int(time.time()))
    for model in models:
        model_folder(model)

    def arm(name: str) -> None:
        place = str(ARMS.index(name) % max(1, cards))
        for model in models:
            row = {"arm": name, "model": model, "call": call, "card": torch.cuda.get_device_name()}
            left = end - time.monotonic()
            module = "tests.benchmarks.rl.rl_vllm"
            child = Child([module, "--arm", name, "--models", model], CUDA_VISIBLE_DEVICES=place)
            row |= child.figures(max(1.0, left))
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row)[:900], flush=True)

    if cards > 1:
        with ThreadPoolExecutor(len(ARMS)) as pool:
            list(pool.map(arm, ARMS))
    else:
        for name in ARMS:
            arm(name)


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures; of several calls the last one counts."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    by = {(r["call"], r["model"], r["arm"]): r for r in rows if "shapes" in r}
    ratios: dict[str, float] = {}
    shares: dict[str, float] = {}
    for (call, model, arm), row in by.items():
        theirs = by.get((call, model, "vllm"), {})
        for shape, mine in row["shapes"].items() if arm == "ours" else ():
            shares[f"{model} {shape}"] = round(mine["floor_s"] / mine["seconds"], 3)
            if theirs:
                ratio = theirs["shapes"][shape]["seconds"] / mine["seconds"]
                ratios[f"{model} {shape}"] = round(ratio, 2)
    cards = ", ".join(dict.fromkeys(r["card"] for r in rows))
    figures = {"ratio_vllm": ratios, "roofline_share": shares, "rows": rows}
    record("rl_vllm", figures, COMMAND, cards)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--collect", nargs="+", type=Path)
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
    elif given.arm:
        tell({"ours": run_ours, "vllm": run_vllm}[given.arm](given.models[0]))
    else:
        run_all(given.out, given.seconds, given.models)


if __name__ == "__main__":
    main()
