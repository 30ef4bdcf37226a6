"""Runs arms of a benchmark on the toy, each from the same weights and for the same rollouts.

An arm is the sections of a training run's TOML file, and is trained as `tfgrpo train` would. Rows
go to a file, one an arm and seed; `collect` turns rows of several seeds into recorded figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.record import record
from tests.benchmarks.rl.toy.warm_start import ON_GPU, ModelSize, start_model
from tests.benchmarks.rl.toy.world import ALL, RightChain, tasks
from tfgrpo.cli.train import allocator_of, top_up_of
from tfgrpo.hints import make_scheduler
from tfgrpo.protocols import Sampling
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.rollouts.factory import maker_of, own_generator
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.statistics import paired_difference, seeds_difference

ROOM = {"environment": "tests.benchmarks.rl.toy.world:Room", "max_tokens": 200, "max_turns": 8}
"""The `[multi_turn]` section of arms with several turns."""
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One method."""

    sections: Sections = field(default_factory=dict)
    turns: bool = False
    """A turn a line, in an environment."""
    base: str = "grpo"
    """The arm that it is held against."""
    letters: str = ""
    """Of its tasks; empty takes the benchmark's."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    tasks: int = 64
    held_out: int = 96
    draws: int = 8
    """A held-out task, at temperature 1."""
    prompts: int = 8
    group: int = 8
    new: int = 24
    lr: float = 1e-3
    rollouts: int = 2560
    """Budget of an arm; all rollouts count, those without a loss too."""
    looks: int = 4
    """Evaluations, equally far apart in rollouts."""
    rows: int = 128
    letters: str = ALL
    length: tuple[int, int] = (2, 4)
    model: ModelSize = field(default_factory=ModelSize)


TINY = Size(
    tasks=4,
    held_out=3,
    draws=2,
    prompts=2,
    group=8,
    new=8,
    rollouts=32,
    looks=1,
    rows=8,
    model=ModelSize(steps=20, rows=8),
)


class Bench:
    """The taught model, and what is done with it.

    Args:
        size: how much.
        device: `cpu` or `cuda`.
        folder: where runs write.
    """

    def __init__(self, size: Size, device: str, folder: Path) -> None:
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("TOY_THREADS", "1")))
        self.size = size
        self.folder = folder
        self.device = device
        self.parts, self.taught = start_model(size.model, device)
        decoder = self.parts.decoder
        self._start = {k: v.detach().clone() for k, v in decoder.state_dict().items()}

    def restore(self) -> None:
        """Put the start's weights back."""
        gc.collect()
        with torch.no_grad():
            for name, value in self.parts.decoder.state_dict().items():
                value.copy_(self._start[name])

    def config(self, arm: Arm, seed: int) -> TrainConfig:
        """The settings of an arm."""
        s = self.size
        base: dict[str, dict[str, Any]] = {
            "verifier": {
                "kind": "function",
                "function": "tests.benchmarks.rl.toy.world:RightChain",
            },
            "rollout": {
                "tasks_per_step": s.prompts,
                "group_size": s.group,
                "max_tokens": s.new,
                "max_rows": s.rows,
                "poll_steps": 4,
                "mismatch_mean": 0.5,
                "mismatch_row": 3.0,
                "max_skipped_steps": 1000,
            },
            "optimiser": {"steps": 400, "lr": s.lr, "micro_batch_tokens": 16_384},
            "run": {"folder": str(self.folder), "seed": seed, "deterministic": False},
        }
        if arm.turns:
            base["multi_turn"] = dict(ROOM)
            base["rollout"]["max_tokens"] = min(12, s.new)
        for name, values in arm.sections.items():
            base[name] = {**base.get(name, {}), **values}
        return TrainConfig.from_mapping(base)

    def given(self, arm: Arm, seed: int) -> tuple[list[Task], list[Task]]:
        """Training tasks of a seed, and held-out tasks, which are the same for all."""
        s = self.size
        letters = arm.letters or s.letters
        held = tasks(s.held_out, 10_001, letters, s.length, arm.turns)
        taken = {t.text for t in held}
        drawn = tasks(s.tasks + s.held_out, seed, letters, s.length, arm.turns)
        return [t for t in drawn if t.text not in taken][: s.tasks], held

    def run(self, name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """Train an arm to its budget and return its row."""
        self.restore()
        config = self.config(arm, seed)
        train, held = self.given(arm, seed)
        hints = make_scheduler(config.hints, tasks=train) if config.hints else None
        trainer = Trainer(
            config,
            self.parts,
            train,
            RightChain(),
            hints=hints,
            parts=TrainerParts(
                allocate=allocator_of(config.curriculum, config.rollout.group_size),
                top_up=top_up_of(config.curriculum),
            ),
        )
        trainer.updater.sync()
        look = Look(self, arm, held, seed)
        before = look()
        row = _train(trainer, self.size, look)
        kept = {} if hints is None else hints.figures()
        return {
            "arm": name,
            "seed": seed,
            "device": self.device,
            "start": statistics.mean(statistics.mean(x) for x in before.values()),
            **row,
            "scheduler": {k: round(v, 4) for k, v in kept.items()},
        }


class Look:
    """Evaluates the weights as they are, without help.

    Args:
        bench: the weights.
        arm: says whether there are turns.
        held_out: what is asked.
        seed: of the draws.
    """

    def __init__(self, bench: Bench, arm: Arm, held_out: Sequence[Task], seed: int) -> None:
        plain = Arm(turns=arm.turns)
        config = bench.config(plain, seed)
        self._held_out = held_out
        self._draws = bench.size.draws
        self._seed = derive_seed("toy look", seed)
        generator = own_generator(config, bench.parts, ())
        self._maker = maker_of(config, bench.parts, RightChain(), generator, None)
        self._sampling = Sampling(max_tokens=config.rollout.max_tokens)

    def __call__(self) -> dict[str, list[float]]:
        """Rewards by task."""
        groups: list[RolloutGroup] = self._maker.make(
            self._held_out, self._draws, seed=self._seed, sampling=self._sampling
        )
        return {g.task.task_id: list(g.rewards_G) for g in groups}


COUNTED = (
    "rollouts",
    "completion_tokens",
    "prompt_tokens",
    "write_tokens",
    "writes",
    "writes_unread",
    "value_rollouts",
    "decode_steps",
    "decode_row_steps",
    "trained_tokens",
    "input_tokens",
    "seconds",
    "rollout_seconds",
    "update_seconds",
)


def _train(trainer: Trainer, size: Size, look: Look) -> dict[str, Any]:
    sums = dict.fromkeys(COUNTED, 0.0)
    curve: list[float] = []
    signal: list[float] = []
    lengths: list[float] = []
    steps = updates = 0
    scores: dict[str, list[float]] = {}
    spent = 0.0
    while spent < size.rollouts:
        figures = trainer.step().figures
        steps += 1
        for name in COUNTED:
            sums[name] += figures.get(name, 0.0)
        spent = sums["rollouts"] + sums["value_rollouts"]
        updates += figures["grad_norm"] > 0
        signal.append(figures["informative_share"])
        lengths.append(figures["length_mean"])
        while spent >= size.rollouts * (len(curve) + 1) / size.looks:
            scores = look()
            curve.append(statistics.mean(statistics.mean(x) for x in scores.values()))
            if len(curve) == size.looks:
                break
    quarter = max(1, len(lengths) // 4)
    return {
        "final": curve[-1],
        "curve": [round(x, 4) for x in curve],
        "scores": {k: round(statistics.mean(v), 4) for k, v in scores.items()},
        "steps": steps,
        "updates": updates,
        "signal_share": round(statistics.mean(signal), 4),
        "length_first": round(statistics.mean(lengths[:quarter]), 2),
        "length_last": round(statistics.mean(lengths[-quarter:]), 2),
        **{k: round(v, 3) for k, v in sums.items() if v},
    }


def options(text: str, default: Size, on_gpu: Size) -> tuple[argparse.Namespace, Size]:
    """Read the command line that the benchmarks share, and the size that it means."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    parser.add_argument("--have", type=Path, nargs="+", default=[], help="rows of earlier calls")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the arms")
    parser.add_argument("--part", type=int, nargs=2, help="(this job's number, number of jobs)")
    parser.add_argument("--arms", nargs="+", default=[], help="some of the arms")
    parser.add_argument("--rollouts", type=int, help="budget of an arm")
    parser.add_argument("--seconds", type=float, default=460, help="no arm begins after")
    parser.add_argument("--tiny", action="store_true", help="a few rollouts, to try the code")
    parser.add_argument("--collect", type=Path, nargs="+", help="record the rows of these files")
    given = parser.parse_args()
    if given.part and given.out:
        given.out = given.out.with_name(f"{given.out.stem}-{given.part[0]}{given.out.suffix}")
    size = TINY if given.tiny else (on_gpu if given.device == "cuda" else default)
    if given.tiny and given.device == "cuda":
        size = replace(size, model=replace(ON_GPU, steps=20, rows=8))
    if given.rollouts:
        size = replace(size, rollouts=given.rollouts)
    return given, size


def run_arms(given: argparse.Namespace, size: Size, arms: Mapping[str, Arm]) -> None:
    """Run a seed's arms and add their rows to the file; arms that it holds are not run again.

    Raises:
        SystemExit: an arm that does not exist.
    """
    unknown = sorted(set(given.arms) - set(arms))
    if unknown:
        raise SystemExit(f"no arm {unknown[0]!r}; known are {', '.join(arms)}")
    known = [*given.have, *([given.out] if given.out else [])]
    have = {(r["arm"], r["seed"]) for r in _rows(known)}
    todo = [n for n in arms if (not given.arms or n in given.arms) and (n, given.seed) not in have]
    if given.part:
        todo = todo[given.part[0] :: given.part[1]]
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, given.device, Path(folder))
        print(json.dumps({"taught": bench.taught}), flush=True)
        for name in todo:
            if time.monotonic() > end:
                print(f"not run for lack of time: {name}", flush=True)
                continue
            began = time.perf_counter()
            row = bench.run(name, arms[name], given.seed)
            row["wall_s"] = round(time.perf_counter() - began, 2)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            told = {k: v for k, v in row.items() if k not in ("scores", "scheduler")}
            print(json.dumps(told), flush=True)


def _rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def against(
    rows: Sequence[Mapping[str, Any]], arms: Mapping[str, Arm]
) -> dict[str, dict[str, Any]]:
    """Return each arm's means over seeds and its gain over its base arm, with an interval."""
    by = {(r["arm"], r["seed"]): r for r in rows}
    found: dict[str, dict[str, Any]] = {}
    for name, arm in arms.items():
        mine = {seed: r for (n, seed), r in by.items() if n == name}
        if not mine:
            continue
        one: dict[str, Any] = {"seeds": len(mine)}
        for key in MEANS:
            values = [r[key] for r in mine.values() if key in r]
            if values:
                one[key] = round(statistics.mean(values), 4)
        one["area"] = round(statistics.mean(statistics.mean(r["curve"]) for r in mine.values()), 4)
        pairs = [
            (_scores(by[arm.base, s]), _scores(r))
            for s, r in sorted(mine.items())
            if name != arm.base and (arm.base, s) in by
        ]
        if pairs:
            gap = seeds_difference(pairs) if len(pairs) > 1 else paired_difference(*pairs[0])
            one |= {
                "base": arm.base,
                "gain": round(gap.estimate, 4),
                "ci_low": round(gap.low, 4),
                "ci_high": round(gap.high, 4),
            }
        schedulers = [r["scheduler"] for r in mine.values() if r["scheduler"]]
        rates = {k for s in schedulers for k in s if k.endswith("rate")}
        for k in sorted(rates):
            one[k] = round(statistics.mean(s[k] for s in schedulers if k in s), 4)
        found[name] = one
    return found


MEANS = (
    "start", "final", "steps", "updates", "signal_share", "rollouts", "completion_tokens",
    "write_tokens", "writes", "writes_unread", "value_rollouts", "decode_steps",
    "decode_row_steps", "input_tokens", "length_first", "length_last", "seconds",
)  # fmt: skip
"""Figures of a row whose means over seeds are kept."""


def _scores(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {task_id: [value] for task_id, value in row["scores"].items()}


def collect(name: str, paths: Sequence[Path], arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Record the figures of rows as `results/NAME.json` and return them."""
    rows = _rows(paths)
    figures = {"against": against(rows, arms), "seeds": sorted({r["seed"] for r in rows})}
    device = sorted({r["device"] for r in rows})
    record(name, figures, f"python -m tests.benchmarks.rl.{name} --device {device[0]}")
    return figures


def main(
    text: str,
    name: str,
    arms: Mapping[str, Arm],
    default: Size,
    on_gpu: Size,
    further: Mapping[str, Arm] | None = None,
) -> None:
    """The command of a benchmark; `further` arms are run where they are named."""
    given, size = options(text, default, on_gpu)
    if given.collect:
        collect(name, given.collect, {**arms, **(further or {})})
        return
    if given.arms:
        arms = {**arms, **(further or {})}
    if given.jobs > 1:
        share(given.jobs, given.device, size)
        return
    run_arms(given, size, arms)


def share(jobs: int, device: str, size: Size) -> None:
    """Run this command in several processes, each with its share of the arms.

    Raises:
        SystemExit: a process failed.
    """
    start_model(size.model, device)  # once, before they ask for it
    command = (
        [sys.executable, "-m", spec.name] if (spec := sys.modules["__main__"].__spec__) else []
    )
    started = [
        subprocess.Popen([*command, *sys.argv[1:], "--part", str(i), str(jobs), "--jobs", "1"])
        for i in range(jobs)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"processes ended with {codes}")
