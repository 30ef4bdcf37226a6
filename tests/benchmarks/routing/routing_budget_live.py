"""Rollout budgets in real training on one GPU: practice, dynamic sampling and uniform groups.

`--model smollm2`: SmolLM2-135M first learns by GRPO to answer easy sums with the number alone
(`hints_h100`); every arm starts from there and trains on sums of eight levels, from "7 + 5" to four
summands. `--model own`: the small model of `budget_model`, whose success rates run from never to
always by its making. All arms train until they have had the same number of full mixed groups,
through the settings of `tfgrpo.rl`:

    uniform     every group of a step is rolled whole, and trained as it is
    dynamic     rounds of whole groups until the step is full of mixed ones (`max_resample_rounds`)
    practice    the same rounds, sized by `allocate = "practice"`: prompts by their own history, a
                probe, hopeless groups stopped, mixed ones finished, what is left to new prompts

`rollouts_per_full_mixed_group` is what a group that was trained on cost, `made` counts the surplus
of a step's last round too. `gradient_noise` is measured after training: gradients of further steps
at fixed weights, tr Σ / |G|² times the rollouts of such a step, which is to say the rollouts that
make noise and signal equal (McCandlish, arXiv 1812.06162).

    python -m tests.benchmarks.routing.routing_budget_live --model smollm2 --out rows.jsonl
    python -m tests.benchmarks.routing.routing_budget_live --model own --out own.jsonl
    python -m tests.benchmarks.routing.routing_budget_live --collect rows.jsonl own.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.record import record
from tests.benchmarks.rl.hints_h100 import Bench, Log, Size, warm_start
from tests.benchmarks.rl.hints_tasks import ONLY
from tests.benchmarks.routing import budget_model
from tfgrpo.rl.optim.master_weights import Weights
from tfgrpo.rl.trainer import StepReport, Trainer
from tfgrpo.rollout import Task
from tfgrpo.statistics import seeds_difference

ROUNDS = 16
ARMS: dict[str, dict[str, Any]] = {
    "dynamic": {"max_resample_rounds": ROUNDS},
    "practice": {
        "max_resample_rounds": ROUNDS,
        "allocate": "practice",
        "allocate_options": {"probe": 3},
        "candidates": "all",
    },
    "uniform": {},
}
LOOKS = 4
"""Held-out evaluations of an arm, the last one at its end."""
SIZES = {
    "smollm2": Size(train=320, held_out=320, arm_s=45.0),
    "own": Size(train=400, held_out=400, arm_s=45.0, new=4, lr=1e-4),
}
STEPS = {"smollm2": 30, "own": 40}
"""Times `Size.prompts`: full mixed groups of an arm."""
NOISE_STEPS = 6


def _sum(low: int, high: int, *more: tuple[int, int]) -> Callable[[random.Random], tuple[str, int]]:
    def make(draw: random.Random) -> tuple[str, int]:
        parts = [draw.randint(*span) for span in ((low, high), *more)]
        return " + ".join(map(str, parts)), sum(parts)

    return make


def _difference(draw: random.Random) -> tuple[str, int]:
    b = draw.randint(10, 79)
    a = draw.randint(b + 10, 99)
    return f"{a} - {b}", a - b


def _product(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(3, 9), draw.randint(11, 39)
    return f"{a} * {b}", a * b


LEVELS: dict[str, Callable[[random.Random], tuple[str, int]]] = {
    "small": _sum(2, 20, (2, 9)),
    "one_digit": _sum(10, 99, (2, 9)),
    "two_digits": _sum(10, 99, (10, 99)),
    "difference": _difference,
    "three_digits": _sum(100, 199, (10, 99)),
    "product": _product,
    "three_summands": _sum(11, 99, (11, 99), (11, 99)),
    "four_summands": _sum(11, 60, (11, 60), (11, 60), (11, 60)),
}


def draw_tasks(n: int) -> list[Task]:
    """Return n different tasks, as many of each level, in a random order."""
    draw = random.Random("budget tasks")
    seen: dict[str, Task] = {}
    levels = list(LEVELS)
    while len(seen) < n:
        level = levels[len(seen) % len(levels)]
        asked, answer = LEVELS[level](draw)
        text = f"What is {asked}? {ONLY}"
        seen.setdefault(text, Task(f"{level}-{len(seen)}", text, answer))
    found = list(seen.values())
    draw.shuffle(found)
    return found


class Still:
    """Stands where an optimiser does: keeps what it would have been given and moves nothing."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._sum: dict[str, Tensor] = {}
        self._squares: list[float] = []

    def step(self, lr: float) -> float:
        """Add a step's gradient."""
        square = torch.zeros((), dtype=torch.float64)
        for name, g in self._weights.gradients().items():
            square += g.double().square().sum().cpu()
            self._sum[name] = self._sum[name].add_(g) if name in self._sum else g.float().clone()
        self._squares.append(float(square))
        self._weights.clear()
        return float(square.sqrt())

    def figures(self) -> dict[str, float]:
        """Unbiased tr Σ of a step's gradient and |G|² of its mean."""
        n = len(self._squares)
        if n < 2:
            return {"gradient_variance": 0.0, "gradient_signal": 0.0}
        mean = sum(float((s.double() / n).square().sum()) for s in self._sum.values())
        variance = n / (n - 1) * (statistics.mean(self._squares) - mean)
        return {"gradient_variance": variance, "gradient_signal": mean - variance / n}


def gradient_noise(trainer: Trainer, steps: int) -> dict[str, float | None]:
    """Measure the noise of further steps at the present weights, which stay as they are; None
    where it drowns the signal."""
    still = Still(trainer.updater.weights)
    trainer.updater.optimiser = still  # type: ignore[assignment]  # only `step` is called
    rollouts = [float(trainer.step().figures["rollouts"]) for _ in range(steps)]
    found, paid = still.figures(), statistics.mean(rollouts)
    signal = found["gradient_signal"]
    noise = found["gradient_variance"] * paid / signal if signal > 0 else None
    return found | {"noise_step_rollouts": paid, "gradient_noise": noise}


class Tally:
    """What an arm's steps cost and gave."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.rollouts = self.mixed_rollouts = 0.0
        self.full = self.made = 0
        self.groups_rolled = self.rounds = 0.0
        self.step_s: list[float] = []
        self.variance: list[float] = []
        self.of_task: Counter[str] = Counter()
        self.of_level: Counter[str] = Counter()

    def add(self, report: StepReport) -> None:
        """Take a step."""
        f = report.figures
        kept = [g for g in report.groups if g.is_informative()]
        full = [g for g in kept if len(g.graded) >= self._group]
        rolled = f.get("groups_rolled", len(report.groups))
        # Surplus mixed groups are not handed out; the share is of all groups that were rolled.
        made = round(f["informative_share"] * rolled)
        self.rollouts += f["rollouts"]
        self.full += len(full)
        self.made += made - (len(kept) - len(full))
        self.mixed_rollouts += sum(len(g.graded) for g in kept) + self._group * (made - len(kept))
        self.groups_rolled += rolled
        self.rounds += f.get("rounds", 1)
        self.step_s.append(f["seconds"])
        self.variance += [float(np.var(g.rewards_G, ddof=1)) / len(g.rewards_G) for g in full]
        self.of_task.update(g.task.task_id for g in full)
        self.of_level.update(g.task.task_id.rpartition("-")[0] for g in full)

    def figures(self) -> dict[str, Any]:
        """The arm's figures; `variance` is that of the mean reward over full mixed groups, times
        the rollouts paid, as in the replay."""
        full = max(1, self.full)
        return {
            "rollouts": int(self.rollouts),
            "full_mixed_groups": self.full,
            "rollouts_per_full_mixed_group": round(self.rollouts / full, 3),
            "rollouts_per_full_mixed_group_made": round(self.rollouts / max(1, self.made), 3),
            "useful_rollouts": round(self.mixed_rollouts / max(1.0, self.rollouts), 4),
            "trained_rollouts": round(self._group * self.full / max(1.0, self.rollouts), 4),
            "variance": round(sum(self.variance) / full**2 * self.rollouts, 4),
            "steps": len(self.step_s),
            "groups_rolled": int(self.groups_rolled),
            "rounds": int(self.rounds),
            "steps_s": round(sum(self.step_s), 2),
            "tasks_trained": len(self.of_task),
            "levels_trained": dict(self.of_level),
        }


def run_arm(
    bench: Bench, arm: str, tasks: tuple[list[Task], list[Task]], seed: int, seconds: float
) -> dict[str, Any]:
    """Train one arm to its number of full mixed groups, evaluate it, measure its gradients."""
    size, (train, held_out) = bench.size, tasks
    bench.restore()
    trainer = bench.trainer(train, held_out, None, seed, curriculum=ARMS[arm])
    target = size.rollouts // size.group
    tally, curve = Tally(size.group), [{"rollouts": 0, "heldout": trainer.evaluate()["mean"]}]
    began = time.perf_counter()
    while tally.full < target and time.perf_counter() - began < seconds:
        tally.add(trainer.step())
        if tally.full * LOOKS >= target * len(curve) and tally.full < target:
            curve.append(_look(trainer, tally))
    curve.append(_look(trainer, tally))
    drawn = bench.sample(held_out, 4, 1.0, 99, 0)
    noise = gradient_noise(trainer, NOISE_STEPS)
    return {
        "arm": arm,
        "seed": seed,
        **tally.figures(),
        **noise,
        "is_whole": tally.full >= target,
        "heldout": curve[-1]["heldout"],
        "heldout_pass1": round(statistics.mean(r for g in drawn for r in g.rewards_G), 4),
        "curve": curve,
        "scores": {g.task.task_id: g.mean_reward for g in drawn if g.rewards_G},
    }


def _look(trainer: Trainer, tally: Tally) -> dict[str, Any]:
    found = trainer.evaluate()
    return {"rollouts": int(tally.rollouts), "heldout": found["mean"]}


def rates_of(bench: Bench, tasks: Sequence[Task]) -> dict[str, Any]:
    """How success rates spread over the training tasks at the start, and by level."""
    groups = bench.sample(tasks, bench.size.group, 1.0, 7, 0)
    shares: dict[str, list[float]] = {}
    for g in groups:
        shares.setdefault(g.task.task_id.rpartition("-")[0], []).append(g.mean_reward or 0.0)
    whole = [s for level in shares.values() for s in level]
    return {
        "never": round(statistics.mean(s == 0 for s in whole), 4),
        "always": round(statistics.mean(s == 1 for s in whole), 4),
        "mixed": round(statistics.mean(0 < s < 1 for s in whole), 4),
        "by_level": {k: round(statistics.mean(v), 3) for k, v in sorted(shares.items())},
    }


def run(size: Size, given: argparse.Namespace) -> None:
    """All arms, seed after seed; a row is written as soon as it is made."""
    end = time.monotonic() + given.seconds
    log, took = Log(given.out), 0.0
    todo = [(seed, arm) for seed in given.seeds for arm in given.arms]
    with tempfile.TemporaryDirectory() as folder:
        bench, found = _start(size, Path(folder), given.model, log)
        tasks = found[: size.train], found[size.train :]
        log("tasks", {"model": given.model, **rates_of(bench, tasks[0])})
        for seed, arm in todo:
            left = end - time.monotonic()
            if left < 1.1 * took + 5:
                log("stopped", {"not_run": todo[todo.index((seed, arm)) :]})
                break
            began = time.monotonic()
            row = run_arm(bench, arm, tasks, seed, min(left - 8, size.arm_s))
            log("arm", {"model": given.model, **row})
            took = max(took, time.monotonic() - began)


def _start(size: Size, folder: Path, model: str, log: Log) -> tuple[Bench, list[Task]]:
    """The weights that every arm starts from, and the tasks."""
    if model == "own":
        made = folder / "model"
        made.mkdir()
        bench = Bench(size, folder, budget_model.make_model(made))
        log("load", {"model": model})
        return bench, budget_model.draw_tasks()
    bench = Bench(size, folder)
    log("load", {"model": model})
    log("warm_start", warm_start(bench))
    return bench, draw_tasks(size.train + size.held_out)


MEANS = (
    "rollouts_per_full_mixed_group",
    "rollouts_per_full_mixed_group_made",
    "useful_rollouts",
    "trained_rollouts",
    "variance",
    "gradient_noise",
    "heldout",
    "heldout_pass1",
    "steps_s",
)


def collect(paths: Sequence[Path]) -> None:
    """Turn rows into the recorded figures of each model."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    figures: dict[str, Any] = {}
    for model in SIZES:
        arms = [r for r in rows if r["kind"] == "arm" and r["model"] == model]
        if not arms:
            continue
        figures[model] = {
            arm: {name: _mean(r[name] for r in arms if r["arm"] == arm) for name in MEANS}
            for arm in ARMS
        }
        for other in ("dynamic", "uniform"):
            figures[model][f"against_{other}"] = against(arms, other)
    dropped = ("scores", "card")
    figures["rows"] = [{k: v for k, v in r.items() if k not in dropped} for r in rows]
    command = "python -m tests.benchmarks.routing.routing_budget_live"
    record("routing_budget_live", figures, command, next((r["card"] for r in rows), ""))


def _mean(values: Any) -> float | None:
    found = [v for v in values if v is not None]
    return round(statistics.mean(found), 4) if found else None


def against(rows: Sequence[Mapping[str, Any]], other: str) -> dict[str, Any]:
    """Practice beside another arm of the same seeds, each seed's figures and their interval."""
    mine = {r["seed"]: r for r in rows if r["arm"] == "practice"}
    base = {r["seed"]: r for r in rows if r["arm"] == other and r["seed"] in mine}
    seeds = sorted(base)
    found: dict[str, Any] = {"seeds": len(seeds)}
    for name, key in (("saved", "rollouts_per_full_mixed_group"), ("noise", "gradient_noise")):
        pairs = [(mine[s][key], base[s][key]) for s in seeds]
        ratios = [a / b - 1 for a, b in pairs if a is not None and b is not None]
        changes = [-x for x in ratios] if name == "saved" else ratios
        found[name] = [round(x, 4) for x in changes]
        found[f"{name}_mean"] = _mean(changes)
        found[f"{name}_ci"] = _interval(changes)
    found["variance"] = [round(mine[s]["variance"] / base[s]["variance"] - 1, 4) for s in seeds]
    found["heldout_at_equal_rollouts"] = [_at_equal_rollouts(mine[s], base[s]) for s in seeds]
    if len(seeds) > 1:
        pairs = [(_scores(base[s]), _scores(mine[s])) for s in seeds]
        gap = seeds_difference(pairs)
        found["heldout_at_equal_groups"] = round(gap.estimate, 4)
        found["heldout_ci"] = [round(gap.low, 4), round(gap.high, 4)]
    return found


def _interval(values: Sequence[float]) -> list[float] | None:
    """95 % of the mean over seeds, by Student's t."""
    from scipy.stats import t as student

    if len(values) < 2:
        return None
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values)
    half /= len(values) ** 0.5
    mean = statistics.mean(values)
    return [round(mean - half, 4), round(mean + half, 4)]


def _scores(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {task_id: [value] for task_id, value in row["scores"].items()}


def _at_equal_rollouts(mine: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """Held-out score less the other's where the one that spent fewer rollouts ended."""
    at = min(mine["curve"][-1]["rollouts"], base["curve"][-1]["rollouts"])
    a, b = (
        np.interp(at, [x["rollouts"] for x in r["curve"]], [x["heldout"] for x in r["curve"]])
        for r in (mine, base)
    )
    return round(float(a - b), 4)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seconds", type=float, default=390)
    parser.add_argument("--model", choices=list(SIZES), default="smollm2")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--collect", type=Path, nargs="+")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
        return
    size, steps = SIZES[given.model], given.steps or STEPS[given.model]
    run(replace(size, rollouts=steps * size.prompts * size.group), given)


if __name__ == "__main__":
    main()
