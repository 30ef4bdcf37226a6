from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.cli.command_line import cli
from tfgrpo.cli.templates import DEFAULT, TEMPLATES
from tfgrpo.config.learn import Config
from tfgrpo.runtime.import_string import noted_module_folder
from tfgrpo.tasks import read_tasks


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
