"""Hint curricula against plain GRPO on tasks that SmolLM2-135M cannot do yet, on one GPU.

The model first learns by GRPO to answer sums and differences with the number alone, asked plainly
or in a hint; every arm starts from there. As released it rambles at temperature 1, or repeats a
hint. Then a hard split is made of the first family of `FAMILIES` that is hard (fresh pass@8 at most
0.05) and where the strongest hint helps (pass@8 at least 0.25); without one the run ends with 3.
Hints are the first sentences of worked solutions. All arms spend the same number of rollouts,
hinted ones counted, and are evaluated without hints on held-out tasks of the same hard
distribution. Start and split are made once for all seeds. `--have` names rows of earlier calls
whose arms are not run again.

    python -m tests.benchmarks.rl.hints_h100 --out rows.jsonl --seeds 0 1 2 --seconds 560
    python -m tests.benchmarks.rl.hints_h100 --collect rows.jsonl time.jsonl

`time.jsonl` is of `hints_time`: what SAGE's rounds cost in wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.record import record
from tests.benchmarks.rl.hints_tasks import FAMILIES, WARM, LastNumber, hard_ones, pass_at, pool
from tests.benchmarks.rl.rl_job import model_folder
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints import make_scheduler
from tfgrpo.hints.answer_leaks import solution_of
from tfgrpo.hints.metadata import MetadataHints
from tfgrpo.hints.writer import parse_levels
from tfgrpo.prompts import render
from tfgrpo.protocols import HintScheduler, Sampling
from tfgrpo.rl.config import CurriculumConfig, TrainConfig
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.trainer import LoadedModel, Trainer, TrainerParts, load_parts
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.factory import open_allocator
from tfgrpo.statistics import paired_difference, seeds_difference

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sage": {"name": "sage"},
    "sage_light": {"name": "sage_light"},
    "scaf": {"name": "scaf"},
    "pope": {"name": "pope", "max_level": 3},
    "questa": {"name": "questa"},
    "sage_ahead": {"name": "sage", "ahead": True},
}
MOST_BARE, LEAST_HINTED = 0.05, 0.25
"""pass@8 of a fitting family's hard tasks: bare at most, under the strongest hint at least."""
FIRST = 5
"""Steps left out at the start of every timing: graphs are captured and kernels compiled there."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    prompts: int = 16
    group: int = 8
    new: int = 32
    lr: float = 2e-5
    warm: int = 80
    """Most steps of the warm start."""
    warm_reward: float = 0.55
    """Mean reward of five steps at which the warm start ends."""
    candidates: int = 600
    draws: int = 16
    """Draws that must all fail for a task to be hard."""
    train: int = 128
    held_out: int = 200
    rollouts: int = 9_216
    """Budget of an arm."""
    rows: int = 512
    """Slots of the generator."""
    written: int = 16
    """Tasks for which the model itself writes hints."""
    is_strict: bool = True
    """Whether a split that is not fit ends the run."""
    arm_s: float = 75.0
    """Longest training of an arm; one that is stopped by it says so (`is_whole`)."""


TINY = Size(
    prompts=2,
    group=2,
    new=4,
    warm=1,
    candidates=6,
    draws=2,
    train=4,
    held_out=2,
    rollouts=12,
    written=1,
    is_strict=False,
    rows=8,
)


class Fixed:
    """A `HintScheduler` that always gives the cut solution's level k."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._plans_of = MetadataHints()

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """The level's hint."""
        return [p for p in self._plans_of(task) if p.level == self._level] or [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """One round."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """The group."""
        return made[0].group

    def epoch_end(self) -> None:
        """Nothing changes."""

    def figures(self) -> dict[str, float]:
        """There are none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


class Bench:
    """Weights that every arm starts from, and what is done with them.

    Args:
        size: how much is done.
        folder: of the runs.
        model: folder of the weights; None takes SmolLM2-135M.
    """

    def __init__(self, size: Size, folder: Path, model: Path | None = None) -> None:
        self.size = size
        self.folder = folder
        self.parts: LoadedModel = load_parts(f"local:{model or model_folder('smollm2')}")
        self._start: dict[str, torch.Tensor] = {}
        self.keep()
        self._raw = self._start
        self.generator = GroupGenerator(
            self.parts.decoder,
            eos_ids=self.parts.eos_ids,
            detokenize=self.parts.text_of,
            max_rows=size.rows,
            poll_steps=4,
        )
        self.generator.reserve(size.rows, 256 + 8 * size.new, 8 * size.new)
        self.prompter = Prompter(
            self.parts.tokenizer, context_tokens=self.parts.decoder.shape.context
        )

    def keep(self) -> None:
        """Take the weights as they are for the start of every arm."""
        self._start = {k: v.detach().clone() for k, v in self.parts.decoder.state_dict().items()}

    def restore(self) -> None:
        """Put the start's weights back."""
        gc.collect()  # an earlier trainer's graphs and caches
        self._put(self._start)

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.parts.decoder.state_dict().items():
                value.copy_(weights[name])

    def trainer(
        self,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        hints: HintScheduler | None,
        seed: int,
        curriculum: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """A trainer on the present weights; `curriculum` is the section of its settings."""
        s, c = self.size, CurriculumConfig.model_validate(curriculum or {})
        config = TrainConfig.from_mapping(
            {
                "rollout": {
                    "tasks_per_step": s.prompts,
                    "group_size": s.group,
                    "max_tokens": s.new,
                    "max_rows": s.rows,
                    "poll_steps": 4,
                    "mismatch_mean": 0.5,
                    "mismatch_row": 3.0,
                },
                "optimiser": {"steps": 100_000, "lr": s.lr, "micro_batch_tokens": 16_384},
                "curriculum": c,
                "run": {"folder": str(self.folder), "seed": seed, "deterministic": False},
            }
        )
        return Trainer(
            config,
            self.parts,
            tasks,
            LastNumber(),
            held_out=held_out,
            hints=hints,
            parts=TrainerParts(
                sampler=self.generator,
                allocate=open_allocator(c.allocate, c.allocate_options, group_size=s.group),
            ),
        )

    def sample(
        self,
        tasks: Sequence[Task],
        draws: int,
        temperature: float,
        seed: int,
        level: int,
        new: int = 0,
    ) -> list[RolloutGroup]:
        """Groups of the present weights under a level of the cut solution."""
        sampling = Sampling(temperature=temperature, max_tokens=new or self.size.new)
        maker = SingleTurnMaker(
            self.generator, Grader(self.prompter, LastNumber()), sampling, policy_id="bench"
        )
        return maker.make(tasks, draws, seed=seed, hints=Fixed(level) if level else None)

    @contextmanager
    def as_released(self) -> Iterator[None]:
        """The weights before the warm start, for a block."""
        self._put(self._raw)
        try:
            yield
        finally:
            self._put(self._start)

    def pass8(self, tasks: Sequence[Task], level: int = 0, new: int = 0) -> dict[str, float]:
        """pass@1 and pass@8 of fresh draws at temperature 1."""
        groups = self.sample(tasks, 8, 1.0, 99, level, new)
        rewards = [r for g in groups for r in g.rewards_G]
        return {
            "pass1": round(statistics.mean(rewards), 4),
            "pass8": round(pass_at(groups), 4),
        }


def warm_start(bench: Bench) -> dict[str, Any]:
    """Teach the model to answer easy sums with a number alone; every arm starts from there."""
    s = bench.size
    tasks = pool(WARM, 40 * s.prompts, 1, "warm")
    trainer = bench.trainer(tasks, (), None, seed=0)
    rewards: list[float] = []
    began = time.perf_counter()
    for _ in range(s.warm):
        rewards.append(trainer.step().figures["reward_mean"])
        if len(rewards) >= 5 and statistics.mean(rewards[-5:]) >= s.warm_reward:
            break
    bench.keep()
    return {
        "steps": len(rewards),
        "seconds": round(time.perf_counter() - began, 1),
        "is_reached": statistics.mean(rewards[-5:]) >= s.warm_reward,
        "reward_first": round(rewards[0], 3),
        "reward_last": round(statistics.mean(rewards[-5:]), 3),
    }


def look_at(bench: Bench, family: str) -> dict[str, Any]:
    """How hard a family's hard tasks are, bare and under each level of hints."""
    s = bench.size
    tasks = pool(family, s.candidates, 1, family)
    hard = hard_ones(tasks, bench.sample, 5, s.draws)
    row: dict[str, Any] = {
        "family": family,
        "candidates": len(tasks),
        "hard": len(hard),
        "all_bare": bench.pass8(tasks[:100]),
        "hard_ids": [t.task_id for t in hard],
    }
    if hard:
        row |= {f"level_{k}": bench.pass8(hard[:100], k) for k in range(4)}
    return row


def choose(bench: Bench, whole: bool, log: Log) -> dict[str, Any]:
    """The first family that is hard enough, large enough and helped by its strongest hint.

    `whole` looks at every family.

    Raises:
        SystemExit: none is (status 3).
    """
    found: dict[str, Any] | None = None
    looks: list[dict[str, Any]] = []
    for family in FAMILIES:
        look = look_at(bench, family)
        looks.append(look)
        look["is_fit"] = (
            look["hard"] >= bench.size.train + bench.size.held_out
            and look["level_0"]["pass8"] <= MOST_BARE
            and look["level_3"]["pass8"] >= LEAST_HINTED
        )
        log("look", look)
        found = found or (look if look["is_fit"] else None)
        if found and not whole:
            break
    if found is None and not bench.size.is_strict:
        found = looks[0]
    if found is None:
        raise SystemExit(3)
    return found


def run_arm(
    bench: Bench,
    method: str,
    train: Sequence[Task],
    held_out: Sequence[Task],
    seed: int,
    seconds: float,
) -> dict[str, Any]:
    """Train one arm to its budget of rollouts and evaluate it without hints."""
    size = bench.size
    row: dict[str, Any] = {"method": method, "seed": seed}
    section = dict(ARMS[method])
    if method == "questa":  # the second stage is the second half of the budget
        steps = size.rollouts // (size.prompts * size.group)
        section["epochs"] = [max(1, steps // (2 * max(1, len(train) // size.prompts)))]
    hints = make_scheduler(section) if section else None
    bench.restore()
    trainer = bench.trainer(train, held_out, hints, seed)
    steps_s: list[float] = []
    sums = {"rollout_seconds": 0.0, "verify_seconds": 0.0, "update_seconds": 0.0}
    signal: list[float] = []
    rewards: list[float] = []
    levels: dict[str, int] = {}
    rollouts = updates = 0
    began = time.perf_counter()
    while rollouts < size.rollouts and time.perf_counter() - began < seconds:
        figures = trainer.step().figures
        rollouts += figures["rollouts"]
        updates += figures["trained_tokens"] > 0
        steps_s.append(figures["seconds"])
        signal.append(figures["informative_share"])
        rewards.append(figures["reward_mean"])
        for name in sums:
            sums[name] += figures[name]
        for name, n in figures.items():
            if name.startswith("groups_"):
                levels[name] = levels.get(name, 0) + n
    training_s = time.perf_counter() - began
    after = trainer.evaluate()
    drawn = bench.sample(held_out, 8, 1.0, 99, 0)
    kept = hints.figures() if hints is not None else {}
    return row | {
        "heldout": after["mean"],
        "ci_low": after["low"],
        "ci_high": after["high"],
        "heldout_tasks": after["tasks"],
        "heldout_pass1": round(statistics.mean(r for g in drawn for r in g.rewards_G), 4),
        "heldout_pass8": round(pass_at(drawn), 4),
        "scores": {g.task.task_id: sum(g.rewards_G) / len(g.rewards_G) for g in drawn},
        "rollouts": rollouts,
        "is_whole": rollouts >= size.rollouts,
        "steps": len(steps_s),
        "updates": updates,
        "seconds": round(training_s, 2),
        **{k: round(v, 2) for k, v in sums.items()},
        "step_seconds": [round(x, 4) for x in steps_s],
        "signal_share": round(statistics.mean(signal), 4),
        "signal_by_quarter": _quarters(signal),
        "reward_by_quarter": _quarters(rewards),
        "groups_by_hint": levels,
        "scheduler": {k: round(v, 4) for k, v in kept.items()},
    }


def _quarters(values: Sequence[float]) -> list[float]:
    n = len(values)
    cuts = [values[i * n // 4 : (i + 1) * n // 4] for i in range(4)]
    return [round(statistics.mean(c), 4) for c in cuts if c]


def self_written(bench: Bench) -> dict[str, Any]:
    """How many replies of the model as released hold three hints, asked once a task."""
    asked = [
        replace(t, prompt=render("hint_write", task=t.text, solution=solution_of(t)))
        for t in pool("other_notation", bench.size.written, 3, "write")
    ]
    with bench.as_released():
        groups = bench.sample(asked, 1, 0.7, 3, 0, 8 * bench.size.new)
    parsed = sum(parse_levels(r.answer) is not None for g in groups for r in g.rollouts)
    return {"replies": len(groups), "parsed": parsed, "parse_rate": parsed / len(groups)}


def ratio_at_equal_steps(mine: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    """Wall-clock over the steps that both took, the first few left out. Where GRPO has no signal it
    has nothing to update either, so this is no measure of what hints cost; `hints_time` is."""
    n = min(len(mine["step_seconds"]), len(base["step_seconds"]))
    if n <= FIRST:
        return None
    span = slice(FIRST, n)
    return sum(mine["step_seconds"][span]) / sum(base["step_seconds"][span])


class Log:
    """Rows to a file and, in short, to the console, each with the seconds since the last one."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        self._last = time.perf_counter()

    def __call__(self, kind: str, row: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        whole = {"kind": kind, **row, "phase_s": round(now - self._last, 1), "card": self._card}
        self._last = now
        with self._out.open("a") as file:
            file.write(json.dumps(whole) + "\n")
        short = {k: v for k, v in whole.items() if k not in ("scores", "step_seconds", "hard_ids")}
        print(json.dumps(short), flush=True)


def run(size: Size, given: argparse.Namespace) -> None:
    """All arms of all seeds; rows are written as they are made."""
    end = time.monotonic() + given.seconds
    log = Log(given.out)
    have = {
        (r["method"], r["seed"])
        for p in given.have
        for r in map(json.loads, p.read_text().splitlines())
        if r["kind"] == "arm" and r.get("is_whole")
    }
    todo = [(m, s) for s in given.seeds for m in given.arms if (m, s) not in have]
    todo.sort(key=lambda one: one[0] == "sage_ahead")  # the same groups as sage, so last
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, Path(folder))
        log("load", {})
        log("warm_start", warm_start(bench))
        look = choose(bench, given.explore, log)
        tasks = {t.task_id: t for t in pool(look["family"], size.candidates, 1, look["family"])}
        hard = [tasks[i] for i in look["hard_ids"]]
        n_train = min(size.train, len(hard) // 2)
        train, held_out = hard[:n_train], hard[n_train:][: size.held_out]
        with bench.as_released():
            released = bench.pass8(train, new=3 * size.new)
        split = {
            "family": look["family"],
            "is_fit": look["is_fit"],
            "train_tasks": len(train),
            "held_out_tasks": len(held_out),
            "train": bench.pass8(train),
            "held_out": bench.pass8(held_out),
            "as_released": released,
        }
        log("split", split)
        log("self_written", self_written(bench))
        took = 0.0
        for method, seed in todo:
            left = end - time.monotonic()
            if left < 1.2 * took + 5:
                log("stopped", {"not_run": todo[todo.index((method, seed)) :]})
                break
            began = time.monotonic()
            log("arm", run_arm(bench, method, train, held_out, seed, min(left, size.arm_s)))
            took = max(took, time.monotonic() - began)


def collect(paths: Sequence[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    arms = [r for r in rows if r["kind"] == "arm"]
    base = {r["seed"]: r for r in arms if r["method"] == "grpo"}
    figures: dict[str, Any] = {"against_grpo": {}}
    for method in ARMS:
        mine = {r["seed"]: r for r in arms if r["method"] == method and r["seed"] in base}
        pairs = [(_scores(base[s]), _scores(r)) for s, r in mine.items()]
        if method == "grpo" or not pairs:
            continue
        ratios = [ratio_at_equal_steps(r, base[s]) for s, r in mine.items()]
        known = [r for r in ratios if r is not None]
        gap = seeds_difference(pairs) if len(pairs) > 1 else paired_difference(*pairs[0])
        figures["against_grpo"][method] = {
            "pass1_gain": round(gap.estimate, 4),
            "ci_low": round(gap.low, 4),
            "ci_high": round(gap.high, 4),
            "seeds": len(pairs),
            "hard_split_step_ratios": [round(r, 3) for r in known],
        }
    dropped = ("scores", "step_seconds", "hard_ids", "card")
    figures["rows"] = [{k: v for k, v in r.items() if k not in dropped} for r in rows]
    card = next((r["card"] for r in rows), "")
    record("hints_h100", figures, "python -m tests.benchmarks.rl.hints_h100", card)


def _scores(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {task_id: [value] for task_id, value in row["scores"].items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--have", type=Path, nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--rollouts", type=int)
    parser.add_argument("--explore", action="store_true", help="look at every family first")
    parser.add_argument("--tiny", action="store_true", help="a few rollouts, to try the code")
    parser.add_argument("--collect", type=Path, nargs="+")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
        return
    size = TINY if given.tiny else Size()
    if given.rollouts:
        size = replace(size, rollouts=given.rollouts)
    run(size, given)


if __name__ == "__main__":
    main()
