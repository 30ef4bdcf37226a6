"""A run whose journal is on a server, from the command line: the verbs are those of any run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command_line import Ran, folder_with, here
from tests.store.postgres_server import NO_SERVER, PostgresServer, programs

CANARY = "canary-pass-4711"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The address of a database, with a password that no output may hold."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if programs() is None:
        pytest.skip(NO_SERVER)
    server = PostgresServer()
    yield server.new_database().replace("tester@", f"tester:{CANARY}@")
    server.close()


def learnt(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Ran:
    config = str(folder / "config.toml")
    ran = here(capsys, "learn", config, "--quiet", "--json", *more)
    assert ran.code in (0, 1, 5), ran.err
    return ran


def _levers(ran: Ran) -> list[dict[str, object]]:
    """Advice without the commands, which name the run as it was given."""
    return [row | {"command": ""} for row in json.loads(ran.out)]


def test_every_verb_takes_the_folder_and_the_address(
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_with(tmp_path)
    monkeypatch.chdir(tmp_path)
    on_server = ("--set", f"run.store={database}")
    told = [learnt(capsys, folder, *on_server)]
    run, address = str(folder / "run"), f"{database}#run"
    assert not (folder / "run" / "run.db").exists()
    (tmp_path / "file").mkdir()
    told.append(learnt(capsys, folder_with(tmp_path / "file")))
    results = [json.loads(r.out) for r in told]
    assert results[0]["verdict"] == results[1]["verdict"]
    assert [r["usage"] for r in results[0]["spend"]] == [r["usage"] for r in results[1]["spend"]]

    def both(*arguments: str, last: tuple[str, ...] = ()) -> list[Ran]:
        ran = [here(capsys, *arguments, place, *last) for place in (run, address)]
        assert [r.code for r in ran] == [0, 0], ran
        told.extend(ran)
        return ran

    report = both("report", "--format", "json")
    summaries = [json.loads(r.out) for r in report]
    assert summaries[0]["verdict"] == summaries[1]["verdict"]
    assert here(capsys, "report", address).out.strip() == str(Path("runs/run/report.html"))
    assert "<!doctype html>" in (tmp_path / "runs" / "run" / "report.html").read_text()[:20]
    advice = both("advise", "--json")
    assert [_levers(r) for r in advice] == [_levers(advice[0])] * 2
    both("library", "show")
    told.append(here(capsys, "advise", address))
    told.append(here(capsys, "eval", str(folder / "config.toml"), f"{address}-absent"))
    assert told[-1].code == 6 and "no library at 'runs/run-absent'" in told[-1].err
    exported = both("export", last=("out.jsonl",))
    assert "groups ->" in exported[1].out
    listed = both("runs", "list", "--json")
    rows = [json.loads(r.out) for r in listed]
    assert rows[0] | {"run": ""} == rows[1] | {"run": ""} and rows[0]["bytes"] is None
    assert rows[0]["rollouts"] > 0 and rows[0]["interruptions"] == 0
    for ran in told:
        assert CANARY not in ran.out + ran.err
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file


def test_the_same_command_goes_on_and_changed_settings_need_a_fork(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, '[run]\nfolder = "again"')
    on_server = ("--set", f"run.store={database}", "--set", f"run.folder={tmp_path / 'again'}")
    first = learnt(capsys, folder, *on_server)
    again = learnt(capsys, folder, *on_server)
    assert json.loads(first.out)["verdict"] == json.loads(again.out)["verdict"]
    config = str(folder / "config.toml")
    other = here(capsys, "learn", config, *on_server, "--set", "learn.seed=7", "--quiet")
    assert other.code == 2 and "learn.seed: 0 -> 7" in other.err and CANARY not in other.err
    learnt(capsys, folder, *on_server, "--set", "learn.seed=7", "--fork")
    listed = here(capsys, "runs", "list", database)
    assert "#again:" in listed.out and "#again-fork1:" in listed.out
    assert (tmp_path / "again-fork1" / "store.json").exists()


def test_eval_compares_on_the_server(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, "[gate]\nenabled = false")  # keeps what was learnt last
    library = str(tmp_path / "library")
    learnt(capsys, folder)
    exported = here(capsys, "library", "export", str(folder / "run"), library)
    assert exported.code == 0, exported.err
    config = str(folder / "config.toml")
    store = ("--set", f"run.store={database}", "--set", f"run.folder={tmp_path / 'compared'}")
    ran = [here(capsys, "eval", config, library, "--json", *store) for _ in range(2)]
    assert ran[0].code in (0, 1, 5), ran[0]
    assert ran[0].code == ran[1].code and json.loads(ran[0].out) == json.loads(ran[1].out)
    assert "#compared-eval:" in here(capsys, "runs", "list", database).out


def test_copy_list_migrate_purge(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    learnt(capsys, folder)
    run, there, back = str(folder / "run"), f"{database}#copied", str(tmp_path / "back")
    told = [here(capsys, "runs", "copy", run, there), here(capsys, "runs", "copy", there, back)]
    assert all("counts and digests are equal" in r.out for r in told), told
    advice = [_levers(here(capsys, "advise", where, "--json")) for where in (run, back)]
    assert advice[0] == advice[1] != []
    told.append(here(capsys, "runs", "copy", run, there))
    assert told[-1].code == 6 and "already" in told[-1].err
    told.append(here(capsys, "runs", "migrate", database))
    assert "nothing to do" in told[-1].out
    told.append(here(capsys, "runs", "purge", "--yes", there))
    assert told[-1].code == 0
    told.append(here(capsys, "runs", "list", database))
    assert "#copied" not in told[-1].out
    assert here(capsys, "runs", "purge", "--yes", there).code == 6
    for ran in told:
        assert CANARY not in ran.out + ran.err


def test_a_server_that_is_away_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tfgrpo.store.postgres.opening._OPENING_S", 0.1)
    folder = folder_with(tmp_path)
    away = f"run.store=postgresql://u:{CANARY}@127.0.0.1:1/db"
    ran = here(capsys, "learn", str(folder / "config.toml"), "--quiet", "--set", away)
    assert ran.code == 6 and "Connection refused" in ran.err and CANARY not in ran.err
