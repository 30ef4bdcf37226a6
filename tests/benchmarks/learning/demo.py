"""The demo as a measurement: the settings of `make demo`, then three further learning seeds.

The split rule, its seed and the tasks stay as they are in the repository; a seed changes the draws
and the order of practice. Each run starts from an empty folder.

Run: python -m tests.benchmarks.learning.demo
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo import Config, learn
from tfgrpo.learning.progress import PlainView
from tfgrpo.runtime.import_string import add_module_folder

FOLDER = Path(__file__).parents[3] / "examples" / "customer_messages"
FURTHER_SEEDS = (2, 3, 4)


def run(folder: str, seed: int | None) -> dict[str, Any]:
    """Learn once and return the figures of the test split."""
    overrides = [f'run.folder="{folder}/run"']
    if seed is not None:
        overrides.append(f"learn.seed={seed}")
    config = Config.from_toml(FOLDER / "config.toml", overrides)
    started = time.perf_counter()
    result = learn(config, view=PlainView())
    seconds = time.perf_counter() - started
    empty, kept = result.empty_score, result.library_score
    proof = result.learned.proof
    assert proof is not None and empty is not None and kept is not None
    difference = proof.difference
    return {
        "seed": config.learn.seed,
        "empty_score": round(empty.estimate, 4),
        "library_score": round(kept.estimate, 4),
        "difference": None if difference is None else round(difference.estimate, 4),
        "ci_low": None if difference is None else round(difference.low, 4),
        "ci_high": None if difference is None else round(difference.high, 4),
        "min_detectable": None
        if result.min_detectable is None
        else round(result.min_detectable, 4),
        "entries": [entry.kind for entry in result.library.shown],
        "gate": [
            [look.what, look.decision.accepted, look.decision.reason]
            for look in result.learned.looks
        ],
        "overlap_notes": list(result.notes),
        "draws_per_task": config.gate.test_group_size,
        "tasks_test": len(result.splits.test),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run all seeds and record the first one's figures with the others' intervals."""
    add_module_folder(FOLDER)
    runs = []
    for seed in (None, *FURTHER_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(folder, seed))
        print(runs[-1], file=sys.stderr)
    first = dict(runs[0])
    figures = first | {
        "ci_low_by_seed": {str(r["seed"]): r["ci_low"] for r in runs},
        "library_score_by_seed": {str(r["seed"]): r["library_score"] for r in runs},
        "empty_score_by_seed": {str(r["seed"]): r["empty_score"] for r in runs},
        "seconds_by_seed": {str(r["seed"]): r["seconds"] for r in runs},
        "entries_by_seed": {str(r["seed"]): r["entries"] for r in runs},
    }
    record("demo", figures, "python -m tests.benchmarks.learning.demo")


if __name__ == "__main__":
    main()
