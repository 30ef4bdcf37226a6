"""The `[hints]` section at work: written by the policy, by a teacher, kept for a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cli.test_train import write_model
from tests.hints.groups import SOLUTION, task
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.rollouts.hint_setup import FILE, policy_lm, prepare
from tfgrpo.rl.trainer import Trainer

GOOD = "Level 1: add\nLevel 2: tens first\nLevel 3: carry the rest"
TASKS = [task(f"t{i}", solution=SOLUTION) for i in range(3)]


def config_of(folder: Path, **hints: Any) -> TrainConfig:
    return tiny_config(folder).model_copy(update={"hints": {"name": "sage", **hints}})


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Opens a scripted LM for any spec; returns the specs that were opened."""
    opened: list[str] = []

    def open_lm(spec: str) -> ScriptedLM:
        opened.append(spec)
        return ScriptedLM(lambda request, seed: GOOD)

    monkeypatch.setattr("tfgrpo.lm.open_lm", open_lm)
    return opened


def test_without_a_section_or_a_writer_tasks_stay_as_they_are(tmp_path: Path) -> None:
    parts = tiny_parts()
    assert prepare(tiny_config(tmp_path), TASKS, parts) == (TASKS, None)
    made, scheduler = prepare(config_of(tmp_path), TASKS, parts)
    assert made == TASKS
    assert scheduler is not None
    assert scheduler.figures() == {}
    assert not (tmp_path / FILE).exists()


def test_a_teacher_writes_once_and_a_resume_reads(tmp_path: Path, teacher: list[str]) -> None:
    config = config_of(tmp_path, writer="openai:gpt-x", retries=0)
    made, scheduler = prepare(config, TASKS, tiny_parts())
    assert [t.metadata["hints"] for t in made] == [["add", "tens first", "carry the rest"]] * 3
    assert {t.metadata["hints_source"] for t in made} == {"teacher"}
    assert scheduler is not None
    figures = {
        "parse_rate": 1.0,
        "written_replies": 3.0,
        "written_leaked": 0.0,
        "written_fallbacks": 0.0,
        "written_without": 0.0,
    }
    assert scheduler.figures() == figures
    again, resumed = prepare(config, TASKS, tiny_parts())
    assert again == made
    assert resumed is not None
    assert resumed.figures() == figures
    assert teacher == ["openai:gpt-x"]
    prepare(config_of(tmp_path, writer="openai:gpt-x", retries=1), TASKS, tiny_parts())
    assert len(teacher) == 2  # other settings, other hints


def test_kept_hints_that_cannot_be_read_are_named(tmp_path: Path, teacher: list[str]) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(StoreError, match="delete the file"):
        prepare(config_of(tmp_path, writer="openai:gpt-x"), TASKS, tiny_parts())
    assert not teacher


def test_the_log_of_a_step_tells_the_parse_rate(tmp_path: Path, teacher: list[str]) -> None:
    config = config_of(tmp_path, writer="openai:gpt-x", success_above=2.0)
    parts = tiny_parts()
    made, scheduler = prepare(config, TASKS, parts)
    figures = Trainer(config, parts, made, EvenTokens(), hints=scheduler).step().figures
    assert figures["hints_parse_rate"] == 1.0
    assert figures["hints_level_3"] == 3.0
    assert figures["rollouts"] == 3 * 4 * 4  # tasks × group × levels tried


@pytest.fixture
def real_parts(tmp_path: Path) -> LoadedModel:
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    settings = tmp_path / "model" / "config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return load_parts(f"local:{tmp_path / 'model'}", dtype="float32")


def test_the_policy_writes_and_what_cannot_be_read_is_cut(
    tmp_path: Path, real_parts: LoadedModel
) -> None:
    config = config_of(tmp_path / "run", writer="self", retries=1, writer_tokens=4)
    made, scheduler = prepare(config, TASKS, real_parts)
    assert scheduler is not None
    assert scheduler.figures()["parse_rate"] == 0.0  # random weights
    assert scheduler.figures()["written_replies"] == 6.0
    assert scheduler.figures()["written_fallbacks"] == 3.0
    assert all(SOLUTION.startswith(h) for t in made for h in t.metadata["hints"])
    assert {t.metadata["hints_source"] for t in made} == {"reference"}


async def test_the_policy_as_a_text_model_answers_alike_for_equal_seeds(
    real_parts: LoadedModel,
) -> None:
    from tfgrpo.messages import Message
    from tfgrpo.protocols import Request, Sampling

    lm = policy_lm(real_parts)
    request = Request((Message("user", "abc"),), sampling=Sampling(temperature=1.0, max_tokens=6))
    first, again, other = [(await lm.complete(request, 1, [s]))[0] for s in (1, 1, 2)]
    await lm.aclose()
    assert first.text == again.text != other.text


def test_a_method_that_reads_no_hints_takes_no_writer(tmp_path: Path) -> None:
    config = config_of(tmp_path, writer="self").model_copy(
        update={"hints": {"name": "questa", "writer": "self"}}
    )
    with pytest.raises(ConfigError, match="writer"):
        prepare(config, TASKS, tiny_parts())
