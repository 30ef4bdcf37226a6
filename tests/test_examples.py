"""Every example runs alone, ends well, learns something, and uses public names only."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import PATIENCE_S
from tfgrpo.config.learn import Config
from tfgrpo.runtime.syntax import syntax_tree
from tfgrpo.testing import Call, FaultServer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))
LEARN_CONFIGS = sorted(
    p for p in EXAMPLES.rglob("*.toml") if "learn" in tomllib.loads(p.read_text())
)


def load(name: str) -> ModuleType:
    """Import an example as a script is: by its file."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_alone(*arguments: str, cwd: Path, shared: str = "/nonexistent") -> str:
    """Run an example in a process of its own, away from the checkout; return what it printed."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PYTHONPATH": str(ROOT),
        "TFGRPO_SHARED": shared,
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_public(module: str, name: str) -> bool:
    """True for a name of `__all__`, or without underscore where a module has no such list."""
    if any(part.startswith("_") for part in (*module.split("."), name)):
        return False
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    if listed is None:
        return hasattr(loaded, name)
    return name in listed or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_an_example_imports_public_names_only(path: Path) -> None:
    tree = syntax_tree(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "an example says first what it shows and how it is run"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tfgrpo":
            for alias in node.names:
                assert is_public(str(node.module), alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize(
    "path",
    [p for p in SCRIPTS if "__main__" in p.read_text(encoding="utf-8")],
    ids=lambda p: str(p.relative_to(EXAMPLES)),
)
def test_an_example_is_run_by_some_test(path: Path) -> None:
    name = path.relative_to(EXAMPLES).with_suffix("")
    quoted = " / ".join(f'"{part}"' for part in (*name.parts[:-1], f"{name.name}.py"))
    spellings = (quoted, f"{name}.py", ".".join(("examples", *name.parts)), f'/ "{name}.py')
    tests = [p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py")]
    assert any(spelling in text for spelling in spellings for text in tests)


@pytest.mark.parametrize("path", LEARN_CONFIGS, ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_an_examples_settings_are_valid(path: Path) -> None:
    config = Config.from_toml(path)
    assert config.to_json()["learn"]["group_size"] >= 2
    if config.tasks.path:
        assert Path(config.tasks.path).is_file()


async def test_the_bare_method_gains_beyond_noise_in_a_hundred_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    low = await load("tfgrpo_in_100_lines.py").main(seed=1)
    assert low > 0.3
    assert "year first" in capsys.readouterr().out
    lines = (EXAMPLES / "tfgrpo_in_100_lines.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100


@pytest.mark.real
@pytest.mark.long
async def test_bare_grpo_teaches_the_embedded_model_sums_in_four_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    example = load("grpo_in_150_lines.py")
    gain = await example.main(seed=0, steps=4)
    out = capsys.readouterr().out
    assert out.count("groups mixed") == 4 and "held-out: +" in out
    assert gain > 0.05
    practice, held_out = example.make_tasks()
    assert not {t.task_id for t in practice} & {t.task_id for t in held_out}
    lines = (EXAMPLES / "grpo_in_150_lines.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150


def test_the_tool_agent_learns_how_its_tools_want_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    example = load("tool_agent/run.py")
    result = example.main(["--set", f"run.folder={tmp_path / 'run'}"])
    assert result.exit_code == 0
    assert [e.body for e in result.library.shown] == [example.LESSON]
    assert result.verdict.status == "met"
    assert result.outcomes["test"] == {"graded": 160}


def test_references_of_the_tool_agents_tasks_are_what_its_tools_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = load("tool_agent/parcel_tools.py")
    rows = (EXAMPLES / "tool_agent" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 40
    for row in map(json.loads, rows):
        parcel_id = row["task_id"].removeprefix("parcel-")
        assert parcel_id in row["prompt"]
        found = tools.find_parcel(parcel_id)
        by_tools = tools.postage(found["weight"] / 1000, found["country"])
        assert row["reference"] == pytest.approx(by_tools)


def test_own_traces_teach_one_lesson_and_stay_unproven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFGRPO_SHARED", str(tmp_path / "absent"))
    result = load("learn_from_traces.py").main(["--folder", str(tmp_path)])
    assert len(result.library.shown) == 1
    assert result.verdict is None
    assert "unproven" in result.learned.choice.reason
    assert (tmp_path / "run" / "prompt.txt").is_file()


def test_recorded_airline_runs_become_fifty_groups_of_four(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFGRPO_SHARED", str(shared))
    example = load("learn_from_traces.py")
    groups = list(example.airline_groups(example.AIRLINE))
    assert len(groups) == 50
    assert {len(g.rollouts) for g in groups} == {4}
    # The data set's own counts: 10 tasks solved four times of four, 14 never, 42 % of all runs.
    assert sum(g.is_informative() for g in groups) == 26
    rewards = [r for g in groups for r in g.rewards_G]
    assert sum(rewards) / len(rewards) == pytest.approx(0.42)
    calls = [c for g in groups for r in g.rollouts for s in r.steps for c in s.action.tool_calls]
    assert len(calls) == 1164


def test_own_arithmetic_tasks_have_right_references() -> None:
    for task in load("gsm8k_openai.py").own_tasks(25):
        a, b, c = (int(n) for n in re.findall(r"\d+", task.text))
        if "ticket" in task.text:
            a, b = b, a  # the text names the price first
        taken = any(word in task.text for word in ("eaten", "gives", "broken"))
        assert int(task.reference) == a * b + (-c if taken else c) > 0


LESSON = "When amounts change several times, keep a running total and check it at the end."
SMALL = ("--set", "tasks.practice=8", "--set", "tasks.gate=8", "--set", "tasks.test=8")


@pytest.mark.real
def test_arithmetic_is_learnt_against_any_openai_compatible_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFGRPO_SHARED", str(tmp_path / "absent"))
    example = load("gsm8k_openai.py")
    answers = {t.text: str(t.reference) for t in example.own_tasks(24)}

    def draw(call: Call, seed: int) -> str:
        if call.text not in answers:
            return json.dumps({"lessons": [{"lesson": LESSON, "attempts": [1]}]})
        taught = LESSON in json.dumps(call.body["messages"])
        right = random.Random(f"{call.text}{seed}").random() < (0.95 if taught else 0.4)
        return f"I count.\nAnswer: {answers[call.text] if right else 100_003}"

    with FaultServer(draw=draw) as server:
        folder = f"run.folder={tmp_path / 'run'}"
        result = example.main(["--lm", server.spec(), *SMALL, "--set", folder])
        assert server.call_count > 0
    assert result.exit_code == 0
    assert LESSON.rstrip(".") in " ".join(e.body for e in result.library.shown)


@contextmanager
def serving_the_embedded_model(home: Path) -> Iterator[str]:
    """`tfgrpo serve-model` in a process of its own; yields a spec."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = (home / "server.log").open("wb")
    command = [sys.executable, "-m", "tfgrpo", "serve-model", "local:smollm2-135m"]
    server = subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert server.poll() is None, (home / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as reply:
                    name = json.load(reply)["data"][0]["id"]
                break
            except OSError:
                assert time.monotonic() < end, (home / "server.log").read_text()
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/v1#{name}"
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
        log.close()


@pytest.mark.real
def test_arithmetic_runs_on_the_embedded_model_behind_serve_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("TFGRPO_SHARED", str(tmp_path / "absent"))
    tiny = {
        "run.folder": tmp_path / "run",
        "tasks.practice": 2,
        "tasks.gate": 2,
        "tasks.test": 2,
        "learn.epochs": 1,
        "learn.group_size": 2,
        "gate.group_size": 1,
        "gate.test_group_size": 1,
        "policy.sampling.max_tokens": 12,
        "critic.sampling.max_tokens": 24,
        "learn.entries": "exemplars",
        "learn.reference_exemplars": "true",
    }
    overrides = [word for key, value in tiny.items() for word in ("--set", f"{key}={value}")]
    with serving_the_embedded_model(tmp_path) as spec:
        result = load("gsm8k_openai.py").main(["--lm", spec, *overrides])
    practice = result.outcomes["practice"]
    assert practice == {"graded": 4}
    assert sum(row.usage.completion_tokens for row in result.spend) > 0
    assert result.exit_code in (0, 1, 5)  # so small a run proves nothing either way


@pytest.mark.real
@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("tfgrpo_in_100_lines.py", (), "test: +"),
        ("tool_agent/run.py", (), "verdict met"),
        ("learn_from_traces.py", (), "ready to paste"),
        ("tool_world_search.py", (), "astar: 3 of 3 solved"),
    ],
)
def test_an_example_runs_alone_from_any_folder(
    script: str, arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    assert expected in run_alone(str(EXAMPLES / script), *arguments, cwd=tmp_path)
