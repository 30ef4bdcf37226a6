"""Running the command line: in this process, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tfgrpo.cli.main import main

ROOT = Path(__file__).parents[2]

_BASE: dict[str, dict[str, Any]] = {
    "run": {"concurrency": 4},
    "tasks": {"path": "tasks.jsonl", "practice": 6, "gate": 6, "test": 6},
    "policy": {"lm": "scripted:digits"},
    "verifier": {"kind": "exact"},
    "learn": {"batch": 6, "group_size": 4, "entries": "exemplars"},
    "gate": {"group_size": 2, "test_group_size": 2},
}


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


def folder_with(parent: Path, text: str = "") -> Path:
    """A folder with eighteen tasks and a config of a small run, changed by TOML text."""
    folder = parent / "project"
    folder.mkdir(exist_ok=True)
    words = "north south east west spring summer autumn winter dawn noon dusk night".split()  # noqa: SIM905
    rows = [
        {"task_id": f"t{i}", "prompt": f"{words[i % 12]} {words[(5 * i + 1) % 12]} {i} digit?",
         "reference": str(i % 3)}
        for i in range(18)
    ]  # fmt: skip
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        (folder / "config.toml").write_text(text)
        return folder
    merged: dict[str, Any] = {k: dict(v) for k, v in _BASE.items()}
    merged["run"]["folder"] = str(folder / "run")
    for section, changes in values.items():
        merged[section] = {**merged.get(section, {}), **changes}
    (folder / "config.toml").write_text(_toml(merged))
    return folder


def _toml(values: dict[str, Any]) -> str:
    lines: list[str] = []
    for section, table in values.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    code = ended.value.code
    return Ran(code if isinstance(code, int) else 0 if code is None else 1, said.out, said.err)


def environment(home: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """An environment without keys, with an empty home."""
    kept = {k: v for k, v in os.environ.items() if not k.endswith(("_API_KEY", "_TOKEN"))}
    cache = kept.get("TFGRPO_CACHE") or str(Path.home() / ".cache" / "tfgrpo")
    return {
        **kept, "HOME": str(home), "TFGRPO_CACHE": cache, "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", **(extra or {}),
    }  # fmt: skip


def command(*arguments: str, safe_path: bool = False) -> list[str]:
    """The command line of a process."""
    # -P leaves the working folder out of the module path, as the installed program does
    return [sys.executable, *(["-P"] if safe_path else []), "-m", "tfgrpo", *arguments]


def cli(
    folder: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    safe_path: bool = False,
    patience_s: float = PATIENCE_S,
) -> Ran:
    """Run a command as a process in that folder."""
    done = subprocess.run(
        command(*arguments, safe_path=safe_path), cwd=folder, env=environment(folder, env),
        capture_output=True, text=True, timeout=patience_s, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)
