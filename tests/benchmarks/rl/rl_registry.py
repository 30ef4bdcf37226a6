"""How many variants are registered, tested against a closed form, and approximations.

Counts an entry as tested only where its claimed test exists and passes. Run as
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

REGISTRIES: Mapping[str, Mapping[str, Entry]] = {
    "losses": LOSSES,
    "aggregations": AGGREGATIONS,
    "advantages": ADVANTAGES,
    "rewards": REWARDS,
    "credit": CREDIT,
}


def claimed_test(root: Path, entry: Entry) -> ast.FunctionDef | None:
    """Return the test function that an entry names, if it exists."""
    path, _, name = entry.test.partition("::")
    return functions_of(root / path).get(name)


@cache
def functions_of(path: Path) -> Mapping[str, ast.FunctionDef]:
    """Return the functions of a Python file by name; none where it is absent."""
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}


def figures(root: Path) -> dict[str, Any]:
    """Return the counts of entries, of those with an existing test, and of approximations."""
    entries = [e for registry in REGISTRIES.values() for e in registry.values()]
    return {
        "entries": len(entries),
        "closed_form_tested": sum(claimed_test(root, e) is not None for e in entries),
        "approximations": sum(e.is_approximation for e in entries),
        "by_certainty": dict(Counter(e.certainty for e in entries)),
        "by_registry": {kind: len(registry) for kind, registry in REGISTRIES.items()},
    }


def main() -> None:
    """Run every claimed test, then count."""
    root = Path(__file__).parents[3]
    tests = sorted({e.test for registry in REGISTRIES.values() for e in registry.values()})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests], cwd=root, check=False
    )
    if done.returncode:
        raise SystemExit(f"a claimed test fails: pytest returned {done.returncode}")
    record(
        "rl_registry",
        figures(root) | {"claimed_tests_run": len(tests)},
        "python -m tests.benchmarks.rl.rl_registry",
    )


if __name__ == "__main__":
    main()
