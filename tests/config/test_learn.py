"""Settings: order of sources, named mistakes, tasks from JSONL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.config.learn import Config
from tfgrpo.config.sections import check_names
from tfgrpo.errors import ConfigError
from tfgrpo.experience.settings import Caps
from tfgrpo.tasks.files import read_tasks


def written(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "[learn]\nbatch = 4\nseed = 3\n")
    config = Config.from_toml(path, ["learn.batch=5", "policy.lm=openai:x", "gate.enabled=false"])
    assert (config.learn.batch, config.learn.seed, config.learn.epochs) == (5, 3, 2)
    assert config.policy.lm == "openai:x" and config.gate.enabled is False


def test_task_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[tasks]\npath = 't.jsonl'\ntraces = '/abs/g.jsonl'\n")
    config = Config.from_toml(path)
    assert config.tasks.path == str(tmp_path / "t.jsonl")
    assert config.tasks.traces == "/abs/g.jsonl"


def test_a_config_is_frozen_and_its_json_form_reads_back() -> None:
    config = Config.from_mapping({"learn": {"batch": 3}, "policy": {"sampling": {"stop": ["x"]}}})
    assert Config.from_mapping(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(Exception, match="frozen"):
        config.learn.batch = 4  # type: ignore[misc]


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "[learn]\nbatch = 0\ngroup_sise = 2\n[gate]\nlevel = 2.0\n")
    with pytest.raises(ConfigError) as caught:
        Config.from_toml(path)
    said = str(caught.value)
    assert "learn.batch = 0" in said and "gate.level = 2.0" in said
    assert "learn.group_sise" in said and "did you mean 'group_size'" in said


@pytest.mark.parametrize("text", ["[run]\nbudget_usd = 1\n", "[budget]\ncost = -1\n", "x = 1\n"])
def test_unknown_keys_are_errors_on_every_level(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        Config.from_toml(written(tmp_path, text))


def test_names_of_a_record_are_checked_with_the_nearest() -> None:
    check_names({"entries": 1}, Caps, "caps")
    with pytest.raises(ConfigError, match="caps: unknown key 'entrys'; did you mean 'entries'"):
        check_names({"entrys": 1}, Caps, "caps")


def test_tasks_take_ids_prompts_turns_references_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"task_id": 7, "prompt": "a\u2028b", "reference": {"x": 1}, "metadata": {"k": 2}},
        {"id": "m", "messages": [{"role": "system", "content": "s"},
                                 {"role": "user", "content": "u"}]},
    ]  # fmt: skip
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    path.write_text(text, encoding="utf-8")
    first, second = read_tasks(path)
    assert (first.task_id, first.prompt, first.reference) == ("7", "a\u2028b", {"x": 1})
    assert dict(first.metadata) == {"k": 2}
    assert [m.role for m in second.messages] == ["system", "user"]


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.text(min_size=1), st.none() | st.text() | st.integers()),
        min_size=1,
        unique_by=lambda row: row[0],
    )
)
def test_any_task_that_json_can_hold_is_read_as_it_was_written(
    rows: list[tuple[str, str, object]],
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.jsonl"
        path.write_text(
            "".join(
                json.dumps({"task_id": i, "prompt": p, "reference": r}) + "\n" for i, p, r in rows
            )
        )
        tasks = read_tasks(path)
    assert [(t.task_id, t.prompt, t.reference) for t in tasks] == rows


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"task_id": "a", "messages": [{"role": "robot", "content": "x"}]}, "line 1"),
        ({"task_id": "a", "messages": ["x"]}, "line 1"),
        ({"task_id": "a", "prompt": "x", "metadata": [1]}, "line 1"),
        ({"task_id": "a", "prompt": 5}, "prompt is 5"),
        ({"task_id": ["a"], "prompt": "x"}, "task_id is"),
    ],
)
def test_rows_of_the_wrong_form_are_named_with_their_line(
    tmp_path: Path, row: dict[str, object], named: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=named):
        read_tasks(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[run]\nfolder = "a\\u0000b"\n', "run.folder"),
        ('[policy.sampling]\nstop = ["x", "\\u0000"]\n', "policy.sampling.stop.1"),
    ],
)
def test_a_nul_character_is_refused_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"{key} holds a NUL"):
        Config.from_toml(tmp_path / "c.toml")
