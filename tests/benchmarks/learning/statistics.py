"""Coverage of the intervals, the gate's error over whole runs, power of the entry values.

`python -m tests.benchmarks.learning.statistics` writes `coverage`, `gate_error`, `gate_level` and
`power`, each over 1,000 simulated runs, with the cases they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.benchmarks.record import record
from tfgrpo.experience.entry_value import Observation, expected_power, inclusion_plan, value_entries
from tfgrpo.experience.gate_rules import gate_step
from tfgrpo.statistics import gate_level, paired_difference

RUNS = 1000
TASKS = 40
DRAWS = 4
LEVEL = 0.95
GATE_LEVEL = 0.90
LOOKS = 6
MAX_HARM = 0.01

Chances = tuple[NDArray[np.float64], NDArray[np.float64]]


def rare(rng: Generator) -> Chances:
    """Most tasks nearly always fail; nothing changes."""
    p = rng.beta(0.5, 5, TASKS)
    return p, p


def skewed(rng: Generator) -> Chances:
    """A few of many failing tasks gain a lot."""
    p = rng.beta(0.3, 6, TASKS)
    return p, np.where(rng.random(TASKS) < 0.15, p + (1 - p) * rng.beta(2, 2, TASKS), p)


def near_ceiling(rng: Generator) -> Chances:
    """Tasks nearly always succeed; a third of the rest is mended."""
    p = rng.beta(9, 1, TASKS)
    return p, p + (1 - p) * 0.3


def bimodal(rng: Generator) -> Chances:
    """Tasks are easy or hard; a fifth change places at random."""
    p = rng.beta(0.3, 0.5, TASKS)
    return p, np.where(rng.random(TASKS) < 0.2, rng.beta(2, 2, TASKS), p)


def middling(rng: Generator) -> Chances:
    """Tasks of middling chance move to the middle."""
    p = rng.beta(2, 2, TASKS)
    return p, p * 0.8 + 0.15


SHAPES: dict[str, Callable[[Generator], Chances]] = {
    f.__name__: f for f in (rare, skewed, near_ceiling, bimodal, middling)
}


def scores(rng: Generator, chances: NDArray[np.float64]) -> dict[str, list[float]]:
    drawn = rng.random((len(chances), DRAWS)) < chances[:, None]
    return {f"t{i}": row for i, row in enumerate(drawn.astype(float).tolist())}


def coverage(shape: Callable[[Generator], Chances]) -> float:
    """Share of runs whose interval holds the difference between the two populations of tasks."""
    rng = np.random.default_rng(1)
    many = [shape(rng) for _ in range(20_000)]
    truth = float(np.mean([q.mean() - p.mean() for p, q in many]))
    hits = 0
    for seed in range(RUNS):
        p, q = shape(rng)
        interval = paired_difference(scores(rng, p), scores(rng, q), level=LEVEL, seed=seed)
        hits += interval.low <= truth <= interval.high
    return hits / RUNS


def gate_error() -> float:
    """Share of whole runs in which any of `LOOKS` proposals that harm by `MAX_HARM` is accepted."""
    wrong = 0
    for seed in range(RUNS):
        rng = np.random.default_rng(10_000 + seed)
        p = MAX_HARM + (1 - MAX_HARM) * rng.beta(1, 2, TASKS)
        current = scores(rng, p)
        for look in range(1, LOOKS + 1):
            decision = gate_step(
                current,
                scores(rng, p - MAX_HARM),
                max_harm=MAX_HARM,
                level=gate_level(look, LOOKS, GATE_LEVEL),
                seed=seed,
            )
            if decision.accepted:
                wrong += 1
                break
    return wrong / RUNS


def entry_power(effect: float) -> dict[str, float]:
    """How often the one good entry among ten is found, and how often an idle one is taken."""
    entries = [f"e{i}" for i in range(10)]
    draws, found, first, wrong = 20, 0, 0, 0
    for seed in range(RUNS):
        rng = np.random.default_rng(20_000 + seed)
        rows = []
        for t, base in enumerate(rng.beta(2, 3, TASKS) * 0.7):
            for shown in inclusion_plan(entries, draws, keep=0.5, seed=seed * 1000 + t):
                reward = float(rng.random() < base + effect * ("e3" in shown))
                rows.append(Observation(f"t{t}", reward, shown, frozenset(entries), 0.5))
        values = value_entries(rows)
        first += values[0].experience_id == "e3"
        found += any(v.p_value < 0.05 and v.experience_id == "e3" for v in values)
        wrong += any(v.p_value < 0.05 and v.experience_id != "e3" for v in values)
    return {
        "power": found / RUNS,
        "power_stated": expected_power(
            effect, TASKS * draws, 10, n_tasks=TASKS, reward_sd=reward_sd(effect)
        ),
        "ranked_first": first / RUNS,
        "wrong_entry": wrong / RUNS,
        "effect": effect,
        "rollouts": TASKS * draws,
    }


def reward_sd(effect: float) -> float:
    """Standard deviation of a reward within its task, over the tasks of `entry_power`."""
    base = np.random.default_rng(3).beta(2, 3, 100_000) * 0.7 + effect / 2
    return math.sqrt(float((base * (1 - base)).mean()))


def main() -> None:
    covered = {name: coverage(shape) for name, shape in SHAPES.items()}
    farthest = max(covered.values(), key=lambda c: abs(c - LEVEL))
    strong, weak = entry_power(0.15), entry_power(0.08)
    figures = {
        "coverage": farthest,
        "coverage_nominal": LEVEL,
        "coverage_by_shape": covered,
        "gate_error": gate_error(),
        "gate_level": GATE_LEVEL,
        "gate_error_allowed": round(1 - GATE_LEVEL, 3),
        "gate_looks": LOOKS,
        "power": strong["power"],
        "power_stated": strong["power_stated"],
        "entry_value": [strong, weak],
        "runs": RUNS,
        "tasks": TASKS,
        "draws": DRAWS,
    }
    record("statistics", figures, "python -m tests.benchmarks.learning.statistics")


if __name__ == "__main__":
    main()
