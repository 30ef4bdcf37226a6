"""A stranger types what README and tutorial say, in their order, after five outcomes of a run.

The commands are read off the pages. Before `learn` the project is changed as life would change it:
nothing (kept), a model that draws at random (not kept), one that says nothing (nothing to learn), a
Ctrl-C (stopped), a server that is not there (failed). A dead end is a command that ends in a crash
or an exit code that the README does not list, or that fails and names nothing to do next.

Run: python -m tests.benchmarks.users.newcomer
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")
OUTCOMES = ("kept", "not kept", "nothing to learn", "stopped", "failed")
CODES = {0, 1, 2, 3, 4, 5, 6, 130, 143}
"""What the README lists."""
_NEXT = re.compile(
    r"tfgrpo \w|next:|[:;] set |give |pip install|run (?:it|the same)|go(?:es)? on"
    r"|--(?!debug)[a-z-]+ \S"
)
"""Words that lead on."""
_LIMIT_S = 900
_LEFT_OUT = ("make ", "pip ", "tfgrpo escalate runs/first", "tfgrpo report runs/first --live")
"""Not typed here: an installation, a training run of minutes."""
_CHANGES: Mapping[str, str] = {
    "kept": "",
    "not kept": 'policy.lm="scripted:digits"',
    "nothing to learn": 'policy.lm="scripted:silent"',
    "stopped": "",
    "failed": 'policy.lm="http://127.0.0.1:9/v1#m"',
}
FAST = 'policy.lm="scripted:coin"'
"""Stands for the embedded model where only the paths are looked at."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command and how it ended."""

    command: str
    code: int
    dead_end: str = ""
    """Why it leads nowhere; empty where it does not."""


def commands() -> list[str]:
    """Return the commands of the pages in order, each once, and the Python blocks as commands."""
    found: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.M | re.S):
            if language == "python":
                found.append(f"python:{block}")
                continue
            for line in filter(None, block.splitlines()):
                found.append(re.sub(r"\s+#.*", "", line).strip())
    kept = [c for c in dict.fromkeys(found) if not _is_left_out(c)]
    return kept


def _is_left_out(command: str) -> bool:
    return command.startswith(("make ", "pip ")) or command in _LEFT_OUT[2:]


def walk(outcome: str, folder: Path, *, fast: bool = False) -> Iterator[Step]:
    """Type every command in a folder of its own; yields how each ended.

    Args:
        outcome: one of `OUTCOMES`.
        folder: an empty one.
        fast: a scripted model in place of the embedded one.
    """
    env = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    env["PYTHONPATH"] = str(ROOT)
    for command in commands():
        if command.startswith("python:"):
            argv = [sys.executable, "-c", command.removeprefix("python:")]
        else:
            argv = [sys.executable, "-P", "-m", *command.split()]
        code, out = _run(argv, folder, env, interrupt=outcome == "stopped" and _learns(command))
        is_python = command.startswith("python:")
        yield Step(command.splitlines()[0][:80], code, _dead_end(code, out, is_python))
        if command.startswith("tfgrpo init"):
            _change(folder / command.split()[2], outcome, fast)


def _learns(command: str) -> bool:
    return bool(re.fullmatch(r"tfgrpo learn \S+", command))


def _change(project: Path, outcome: str, fast: bool) -> None:
    """Change a project's config as the outcome asks for."""
    setting = _CHANGES[outcome] or (FAST if fast else "")
    path = project / "config.toml"
    text = path.read_text(encoding="utf-8")
    if setting:
        text = re.sub(r"^lm = .*$", setting.removeprefix("policy."), text, count=1, flags=re.M)
    if outcome == "failed":
        text = text.replace("[run]\n", "[run]\nretry_deadline_s = 1\n")
    if outcome == "nothing to learn":
        text = text.replace("[learn]\n", "[learn]\nreference_exemplars = false\n")
    path.write_text(text, encoding="utf-8")


def _run(
    argv: list[str], folder: Path, env: Mapping[str, str], *, interrupt: bool
) -> tuple[int, str]:
    """Run a command to its end, or press Ctrl-C once its journal is there and calls are made."""
    process = subprocess.Popen(
        argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if interrupt:
        end = time.monotonic() + _LIMIT_S
        while process.poll() is None and time.monotonic() < end:
            if _has_calls(folder / "runs" / Path(argv[-1]).parent.name / "run.db"):
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.05)
    out, _ = process.communicate(timeout=_LIMIT_S)
    return process.returncode, out


def _has_calls(path: Path) -> bool:
    import sqlite3

    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as found:
            return bool(found.execute("SELECT 1 FROM calls LIMIT 1").fetchall())
    except sqlite3.Error:
        return False  # not made yet


def _dead_end(code: int, out: str, is_python: bool) -> str:
    # A library's error reaches a script as a traceback, whose last line must lead on.
    if "a bug of ours" in out or ("Traceback" in out and not is_python):
        return f"crash: {out.strip().splitlines()[-1][:160]}"
    if code not in CODES:
        return f"exit code {code} is in no list"
    if code in (0, 1, 5) and "error:" not in out:
        return ""  # an answer: done, not met, inconclusive
    if not _NEXT.search(out):
        return f"exit {code} names nothing to do: {out.strip()[-160:]}"
    return ""


def first_steps(seeds: Sequence[int | None]) -> dict[str, dict[str, Any]]:
    """Learn on what `init` writes, as shipped (None) and with other seeds; returns CPU seconds and
    exit code of each."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    env["PYTHONPATH"] = str(ROOT)
    found: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="tfgrpo-newcomer-") as place:
            before = _cpu_s()
            command = [sys.executable, "-P", "-m", "tfgrpo"]
            _run([*command, "init", "first"], Path(place), env, interrupt=False)
            given = [] if seed is None else [f"learn.seed={seed}", f"tasks.seed={seed}"]
            sets = [word for value in given for word in ("--set", value)]
            learn = [*command, "learn", "first/config.toml", "--quiet", *sets]
            code, out = _run(learn, Path(place), env, interrupt=False)
            gains = re.findall(r"gain ([-+]?\d+\.\d+)", out)
            name = "as shipped" if seed is None else f"seed {seed}"
            found[name] = {
                "exit_code": code, "cpu_s": round(_cpu_s() - before, 1),
                "gain": float(gains[-1]) if gains else None,
            }  # fmt: skip
            print(name, found[name], flush=True)
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(outcomes: tuple[str, ...] = OUTCOMES, *, fast: bool = False) -> dict[str, object]:
    """Walk all outcomes; returns the figures."""
    before = _cpu_s()
    steps: dict[str, list[Step]] = {}
    for outcome in outcomes:
        with tempfile.TemporaryDirectory(prefix="tfgrpo-newcomer-") as place:
            steps[outcome] = []
            for step in walk(outcome, Path(place), fast=fast):
                steps[outcome].append(step)
                mark = f"DEAD END: {step.dead_end}" if step.dead_end else "ok"
                print(f"{outcome:<17} {step.code:>3}  {step.command}  {mark}", flush=True)
    used = _cpu_s() - before
    dead = [asdict(s) | {"outcome": o} for o, rows in steps.items() for s in rows if s.dead_end]
    return {
        "commands": len(commands()),
        "outcomes": len(steps),
        "dead_ends": len(dead),
        "cpu_minutes": round(used / 60, 2),
        "where": dead,
        "exit_codes": {o: {s.command: s.code for s in rows} for o, rows in steps.items()},
    }


if __name__ == "__main__":
    figures = measure() | {"first_steps": first_steps((None, 1, 2, 3))}
    if "--dry" in sys.argv:
        print(json.dumps(figures, indent=1))
    else:
        record("newcomer", figures, "python -m tests.benchmarks.users.newcomer")
