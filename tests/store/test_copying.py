"""Runs copied between a folder and a server: equal in every row, or not there."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.conftest import Where
from tests.store.driver import CountingServer, Settings, learn, result_of, run_whole
from tests.store.test_both_stores import group
from tests.store.test_crash_property import run_until_death
from tfgrpo.errors import BudgetError, StoreError
from tfgrpo.store import Journal
from tfgrpo.store.budget import Budget
from tfgrpo.store.postgres.copying import copy_run
from tfgrpo.store.postgres.places import Place, place_of
from tfgrpo.store.postgres.statements import TABLES

SETTINGS = Settings()


def rows_of(place: str | Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of a journal, sorted."""
    with Journal.open(place, readonly=True) as store:
        return {
            table: sorted(
                (
                    tuple(bytes(v, "ascii") if c == "body" and isinstance(v, str) else v
                          for c, v in zip(columns, row, strict=True))
                    for row in store._writer.read(f"SELECT {', '.join(columns)} FROM {table}")
                ),
                key=repr,
            )
            for table, columns in TABLES.items()
        }  # fmt: skip


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed, gone on with, and has a damaged row and odd names."""
    folder = tmp_path / "killed"
    run_until_death(folder, CountingServer(), SETTINGS, 30, True)
    with Journal.open(folder, config=SETTINGS.to_config()) as store:
        store.record_group(group("odd \x00 \x01 \ud800"))
        store.record_decision("kind", {"a": ["x" * 9000]}, key="k")
        store._values.set_aside("rollouts", 1, "for a test")
        store.calls.count_hit("stage", "model")
    return folder


def test_a_run_goes_to_a_server_and_back_without_a_difference(
    killed: Path, on_server: Where, tmp_path: Path
) -> None:
    there = copy_run(place_of(killed), place_of(on_server("run")))
    back = copy_run(place_of(on_server("run")), Place(tmp_path / "back"))
    again = copy_run(Place(tmp_path / "back"), place_of(on_server("again")))
    beside = copy_run(place_of(on_server("again")), place_of(on_server("beside")))
    assert there == back == again == beside
    assert there.rows["calls"] > 5 and there.rows["groups"] > 1 and there.rows["set_aside"] == 1
    original = rows_of(killed)
    for copied in (on_server("run"), tmp_path / "back", on_server("beside")):
        assert rows_of(copied) == original
    states, seconds = [], 0.0
    for place in (killed, on_server("run"), tmp_path / "back"):
        with Journal.open(place, readonly=True) as store:
            state = store.state()
            assert state.seconds == pytest.approx(seconds := seconds or state.seconds, abs=1e-5)
            rows = [replace(r, duration_s=round(r.duration_s, 9)) for r in state.spend]
            state = replace(state, seconds=0.0, spend=tuple(rows))
            states.append((result_of(store), state, store.config, list(store.groups())))
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("target", ["server", "folder"])
def test_a_copied_run_goes_on_and_pays_nothing_twice(
    target: str, on_server: Where, tmp_path: Path
) -> None:
    server, capped = CountingServer(), Budget(calls=20)
    origin, copied = str(tmp_path / "origin"), on_server("copied")
    if target == "folder":
        origin, copied = on_server("origin"), str(tmp_path / "copied")
    with (
        Journal.open(origin, create=True, config=SETTINGS.to_config(), budget=capped) as store,
        pytest.raises(BudgetError),
    ):
        asyncio.run(learn(store, server, SETTINGS))
    copy_run(place_of(origin), place_of(copied))
    with Journal.open(copied, budget=capped) as store:
        assert store.ledger.spent["calls"] == 20
        with pytest.raises(BudgetError, match="budget calls"):
            store.ledger.reserve(calls=1)
    assert run_whole(copied, server, SETTINGS) == run_whole(
        tmp_path / "reference", CountingServer(), SETTINGS
    )
    assert set(server.received.values()) == {1}
    assert len(rows_of(copied)["calls"]) == len({r[0] for r in rows_of(copied)["calls"]}) == 26


def test_new_rows_come_after_the_copied_ones(killed: Path, on_server: Where) -> None:
    copy_run(place_of(killed), place_of(on_server("run")))
    copied = max(row[0] for row in rows_of(on_server("run"))["decisions"])
    with Journal.open(on_server("run")) as store:
        store.record_decision("kind", "newest", key="k")
        newest = store._writer.read("SELECT max(decision) FROM decisions")[0][0]
        assert newest > copied  # type: ignore[operator]
        assert store.decisions("kind")[-1] == ("k", "newest")


def test_a_run_in_use_is_not_copied(killed: Path, on_server: Where, tmp_path: Path) -> None:
    with Journal.open(killed), pytest.raises(StoreError, match="in use"):
        copy_run(place_of(killed), place_of(on_server("run")))
    copy_run(place_of(killed), place_of(on_server("run")))
    with (
        Journal.open(on_server("run"), role="writer"),
        pytest.raises(StoreError, match=r"in use by process .* nothing was copied"),
    ):
        copy_run(place_of(on_server("run")), Place(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_taken_place_is_left_as_it_is(killed: Path, on_server: Where, tmp_path: Path) -> None:
    copy_run(place_of(killed), place_of(on_server("run")))
    before = rows_of(on_server("run"))
    with pytest.raises(StoreError, match="already: choose another name"):
        copy_run(place_of(killed), place_of(on_server("run")))
    assert rows_of(on_server("run")) == before
    with pytest.raises(StoreError, match="already: choose another folder"):
        copy_run(place_of(on_server("run")), Place(killed))
    with pytest.raises(StoreError, match="onto itself"):
        copy_run(place_of(on_server("run")), place_of(on_server("run")))
    with pytest.raises(StoreError, match="there is no run"):
        copy_run(Place(tmp_path / "nothing"), place_of(on_server("other")))
    with pytest.raises(StoreError, match="there is no run"):
        copy_run(place_of(on_server("other")), Place(tmp_path / "x"))


def test_a_value_of_another_type_stops_the_copy_and_leaves_nothing(
    killed: Path, on_server: Where
) -> None:
    connection = sqlite3.connect(killed / "run.db", isolation_level=None)
    connection.execute("UPDATE results SET calls = 'many' WHERE call = 3")
    connection.close()
    with pytest.raises(StoreError, match=r"results\.calls holds 'many', no bigint"):
        copy_run(place_of(killed), place_of(on_server("run")))
    with pytest.raises(StoreError, match="there is no run"):
        Journal.open(on_server("run"), readonly=True)


def test_a_copy_that_differs_is_not_kept(
    killed: Path, on_server: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfgrpo.store.postgres import copying

    write = copying._write_file

    def forgetful(connection: object, table: str, rows: object) -> None:
        write(connection, table, list(rows)[:-1] if table == "rollouts" else rows)  # type: ignore

    copy_run(place_of(killed), place_of(on_server("run")))
    monkeypatch.setattr(copying, "_write_file", forgetful)
    with pytest.raises(StoreError, match="not equal: rollouts has"):
        copy_run(place_of(on_server("run")), Place(tmp_path / "back"))
    assert [p.name for p in (tmp_path / "back").iterdir()] == []


def test_a_gateways_journal_stays_where_it_is(killed: Path, on_server: Where) -> None:
    connection = sqlite3.connect(killed / "run.db", isolation_level=None)
    connection.execute("PRAGMA user_version=2")
    connection.close()
    with pytest.raises(StoreError, match="a gateway's journal"):
        copy_run(place_of(killed), place_of(on_server("run")))
