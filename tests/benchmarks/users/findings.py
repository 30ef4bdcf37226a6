"""What newcomers met, and what became of each: mended with a test that holds it, or left, and why.

Run: python -m tests.benchmarks.users.findings
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.record import record
from tfgrpo.runtime.syntax import syntax_tree

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("findings.toml")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that somebody met."""

    number: int
    title: str
    how: str = ""
    test: str = ""
    """`path::name` of the test that holds the mending."""
    left: str = ""
    """Why it was not mended; empty where it was."""
    rest: str = ""
    """What of a mended one is still open, and why."""

    @property
    def is_mended(self) -> bool:
        """True where a test holds it."""
        return bool(self.how and self.test and not self.left)


def findings() -> list[Finding]:
    """Return the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["finding"]
    return [Finding(**row) for row in rows]


def exists(test: str) -> bool:
    """True where the file has a test function of that name."""
    path, _, name = test.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    tree = syntax_tree(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) and node.name == name for node in ast.walk(tree))


def problems() -> list[str]:
    """Return what is wrong with the table: a finding without an end, a test that is not there."""
    rows = findings()
    found = [f"{r.number}: mended and left" for r in rows if r.left and (r.how or r.test)]
    found += [f"{r.number}: neither" for r in rows if not r.left and not r.is_mended]
    found += [f"{r.number}: no test {r.test}" for r in rows if r.test and not exists(r.test)]
    numbers = [r.number for r in rows]
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"numbers are {numbers}")
    return found


if __name__ == "__main__":
    wrong = problems()
    assert not wrong, wrong
    table = findings()
    left = [r for r in table if r.left]
    figures = {
        "findings": len(table),
        "mended": sum(r.is_mended for r in table),
        "left_with_reason": len(left),
        "with_a_rest": {str(r.number): r.rest for r in table if r.rest},
        "left": {str(r.number): f"{r.title}: {r.left}" for r in left},
    }
    record("users", figures, "python -m tests.benchmarks.users.findings")
