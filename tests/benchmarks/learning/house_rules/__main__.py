"""House rules: what methods learn of conventions that no single task shows.

`python -m tests.benchmarks.learning.house_rules --families labels --methods default,gepa` prints a
row for each family, method, arm and noise, and writes `results/house_rules.json`. Captured gain is
(with - without) / (attainable - without) on the test tasks, attainable being the policy with the
true rules in its prompt at the same noise (1 without noise); `captured_of_1` takes 1 in its place.
Both simulators are described in `policy_simulator` and `critic_simulator`: what is measured is what
a method's prompts let a capable, honest pair learn, never a language model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.head_to_head.methods import Learnt, Unavailable
from tests.benchmarks.learning.house_rules.families import FAMILIES, Case, Family
from tests.benchmarks.learning.house_rules.families.family import shuffled_keys, wrong_keys
from tests.benchmarks.learning.house_rules.methods import (
    ARMS,
    RIVALS,
    Job,
    learn_ours,
    learn_rival,
    test_scores,
)
from tests.benchmarks.learning.house_rules.model import Account
from tests.benchmarks.learning.house_rules.page import merged, write_page
from tests.benchmarks.learning.house_rules.server import Bench
from tests.benchmarks.record import RESULTS, record
from tfgrpo.errors import TfgrpoError
from tfgrpo.statistics import Scores

COMMAND = "python -m tests.benchmarks.learning.house_rules"
T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14,
         19: 2.09}  # fmt: skip
"""Student's t, 97.5 %, by degrees of freedom."""

FAILED = (Unavailable, TfgrpoError)
"""A learner that cannot run here or fails: the row says so."""
SIDE_BY_SIDE = 3
"""Rivals' processes at once."""


@dataclass(frozen=True)
class Sizes:
    """Tasks of a run."""

    practice: int = 30
    gate: int = 16
    test: int = 40


@dataclass(frozen=True)
class Run:
    """One learning run and its test."""

    captured: float
    captured_of_1: float
    score: float
    tokens: int
    rollouts: int
    critic_calls: int
    prompt_tokens: float
    seconds: float
    note: str


async def one_run(bench: Bench, family: Family, method: str, job: Job, test: Sequence[Case]) -> Run:
    """Learn once and test; keys of the practice and gate tasks are the job's."""
    started = time.monotonic()
    if method in RIVALS:
        label = f"{family.name}-{method}-{job.arm.name}-{job.noise:g}-{job.seed}-{len(bench.seats)}"
        learnt = await learn_rival(method, job, bench, label)
        account = bench.seats[label].account
    else:
        account = Account()
        learnt = await learn_ours(method, job, account)
    seconds = time.monotonic() - started
    spent = Account()
    score = mean(await test_scores(learnt, job, test, spent))
    bare = mean(await test_scores(Learnt(family.system), job, test, Account()))
    told = Learnt(family.system + "\n\n" + "\n".join(family.rules))
    best = mean(await test_scores(told, job, test, Account()))
    return Run(
        captured=(score - bare) / (best - bare),
        captured_of_1=(score - bare) / (1.0 - bare),
        score=score,
        tokens=account.tokens,
        rollouts=account.calls["policy"],
        critic_calls=account.calls["critic"],
        prompt_tokens=spent.prompt_tokens / max(1, spent.calls["policy"]),
        seconds=seconds,
        note=learnt.note,
    )


def mean(scores: Scores) -> float:
    """Mean over tasks of the mean over draws."""
    return statistics.fmean(statistics.fmean(draws) for draws in scores.values())


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean and 95 % range over seeds by Student's t; the mean alone for one seed.

    >>> interval([0.5])
    (0.5, 0.5, 0.5)
    """
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, middle, middle
    half = T_975.get(len(values) - 1, 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


@dataclass(frozen=True)
class Cell:
    """One row of the table before it is run: a method in a family, over all seeds."""

    family: str
    method: str
    arm: str
    noise: float
    keys: str = "true"
    settings: str = "{}"
    sizes: Sizes = Sizes()

    async def run(self, bench: Bench, seed: int) -> Run:
        """Learn and test with one seed."""
        family = FAMILIES[self.family]
        split = family.draw(seed, self.sizes.practice, self.sizes.gate, self.sizes.test)
        practice, gate = split.practice, split.gate
        if self.keys == "shuffled":
            practice, gate = shuffled_keys(practice, seed), shuffled_keys(gate, seed + 1000)
        if self.keys == "wrong":
            practice = wrong_keys(practice, 0.1, seed)
        arm, settings = ARMS[self.arm], json.loads(self.settings)
        job = Job(family, practice, gate, self.noise, seed, arm, settings)
        return await one_run(bench, family, self.method, job, split.test)

    def run_alone(self, seed: int) -> Run:
        """The same in a process of its own, for methods of ours: no server is started."""
        return asyncio.run(self.run(Bench(), seed))


async def row_of(cell: Cell, bench: Bench, seeds: int, pool: Executor | None) -> dict[str, Any]:
    """Return one row of the table; seeds of our methods run in the pool's processes."""
    slots = asyncio.Semaphore(SIDE_BY_SIDE if cell.method in RIVALS else 1)
    loop = asyncio.get_running_loop()

    async def learn(seed: int) -> Run:
        if pool is not None and cell.method not in RIVALS:
            return await loop.run_in_executor(pool, cell.run_alone, seed)
        async with slots:
            return await cell.run(bench, seed)

    done = await asyncio.gather(*(learn(s) for s in range(seeds)), return_exceptions=True)
    runs = [r for r in done if isinstance(r, Run)]
    failed = "; ".join(f"{type(r).__name__}: {r}"[:200] for r in done if isinstance(r, FAILED))
    for other in done:
        if isinstance(other, BaseException) and not isinstance(other, FAILED):
            raise other
    row: dict[str, Any] = {"family": cell.family, "method": cell.method, "arm": cell.arm,
                           "noise": cell.noise, "keys": cell.keys, "seeds": len(runs)}  # fmt: skip
    if not runs:
        return row | {"captured": None, "note": failed}
    captured, low, high = interval([r.captured for r in runs])
    return row | {
        "captured": round(captured, 3),
        "ci_low": round(low, 3),
        "ci_high": round(high, 3),
        "captured_of_1": round(statistics.fmean(r.captured_of_1 for r in runs), 3),
        "score": round(statistics.fmean(r.score for r in runs), 3),
        "tokens": round(statistics.fmean(r.tokens for r in runs)),
        "rollouts": round(statistics.fmean(r.rollouts for r in runs)),
        "critic_calls": round(statistics.fmean(r.critic_calls for r in runs)),
        "prompt_tokens_per_call": round(statistics.fmean(r.prompt_tokens for r in runs)),
        "seconds": round(statistics.fmean(r.seconds for r in runs), 1),
        "note": failed or runs[-1].note,
    }


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole table, and what wrong and shuffled keys cost."""
    sizes = Sizes(options.practice, options.gate, options.test)
    cells = [
        Cell(family, method, arm, noise, keys, options.settings, sizes)
        for family in options.families
        for method in options.methods
        for arm in (options.arms if method not in (*RIVALS, "paper-main") else ("both",))
        for noise in options.noise
        for keys in options.keys
    ]
    pool = ProcessPoolExecutor(options.processes) if options.processes > 1 else None
    side_by_side = asyncio.Semaphore(len(cells) if pool else 1)

    async def row(cell: Cell) -> dict[str, Any]:
        async with side_by_side:
            found = await row_of(cell, bench, options.seeds, pool)
        print(json.dumps(found), flush=True)
        return found

    async with Bench().running() as bench:
        rows = list(await asyncio.gather(*map(row, cells)))
    return {"rows": rows, "practice": sizes.practice, "gate": sizes.gate, "test": sizes.test,
            **costs(rows)}  # fmt: skip


def costs(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what 10 % wrong keys cost each method, and what is captured from shuffled keys."""
    wrong: dict[str, float] = {}
    shuffled: dict[str, float] = {}
    for row in rows:
        if row["captured"] is None:
            continue
        name = f"{row['method']}/{row['arm']}/{row['family']}"
        same = ("family", "method", "arm", "noise")
        true = [r for r in rows if r["keys"] == "true" and all(r[k] == row[k] for k in same)]
        if row["keys"] == "wrong" and true and true[0]["captured"] is not None:
            wrong[name] = round(true[0]["captured"] - row["captured"], 3)
        if row["keys"] == "shuffled":
            shuffled[name] = row["captured"]
    return {"wrong_keys_cost": wrong, "shuffled_gain": shuffled}


def words(text: str) -> tuple[str, ...]:
    """Split a comma list."""
    return tuple(w for w in text.split(",") if w)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--families", type=words, default=tuple(FAMILIES))
    parser.add_argument(
        "--methods", type=words, default=("default", "paper-main", "gepa", "simba", "ace"),
        help=f"presets of tfgrpo, and {', '.join(RIVALS)}",
    )  # fmt: skip
    parser.add_argument("--arms", type=words, default=("both",), help=", ".join(ARMS))
    parser.add_argument(
        "--noise", type=lambda t: tuple(float(x) for x in t.split(",")), default=(0.0,)
    )
    parser.add_argument("--keys", type=words, default=("true",), help="true, wrong, shuffled")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="for our methods")
    parser.add_argument("--practice", type=int, default=Sizes.practice)
    parser.add_argument("--gate", type=int, default=Sizes.gate)
    parser.add_argument("--test", type=int, default=Sizes.test)
    parser.add_argument("--settings", default="{}", help="further keys of our config, JSON")
    parser.add_argument("--record", action="store_true", help="keep the rows, write the page")
    return parser.parse_args()


def main() -> None:
    options = parse()
    figures = asyncio.run(compare(options))
    if options.record:
        keep(figures)


def keep(figures: dict[str, Any]) -> None:
    """Put the rows beside those of earlier commands, and write the page."""
    kept = RESULTS / "house_rules.json"
    old = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = merged(old, figures["rows"])
    write_page(record("house_rules", {**figures, "rows": rows, **costs(rows)}, COMMAND))


if __name__ == "__main__":
    main()
