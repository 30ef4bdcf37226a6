"""Installs every extra alone, with nothing else on the machine, and runs its feature once.

    python -m tests.extras [NAME …]

Each extra of pyproject.toml has a script NAME.py beside this file. It gets an environment of its
own with exactly `tfgrpo[NAME]` (a wheel, so that no file of the checkout is in reach), an empty
home and empty caches, and must end with 0. A script may say in a line of its own:

    # pip: ARGUMENTS     one further `pip install` that the documentation tells a user to make
    # skip: REASON       not run here

Downloads go through pip's cache, which hides no missing package: what an environment holds is what
was resolved for it. Prints a table; ends with 1 where a feature failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent
NOT_FEATURES = ("dev",)
_LIMIT_S = 900
_AT_ONCE = 2
_KEPT = (
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "tfgrpo",
    "prompts",
    "rl",
    "routing",
    "search",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """How an extra fared."""

    name: str
    verdict: str
    install_s: float = 0.0
    feature_s: float = 0.0
    words: str = ""


def extras() -> list[str]:
    """Return the extras that stand for a feature, as pyproject.toml lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_FEATURES]


def told(script: Path, word: str) -> list[str]:
    """Return what a script says in `# WORD: …` lines."""
    return re.findall(rf"^# {word}: (.+)$", script.read_text(encoding="utf-8"), re.M)


def bare_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a machine that has never run this: empty home, empty caches."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TFGRPO_", "XDG_"))}
    places = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TFGRPO_CACHE": "models"}
    made = {name: str(folder / place) for name, place in places.items()}
    for place in made.values():
        Path(place).mkdir()
    return kept | made


def copy_project(folder: Path) -> Path:
    """Return a copy of what is installed, so that no build folder stays in the checkout."""
    copy = folder / "source"
    copy.mkdir()
    for name in _KEPT:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    return copy


def build_wheel(folder: Path) -> Path:
    """Return the project's wheel."""
    copy = copy_project(folder)
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, copy])
    return next(folder.glob("*.whl"))


def try_extra(name: str, wheel: Path, folder: Path) -> Trial:
    """Install one extra and run its script."""
    script = SCRIPTS / f"{name}.py"
    if not script.is_file():
        return Trial(name, "FAILED", words=f"{script.name} is not there: write one that uses it")
    if reasons := told(script, "skip"):
        return Trial(name, "not run", words=reasons[0])
    folder.mkdir()
    python = folder / "venv" / "bin" / "python"
    started = time.monotonic()
    try:
        _run([sys.executable, "-m", "venv", folder / "venv"])
        pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
        _run([*pip, "-c", ROOT / "constraints.txt", f"tfgrpo[{name}] @ {wheel.as_uri()}"])
        for arguments in told(script, "pip"):
            _run([*pip, *arguments.split()])
        installed = time.monotonic()
        # -P: a script's own name (math, mcp) stands for no module
        _run([python, "-P", script], cwd=folder, env=bare_environment(folder))
    except subprocess.SubprocessError as exc:
        output = str(getattr(exc, "stderr", "") or exc)
        return Trial(name, "FAILED", words="\n" + output[-2000:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # an environment with torch takes a gigabyte
    return Trial(name, "works", installed - started, time.monotonic() - installed)


def _run(
    command: list[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    subprocess.run(
        command, cwd=cwd, env=env, check=True, capture_output=True, text=True, timeout=_LIMIT_S
    )


def main(names: list[str]) -> int:
    """Try the named extras, or all; returns the exit code."""
    unknown = set(names) - set(extras())
    if unknown:
        print(f"no such extra: {', '.join(sorted(unknown))}; there are {', '.join(extras())}")
        return 2
    with tempfile.TemporaryDirectory(prefix="tfgrpo-extras-") as place:
        folder = Path(place)
        wheel = build_wheel(folder)
        print(f"{'extra':<10} {'':<8} {'install s':>9} {'feature s':>9}")
        trials = []
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for t in pool.map(lambda n: try_extra(n, wheel, folder / n), names or extras()):
                row = f"{t.name:<10} {t.verdict:<8} {t.install_s:9.0f} {t.feature_s:9.0f} {t.words}"
                print(row, flush=True)
                trials.append(t)
    return int(any(t.verdict == "FAILED" for t in trials))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
