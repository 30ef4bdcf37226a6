"""Training on one GPU while vLLM servers on another one sample: step times by staleness.

The job is `rl_job`'s, with random weights in Qwen2.5-0.5B's shape and an output layer of its own
(vLLM's server keeps a tied one as it was). Every arm starts from the same weights with the same
servers; `max_staleness` 0 samples, trains and hands over in turn, 1 samples the next step beside
the update.

    python -m tests.benchmarks.scale.vllm_train --out rows.jsonl --seconds 250
    python -m tests.benchmarks.scale.vllm_train --collect rows.jsonl

vLLM must be importable; with one GPU servers and trainer share it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_job import (
    GROUP,
    NEW,
    PROMPTS,
    VLLM_ENVIRONMENT,
    CrcParity,
    model_folder,
    questions,
)
from tests.benchmarks.rl.vllm_cpu import wait_for
from tests.benchmarks.runs.child import Child, tell, tell_step

COMMAND = "python -m tests.benchmarks.scale.vllm_train"
MODEL = "qwen05_untied"
STEPS, WARM_UP = 7, 2
ARMS = {"one server": (1, 0), "one server, ahead": (1, 1), "two servers, ahead": (2, 1)}
"""Servers and `max_staleness`."""


@contextlib.contextmanager
def servers(folder: Path, count: int, logs: Path) -> Iterator[list[str]]:
    """Serve a folder with development endpoints; yields the base URLs."""
    import torch

    place = str(min(1, torch.cuda.device_count() - 1))
    started, urls = [], []
    for i in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "tests.benchmarks.scale.vllm_train", "--serve"]
        options = ["--served-model-name", str(folder), "--host", "127.0.0.1", "--port", str(port),
                   "--max-model-len", "2048", "--dtype", "bfloat16", "--max-num-seqs", "512",
                   "--gpu-memory-utilization", str(0.8 / count)]  # fmt: skip
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": place}
        env |= VLLM_ENVIRONMENT
        with (logs / f"server{i}.log").open("wb") as out:
            started.append(
                subprocess.Popen([*command, str(folder), *options], env=env, stdout=out, stderr=out)
            )
        urls.append(f"http://127.0.0.1:{port}/v1")
        wait_for(f"{urls[-1]}/models", started[-1], logs / f"server{i}.log")
    try:
        yield urls
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def run_arm(folder: Path, urls: list[str], staleness: int) -> dict[str, Any]:
    """Train some steps; the first ones warm up."""
    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.rl.generation import engine_of
    from tfgrpo.rl.trainer import Trainer, TrainerParts, load_parts
    from tfgrpo.rollout import Task

    with tempfile.TemporaryDirectory() as run:
        config = TrainConfig.from_mapping({
            "model": {"lm": f"local:{model_folder(MODEL)}"},
            "rollout": {"tasks_per_step": PROMPTS, "group_size": GROUP, "max_tokens": NEW,
                        "ignore_eos": True, "mismatch_mean": 0.1, "mismatch_row": 1.0},
            "loss": {"name": "decoupled_clip", "options": {"cap": 2.0},
                     "skip_zero_advantage": False},
            "engine": {"kind": "vllm-server", "folder": str(folder), "base_urls": urls,
                       "max_staleness": staleness, "concurrency": 512},
            "optimiser": {"steps": STEPS, "micro_batch_tokens": 7424, "moments": "bfloat16"},
            "run": {"folder": run, "save_every": 10_000, "deterministic": False},
        })  # fmt: skip
        model = load_parts(f"local:{model_folder(MODEL)}", dtype="bfloat16")
        tasks = [Task(f"q{i}", text) for i, text in enumerate(questions())]
        engine = engine_of(config, model)
        trainer = Trainer(config, model, tasks, CrcParity(), parts=TrainerParts(generator=engine))
        trainer.updater.sync()
        reports = []
        for _ in range(STEPS):
            reports.append(trainer.step().figures)
            tell_step(reports[-1]["seconds"])
    # the last step has no next one to sample beside it
    kept = reports[WARM_UP:-1]
    middle = {
        name: round(statistics.median(r.get(name, 0.0) for r in kept), 4)
        for name in ("seconds", "rollout_seconds", "update_seconds", "waited_seconds",
                     "mismatch_mean", "staleness", "dropped_stale")
    }  # fmt: skip
    return middle | {
        "samples_per_s": round(PROMPTS * GROUP / middle["seconds"], 1),
        "all_step_s": [round(r["seconds"], 3) for r in reports],
    }


def run_all(out: Path, seconds: float) -> None:
    """Run every arm against the same servers, while time is left."""
    import torch

    end = time.monotonic() + seconds
    card = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = shutil.copytree(model_folder(MODEL), place / "served")
        with servers(folder, 2, place) as urls:
            print(f"servers after {seconds - (end - time.monotonic()):.0f} s", flush=True)
            for arm, (count, staleness) in ARMS.items():
                job = ["tests.benchmarks.scale.vllm_train", "--arm", str(staleness)]
                child = Child([*job, "--folder", str(folder), "--urls", *urls[:count]],
                              CUDA_VISIBLE_DEVICES="0")  # fmt: skip
                row = {"arm": arm, "servers": count, "max_staleness": staleness, "card": card}
                row |= child.figures(max(1.0, end - time.monotonic()))
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row)[:1500], flush=True)


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    seconds = {r["arm"]: r["seconds"] for r in rows if "seconds" in r}
    base = seconds.get("one server")
    figures = {
        "step_s": seconds,
        "speedup": {n: round(base / s, 3) for n, s in seconds.items()} if base else {},
        "mismatch": {r["arm"]: r["mismatch_mean"] for r in rows if "seconds" in r},
        "rows": rows,
    }
    record("vllm_train", figures, COMMAND, ", ".join(dict.fromkeys(r["card"] for r in rows)))


def serve(arguments: list[str]) -> None:
    """Be `vllm serve`."""
    import types

    sys.modules.setdefault("pycountry", types.ModuleType("pycountry"))
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", "serve", *arguments]
    vllm_main()


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--arm", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--urls", nargs="+")
    parser.add_argument("--collect", nargs="+", type=Path)
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
    elif given.arm is not None:
        tell(run_arm(given.folder, given.urls, given.arm))
    else:
        run_all(given.out, given.seconds)


if __name__ == "__main__":
    main()
