"""What a large run keeps for lists of runs is what opening it says, or is not used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.learning.worlds import HELPFUL, World
from tests.learning.worlds import settings as run_settings
from tests.store.test_damage import flip
from tfgrpo.report.served import rows
from tfgrpo.store import Journal, journal
from tfgrpo.store.disk.listing import kept_state

KINDS = ("final", "result")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that counts as large."""
    root = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "_LARGE", 10)
        World(lesson=HELPFUL).learn(run_settings(root))
    return root / "run"


@pytest.fixture
def run(large: Path, tmp_path: Path) -> Path:
    """A copy of it, with its times."""
    shutil.copytree(large, tmp_path / "run")
    return tmp_path / "run"


def test_a_list_shows_the_same_with_and_without_what_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_state(run, KINDS) is not None
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "open", None)  # nothing is opened for it
        quick = rows.run_row(run)
    monkeypatch.setattr(rows, "kept_state", lambda *args: None)
    slow = rows.run_row(run)
    assert quick.pop("seconds") == pytest.approx(slow.pop("seconds"), abs=1.0)
    assert quick == slow and quick["rollouts"] > 200 and quick["state"]


def test_what_is_kept_is_not_used_once_anything_was_added(run: Path) -> None:
    with Journal.open(run) as store:
        assert kept_state(run, KINDS) is None, "somebody writes"
        store.record_decision("note", 1)
    assert kept_state(run, KINDS) is None, "this session was not large enough to keep anything"


def test_what_is_kept_is_not_used_once_the_file_was_written(run: Path) -> None:
    file = run / "run.db"
    later = file.stat().st_mtime_ns + 10**9
    flip(file, 200_000)
    os.utime(file, ns=(later, later))
    assert kept_state(run, KINDS) is None
    assert rows.run_row(run)["damaged"]


def test_a_run_without_anything_kept_is_opened(tmp_path: Path) -> None:
    Journal.open(tmp_path / "run", create=True).close()
    assert kept_state(tmp_path / "run", KINDS) is None
    assert kept_state(tmp_path / "none", KINDS) is None
