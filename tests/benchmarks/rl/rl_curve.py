"""A learning curve on one GPU: SmolLM2-135M adds two-digit numbers, our trainer beside TRL's GRPO.

16 prompts × 8, at most 96 tokens, 40 steps, the same tasks, reward, learning rate and optimiser
settings; weights are float32 masters in both (TRL: float32 weights under autocast). Held-out
accuracy is greedy, made by the same generator for both, with an interval over tasks. One process a
run, one after another; those under `--together` share the card at the same time, so that only
their accuracy counts (`shared` in the row says so).

    python -m tests.benchmarks.rl.rl_curve --out rows.jsonl --runs ours:0 trl:0 \\
        --together trl:1 trl:2
    python -m tests.benchmarks.rl.rl_curve --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_job import TRL_PLAIN, model_folder
from tests.benchmarks.runs.child import Child, tell
from tfgrpo.rollout import Score, Task

STEPS, PROMPTS, GROUP, NEW, LR = 40, 16, 8, 96, 1e-5
TARGET = 0.5
"""Training reward (mean of five steps) whose time is reported."""


def tasks(n: int, seed: int, prefix: str) -> list[Task]:
    """Additions of two two-digit numbers; training and held-out ones never share a pair."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    chosen = pairs[:n] if prefix == "train" else pairs[-n:]
    return [
        Task(f"{prefix}-{a}-{b}", f"What is {a} + {b}? Give only the number.", a + b)
        for a, b in chosen
    ]


def is_right(text: str, answer: int) -> float:
    """1 when the last number of the text is the answer."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(found) and int(found[-1]) == answer)


class LastNumber:
    """The reward as a verifier."""

    verifier_id = "last-number"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task has an integer answer."""

    async def score(self, rollout: Any, task: Task) -> Score:
        """Compare the last number of the reply."""
        return Score(is_right(rollout.answer, task.reference))


def our_trainer(folder: str, seed: int, lm: str, dtype: str | None = None) -> Any:
    """Our trainer on the training tasks, with the held-out ones; `dtype` is of what runs."""
    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.rl.trainer import Trainer, load_parts

    config = TrainConfig.from_mapping(
        {
            "rollout": {
                "tasks_per_step": PROMPTS,
                "group_size": GROUP,
                "max_tokens": NEW,
                "max_rows": 256,
                "poll_steps": 8,
                "mismatch_mean": 0.2,
            },
            "optimiser": {"steps": STEPS, "lr": LR, "micro_batch_tokens": 16_384},
            "run": {"folder": folder, "seed": seed, "deterministic": False},
            "model": {} if dtype is None else {"dtype": dtype},
        }
    )
    return Trainer(
        config,
        load_parts(f"local:{lm}", dtype=dtype),
        tasks(640, 1, "train"),
        LastNumber(),
        held_out=tasks(400, 1, "held"),
    )


def run_ours(seed: int, dtype: str | None = None) -> dict[str, Any]:
    """Train and evaluate ours."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = our_trainer(folder, seed, str(model_folder("smollm2")), dtype)
        before = trainer.evaluate()
        start = time.perf_counter()
        curve = []
        for _ in range(STEPS):
            figures = trainer.step().figures
            curve.append((time.perf_counter() - start, figures["reward_mean"]))
        return _row(before, trainer.evaluate(), curve)


def run_trl(seed: int) -> dict[str, Any]:
    """Train with TRL; evaluate its weights by our generator."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lm = str(model_folder("smollm2"))
    curve: list[tuple[float, float]] = []
    start = 0.0

    class Clock(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal start
            start = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                curve.append((time.perf_counter() - start, float(logs["reward"])))

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        return [is_right(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=PROMPTS * GROUP // 32,
            num_generations=GROUP,
            max_completion_length=NEW,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            gradient_checkpointing=False,
            seed=seed,
            **TRL_PLAIN,
        )
        rows = [
            {"prompt": [{"role": "user", "content": t.prompt}], "answer": t.reference}
            for t in tasks(640, 1, "train")
        ]
        trainer = GRPOTrainer(
            model=lm,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(lm),
            callbacks=[Clock()],
        )
        trainer.train()
        judge = our_trainer(out, seed, lm)
        judge.generator.sync(dict(trainer.model.named_parameters()))
        return _row(None, judge.evaluate(), curve)


def _row(
    before: dict[str, Any] | None, after: dict[str, Any], curve: list[tuple[float, float]]
) -> dict[str, Any]:
    reached = None
    for i in range(4, len(curve)):
        if sum(r for _, r in curve[i - 4 : i + 1]) / 5 >= TARGET:
            reached = round(curve[i][0], 2)
            break
    return {
        "steps": len(curve),
        "heldout": after["mean"],
        "ci_low": after["low"],
        "ci_high": after["high"],
        "heldout_before": None if before is None else before["mean"],
        "heldout_tasks": after["tasks"],
        "seconds": round(curve[-1][0], 2),
        "seconds_to_target": reached,
        "target": TARGET,
        "rewards": [round(r, 3) for _, r in curve],
    }


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Difference of two means with Welch's 95 % interval.

    >>> difference([1.0, 3.0], [0.5, 1.5])["difference"]
    1.0
    """
    from scipy.stats import ttest_ind

    interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return {
        "difference": round(statistics.fmean(ours) - statistics.fmean(theirs), 4),
        "ci_low": round(float(interval.low), 4),
        "ci_high": round(float(interval.high), 4),
        "seeds": min(len(ours), len(theirs)),
    }


def _compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows; the trainers' times for the seeds that both ran alone on one machine; and the
    difference of their held-out accuracy over seeds, within the calls that ran both."""
    both = {r["call"] for r in rows if r["trainer"] == "ours"} & {
        r["call"] for r in rows if r["trainer"] == "trl"
    }
    held = {
        name: [r["heldout"] for r in rows if r["trainer"] == name and r["call"] in both]
        for name in dict.fromkeys(r["trainer"] for r in rows)
        if name != "trl"
    }
    theirs = [r["heldout"] for r in rows if r["trainer"] == "trl" and r["call"] in both]
    pairs = [
        (a, b)
        for a in rows
        for b in rows
        if (a["trainer"], b["trainer"]) == ("ours", "trl")
        and all(a[k] == b[k] for k in ("seed", "call"))
        and not any("error" in r or r["shared"] for r in (a, b))
    ]
    return {
        "rows": rows,
        **difference(held.pop("ours"), theirs),
        "others": {name: difference(values, theirs) for name, values in held.items() if values},
        "ratio_seconds": [round(b["seconds"] / a["seconds"], 2) for a, b in pairs],
        "ratio_seconds_to_target": [
            round(b["seconds_to_target"] / a["seconds_to_target"], 2)
            for a, b in pairs
            if a["seconds_to_target"] and b["seconds_to_target"]
        ],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", nargs="+", default=[])
    parser.add_argument("--together", nargs="+", default=[])
    parser.add_argument("--call", default=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    parser.add_argument("--one")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--collect", type=Path, nargs="+")
    given = parser.parse_args()
    if given.one:
        trainer, _, seed = given.one.partition(":")
        runs = {
            "ours": run_ours,
            "ours-float32": partial(run_ours, dtype="float32"),
            "trl": run_trl,
        }
        made = runs[trainer](int(seed))
        tell({"trainer": trainer, "seed": int(seed), **made})
        return
    if given.collect:
        rows = [json.loads(x) for p in given.collect for x in p.read_text().splitlines()]
        cards = ", ".join(dict.fromkeys(r["card"] for r in rows if "card" in r))
        record("rl_curve", _compared(rows), "python -m tests.benchmarks.rl.rl_curve", cards)
        return
    end = time.monotonic() + given.seconds
    for ones in [*([one] for one in given.runs), given.together]:
        _run_beside(ones, given.out, end, given.call)


def _run_beside(ones: list[str], out: Path, end: float, call: str) -> None:
    """Run these at the same time, each in a process, and write a row for each."""
    import torch

    running = [Child(["tests.benchmarks.rl.rl_curve", "--one", one]) for one in ones]
    for one, child in zip(ones, running, strict=True):
        trainer, _, seed = one.partition(":")
        row: dict[str, Any] = {"trainer": trainer, "seed": int(seed), "shared": len(ones) > 1}
        row |= {"call": call, **child.figures(max(1, end - time.monotonic()))}
        row["card"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:1200], flush=True)


if __name__ == "__main__":
    main()
