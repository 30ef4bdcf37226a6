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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.record import record
from tests.benchmarks.rl.toy import chains, letters, sums, warm_start
from tests.benchmarks.rl.toy.warm_start import ON_GPU, ModelSize
from tfgrpo.cli.train import allocator_of
from tfgrpo.errors import ConfigError
from tfgrpo.hints import make_scheduler
from tfgrpo.protocols import Sampling
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.rollouts.factory import maker_of, own_generator
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.statistics import paired_difference, seeds_difference

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One method."""

    sections: Sections = field(default_factory=dict)
    turns: bool = False
    """A turn a line, in an environment."""
    base: str = "grpo"
    """The arm that it is held against."""
    task: str = ""
    """What its tasks, or its setting, are about."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    model: ModelSize
    tasks: int
    held_out: int
    prompts: int
    """Groups of a step, of eight rollouts each."""
    new: int
    """Most tokens of a reply."""
    lr: float
    rollouts: int
    """Budget of an arm; all rollouts count, those without a loss too."""
    length: tuple[int, int]
    """Of what is asked for."""
    draws: int = 8
    """A held-out task, at temperature 1."""
    looks: int = 1
    """Evaluations, equally far apart in rollouts."""
    rows: int = 128


@dataclass(frozen=True, slots=True)
class World:
    """What is trained on."""

    module: Any
    """Has `tasks`, `Right` and `Room`."""
    start: Callable[[ModelSize, str], tuple[LoadedModel, dict[str, float]]]
    """The model that every arm starts from, of a size on a device."""
    cpu: Size
    gpu: Size

    def path(self, name: str) -> str:
        """Return the import string of a name in it."""
        return f"{self.module.__name__}:{name}"

    def given(self, n: int, seed: int, length: tuple[int, int], turns: bool) -> list[Task]:
        """Draw tasks."""
        found: list[Task] = self.module.tasks(n, seed, length, turns)
        return found


ON_CPU = ModelSize(hidden=32, layers=2, heads=2, head_size=16)
LETTERS = World(
    letters,
    letters.start_model,
    Size(ON_CPU, 48, 48, 4, 8, 5e-3, 512, (1, 3), draws=4),
    Size(ON_GPU, 128, 64, 16, 12, 3e-4, 7680, (1, 3), looks=4, rows=512),
)
CHAINS = World(
    chains,
    warm_start.start_model,
    Size(ModelSize(), 48, 48, 8, 16, 5e-4, 1024, (1, 3)),
    Size(ON_GPU, 256, 200, 16, 24, 3e-4, 7680, (2, 4), looks=4, rows=512),
)

LONG_SUMS = World(
    sums,
    sums.start,
    Size(ModelSize(steps=5000), 96, 96, 16, 40, 2e-4, 8192, (5, 5), looks=2),
    Size(ON_GPU, 256, 200, 16, 40, 3e-4, 7680, (5, 5), looks=4, rows=512),
)


class Bench:
    """The model that every arm starts from, and what is done with it.

    Args:
        world: what it is trained on.
        size: how much.
        device: `cpu` or `cuda`.
        folder: where runs write.
    """

    def __init__(self, world: World, size: Size, device: str, folder: Path) -> None:
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("TOY_THREADS", "1")))
        self.world = world
        self.size = size
        self.folder = folder
        self.device = device
        self.right = world.module.Right()
        self.parts, self.taught = world.start(size.model, device)
        decoder = self.parts.decoder
        self._before: dict[tuple[bool, int], float] = {}
        """Held-out rewards of the start, by whether there are turns and seed."""
        self._start = {k: v.detach().clone() for k, v in decoder.state_dict().items()}

    def restore(self) -> None:
        """Put the start's weights back."""
        if self.device == "cuda":
            gc.collect()
        with torch.no_grad():
            for name, value in self.parts.decoder.state_dict().items():
                value.copy_(self._start[name])

    def config(self, arm: Arm, seed: int) -> TrainConfig:
        """The settings of an arm."""
        s = self.size
        base: dict[str, dict[str, Any]] = {
            "verifier": {"kind": "function", "function": self.world.path("Right")},
            "rollout": {
                "tasks_per_step": s.prompts,
                "group_size": 8,
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
            room = self.world.path("Room")
            base["multi_turn"] = {"environment": room, "max_tokens": 200, "max_turns": 8}
        for name, values in arm.sections.items():
            base[name] = {**base.get(name, {}), **values}
        return TrainConfig.from_mapping(base)

    def given(self, arm: Arm, seed: int) -> tuple[list[Task], list[Task]]:
        """Training tasks of a seed, and held-out tasks, which are the same for all."""
        s = self.size
        held = self.world.given(s.held_out, 10_001, s.length, arm.turns)
        taken = {t.text for t in held}
        drawn = self.world.given(s.tasks + s.held_out, seed, s.length, arm.turns)
        return [t for t in drawn if t.text not in taken][: s.tasks], held

    def run(self, name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """Train an arm to its budget and return its row."""
        self.restore()
        config = self.config(arm, seed)
        train, held = self.given(arm, seed)
        hints = make_scheduler(config.hints, tasks=train) if config.hints else None
        by_pairs = config.verifier["kind"] == "win_rate"
        trainer = Trainer(
            config,
            self.parts,
            train,
            self.world.module.Duels() if by_pairs else self.right,
            hints=hints,
            parts=TrainerParts(allocate=allocator_of(config)),
        )
        trainer.updater.sync()
        look = Look(self, arm, held, seed)
        key = (arm.turns, seed)
        if key not in self._before:
            self._before[key] = statistics.mean(statistics.mean(x) for x in look().values())
        row = _train(trainer, self.size, look)
        kept = {} if hints is None else hints.figures()
        return {
            "arm": name,
            "seed": seed,
            "device": self.device,
            "start": self._before[key],
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
        generator = own_generator(config, bench.parts, None)
        self._maker = maker_of(config, bench.parts, bench.right, generator, None)
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
    "row_tokens",
    "mixed_groups",
    "useful_rollouts",
    "mean_variance",
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
        report = trainer.step()
        figures, steps = report.figures, steps + 1
        figures |= _of_groups(report.groups)
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
    sums["mean_variance"] /= steps
    return {
        "final": curve[-1],
        "curve": [round(x, 4) for x in curve],
        "scores": {k: round(statistics.mean(v), 4) for k, v in scores.items()},
        "steps": steps,
        "updates": updates,
        "signal_share": round(statistics.mean(signal), 4),
        "length_first": round(statistics.mean(lengths[:quarter]), 2),
        "length_last": round(statistics.mean(lengths[-quarter:]), 2),
        **{k: round(v, 5) for k, v in sums.items() if v},
    }


def _of_groups(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens in rows, groups that teach and their rollouts, and how well means are known."""
    teach = [g for g in groups if g.is_informative()]
    known = [
        statistics.variance(g.rewards_G) / len(g.rewards_G) for g in groups if len(g.rewards_G) > 1
    ]
    return {
        "row_tokens": sum(
            len(s.token_ids or ()) for g in groups for r in g.rollouts for s in r.steps
        ),
        "mixed_groups": len(teach),
        "useful_rollouts": sum(len(g.rollouts) for g in teach),
        "mean_variance": statistics.mean(known) if known else 0.0,
    }


def options(text: str, world: World) -> tuple[argparse.Namespace, Size]:
    """Read the command line that the benchmarks share, and the size that it means."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="rows are added to this file")
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
    size = world.gpu if given.device == "cuda" else world.cpu
    if given.tiny:
        few = replace(size.model, steps=20, rows=8)
        size = replace(size, model=few, tasks=4, held_out=3, draws=2, rollouts=64, looks=1)
    if given.rollouts:
        size = replace(size, rollouts=given.rollouts)
    return given, size


def run_arms(given: argparse.Namespace, world: World, size: Size, arms: Mapping[str, Arm]) -> None:
    """Run arms and add their rows to the file; rows that it holds are not made again.

    Raises:
        SystemExit: an arm that does not exist.
    """
    unknown = sorted(set(given.arms) - set(arms))
    if unknown:
        raise SystemExit(f"no arm {unknown[0]!r}; known are {', '.join(arms)}")
    have = {(r["arm"], r["seed"]) for r in _rows([given.out] if given.out else [])}
    todo = [(n, s) for s in given.seeds for n in arms if not given.arms or n in given.arms]
    todo = [one for one in todo if one not in have]
    if given.part:
        todo = todo[given.part[0] :: given.part[1]]
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(world, size, given.device, Path(folder))
        print(json.dumps({"taught": bench.taught}), flush=True)
        for name, seed in todo:
            if time.monotonic() > end:
                print(f"not run for lack of time: {name}, seed {seed}", flush=True)
                continue
            began = time.perf_counter()
            try:
                row = bench.run(name, arms[name], seed)
            except ConfigError as exc:  # a refusal is a finding; the other arms go on
                print(json.dumps({"arm": name, "refused": str(exc)}), flush=True)
                continue
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
            values = [r.get(key, 0.0) for r in mine.values()]
            one[key] = round(statistics.mean(values), 4)
        if one["mixed_groups"]:
            one["rollouts_per_mixed"] = round(one["rollouts"] / one["mixed_groups"], 2)
            one["useful_share"] = round(one["useful_rollouts"] / one["rollouts"], 4)
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
    "row_tokens", "mixed_groups", "useful_rollouts", "mean_variance", "write_tokens", "writes",
    "writes_unread", "value_rollouts", "decode_steps", "decode_row_steps", "input_tokens",
    "length_first", "length_last", "seconds",
)  # fmt: skip
"""Figures of a row whose means over seeds are kept."""


def _scores(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {task_id: [value] for task_id, value in row["scores"].items()}


def collect(name: str, paths: Sequence[Path], arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Record the figures of rows as `results/NAME.json` and return them."""
    rows = _rows(paths)
    found = against(rows, arms)
    told = ("gain", "ci_low", "ci_high", "seeds", "base")
    figures = {
        "rows": [
            {"entry": n, "task": arms[n].task}
            | {("gain_over_grpo" if k == "gain" else k): f[k] for k in told}
            for n, f in found.items()
            if "gain" in f
        ],
        "means": found,
        "seeds": sorted({r["seed"] for r in rows}),
    }
    device = sorted({r["device"] for r in rows})
    record(name, figures, f"python -m tests.benchmarks.rl.{name} --device {device[0]}")
    return figures


def main(text: str, name: str, arms: Mapping[str, Arm], world: World) -> None:
    """The command of a benchmark."""
    given, size = options(text, world)
    if given.collect:
        collect(name, given.collect, arms)
    elif given.jobs > 1:
        world.start(size.model, given.device)  # once, before they ask for it
        share(given.jobs)
    else:
        run_arms(given, world, size, arms)


def share(jobs: int) -> None:
    """Run this command in several processes, each with its share of the arms.

    Raises:
        SystemExit: a process failed.
    """
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
