from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path

import pytest

from tests.cli.command_line import cli, here
from tests.learning.worlds import critic_reply
from tests.patience import LONG_S
from tfgrpo.cli.templates import DEFAULT, TEMPLATES
from tfgrpo.config.learn import Config
from tfgrpo.learning.forecast import forecast
from tfgrpo.runtime.import_string import noted_module_folder
from tfgrpo.tasks import read_tasks
from tfgrpo.tasks.run_tasks import read_run_tasks
from tfgrpo.testing import Call, FaultServer


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_a_valid_config_with_enough_tasks(name: str, tmp_path: Path) -> None:
    for file, text in TEMPLATES[name].written("runs/x").items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    config = Config.from_toml(tmp_path / "config.toml")
    tasks = read_tasks(config.tasks.path)
    wanted = (config.tasks.practice or 0) + (config.tasks.gate or 0) + (config.tasks.test or 0)
    assert wanted <= len(tasks)
    assert len({t.text for t in tasks}) == len(tasks)
    values = tomllib.loads((tmp_path / "config.toml").read_text("utf-8"))
    functions = [values.get("verifier", {}).get("function", ""), config.policy.function]
    for path in filter(None, [*functions, *config.policy.tools]):
        module, _, function = path.partition(":")
        code = (tmp_path / f"{module}.py").read_text("utf-8")
        assert re.search(rf"^def {function}\(", code, re.MULTILINE), path


def test_the_default_template_needs_nothing_from_a_person() -> None:
    assert TEMPLATES[DEFAULT].needs == ""


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_function_template_ends_in_a_kept_library(seed: int, tmp_path: Path) -> None:
    assert cli(tmp_path, "init", "mine", "--template", "function").code == 0
    seeds = ("--set", f"learn.seed={seed}", "--set", f"tasks.seed={seed}")
    ran = cli(tmp_path, "learn", "mine/config.toml", "--quiet", *seeds)
    assert ran.code == 0, ran.err
    assert "verdict met beyond noise" in ran.out
    assert (tmp_path / "runs" / "mine" / "messages.json").is_file()


def test_an_unknown_template_names_the_nearest(tmp_path: Path) -> None:
    ran = cli(tmp_path, "init", ".", "--template", "extractoin")
    assert ran.code == 2 and "did you mean 'extraction'" in ran.err


def test_a_run_remembers_where_its_modules_lay(tmp_path: Path) -> None:
    assert cli(tmp_path, "init", "mine", "--template", "function").code == 0
    assert cli(tmp_path, "learn", "mine/config.toml", "--quiet").code == 0
    assert noted_module_folder(tmp_path / "runs" / "mine") == (tmp_path / "mine").resolve()
    assert noted_module_folder(tmp_path) is None


LESSON = "When a number is asked for, work it out step by step and answer with the number alone."


@pytest.mark.real
@pytest.mark.parametrize("name", ["tools", "server"])
def test_a_template_for_a_served_model_ends_in_a_kept_library(name: str, tmp_path: Path) -> None:
    """The served model is right in four of ten attempts, and nearly always under the lesson."""
    assert cli(tmp_path, "init", "mine", "--template", name).code == 0
    rows = (tmp_path / "mine" / "tasks.jsonl").read_text("utf-8").splitlines()
    answers = {row["prompt"]: row["reference"] for row in map(json.loads, rows)}

    def draw(call: Call, seed: int) -> str:
        if call.text not in answers:
            return critic_reply(call.body["messages"][0]["content"], LESSON)
        chance = 0.97 if LESSON in json.dumps(call.body["messages"]) else 0.4
        right = random.Random(f"{call.text}{seed}").random() < chance
        return answers[call.text] if right else "I do not know."

    with FaultServer(draw=draw) as server:
        lm = f'policy.lm="{server.spec("m")}"'
        critic = f'critic.lm="{server.spec("m")}"'
        ran = cli(tmp_path, "learn", "mine/config.toml", "--quiet", "--set", lm, "--set", critic)
    assert ran.code == 0, ran.err + ran.out
    assert "kept: version" in ran.out and "verdict met beyond noise" in ran.out
    assert (tmp_path / "runs" / "mine" / "messages.json").is_file()


@pytest.mark.parametrize("name", [n for n, t in TEMPLATES.items() if t.needs])
def test_a_template_that_is_not_filled_in_says_what_is_missing(name: str, tmp_path: Path) -> None:
    made = cli(tmp_path, "init", "mine", "--template", name)
    assert f"first: {TEMPLATES[name].needs}" in made.out
    closed = {"OPENAI_API_KEY": ""}
    short = ("--quiet", "--set", "run.retry_deadline_s=0.2")
    ran = cli(tmp_path, "learn", "mine/config.toml", *short, env=closed)
    assert ran.code in (3, 5), ran
    assert "OPENAI_API_KEY" in ran.err or "127.0.0.1:8000" in ran.err


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("name", ["extraction"])  # the other is a command of the tutorial
def test_a_template_for_the_embedded_model_ends_in_a_kept_library(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    assert cli(tmp_path, "init", "mine", "--template", name).code == 0
    ran = cli(tmp_path, "learn", "mine/config.toml", "--quiet", patience_s=LONG_S)
    assert ran.code == 0, ran.err + ran.out
    assert "kept: version" in ran.out and "verdict met beyond noise" in ran.out


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_tests_on_what_it_teaches(name: str, tmp_path: Path) -> None:
    for file, text in TEMPLATES[name].written("runs/x").items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    config = Config.from_toml(tmp_path / "config.toml")
    found = read_run_tasks(config)
    splits = found.splits
    assert found.notes == ()
    assert forecast(config, splits.practice, splits.gate, splits.test).warnings == ()


def test_a_folder_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ('we"ird', "back\\slash", "ünï 日", "line\nbreak"):
        assert here(capsys, "init", str(tmp_path / name)).code == 0
        config = Config.from_toml(tmp_path / name / "config.toml")
        assert config.run.folder == f"runs/{name}"
