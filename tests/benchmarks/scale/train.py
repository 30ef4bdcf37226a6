"""Whole training steps on one GPU and on several of one host: samples a second, efficiency.

The job is `rl_job`'s (64 prompts x 8, 256 forced tokens, random weights in Qwen2.5's shapes). Each
number of GPUs runs it as it is (`strong`: the same step shared) and with as many prompts more as
there are GPUs (`weak`), each process with all weights, or with `--shard` with a share of them.
Rows of one call are of one host.

    python -m tests.benchmarks.scale.train --out rows.jsonl --seconds 300   (--shard)
    python -m tests.benchmarks.scale.train --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_job import GROUP, NEW, PROMPTS, CrcParity, model_folder, questions

COMMAND = "python -m tests.benchmarks.scale.train"
WARM_UP = 2


def run_worker(model: str, steps: int, prompts: int, out: Path, *, shard: bool) -> None:
    """Train as one of the processes that torchrun started; the first writes the row."""
    import torch

    from tfgrpo.rl import distributed
    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.rl.trainer import Trainer, load_parts
    from tfgrpo.rollout import Task

    rank, processes = distributed.start()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_mapping({
            "rollout": {"tasks_per_step": prompts, "group_size": GROUP, "max_tokens": NEW,
                        "ignore_eos": True, "max_rows": 512},
            "model": {"shard": shard},
            "loss": {"skip_zero_advantage": False},
            "optimiser": {"steps": steps, "micro_batch_tokens": 7424},
            "run": {"folder": folder, "save_every": 10_000, "deterministic": False},
        })  # fmt: skip
        parts = load_parts(f"local:{model_folder(model)}", dtype="bfloat16")
        tasks = [Task(f"q{i}", text) for i, text in enumerate(questions(prompts))]
        trainer = Trainer(config, parts, tasks, CrcParity())
        reports = [trainer.step().figures for _ in range(steps)]
    kept = reports[WARM_UP:]
    seconds = statistics.median(r["seconds"] for r in kept)
    peaks = distributed.gather_objects(torch.cuda.max_memory_allocated() / 1e9)
    if rank == 0:
        row = {
            "step_s": round(seconds, 3),
            "rollout_s": round(statistics.median(r["rollout_seconds"] for r in kept), 3),
            "update_s": round(statistics.median(r["update_seconds"] for r in kept), 3),
            "samples_per_s": round(prompts * GROUP / seconds, 1),
            "peak_gb": round(max(peaks), 2),
            "grad_norm": kept[-1]["grad_norm"],
            "all_step_s": [round(r["seconds"], 3) for r in reports],
        }
        out.write_text(json.dumps(row))
    distributed.finish()
    if processes > 1:
        distributed.end()


def run_all(out: Path, seconds: float, models: list[str], steps: int, *, shard: bool) -> None:
    """Run every number of GPUs that there is, one after another, while time is left."""
    import torch

    end = time.monotonic() + seconds
    most = torch.cuda.device_count()
    card = torch.cuda.get_device_name() if most else "none"
    call = str(int(time.time()))
    gpus = [n for n in (1, 2, 4, 8) if n <= most]
    for model in models:
        model_folder(model)
        for kind, n in [("strong", n) for n in gpus] + [("weak", n) for n in gpus[1:]]:
            prompts = PROMPTS * (n if kind == "weak" else 1)
            row: dict[str, Any] = {"model": model, "kind": kind, "gpus": n, "prompts": prompts}
            row |= {"card": card, "call": call, "shard": shard and n > 1}
            job = ["--models", model, "--steps", str(steps), "--prompts", str(prompts)]
            job += ["--shard"] if row["shard"] else []
            left = end - time.monotonic()
            row |= _torchrun(n, job, left) if left > 20 else {"error": "no time"}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row)[:1500], flush=True)


def _torchrun(n: int, arguments: list[str], left: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        told = Path(place) / "row.json"
        job = ["-m", "tests.benchmarks.scale.train", "--worker", str(told), *arguments]
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *job]
        try:
            done = subprocess.run(
                [sys.executable, *run], capture_output=True, text=True, check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            return {"error": "no time"}
        if done.returncode or not told.exists():
            return {"error": done.stderr[-1500:]}
        row: dict[str, Any] = json.loads(told.read_text())
        return row


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    alone = {(r["call"], r["model"]): r for r in rows if r["gpus"] == 1 and "error" not in r}
    by_gpus: dict[str, dict[str, float]] = {}
    efficiency: dict[str, dict[str, float]] = {}
    for row in rows:
        one = alone.get((row["call"], row["model"]))
        if "error" in row or one is None:
            continue
        name = f"{row['model']} {row['kind']}"
        if any(r["shard"] for r in rows if (r["call"], r["model"]) == (row["call"], row["model"])):
            name += ", sharded"
        by_gpus.setdefault(name, {})[str(row["gpus"])] = row["samples_per_s"]
        share = row["samples_per_s"] / (row["gpus"] * one["samples_per_s"])
        efficiency.setdefault(name, {})[str(row["gpus"])] = round(share, 3)
    cards = ", ".join(dict.fromkeys(r["card"] for r in rows))
    figures = {"samples_per_s": by_gpus, "efficiency": efficiency, "rows": rows}
    record("scale_train", figures, COMMAND, cards)


def main() -> None:
    """Run, or collect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--models", nargs="+", default=["qwen05", "qwen15"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--collect", nargs="+", type=Path)
    options = parser.parse_args()
    if options.collect:
        collect(options.collect)
    elif options.worker:
        job = (options.models[0], options.steps, options.prompts, options.worker)
        run_worker(*job, shard=options.shard)
    else:
        run = (options.out, options.seconds, options.models, options.steps)
        run_all(*run, shard=options.shard)


if __name__ == "__main__":
    main()
