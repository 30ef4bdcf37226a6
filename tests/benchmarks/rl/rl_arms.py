"""The trainers and samplers that are timed on one GPU, one a process."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.rl.rl_job import (
    GROUP,
    NEW,
    PROMPTS,
    TRL_PLAIN,
    CrcParity,
    crc_parity,
    model_folder,
    prepare_vllm,
    questions,
)
from tests.benchmarks.runs.child import tell_step

COLOCATED = "colocated-trl"
"""TRL with vLLM in its own process, on the same GPU."""


def run_ours(
    model: str,
    steps: int,
    skip: bool = False,
    max_rows: int | None = None,
    micro: int | None = None,
    chunk: int = 2048,
    checkpoint: bool = False,
    moments: str = "float32",
) -> dict[str, Any]:
    """Our trainer; the first two steps are warm-up."""
    import torch

    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.rl.trainer import Trainer, load_parts
    from tfgrpo.rollout import Task

    rows = max_rows or 512
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_mapping(
            {
                "rollout": {
                    "tasks_per_step": PROMPTS,
                    "group_size": GROUP,
                    "max_tokens": NEW,
                    "ignore_eos": True,
                    "max_rows": rows,
                    "mismatch_mean": 0.1,
                },
                "loss": {"skip_zero_advantage": skip},
                "model": {"checkpoint_activations": checkpoint},
                "optimiser": {
                    "steps": steps,
                    "micro_batch_tokens": micro or (4608 if model == "smollm2" else 8192),
                    "vocabulary_chunk": chunk,
                    "moments": moments,
                },
                "run": {"folder": folder, "save_every": 10_000, "deterministic": False},
            }
        )
        parts = load_parts(f"local:{model_folder(model)}", dtype="bfloat16")
        tasks = [Task(f"q{i}", text) for i, text in enumerate(questions())]
        trainer = Trainer(config, parts, tasks, CrcParity())
        reports = []
        for _ in range(steps):
            reports.append(trainer.step().figures)
            tell_step(reports[-1]["seconds"])
    kept = reports[2:]
    step_s = statistics.median(r["seconds"] for r in kept)
    rollout_s = statistics.median(r["rollout_seconds"] for r in kept)
    return {
        "step_s": step_s,
        "samples_per_s": PROMPTS * GROUP / step_s,
        "rollout_s": rollout_s,
        "update_s": statistics.median(r["update_seconds"] for r in kept),
        "verify_s": statistics.median(r["verify_seconds"] for r in kept),
        "rollout_tokens_per_s": PROMPTS * GROUP * NEW / rollout_s,
        "rollout_floor_s": statistics.median(r["rollout_floor_seconds"] for r in kept),
        "update_tflop_s": statistics.median(r["update_tflop_s"] for r in kept),
        "update_floor_s": statistics.median(r["update_floor_seconds"] for r in kept),
        "roofline": {k: kept[-1][f"roofline_{k}"] for k in ("tb_s", "tflop_s")},
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "mixed_share": statistics.mean(r["informative_share"] for r in kept),
        "mismatch_mean": kept[-1].get("mismatch_mean"),
        "skipped_tokens": kept[-1]["skipped_tokens"],
        "grad_norm": kept[-1]["grad_norm"],
        "all_step_s": [round(r["seconds"], 3) for r in reports],
        "max_rows": rows,
        "micro_batch_tokens": config.optimiser.micro_batch_tokens,
        "checkpoint_activations": checkpoint,
    }


def run_trl(model: str, steps: int, kind: str, batch: int | None = None) -> dict[str, Any]:
    """TRL's trainer; the first step is warm-up."""
    if kind == COLOCATED:
        prepare_vllm()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder = str(model_folder(model))
    times: list[float] = []
    shares: list[float] = []
    norms: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            times[-1] = time.perf_counter() - times[-1]
            tell_step(times[-1])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "frac_reward_zero_std" in logs:
                shares.append(1 - logs["frac_reward_zero_std"])
                norms.append(float(logs.get("grad_norm", "nan")))

    def reward(completion_ids: Any, **_: Any) -> list[float]:
        return [crc_parity(ids) for ids in completion_ids]

    batch = batch or (8 if kind == "trl-defaults" else (32 if model == "smollm2" else 16))
    options: dict[str, Any] = {}
    if kind != "trl-defaults":
        options = {
            "model_init_kwargs": {"dtype": torch.bfloat16},
            "gradient_checkpointing": False,
        }
    if kind == "trl-bf16-liger":
        options["use_liger_kernel"] = True
    if kind == "trl-static":
        options["cache_implementation"] = "static"
    if kind == "trl-continuous":
        options["use_transformers_continuous_batching"] = True
    forced: dict[str, Any] = {"min_new_tokens": NEW}
    if kind == COLOCATED:
        forced = {"ignore_eos": True}
        options |= {"use_vllm": True, "vllm_max_model_length": 1024}
        # its pass for the ratio between both engines' log-probs: this is its fastest form
        options["vllm_importance_sampling_correction"] = False
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=PROMPTS * GROUP // batch,
            num_generations=GROUP,
            max_completion_length=NEW,
            learning_rate=1e-6,
            max_steps=steps,
            generation_kwargs=forced,
            **TRL_PLAIN,
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        data = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": q}]} for q in questions()]
        )
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    step_s = statistics.median(times[1:])
    return {
        "step_s": step_s,
        "samples_per_s": PROMPTS * GROUP / step_s,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "mixed_share": statistics.mean(shares) if shares else None,
        "grad_norm": norms[-1] if norms else None,
        "all_step_s": [round(t, 3) for t in times],
        "micro_batch_rows": batch,
    }


def _prompt_ids(rows: int) -> list[list[int]]:
    return [[5 + (17 * i + j) % 40_000 for j in range(120)] for i in range(rows // GROUP)]


def run_rollout_ours(model: str, rows: int) -> dict[str, Any]:
    """Tokens a second of our generator, prefill included; three warm-ups."""
    import torch

    from tfgrpo.protocols import Sampling
    from tfgrpo.rl.generation.generator import GroupGenerator
    from tfgrpo.rl.trainer import load_parts

    parts = load_parts(f"local:{model_folder(model)}", dtype="bfloat16")
    generator = GroupGenerator(parts.decoder, eos_ids=(), max_rows=rows, poll_steps=64)
    sampling = Sampling(max_tokens=NEW, extra={"ignore_eos": True})
    ids = _prompt_ids(rows)

    def work() -> None:
        seeds = [[100 * i + j for j in range(GROUP)] for i in range(len(ids))]
        generator.generate(ids, GROUP, sampling, seeds)

    seconds = _median_seconds(work, 3, 5)
    return {
        "rollout_tokens_per_s": rows * NEW / seconds,
        "step_ms": 1e3 * seconds / NEW,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def run_rollout_generate(model: str, rows: int, static: bool = False) -> dict[str, Any]:
    """Tokens a second of `generate`, dynamic or static cache."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=torch.bfloat16)
    loaded = loaded.cuda().eval()
    ids = torch.tensor(_prompt_ids(rows), device="cuda").repeat_interleave(GROUP, 0)
    options = {"cache_implementation": "static"} if static else {}

    def work() -> None:
        with torch.no_grad():
            loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                **options,
            )

    seconds = _median_seconds(work, 1, 2)
    return {
        "rollout_tokens_per_s": rows * NEW / seconds,
        "step_ms": 1e3 * seconds / NEW,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def _median_seconds(work: Callable[[], None], warm: int, rounds: int) -> float:
    import torch

    times = []
    for i in range(warm + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def run_arm(arm: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one arm in this process."""
    if arm.startswith("ours"):
        return run_ours(model, skip=arm == "ours-skip", **options)
    if arm.startswith("trl") or arm == COLOCATED:
        return run_trl(model, kind=arm, **options)
    if arm == "rollout-ours":
        return run_rollout_ours(model, **options)
    return run_rollout_generate(model, static=arm == "rollout-static", **options)
