"""Hint curricula against plain GRPO on tasks that SmolLM2-135M cannot do yet, on one GPU.

The model first learns to answer two-number sums with the number alone (`WARM` steps of GRPO, the
same start for every arm): as released it rambles at temperature 1, and no prompt hint changes that.
Then a hard split is made of the first family of `FAMILIES` that is hard (fresh pass@8 at most 0.05)
and where the strongest hint helps (pass@8 at least 0.25). Hints are cut from worked solutions. All
arms spend the same number of rollouts, hinted ones counted, and are evaluated without hints on
held-out tasks of the same hard distribution. One seed a call:

    python -m tests.benchmarks.hints_h100 --out rows.jsonl --seed 0 --seconds 480
    python -m tests.benchmarks.hints_h100 --out look.jsonl --explore --rollouts 7680 --arms grpo
    python -m tests.benchmarks.hints_h100 --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.hints_tasks import FAMILIES, LastNumber, hard_ones, pass_at, pool
from tests.benchmarks.record import record
from tests.benchmarks.rl_h100 import model_folder
from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import HintScheduler, Sampling
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.generator import GroupGenerator
from tfgrpo.rl.hints import make_scheduler
from tfgrpo.rl.hints.texts import MetadataHints
from tfgrpo.rl.rollouts import Prompter, RolloutMaker
from tfgrpo.rl.trainer import Parts, Trainer, load_parts
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.statistics import paired_difference, seeds_difference

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sage": {"name": "sage"},
    "sage_light": {"name": "sage_light"},
    "scaf": {"name": "scaf"},
    "pope": {"name": "pope", "max_level": 3},
    "questa": {"name": "questa"},
}
WARM_FAMILY = "sum_of_two"
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
    lr: float = 1e-5
    warm: int = 80
    """Most steps of the warm start."""
    warm_reward: float = 0.6
    """Mean reward of five steps at which the warm start ends."""
    candidates: int = 900
    draws: int = 24
    """Draws that must all fail for a task to be hard."""
    train: int = 192
    held_out: int = 300
    rollouts: int = 30_720
    """Budget of an arm."""
    rows: int = 512
    """Slots of the generator."""


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
    rows=8,
)


class Fixed:
    """A `HintScheduler` that always gives the cut solution's level k; 0 is the bare task."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._plans_of = MetadataHints()

    def start(self, task: Task) -> ContextPart | None:
        """The level's hint."""
        found = [p for p in self._plans_of(task) if p.level == self._level]
        return found[0].part() if found else None

    def after(self, task: Task, plan: Any, group: RolloutGroup) -> None:
        """Accept."""

    def epoch_end(self) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


class Bench:
    """Weights that every arm starts from, and what is done with them."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.parts: Parts = load_parts(f"local:{model_folder('smollm2')}")
        self._start: dict[str, torch.Tensor] = {}
        self.keep()
        self._raw = self._start

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
    ) -> Trainer:
        """A trainer on the present weights."""
        s = self.size
        config = TrainConfig.from_mapping(
            {
                "rollout": {
                    "tasks_per_step": s.prompts,
                    "group_size": s.group,
                    "max_tokens": s.new,
                    "max_rows": s.rows,
                    "poll_steps": 4,
                    "mismatch_mean": 0.5,
                },
                "optimiser": {"steps": 100_000, "lr": s.lr, "micro_batch_tokens": 16_384},
                "run": {"folder": str(self.folder), "seed": seed, "deterministic": False},
            }
        )
        return Trainer(config, self.parts, tasks, LastNumber(), held_out=held_out, hints=hints)

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
        generator = GroupGenerator(
            self.parts.decoder, eos_ids=self.parts.eos_ids, max_rows=self.size.rows, poll_steps=4
        )
        prompter = Prompter(self.parts.tokenizer, context_tokens=self.parts.decoder.shape.context)
        sampling = Sampling(temperature=temperature, max_tokens=new or self.size.new)
        maker = RolloutMaker(generator, prompter, LastNumber(), sampling, policy_id="bench")
        return maker.make(tasks, draws, seed=seed, hints=Fixed(level) if level else None)

    def raw_pass8(self, tasks: Sequence[Task]) -> dict[str, float]:
        """The same of the model as released, with 96 tokens, since it needs more words."""
        self._put(self._raw)
        found = self.pass8(tasks, new=3 * self.size.new)
        self.restore()
        return found

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
    tasks = pool(WARM_FAMILY, 40 * s.prompts, 1, "warm")
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
        "all_bare": bench.pass8(tasks[:200]),
        "hard_ids": [t.task_id for t in hard],
    }
    if hard:
        row |= {f"level_{k}": bench.pass8(hard[:200], k) for k in range(4)}
    return row


def choose(bench: Bench, looks: list[dict[str, Any]], whole: bool) -> dict[str, Any]:
    """The first family that is hard enough, large enough and helped by its strongest hint; where
    none is, the one that its strongest hint helps most, and the row says so.

    `whole` looks at every family.
    """
    found: dict[str, Any] | None = None
    for family in FAMILIES:
        if family == WARM_FAMILY:
            continue
        look = look_at(bench, family)
        looks.append(look)
        look["is_fit"] = (
            look["hard"] >= bench.size.train + bench.size.held_out
            and look["level_0"]["pass8"] <= MOST_BARE
            and look["level_3"]["pass8"] >= LEAST_HINTED
        )
        found = found or (look if look["is_fit"] else None)
        if found and not whole:
            break
    enough = [x for x in looks if x["hard"] >= 2]
    return found or max(enough, key=lambda x: x["level_3"]["pass8"])


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
    try:
        hints = make_scheduler(section) if section else None
    except ConfigError as exc:
        return {**row, "error": str(exc)}
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
        rollouts += trainer._maker.figures.rollouts
        updates += figures["trained_tokens"] > 0
        steps_s.append(figures["seconds"])
        signal.append(figures["informative_share"])
        rewards.append(figures["reward_mean"])
        for name in sums:
            sums[name] += figures[name]
        for level, n in trainer._maker.figures.levels.items():
            levels[level] = levels.get(level, 0) + n
    training_s = time.perf_counter() - began
    after = trainer.evaluate()
    drawn = bench.sample(held_out, 8, 1.0, 99, 0)
    kept = hints.record.figures() if hints is not None and hasattr(hints, "record") else {}
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


def self_written(folder: str, n: int = 16) -> dict[str, Any]:
    """How many replies of the model itself hold three hints, asked once a task."""
    import asyncio

    from tfgrpo.lm.local import LocalLM
    from tfgrpo.rl.hints.writer import write_hints

    lm = LocalLM(folder, max_tokens=256)
    tasks = pool("sum_of_three", n, 3, "write")
    sampling = Sampling(temperature=0.7, max_tokens=256)
    made = asyncio.run(write_hints(tasks, lm, retries=0, sampling=sampling))
    return {
        "replies": made.replies,
        "parsed": made.parsed,
        "parse_rate": made.parse_rate,
        "leaked": made.leaked,
        "fallbacks": len(made.fallbacks),
    }


def ratio_at_equal_steps(mine: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    """Wall-clock over the steps that both took, the first few left out."""
    n = min(len(mine["step_seconds"]), len(base["step_seconds"]))
    if n <= FIRST:
        return None
    span = slice(FIRST, n)
    return sum(mine["step_seconds"][span]) / sum(base["step_seconds"][span])


def run_seed(
    size: Size, seed: int, seconds: float, out: Path, arms: Sequence[str], whole: bool
) -> None:
    """All arms of one seed; rows are written as they are made."""
    end = time.monotonic() + seconds
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"

    def write(row: dict[str, Any]) -> None:
        row = {**row, "card": card}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        short = {k: v for k, v in row.items() if k not in ("scores", "step_seconds", "hard_ids")}
        print(json.dumps(short), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, Path(folder))
        looks: list[dict[str, Any]] = []
        raw = bench.pass8(pool("sum_of_three", min(200, size.candidates), 2, "raw"))
        row: dict[str, Any] = {"kind": "start", "seed": seed, "raw_sum_of_three": raw}
        row["warm_start"] = warm_start(bench)
        look = choose(bench, looks, whole)
        write(row | {"looks": [{k: v for k, v in x.items() if k != "hard_ids"} for x in looks]})
        tasks = {t.task_id: t for t in pool(look["family"], size.candidates, 1, look["family"])}
        hard = [tasks[i] for i in look["hard_ids"]]
        n_train = min(size.train, len(hard) // 2)
        train, held_out = hard[:n_train], hard[n_train:][: size.held_out]
        split = {
            "family": look["family"],
            "is_fit": look["is_fit"],
            "train_tasks": len(train),
            "held_out_tasks": len(held_out),
            "train": bench.pass8(train),
            "held_out": bench.pass8(held_out),
            "as_released": bench.raw_pass8(train),
        }
        write({"kind": "split", "seed": seed, **split})
        written = self_written(str(model_folder("smollm2")), 2 if size is TINY else 16)
        write({"kind": "self_written", "seed": seed, **written})
        for i, method in enumerate(arms):
            cap = (end - time.monotonic() - 10) / (len(arms) - i)
            write({"kind": "arm", **run_arm(bench, method, train, held_out, seed, cap)})


def collect(paths: Sequence[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    arms = [r for r in rows if r["kind"] == "arm" and "error" not in r]
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
            "time_ratio": round(statistics.mean(known), 3) if known else None,
            "time_ratios": [round(r, 3) for r in known],
        }
    figures["sage_ratio"] = figures["against_grpo"].get("sage", {}).get("time_ratio")
    dropped = ("scores", "step_seconds", "card")
    figures["rows"] = [{k: v for k, v in r.items() if k not in dropped} for r in rows]
    card = next((r["card"] for r in rows), "")
    record("hints_h100", figures, "python -m tests.benchmarks.hints_h100 --seed 0|1|2", card)


def _scores(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {task_id: [value] for task_id, value in row["scores"].items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=480)
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
    run_seed(size, given.seed, given.seconds, given.out, given.arms, given.explore)


if __name__ == "__main__":
    main()
