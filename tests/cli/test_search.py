"""Settings, the command, the example, and what importing the package loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples import tool_world_search as example
from tfgrpo.cli.search import app, run_config
from tfgrpo.errors import ConfigError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.search.config import read_config
from tfgrpo.store import read_groups

ROOT = Path(__file__).resolve().parents[2]

WORLD = """
from tfgrpo.search.environments.tools import ToolEnvironment

def step(state: dict, name: str) -> str:
    '''Make a step.'''
    state["path"].append(name)
    return "did " + name

def make(task):
    return ToolEnvironment([step], state={"path": []}, goal=lambda s: s["path"] == ["a", "b"])
"""


def write(folder: Path, extra: str = "", budget: str = "expansions = 20") -> Path:
    (folder / "world.py").write_text(WORLD)
    rows = [{"task_id": "first", "prompt": "do a, then b"}, {"task_id": "../2", "prompt": "again"}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    path = folder / "search.toml"
    path.write_text(
        f"""tasks = "tasks.jsonl"
[model]
lm = "scripted:none"
form = "text"
[world]
python = "world.py:make"
[budget]
{budget}
[output]
groups = "out/groups.jsonl"
logs = "out/logs"
views = "out/views"
memory = "out/plans.json"
{extra}
"""
    )
    return path


def reply(request: Request, seed: int | None) -> str:
    n = sum(m.role == "assistant" for m in request.messages)
    name = "ab"[min(n, 1)] if (seed or 0) % 2 else "z"
    return f'Action: step {{"name": "{name}"}}'


def scores_in(row: Any) -> list[dict[str, Any]]:
    """Return every score in a line of an event log."""
    if isinstance(row, list):
        return [s for part in row for s in scores_in(part)]
    if not isinstance(row, dict):
        return []
    return [row] * ("step_cost" in row) + [s for part in row.values() for s in scores_in(part)]


async def test_the_command_searches_each_task_and_keeps_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(write(tmp_path))
    lm = ScriptedLM(reply)
    found = await run_config(config, lm=lm, show=True)
    assert found.exit_code == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [r["solved"] for r in rows] == [True, True]
    assert rows[0]["plan"][0] == {"name": "step", "arguments": {"name": "a"}}
    assert "★ step(name='b')" in err
    groups = list(read_groups(tmp_path / "out" / "groups.jsonl"))
    assert [g.task.task_id for g in groups] == ["first", "../2"]
    assert all(1.0 in g.rewards_G for g in groups)
    names = sorted(p.name for p in (tmp_path / "out" / "views").iterdir())
    assert names[1] == "first.html" and "/" not in names[0] and names[0].startswith("__")
    plans = json.loads((tmp_path / "out" / "plans.json").read_text())["plans"]
    assert [p["names"] for p in plans] == [["step", "step"]]
    asked = len(lm.requests)
    again = await run_config(config, lm=lm)  # from the logs: nothing is asked twice
    assert again.exit_code == 0 and len(lm.requests) == asked


@pytest.mark.parametrize(
    ("knobs", "cost"),
    [("floor = 0.0", 0.0), ("floor = 0.25", 0.25)],  # nothing is remembered; all samples agree
)
async def test_knobs_of_the_scorer_are_settings(tmp_path: Path, knobs: str, cost: float) -> None:
    extra = f'[search]\nscorer = "paper"\nscorer_options = {{ {knobs} }}\nseed = 1\nsamples = 1'
    await run_config(read_config(write(tmp_path, extra)), lm=ScriptedLM(reply))
    log = (tmp_path / "out" / "logs" / "first.jsonl").read_text()
    costs = [s["step_cost"] for line in log.splitlines() for s in scores_in(json.loads(line))]
    assert costs and set(costs) == {cost}


async def test_knobs_of_a_scorer_that_has_none_are_refused(tmp_path: Path) -> None:
    extra = '[search]\nscorer = "unit"\nscorer_options = { alpha = 1.0 }'
    with pytest.raises(ConfigError, match=r"scorer_options .*alpha.* belong to .* is unit"):
        await run_config(read_config(write(tmp_path, extra)), lm=ScriptedLM(reply))


async def test_an_unsolved_task_that_a_limit_stopped_is_exit_code_4(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, budget="expansions = 1"))
    found = await run_config(config, lm=ScriptedLM('Action: step {"name": "z"}'))
    assert found.exit_code == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks = 'x'\n[search]\nalgoritm = 'astar'", "did you mean 'algorithm'"),
        ("tasks = 'x'\n[serch]\nsamples = 3", "did you mean 'search'"),
        ("tasks = 'x'\n[search]\nscorer = 'best'", "robust"),
        ("tasks = ", "is not TOML"),
        ("tasks = 'x'\n[world]\npython = 'a:b'\nmcp = 'http://x'", "give one of them"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("nothing.py:make", "no file"),
        ("world.py:other", "has no 'other'"),
        ("world", "write file.py"),
    ],
)
async def test_a_wrong_world_is_named(tmp_path: Path, world: str, message: str) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("world.py:make", world))
    with pytest.raises(ConfigError, match=message):
        await run_config(read_config(path), lm=ScriptedLM("x"))


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none.toml")])
    assert isinstance(result.exception, ConfigError)
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="tasks is missing"):
        read_config(tmp_path / "empty.toml")


def test_the_core_loads_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "from tfgrpo.search import search, BestFirst, MCTS, Beam, ABMCTS, BestOfN, DepthFirst\n"
        "from tfgrpo.search import EntropyRollouts, ToolChainScorer, FileLog, explore, group_of\n"
        "import tfgrpo.search.views, tfgrpo.search.environments.undo_log\n"
        "import tfgrpo.search.environments.cached\n"
        "names = {m.split('.')[0] for m in sys.modules}\n"
        "own = {'tfgrpo', 'sitecustomize', '__main__'}\n"
        "print(sorted(n for n in names - own if n not in sys.stdlib_module_names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = json.loads(done.stdout.replace("'", '"'))
    ours = [n for n in loaded if not n.startswith(("_", "__editable__"))]
    assert ours == []


def test_loading_the_core_loads_nothing_that_is_dear() -> None:
    """Text comparison and package metadata wait for the first use."""
    code = (
        "import sys\n"
        "import tfgrpo.search.api, tfgrpo.search.driver, tfgrpo.search.groups\n"
        "dear = {'numpy', 'pydantic', 'difflib', 'importlib.metadata'}\n"
        "print(sorted(dear & set(sys.modules)))\n"
    )
    command = [sys.executable, "-S", "-c", code]  # without what site-packages load at the start
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def scripted_errands(request: Request, seed: int | None) -> str:
    """Play the errand right in two of three draws."""
    text = next(m.content for m in reversed(request.messages) if m.content.startswith("Go to"))
    words = text.replace(".", "").split()
    thing_at, thing = words[3], words[7]
    person_at, person = words[12], words[-1]
    done = 0
    for message in reversed(request.messages):
        if message.content.startswith("Go to"):
            break
        done += message.role == "assistant"
    steps = [
        f'go {{"place": "{thing_at}"}}',
        f'take {{"thing": "{thing}"}}',
        f'go {{"place": "{person_at}"}}',
        f'give {{"thing": "{thing}", "person": "{person}"}}',
    ]
    wrong = 'go {"place": "attic"}'
    return "Action: " + (steps[min(done, 3)] if (seed or 0) % 3 else wrong)


async def test_the_example_runs_on_a_scripted_model(capsys: pytest.CaptureFixture[str]) -> None:
    solved = await example.run(ScriptedLM(scripted_errands))
    assert solved["astar"] == [True, True, True]
    assert "give(" in capsys.readouterr().out


async def test_the_example_s_settings_are_the_example(tmp_path: Path) -> None:
    config = read_config(ROOT / "examples" / "tool_world.toml")
    found = await run_config(config, lm=ScriptedLM(scripted_errands))
    assert found.exit_code == 0


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_embedded_model_runs_the_whole_example(tmp_path: Path) -> None:
    for name in ("tool_world_search.py", "tool_world_tasks.jsonl"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    path = tmp_path / "tool_world.toml"
    text = (ROOT / "examples" / "tool_world.toml").read_text()
    path.write_text(text + '\n[output]\ngroups = "groups.jsonl"\n')
    code = (
        "import asyncio, sys\n"
        "from tfgrpo.cli.search import run_config\n"
        "from tfgrpo.search.config import read_config\n"
        "found = asyncio.run(run_config(read_config(sys.argv[1])))\n"
        "sys.exit(found.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["task_id"] for r in rows] == ["errand-1", "errand-2"], done.stderr
    assert done.returncode == 0 if all(r["solved"] for r in rows) else done.returncode in (1, 4)
    groups = list(read_groups(tmp_path / "groups.jsonl"))
    for row, group in zip(rows, groups, strict=True):
        assert 0 < row["calls"] <= row["counters"]["expansions"] <= 12
        assert row["solved"] == (1.0 in group.rewards_G)
        if row["solved"]:
            assert [a["name"] for a in row["plan"]].count("give") >= 1
    assert any(row["counters"]["nodes"] > 3 for row in rows)  # the model's actions were understood
