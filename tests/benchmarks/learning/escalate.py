"""The example `examples/escalate` whole: learn, escalate, and the table of four arms on test tasks.

Each seed changes the draws and the order of practice and of training; the splits stay as they are.
The headline figures are the mean over seeds on the same test tasks: per task the mean over seeds,
then an interval over tasks, so seeds narrow the noise of draws and never count as further tasks.
`over_seeds` are the differences with learning seeds as chance too: what a further seed may give.

With `--folder` the runs are kept there, and the same command goes on where it was cut. Seconds are
those of all sessions, by the journals, on whatever else the machine did.

Run: python -m tests.benchmarks.learning.escalate [--folder FOLDER] [SEED …]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.escalate.comparison import ARMS, PAIRS, Table, make_table
from tfgrpo.statistics import seeds_difference
from tfgrpo.store import Journal

EXAMPLE = Path(__file__).parents[3] / "examples" / "escalate" / "run.py"
SEEDS = (1, 2, 3)
Rewards = dict[str, dict[str, tuple[float, ...]]]


def example() -> ModuleType:
    """Import the example as a script is: by its file."""
    spec = importlib.util.spec_from_file_location("example_escalate", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(seed: int, folder: Path) -> tuple[dict[str, Any], Rewards]:
    """Run the example once; return its figures and the rewards of every arm by test task."""
    result = example().main(["--folder", str(folder), "--seed", str(seed)])
    rewards: Rewards = {}
    with Journal.open(folder, readonly=True) as store:
        learn_seconds = store.state().seconds
    with Journal.open(result.folder, readonly=True) as store:
        escalate_seconds = store.state().seconds
        for group in store.groups("test"):
            rewards.setdefault(group.metadata["arm"], {})[group.task.task_id] = group.rewards_G
    if result.kept == "base":
        rewards |= {n.replace("base", "trained"): dict(s) for n, s in rewards.items()}
    distilled = result.distilled
    row = {
        "seed": seed,
        "kept": result.kept,
        "choice": result.choice,
        "plan": result.preview.plan.to_dict(),
        "rows": None if distilled is None else distilled.rows,
        "row_tasks": None if distilled is None else distilled.tasks,
        "looks": None if distilled is None else distilled.looks,
        "grpo": None if result.practised is None else result.practised.reason,
        "verdict": result.table.verdict.status,
        **figures(result.table),
        "forecast_seconds": round(result.preview.cost.seconds, 1),
        "learn_seconds": round(learn_seconds, 1),
        "escalate_seconds": round(escalate_seconds, 1),
    }
    return row, rewards


def figures(table: Table) -> dict[str, Any]:
    """The arms, the differences and what was kept, as the results file has them."""
    arms = {
        name: {
            "score": round(i.estimate, 4),
            "ci_low": round(i.low, 4),
            "ci_high": round(i.high, 4),
        }
        for name, i in table.arms.items()
    }
    differences = {
        name: [round(d.estimate, 4), round(d.low, 4), round(d.high, 4)]
        for name, d in table.differences.items()
    }
    kept = table.retained
    return {
        **arms,
        "differences": differences,
        "retained": None if kept is None else kept.to_dict(),
    }


def pooled(runs: list[Rewards]) -> Table:
    """All seeds on the same tasks: rewards of a task side by side, a task being the unit."""
    together: Rewards = {}
    for arm in ARMS:
        if all(arm in rewards for rewards in runs):
            tasks = set.intersection(*(set(rewards[arm]) for rewards in runs))
            together[arm] = {
                t: tuple(r for rewards in runs for r in rewards[arm][t]) for t in sorted(tasks)
            }
    return make_table(together)


def over_seeds(runs: list[Rewards]) -> dict[str, list[float]] | None:
    """Differences with tasks and learning seeds both as chance; None for a single seed."""
    if len(runs) < 2:
        return None
    found = {}
    for name, (a, b) in PAIRS.items():
        if all(a in rewards and b in rewards for rewards in runs):
            d = seeds_difference([(rewards[a], rewards[b]) for rewards in runs])
            found[name] = [round(d.estimate, 4), round(d.low, 4), round(d.high, 4)]
    return found


def main() -> None:
    """Run every seed and record the figures of those that are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--folder", default="", help="keep the runs here and go on from them")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    rewards: list[Rewards] = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            row, found = run(seed, Path(given.folder or scratch) / f"seed-{seed}")
        rows.append(row)
        rewards.append(found)
        print(row, file=sys.stderr)
        whole = pooled(rewards)
        found_figures = {
            **figures(whole),
            "pairs": {name: list(pair) for name, pair in PAIRS.items()},
            "over_seeds": over_seeds(rewards),
            "verdict": whole.verdict.text,
            "tasks": next(iter(whole.arms.values())).n_tasks,
            "seeds": [r["seed"] for r in rows],
            "by_seed": rows,
        }
        record("escalate", found_figures, "python -m tests.benchmarks.learning.escalate")


if __name__ == "__main__":
    main()
