from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tfgrpo.cli.library import app
from tfgrpo.errors import ConfigError, EditError, TfgrpoError
from tfgrpo.experience.artefact import Artefact, Card, export_artefact, load_artefact
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.library import Library, from_texts
from tfgrpo.store import Journal


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, TfgrpoError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> str:
    library = from_texts(["Tie two knots.", "Draw the \x1b[31mboat first."])
    export_artefact(Artefact(library, Card(name="ropes")), tmp_path / "art")
    return str(tmp_path / "art")


@pytest.fixture
def run(tmp_path: Path) -> str:
    path = tmp_path / "run"
    first = from_texts(["Tie two knots."])
    second = first.apply([Edit("add", "Draw the boat first.")]).library
    with Journal.open(path, create=True, config={"learn": {}}) as store:
        for library in (first, second):
            store.record_library(library.version_id, library.to_dict())
    return str(path)


def test_show_prints_entries_without_control_characters(folder: str) -> None:
    output = call("show", folder)
    assert "E1 lesson active trust=human: Tie two knots." in output
    assert "\x1b" not in output and "\\x1b[31mboat" in output


def test_show_json_restores_the_library(folder: str) -> None:
    row = json.loads(call("show", folder, "--json"))
    assert Library.from_dict(row) == load_artefact(folder).library


def test_pin_ban_release_and_undo_change_the_artefact_in_place(folder: str) -> None:
    before = load_artefact(folder).library.version_id
    call("pin", folder, "E1", "--reason", "proved")
    call("ban", folder, "E2")
    library = load_artefact(folder).library
    assert [e.status for e in library.entries] == ["pinned", "banned"]
    call("release", folder, "E2")
    call("undo", folder, "--count", "3")
    assert load_artefact(folder).library.version_id == before


def test_a_run_is_changed_by_a_further_version(run: str) -> None:
    row = json.loads(call("ban", run, "E1", "--json"))
    with Journal.open(run, readonly=True) as store:
        versions = [key for key, _ in store.libraries()]
    assert versions[-2:] == [row["before"], row["after"]] and len(versions) == 3


def test_diff_compares_versions_of_a_run(run: str) -> None:
    with Journal.open(run, readonly=True) as store:
        first = store.libraries()[0][0]
    assert call("diff", f"{run}@{first}", run) == "+ E2 Draw the boat first.\n"
    assert call("diff", run, run) == "no difference\n"
    assert [e["experience_id"] for e in json.loads(call("diff", f"{run}@{first}", run, "--json"))["added"]] == ["E2"]  # fmt: skip  # noqa: E501


def test_export_writes_an_artefact_that_loads(run: str, tmp_path: Path) -> None:
    row = json.loads(call("export", run, str(tmp_path / "out"), "--json"))
    loaded = load_artefact(tmp_path / "out")
    assert loaded.render_hash == row["render_hash"]
    assert len(loaded.library) == 2


def test_mistakes_name_what_is_there(run: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no library at"):
        call("show", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="has no version 'ffff'"):
        call("show", f"{run}@ffff")
    with pytest.raises(EditError, match="no experience 'E9' in this library; there are: E1, E2"):
        call("pin", folder, "E9")
    with pytest.raises(EditError, match="changes go to the newest"):
        call("ban", f"{run}@abcd", "E1")
    with pytest.raises(EditError, match="cannot undo 50 changes"):
        call("undo", folder, "--count", "50")
