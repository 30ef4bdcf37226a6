"""Head-to-head on the embedded model: one command, one table.

`python -m tests.benchmarks.head_to_head` writes `results/head_to_head.json` and
`docs/head_to_head.md`. Same model behind one server, same actor, same test tasks and draws, equal
tokens for learning counted at the server, three learning seeds that run side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.head_to_head.data import split
from tests.benchmarks.head_to_head.families import FAMILIES, Family
from tests.benchmarks.head_to_head.methods import (
    Learnt,
    Setup,
    Unavailable,
    learnt_by,
    test_scores,
    tips,
    voting_scores,
)
from tests.benchmarks.head_to_head.rivals import run_rival
from tests.benchmarks.head_to_head.server import HARD_LIMIT, Bench
from tests.benchmarks.head_to_head.table import write_page
from tests.benchmarks.record import RESULTS, commit, record
from tfgrpo.errors import TfgrpoError
from tfgrpo.lm import open_lm
from tfgrpo.statistics import Interval, Scores, mean_interval, paired_difference, seeds_difference

COMMAND = "python -m tests.benchmarks.head_to_head"
MAX_VOTES = 16


@dataclass(frozen=True)
class Options:
    """How large the comparison is."""

    seeds: int
    tests: int
    draws: int
    learn: int
    budget: int
    deadline_s: float
    methods: tuple[str, ...]
    families: tuple[str, ...] = tuple(FAMILIES)


@dataclass
class Row:
    """One method on one family in the table."""

    family: str
    method: str
    seeds: int = 0
    score: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    tokens: int = 0
    """Learning tokens a seed, mean over seeds; for voting, what it spends more at test time."""
    seconds: float = 0.0
    """Wall time of the learning, seeds side by side."""
    note: str = ""
    scores: list[Scores] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The row as it is kept; scores by task are left out."""
        return {k: v for k, v in vars(self).items() if k != "scores"}


Learner = Callable[[Bench, Setup, str], Awaitable[Learnt]]


def rival(name: str, script: str, **extra: object) -> Learner:
    """A learner that runs in an environment of its own."""

    async def learn(bench: Bench, setup: Setup, label: str) -> Learnt:
        marked = Setup(setup.family, setup.spec, setup.seed, setup.split, setup.budget_tokens,
                       setup.deadline_s, extra)  # fmt: skip
        return await run_rival(name, script, marked, bench.url(label))

    return learn


LEARNERS: dict[str, Learner] = {
    "tips": lambda bench, setup, label: tips(setup),
    "paper-main": lambda bench, setup, label: learnt_by("paper-main", setup),
    "dspy-simba": rival("dspy", "simba_arm.py"),
    "dspy-simba-demos": rival("dspy", "simba_arm.py", DEMOS=4),
    "gepa": rival("gepa", "gepa_arm.py"),
    "ace-playbook": rival("ace", "ace_arm.py"),
    "ours": lambda bench, setup, label: learnt_by("default", setup),
}
METHODS = ("none", "tips", "voting", *(m for m in LEARNERS if m != "tips"))


async def compare(options: Options) -> list[Row]:
    """Run every method on every family."""
    rows: list[Row] = []
    for family in options.families:
        rows += await compare_on(FAMILIES[family], options)
    return rows


async def compare_on(family: Family, options: Options) -> list[Row]:
    """Run every method on a family and return its row, `none` first."""
    lm = open_lm("local:smollm2-135m", max_rows=64)
    bench = Bench(lm, family)
    try:
        async with bench.running():
            rows = [await bare(bench, options)]
            for method in options.methods:
                if method == "none":
                    continue
                started = time.monotonic()
                if method == "voting":
                    row = await voting(bench, options, rows[0])
                else:
                    row = await learnt(bench, options, method, LEARNERS[method])
                finish(row, rows[0])
                rows.append(row)
                took = time.monotonic() - started
                # Each row as it comes, so that a run that is cut short has not been for nothing.
                print(json.dumps(row.to_dict() | {"wall_s": round(took)}), flush=True)
    finally:
        await lm.aclose()
    return rows


async def bare(bench: Bench, options: Options) -> Row:
    """The actor as it is."""
    bench.open_account("none", None)
    tasks = split(bench.family, 0, n_test=options.tests, n_learn=options.learn).test
    actor = Learnt(bench.family.system)
    scores = await test_scores(bench.family, actor, bench.spec("none"), tasks, options.draws)
    row = Row(bench.family.name, "none", seeds=1, scores=[scores], note="nothing is learnt")
    finish(row, row)
    return row


async def voting(bench: Bench, options: Options, none: Row) -> Row:
    """Majority of as many draws as the learning tokens would pay for at test time."""
    votes = min(MAX_VOTES, 1 + options.budget // max(1, bench.accounts["none"].tokens))
    votes = max(2, votes)
    account = bench.open_account("voting", None)
    tasks = split(bench.family, 0, n_test=options.tests, n_learn=options.learn).test
    started = time.monotonic()
    scores = [
        await voting_scores(
            bench.family, bench.spec("voting"), tasks, votes=votes, answers=1, seed=seed
        )
        for seed in range(options.seeds)
    ]
    return Row(
        bench.family.name,
        "voting",
        seeds=options.seeds,
        scores=scores,
        tokens=account.tokens // options.seeds,
        seconds=time.monotonic() - started,
        note=f"majority of {votes} draws, paid with every answer",
    )


async def learnt(bench: Bench, options: Options, method: str, learner: Learner) -> Row:
    """Learn under every seed side by side, then score each result."""
    row = Row(bench.family.name, method)
    setups, accounts = [], []
    for seed in range(options.seeds):
        label = f"{method}-{seed}"
        accounts.append(bench.open_account(label, options.budget))
        parts = split(bench.family, seed, n_test=options.tests, n_learn=options.learn)
        setups.append(
            Setup(bench.family, bench.spec(label), seed, parts, options.budget, options.deadline_s)
        )
    started = time.monotonic()
    results = await asyncio.gather(
        *(learner(bench, s, f"{method}-{s.seed}") for s in setups), return_exceptions=True
    )
    row.seconds = time.monotonic() - started
    row.tokens = sum(a.tokens for a in accounts) // len(accounts)
    notes: list[str] = []
    for result in results:
        if isinstance(result, (Unavailable, TfgrpoError)):
            notes.append(str(result)[:200])
        elif isinstance(result, BaseException):
            raise result
        else:
            label = f"test-{method}-{row.seeds}"
            bench.open_account(label, None)
            row.scores.append(
                await test_scores(
                    bench.family, result, bench.spec(label), setups[0].split.test, options.draws
                )
            )
            row.seeds += 1
            notes.append(result.note)
    refused = sum(a.refused for a in accounts)
    if refused:
        notes.append(f"{refused} calls refused past {HARD_LIMIT:g} x budget")
    row.note = "; ".join(dict.fromkeys(n for n in notes if n))
    return row


def finish(row: Row, none: Row) -> None:
    """Fill in score and gain with their intervals: over seeds and tasks where there are seeds."""
    if not row.scores:
        return
    zero: Scores = {t: [0.0] for s in row.scores for t in s}
    score = over_seeds([(zero, s) for s in row.scores])
    row.score, row.ci_low, row.ci_high = score.estimate, max(0.0, score.low), min(1.0, score.high)
    if row is not none:
        gain = over_seeds([(none.scores[0], s) for s in row.scores])
        row.gain, row.gain_low, row.gain_high = gain.estimate, gain.low, gain.high


def over_seeds(pairs: list[tuple[Scores, Scores]]) -> Interval:
    """Interval over seeds and tasks; over tasks alone where there is one seed."""
    if len(pairs) > 1:
        return seeds_difference(pairs)
    ((base, other),) = pairs
    if all(r == [0.0] for r in base.values()):
        return mean_interval(other)
    return paired_difference(base, other)


def parse() -> tuple[Options, bool]:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tests", type=int, default=25)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument(
        "--learn", type=int, default=24, help="tasks to learn from, and to choose by"
    )
    parser.add_argument("--budget", type=int, default=20_000, help="learning tokens a seed")
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        help="seconds of learning, past which nothing is waited for",
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--smoke", action="store_true", help="tiny and not recorded")
    given = parser.parse_args()
    methods = tuple(given.methods.split(","))
    unknown = set(methods) - set(METHODS)
    if unknown:
        parser.error(f"unknown methods {sorted(unknown)}; there are {', '.join(METHODS)}")
    families = tuple(given.families.split(","))
    if set(families) - set(FAMILIES):
        parser.error(f"unknown families; there are {', '.join(FAMILIES)}")
    if given.smoke:
        return Options(1, 3, 2, 6, 8_000, 60.0, methods, families), True
    return (
        Options(given.seeds, given.tests, given.draws, given.learn, given.budget,
                given.deadline, methods, families),
        False,
    )  # fmt: skip


def kept_rows(families: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the recorded rows of families that this run leaves out."""
    kept = RESULTS / "head_to_head.json"
    rows = json.loads(kept.read_text())["rows"] if kept.exists() else []
    return [r for r in rows if r.get("family") in set(FAMILIES) - set(families)]


def main() -> None:
    options, is_smoke = parse()
    # Read when torch is loaded: waiting threads sleep, so that the rivals' own processes on the
    # same cores do not make every step of the model wait for a spinning thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    started = time.monotonic()
    at = commit()
    rows = [r.to_dict() | {"commit": at} for r in asyncio.run(compare(options))]
    figures = {
        "rows": rows if is_smoke else kept_rows(options.families) + rows,
        "model": "SmolLM2-135M-Instruct",
        "tests": options.tests,
        "draws": options.draws,
        "budget_tokens": options.budget,
        "deadline_s": options.deadline_s,
        "learning_tasks": 2 * options.learn,
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    if is_smoke:
        for row in rows:
            print(row)
        return
    write_page(record("head_to_head", figures, COMMAND))


if __name__ == "__main__":
    main()
