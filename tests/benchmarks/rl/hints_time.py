"""What SAGE's extra rollouts cost in wall time: steps of GRPO and of SAGE on one GPU, same tasks.

64 prompts × 8, 256 forced new tokens, SmolLM2-135M. A third of the tasks fail until they are shown
a hint of level 1, 2 or 3 (as many of each), whatever the model writes; elsewhere the reward is the
parity of a checksum of the reply, so nearly every other group is mixed. Rounds cannot hide behind
replies that differ in length, since none does. `sage_stored` starts at a task's stored level, as
the paper's equation 13 does; the others at the bare task, as its algorithm 1 does.

    python -m tests.benchmarks.rl.hints_time --out rows.jsonl
    python -m tests.benchmarks.rl.hints_time --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_job import crc_parity, model_folder, questions
from tfgrpo.hints import make_scheduler
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.trainer import LoadedModel, Trainer, TrainerParts, load_parts
from tfgrpo.rollout import Rollout, Score, Task

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sage": {"name": "sage"},
    "sage_ahead": {"name": "sage", "ahead": True},
    "sage_stored": {"name": "sage", "restart": False},
}
WARM = 2
"""First steps of an arm, left out."""


def tasks(n: int) -> list[Task]:
    """Every third task needs a hint, of level 1, 2, 3 in turn."""
    made = []
    for i, text in enumerate(questions()[:n]):
        level = 1 + i // 3 % 3 if i % 3 == 0 else 0
        hints = [f"Step {k}: think of place {k} in the city first." for k in (1, 2, 3)]
        made.append(Task(f"q{i}", text, metadata={"needs": level, "hints": hints}))
    return made


class NeedsHint:
    """0 below the level that a task needs, else the parity of the reply's checksum."""

    verifier_id = "needs-hint"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task says what it needs."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Score the last turn's token ids."""
        hint = rollout.metadata.get("hint") or {}
        if int(hint.get("level", 0)) < int(task.metadata["needs"]):
            return Score(0.0)
        return Score(crc_parity(rollout.steps[-1].token_ids or ()))


def run_arm(
    arm: str,
    parts: LoadedModel,
    sampler: GroupGenerator,
    *,
    skip: bool,
    steps: int,
    n: int,
    new: int,
) -> dict[str, Any]:
    """Steps of one arm on the present weights."""
    gc.collect()  # an earlier trainer's gradients
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_mapping(
            {
                "model": {"checkpoint_activations": True},
                "rollout": {
                    "tasks_per_step": n,
                    "group_size": 8,
                    "max_tokens": new,
                    "ignore_eos": True,
                    "mismatch_row": 3.0,
                },
                "loss": {"skip_zero_advantage": skip},
                "optimiser": {"steps": 1000, "micro_batch_tokens": 40_960},
                "run": {"folder": folder, "deterministic": False},
            }
        )
        hints = make_scheduler(ARMS[arm]) if ARMS[arm] else None
        trainer = Trainer(
            config, parts, tasks(n), NeedsHint(), hints=hints, parts=TrainerParts(sampler=sampler)
        )
        figures = [trainer.step().figures for _ in range(WARM + steps)][WARM:]
    return {
        "method": arm,
        "skips_zero_advantage": skip,
        "step_seconds": [round(f["seconds"], 4) for f in figures],
        "step_s": statistics.median(f["seconds"] for f in figures),
        "rollout_s": statistics.median(f["rollout_seconds"] for f in figures),
        "update_s": statistics.median(f["update_seconds"] for f in figures),
        "completion_tokens": figures[-1]["completion_tokens"],
        "informative_share": figures[-1]["informative_share"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
    }


def collect(path: Path) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = step_times(rows)
    # Every row forwarded in both, as the published code does; the stricter ratios stand beside it.
    figures: dict[str, Any] = {"step_time": times}
    for name, ending in (("forwards_all_rows", ""), ("skips_zero_advantage", "_skipping")):
        for arm in ARMS:
            if arm != "grpo":
                figures[f"{arm}_ratio{ending}"] = times[name][arm]["ratio"]
    figures["rows"] = rows
    record("hints_time", figures, "python -m tests.benchmarks.rl.hints_time", rows[0]["card"])


def step_times(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows as seconds a step, and their ratio to GRPO's under equal settings."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = "skips_zero_advantage" if row["skips_zero_advantage"] else "forwards_all_rows"
        found.setdefault(name, {})[row["method"]] = {
            "step_s": round(row["step_s"], 3),
            "rollout_s": round(row["rollout_s"], 3),
            "update_s": round(row["update_s"], 3),
        }
    for arms in found.values():
        for one in arms.values():
            one["ratio"] = round(one["step_s"] / arms["grpo"]["step_s"], 3)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a few tokens, to try the code")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
        return
    n, new, rows = (6, 4, 64) if given.tiny else (64, 256, 896)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    parts = load_parts(f"local:{model_folder('smollm2')}")
    sampler = GroupGenerator(parts.decoder, eos_ids=(), max_rows=rows, poll_steps=16)
    for skip in (False, True):
        for arm in ARMS:
            began = time.monotonic()
            row = run_arm(arm, parts, sampler, skip=skip, steps=given.steps, n=n, new=new)
            row |= {"kind": "time", "card": card, "arm_s": round(time.monotonic() - began, 1)}
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
