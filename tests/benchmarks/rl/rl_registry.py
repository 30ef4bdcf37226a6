"""How many variants are registered, reachable from TOML, checked against a release, approximations.

Counts an entry as tested only where its claimed test exists and passes, as reachable where the test
through a config trains a step with it, and as a silent no-op where one of its options, or the entry
itself in a run of one update per batch, changes nothing without a word. Run as
`python -m tests.benchmarks.rl.rl_registry`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry
from tfgrpo.rl.formulas.rewards import REWARDS
from tfgrpo.runtime.syntax import syntax_tree

REGISTRIES: Mapping[str, Mapping[str, Entry]] = {
    "losses": LOSSES,
    "aggregations": AGGREGATIONS,
    "advantages": ADVANTAGES,
    "rewards": REWARDS,
    "credit": CREDIT,
}
COLUMNS = {
    "statistic_R": "length",
    "metric_R": "entropy",
    "score_R": "logp",
    "round_R": "part:content",
    "class_R": "task:hops",
    "flawed_R": "part:structure",
    "trigger_count_R": "part:content",
    "target_R": "task:target",
    "budget_R": "task:target",
    "overlap_R": "part:content",
}
"""Columns of entries that only the user can name, to where they come from in tests."""


def claimed_test(root: Path, entry: Entry) -> ast.FunctionDef | None:
    """Return the test function that an entry names, if it exists."""
    path, _, name = entry.test.partition("::")
    return functions_of(root / path).get(name)


@cache
def functions_of(path: Path) -> Mapping[str, ast.FunctionDef]:
    """Return the functions of a Python file by name; none where it is absent."""
    if not path.exists():
        return {}
    tree = syntax_tree(path.read_text(encoding="utf-8"))
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}


def figures(root: Path) -> dict[str, Any]:
    """Return the counts of entries, of those with an existing test, and of approximations."""
    entries = [e for registry in REGISTRIES.values() for e in registry.values()]
    return {
        "entries": len(entries),
        "reachable": len(entries) - len(unreachable()),
        "checked_against_release": sum(
            "read in" in e.checked or "run beside" in e.checked for e in entries
        ),
        "closed_form_tested": sum(claimed_test(root, e) is not None for e in entries),
        "approximations": sum(e.is_approximation for e in entries),
        "by_certainty": dict(Counter(e.certainty for e in entries)),
        "by_registry": {kind: len(registry) for kind, registry in REGISTRIES.items()},
    }


def unreachable() -> list[str]:
    """Entries that no setting of a run lets through; the test through a config proves the rest."""
    from tests.rl.formulas.test_through_config import REFUSED

    return [name for name in REFUSED if name not in WITH_HINTS]


WITH_HINTS = ("nudge",)
"""Refused without [hints], trained with them (`test_contexts_of_hints_reach_the_estimator`)."""
THROUGH_CONFIG = "tests/rl/formulas/test_through_config.py"
NO_OPS = (
    "test_every_option_of_losses_and_advantages_changes_something",
    "test_every_option_of_rewards_and_credit_changes_something",
    "test_a_loss_with_a_ratio_is_reinforce_under_one_update_and_the_run_says_so",
    "test_an_outlier_that_no_group_can_have_is_refused",
)
"""Tests each of whose failures is a setting without an effect that nobody is told of."""


def silent_noops(root: Path) -> int:
    """Run the tests of settings without effect and count failures."""
    ids = [f"tests/rl/formulas/test_in_training.py::{name}" for name in NO_OPS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", *ids],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.count("FAILED") if done.returncode else 0


def main() -> None:
    """Run every claimed test and the one through a config, then count."""
    root = Path(__file__).parents[3]
    tests = sorted({e.test for registry in REGISTRIES.values() for e in registry.values()})
    tests.append(THROUGH_CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests], cwd=root, check=False
    )
    if done.returncode:
        raise SystemExit(f"a claimed test fails: pytest returned {done.returncode}")
    record(
        "rl_registry",
        figures(root) | {"claimed_tests_run": len(tests) - 1, "silent_noops": silent_noops(root)},
        "python -m tests.benchmarks.rl.rl_registry",
    )


if __name__ == "__main__":
    main()
