"""Verifier that runs the Python code of an answer against a task's cases or tests.

The candidate's code never shares a process with what judges it. It runs in a cell that is asked
for return values (or printed output); values are compared here, in the parent, or by the task's
tests in a second cell. So nothing that the candidate can do (exit 0, raise `SystemExit`, print a
score, patch `assert`, write to a pipe) makes a pass: it can only return right values.

Running code is off unless a level is chosen. Does not know other languages. Limits of the method:
functions are called by value, so tests that hand over functions, need classes of the candidate or
expect arguments changed in place cannot pass. Source: own.
"""

from __future__ import annotations

import ast
import builtins
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.user_code import call_foreign
from tfgrpo.verifiers.answer import UnitVerifier, short
from tfgrpo.verifiers.code.answer_code import code_in, parse_code
from tfgrpo.verifiers.code.cell_runner import decode, encode
from tfgrpo.verifiers.code.sandbox import Cell, CellGone, CellLimits, Level, check_level

__all__ = ["Code"]

_MOST_FEEDBACK = 3


Result = tuple[str, str]
"""Name of a check, and why it failed; empty for a pass."""


@dataclass(frozen=True, slots=True)
class _Checks:
    """A reference, read."""

    function: str = ""
    cases: tuple[Mapping[str, Any], ...] = ()
    runs: tuple[Mapping[str, Any], ...] = ()
    tests: str = ""


@dataclass(frozen=True, slots=True)
class Marking:
    """How checks become a reward."""

    partial: bool = True
    """Give the share that passes; else 1 only where all pass."""
    tolerance: float = 1e-9
    """Relative and absolute difference of floats that counts as equal in `cases`."""


_MARKING = Marking()


class Code(UnitVerifier):
    """The share of checks that the answer's code passes.

    The reference is one of:

    * `{"function": name, "cases": [{"args": [...], "kwargs": {...}, "expected": ...}, ...]}`
    * `{"runs": [{"stdin": text, "stdout": text}, ...]}`: the code is a program.
    * `{"tests": source, "function": name}` or just the source: each top-level `assert`, each
      function `test...`, and `check(function)` count as one check.

    Args:
        level: `none` runs nothing; `process` limits a subprocess and is no security boundary;
            `bwrap` adds namespaces without network (needs bubblewrap).
        i_understand: set to use `process` for code that a model wrote.
        timeout_s: wall and CPU time of one answer, seconds.
        memory_mb: address space, MiB.
        packages: let the code import installed packages.
        marking: how checks become a reward; settings files give `partial` and `tolerance`.
        parallel: cells at a time; None takes the number of cores.
    """

    def __init__(
        self,
        *,
        level: Level = "none",
        i_understand: bool = False,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        packages: bool = False,
        marking: Marking = _MARKING,
        parallel: int | None = None,
    ) -> None:
        check_level(level)
        if level == "process" and not i_understand:
            raise ConfigError(
                "Code: level 'process' is no security boundary: model-written code can read your "
                "files and use the network; set i_understand = true to accept that, or use "
                "level 'bwrap'"
            )
        if not timeout_s > 0 or memory_mb < 64 or marking.tolerance < 0:
            raise ConfigError(
                f"Code: timeout_s {timeout_s} must be above 0, memory_mb {memory_mb} at least 64, "
                f"tolerance {marking.tolerance} at least 0"
            )
        self._level: Level = level
        self._limits = CellLimits(timeout_s=timeout_s, memory_mb=memory_mb, packages=packages)
        self._partial, self._tolerance = marking.partial, marking.tolerance
        self._slots = threading.BoundedSemaphore(max(1, parallel or os.cpu_count() or 1))
        settings = [level, timeout_s, memory_mb, self._partial, packages, self._tolerance]
        super().__init__("code", settings)

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` where code is not to be run or the reference holds no check."""
        if self._level == "none":
            raise ConfigError(
                "verifier 'code' is off: it runs what a model wrote; set level = 'bwrap' "
                "(or 'process' with i_understand = true)"
            )
        _read(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Run the answer's code; a failed start of a cell is a `VerifierError`."""
        self.check_task(task)
        checks = _read(task)
        wanted = _visible(checks) if checks.tests else {checks.function} - {""}
        code = code_in(rollout.answer, wanted, is_program=bool(checks.runs))
        if code is None:
            return Score(0.0, "the answer holds no Python code")
        results, output = await call_foreign(
            self._run, code, checks, error=VerifierError, where="verifier 'code'"
        )
        failed = [(name, why) for name, why in results if why]
        share = 1.0 - len(failed) / len(results)
        lines = [f"{len(results) - len(failed)} of {len(results)} checks passed"]
        lines += [f"{short(name, 120)}: {short(why, 200)}" for name, why in failed[:_MOST_FEEDBACK]]
        if failed and output:
            lines.append(f"printed: {short(output, 300)}")
        reward = share if self._partial else float(not failed)
        return Score(reward, "\n".join(lines), {"passed": share})

    def _run(self, code: str, checks: _Checks) -> tuple[list[Result], str]:
        with self._slots:
            if checks.runs:
                return self._programs(code, checks), ""
            candidate = _Candidate(code, self._level, self._limits)
            try:
                if checks.tests:
                    results = self._tests(candidate, checks)
                else:
                    results = [self._case(candidate, checks.function, c) for c in checks.cases]
                return results, candidate.output
            finally:
                candidate.close()

    def _case(self, candidate: _Candidate, function: str, case: Mapping[str, Any]) -> Result:
        args, kwargs = case.get("args", []), case.get("kwargs", {})
        shown = ", ".join([*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())])
        name = f"{function}({shown})"
        request = {"call": function, "args": encode(tuple(args)), "kwargs": encode(dict(kwargs))}
        reply = candidate.call(request)
        if "value" not in reply:
            return name, str(reply.get("gone") or reply.get("raised") or "no result")
        try:
            value = decode(reply["value"])
        except (KeyError, TypeError, ValueError, RecursionError):
            return name, "unreadable result"
        if _same(case["expected"], value, self._tolerance):
            return name, ""
        return name, f"returned {_shown(value)}, expected {_shown(case['expected'])}"

    def _programs(self, code: str, checks: _Checks) -> list[Result]:
        results: list[Result] = []
        for number, run in enumerate(checks.runs, 1):
            name = f"run {number}"
            try:
                with Cell(self._level, self._limits) as cell:
                    printed = cell.run_program(code, str(run.get("stdin", "")))
            except CellGone as exc:
                results.append((name, str(exc)))
                continue
            if _lines(printed) != _lines(run["stdout"]):
                said = f"printed {short(printed, 80)}, expected {short(run['stdout'], 80)}"
                results.append((name, said))
            else:
                results.append((name, ""))
        return results

    def _tests(self, candidate: _Candidate, checks: _Checks) -> list[Result]:
        names = sorted(_visible(checks) & set(candidate.names()))
        request = {"tests": checks.tests, "names": names, "entry": checks.function}
        # The tests' own cell outlives the candidate's, so that its lateness is seen as such.
        grace_s = self._limits.timeout_s + 10.0
        with Cell(self._level, self._limits, grace_s=grace_s) as judge:
            try:
                reply = judge.ask(request)
                while "call" in reply:
                    reply = judge.ask(candidate.call(reply))
            except CellGone as exc:
                raise VerifierError(f"the tests themselves failed: {exc}") from exc
        results = reply.get("results")
        if not results:
            raise VerifierError(f"the tests themselves failed: {reply.get('raised', reply)}")
        if candidate.broken:
            return [(name, why or candidate.broken) for name, why in results]
        return [(name, why) for name, why in results]


class _Candidate:
    """The candidate's code in its cell; started again where the code ended it."""

    def __init__(self, code: str, level: Level, limits: CellLimits) -> None:
        self._code = code
        self._level = level
        self._limits = limits
        self._cell: Cell | None = None
        self._names: list[str] = []
        self.broken = ""
        """Why no further call can succeed, where that is so."""
        self._restarts = 0

    @property
    def output(self) -> str:
        return "" if self._cell is None else self._cell.output.decode(errors="replace")

    def names(self) -> list[str]:
        """Return the functions that the code defines; none where it does not load."""
        self._open()
        return self._names

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return `{"value"}`, `{"raised"}`, or `{"gone"}` where the cell is no more."""
        cell = self._open()
        if cell is None:
            return {"gone": self.broken}
        wanted = {key: request[key] for key in ("call", "args", "kwargs")}
        try:
            reply = cell.ask(wanted)
        except CellGone as exc:
            self._lose(exc)
            return {"gone": str(exc)}
        if "value" in reply:
            return {"value": reply["value"]}
        return {"raised": str(reply.get("raised", "no result"))}

    def _open(self) -> Cell | None:
        if self.broken:
            return None
        if self._cell is not None:
            return self._cell
        self._cell = Cell(self._level, self._limits)
        try:
            reply = self._cell.ask({"load": self._code})
        except CellGone as exc:
            self._lose(exc)
            self.broken = f"the code does not load: {exc}"
            return None
        names = reply.get("names")
        if not isinstance(names, list):
            self.broken = f"the code does not load: {reply.get('raised', 'no result')}"
            return None
        self._names = [n for n in names if isinstance(n, str) and n.isidentifier()]
        return self._cell

    def _lose(self, error: CellGone) -> None:
        if self._cell is not None:
            self._cell.close()
            self._cell = None
        self._restarts += 1
        if error.is_late or self._restarts >= 3:
            self.broken = str(error)

    def close(self) -> None:
        if self._cell is not None:
            self._cell.close()


def _read(task: Task) -> _Checks:
    given, where = task.reference, f"task {task.task_id!r}: the reference"
    if isinstance(given, str):
        given = {"tests": given}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} is {given!r:.80}; Code needs tests as text, or a table with 'cases', 'runs' "
            "or 'tests'"
        )
    function = given.get("function", "")
    if "tests" in given:
        _check_tests(given["tests"], function, where)
        return _Checks(function=function, tests=given["tests"])
    kind, needed = ("runs", "stdout") if "runs" in given else ("cases", "expected")
    items = given.get(kind)
    if not isinstance(items, (list, tuple)) or not items:
        raise ConfigError(f"{where} has no {kind!r}: give a list with at least one")
    for item in items:
        if not isinstance(item, Mapping) or needed not in item:
            raise ConfigError(f"{where}: {item!r:.80} in {kind!r} has no {needed!r}")
    if kind == "runs":
        return _Checks(runs=tuple(items))
    if not isinstance(function, str) or not function.isidentifier():
        raise ConfigError(f"{where}: function is {function!r:.80}; name the function to call")
    return _Checks(function=function, cases=tuple(items))


def _check_tests(tests: Any, function: str, where: str) -> None:
    tree = parse_code(tests) if isinstance(tests, str) else None
    if tree is None:
        raise ConfigError(f"{where}: the tests are no Python code: {tests!r:.80}")
    for node in tree.body:
        if isinstance(node, ast.Assert):
            return
        if isinstance(node, ast.FunctionDef):
            if node.name.startswith("test"):
                return
            if node.name == "check" and function:
                return
    raise ConfigError(
        f"{where}: the tests check nothing: write an assert at top level, a function test..., or "
        "check(candidate) with 'function' given"
    )


def _visible(checks: _Checks) -> set[str]:
    """Return which names of the candidate's the tests may see: those they use and do not bind.

    No builtin is among them, unless it is the function asked for: a candidate's own `abs` or `all`
    would make any comparison come out right.
    """
    nodes = list(ast.walk(parse_code(checks.tests) or ast.Module([], [])))
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return (used - bound - set(dir(builtins))) | ({checks.function} - {""})


def _lines(text: str) -> list[str]:
    """Return the lines of an output; a line feed alone ends a line, blank ends do not count."""
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _shown(value: Any) -> str:
    """Return a value for feedback; an integer may be too long to be written out."""
    try:
        return short(value, 80)
    except ValueError:
        return f"a {type(value).__name__} with an integer of thousands of digits"


def _same(expected: Any, value: Any, tolerance: float) -> bool:
    """Compare a JSON expectation with a value; a tuple is a list here."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        if expected == value:
            return True
        if isinstance(expected, int) and isinstance(value, int):
            return False
        try:
            return abs(expected - value) <= tolerance * max(1.0, abs(expected))
        except OverflowError:
            return False
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(expected) == len(value) and all(
            _same(e, v, tolerance) for e, v in zip(expected, value, strict=True)
        )
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        return expected.keys() == value.keys() and all(
            _same(expected[k], value[k], tolerance) for k in expected
        )
    return type(expected) is type(value) and bool(expected == value)
