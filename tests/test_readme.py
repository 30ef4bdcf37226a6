"""What the README and the pages promise: code runs, settings parse, commands and links exist.

`python -m tests.test_readme` writes the demo's recorded figures into the README.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.commands import HOW, MODEL, commands
from tests.patience import PATIENCE_S
from tfgrpo.cli.main import _LAZY
from tfgrpo.config.learn import Config

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


BEGIN = "<!-- demo:begin, written from tests/benchmarks/results/demo.json -->"
END = "<!-- demo:end -->"


def demo_text(row: dict[str, Any]) -> str:
    """Say a recorded run of the demo in words."""
    said = [
        f"On {row['tasks_test']} unseen tasks the empty library scored {row['empty_score']:.3f}"
    ]
    if row["ci_low"] is None:
        said[0] += " and was kept: the gate found nothing better."
    else:
        gain = row["library_score"] - row["empty_score"]
        met = "above zero" if row["ci_low"] > 0 else "which includes zero: no gain was shown"
        said[0] += f" and what was kept scored {row['library_score']:.3f}: {gain:+.3f},"
        said.append(f"95 % paired interval {row['ci_low']:+.3f} to {row['ci_high']:+.3f}, {met}.")
    if row["min_detectable"] is not None:
        said.append(f"Smallest effect that could have been seen: {row['min_detectable']:.3f}.")
    lows = row["ci_low_by_seed"].items()
    seeds = [f"{low:+.3f} ({s})" if low is not None else f"none kept ({s})" for s, low in lows]
    said.append(f"Lower end of the interval by learning seed: {', '.join(seeds)}.")
    said.append(f"It took {row['seconds']:.0f} s on {row['processor']}")
    said.append(f"({row['date']}, `{row['command']}`).")
    return " ".join(said)


def with_demo(readme: str, row: dict[str, Any]) -> str:
    """Return the README with the generated place filled."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{demo_text(row)}\n{END}{tail}"


def test_the_demos_figures_stand_between_their_marks_and_nowhere_else() -> None:
    readme = README.read_text(encoding="utf-8")
    assert readme.count(BEGIN) == readme.count(END) == 1
    row = {
        "empty_score": 0.1, "library_score": 0.6, "ci_low": 0.4, "ci_high": 0.55,
        "ci_low_by_seed": {"1": 0.4, "2": 0.35}, "min_detectable": 0.08, "seconds": 120.4,
        "tasks_test": 40, "processor": "a processor", "date": "a day", "command": "make demo",
    }  # fmt: skip
    once = with_demo(readme, row)
    assert "the empty library scored 0.100 and what was kept scored 0.600" in once
    assert "+0.500, 95 % paired interval +0.400 to +0.550, above zero" in once
    assert with_demo(once, row) == once
    assert "no gain was shown" in with_demo(readme, row | {"ci_low": -0.01})
    none = row | {"ci_low": None, "ci_high": None, "ci_low_by_seed": {"1": None, "2": 0.1}}
    assert "found nothing better" in with_demo(readme, none)
    assert "none kept (1), +0.100 (2)" in with_demo(readme, none)


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_the_readmes_python_runs_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(README, "python")
    assert len(found) == 2
    for code in found:
        exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "graded" in printed
    assert "verdict" in printed


def test_the_readmes_first_two_examples_need_few_modules() -> None:
    modules = set(re.findall(r"^from (tfgrpo[\w.]*) import", README.read_text("utf-8"), re.M))
    assert modules == {"tfgrpo"}


def test_every_toml_block_of_the_readme_is_a_valid_config() -> None:
    found = blocks(README, "toml")
    assert found
    for text in found:
        config = Config.from_mapping(tomllib.loads(text), "README.md")
        assert config.tasks.path == "tasks.jsonl"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    shell = "".join(blocks(page, "sh"))
    named = re.findall(r"^tfgrpo ([a-z-]+)", shell, re.M)
    named += re.findall(r"`tfgrpo ([a-z-]+)", page.read_text("utf-8"))
    for verb in set(named):
        assert verb in _LAZY, f"{page.name}: tfgrpo {verb}"


def test_every_command_of_a_page_is_run_or_has_a_reason() -> None:
    assert set(commands()) == set(HOW)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"MODEL := {MODEL}" in makefile and "-e '.[local,report]'" in makefile


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"^make ([a-z][a-z0-9-]*)", "".join(blocks(page, "sh")), re.M)
    named += re.findall(r"`make ([a-z][a-z0-9-]*)", text)
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} → {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_block_of_a_page_compiles(page: Path) -> None:
    import ast

    for code in blocks(page, "python"):
        compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_import_that_a_page_shows_works(page: Path) -> None:
    lines = []
    for code in blocks(page, "python"):
        lines += re.findall(r"^from tfgrpo[\w.]* import (?:\([^)]*\)|[^(\n]+)$", code, re.M)
    for line in lines:
        exec(line, {})


@pytest.mark.real
def test_the_readmes_first_steps_work_on_the_command_line(tmp_path: Path) -> None:
    def tfgrpo(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tfgrpo", *arguments]
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def checked(*arguments: str) -> str:
        done = tfgrpo(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "config.toml" in checked("init", "first")
    assert "calls" in checked("learn", "first/config.toml", "--dry-run")
    scripted = ("--set", "policy.lm=scripted:digits", "--quiet")
    learnt = tfgrpo("learn", "first/config.toml", *scripted)
    assert learnt.returncode in (0, 1, 5), learnt.stderr  # digits drawn by chance prove nothing
    assert "run: " in learnt.stdout
    assert checked("runs", "list")
    checked("report", "runs/first")
    assert checked("advise", "runs/first").strip()
    assert list((tmp_path / "runs" / "first").glob("*.html"))


if __name__ == "__main__":
    figures = json.loads((ROOT / "tests/benchmarks/results/demo.json").read_text("utf-8"))
    README.write_text(with_demo(README.read_text("utf-8"), figures), encoding="utf-8")
    print("the README holds the demo's recorded figures")
