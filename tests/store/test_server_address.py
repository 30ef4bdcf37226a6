"""Addresses, places, tables and their versions, and what a server may be asked without."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.store.conftest import Where
from tests.store.driver import CountingServer, Settings, run_whole
from tests.store.postgres_server import PostgresServer
from tfgrpo.errors import ConfigError, MissingExtraError, StoreError
from tfgrpo.runtime.redaction import forget_secrets
from tfgrpo.store import Journal, OpenOptions
from tfgrpo.store.postgres import link, schema
from tfgrpo.store.postgres.address import is_address, parse_address
from tfgrpo.store.postgres.link import Link
from tfgrpo.store.postgres.opening import list_runs, migrate_database, purge_run
from tfgrpo.store.postgres.places import POINTER, place_of, runs_under

CANARY = "canary-pass-4711"


def name_of(address: str) -> str:
    return address.split("/")[3].split("?")[0]


@pytest.mark.parametrize(
    ("text", "shown", "run"),
    [
        ("postgresql://h/db#first", "postgresql://h/db#first", "first"),
        ("postgres://u@h:5433/db", "postgresql://u@h:5433/db#named", "named"),
        ("postgresql:///db?host=/tmp/x#a%20b", "postgresql:///db?host=/tmp/x#a%20b", "a b"),
        (f"postgresql://u:{CANARY}@h/db#r", "postgresql://u@h/db#r", "r"),
        (f"postgresql://h/db?password={CANARY}&sslmode=require#r",
         "postgresql://h/db?sslmode=require#r", "r"),
        ("postgresql://[::1]:5432/db#r", "postgresql://[::1]:5432/db#r", "r"),
    ],
)  # fmt: skip
def test_an_address_is_read_and_shown_without_its_password(text: str, shown: str, run: str) -> None:
    for where in (text, Path(text)):  # a path has lost a slash
        address = parse_address(where, "named")
        assert (str(address), address.run) == (shown, run)
        assert is_address(where)
        assert CANARY not in repr(address)
    assert parse_address(address.whole) == address
    if CANARY in text:
        assert address.clean(f"no {CANARY} here") == "no [redacted] here"


@pytest.mark.parametrize(
    "text",
    ["mysql://h/db", "postgresql://h", f"postgresql://u:{CANARY}@[h/db", "postgresql://h/db#a/b",
     "postgresql://h/db#..", "postgresql://h/db#" + "x" * 201, "postgresql://h/db#a%0ab"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_its_password(text: str) -> None:
    forget_secrets()
    with pytest.raises(ConfigError) as refused:
        parse_address(text)
    assert CANARY not in str(refused.value)


def test_folders_are_no_addresses() -> None:
    assert not any(map(is_address, ("runs/first", "postgresql", "postgresql:", "C:/runs", "")))


def test_a_folder_names_the_database_that_keeps_its_run(
    one_database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "named-by-folder"
    address = one_database.replace("tester@", f"tester:{CANARY}@")
    with (
        caplog.at_level(logging.DEBUG),
        Journal.open(folder, create=True, options=OpenOptions(address)) as store,
    ):
        store.record_decision("kind", 1)
        assert store.folder == folder
    assert json.loads((folder / POINTER).read_text()) == {"store": f"{one_database}#{folder.name}"}
    with Journal.open(folder, readonly=True) as store:
        assert store.decisions("kind") == [("", 1)]
        assert store.place.address is not None and store.place.address.run == folder.name
    assert runs_under(tmp_path) == [folder]
    (folder / POINTER).write_text("{}")
    with pytest.raises(StoreError, match="does not say where"):
        place_of(folder)
    assert CANARY not in caplog.text


def test_a_folder_with_a_journal_is_not_begun_anew_on_a_server(
    one_database: str, tmp_path: Path
) -> None:
    run_whole(tmp_path / "here", CountingServer(), Settings(steps=1))
    with pytest.raises(StoreError, match="copy it first"):
        Journal.open(tmp_path / "here", create=True, options=OpenOptions(one_database))
    assert "here" not in list_runs(parse_address(one_database))


def test_a_database_without_a_run_is_no_run(one_database: str) -> None:
    with pytest.raises(StoreError, match="names a database and no run"):
        Journal.open(one_database, create=True)


def test_passwords_never_leave_in_errors(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfgrpo.store.postgres.opening._OPENING_S", 0.1)
    forget_secrets()
    short = "pw7"
    wrong = [
        f"postgresql://u:{CANARY}@/nodb?host={postgres.socket}#r",
        f"postgresql://u:{short}@127.0.0.1:1/db#r",
        f"postgresql://u:{CANARY}@127.0.0.1:1/db?bogus={CANARY}#r",
        f"postgresql://u:{CANARY}@127.0.0.1:1/db?password={short}#r",
    ]
    for text in wrong:
        with caplog.at_level(logging.DEBUG), pytest.raises((StoreError, ConfigError)) as failed:
            Journal.open(text, create=True)
        told = str(failed.value) + caplog.text
        assert CANARY not in told and short not in told


def test_a_database_that_is_not_there_is_told_at_once(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match=r"make the database first \(createdb\)"):
        Journal.open(postgres.address("not_there") + "#r", create=True)


def test_off_this_machine_the_connection_is_encrypted_and_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PGSSLMODE", raising=False)
    monkeypatch.delenv("PGHOST", raising=False)
    found = {
        host: link._encryption(link.psycopg().conninfo.conninfo_to_dict(f"postgresql://{host}/d"))
        for host in ("db.example", "127.0.0.1", "localhost", "", "a.example,127.0.0.1",
                     "db.example:5433")
    }  # fmt: skip
    checked = {"sslmode": "verify-full", "sslrootcert": "system"}
    assert [h for h, s in found.items() if s == checked] == [
        "db.example", "a.example,127.0.0.1", "db.example:5433",
    ]  # fmt: skip
    assert all(s in ({}, checked) for s in found.values())
    assert link._encryption({"host": "db.example", "sslmode": "disable"}) == {}
    own = link._encryption({"host": "db.example", "sslrootcert": "/ca.pem"})
    assert own == {"sslmode": "verify-full"}


def test_the_driver_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    link.psycopg.cache_clear()
    monkeypatch.setitem(sys.modules, "psycopg", None)
    try:
        with pytest.raises(MissingExtraError, match=r"pip install 'tfgrpo\[postgres\]'"):
            Journal.open("postgresql://h/db#r")
    finally:
        link.psycopg.cache_clear()


def test_importing_the_store_does_not_load_the_driver() -> None:
    code = (
        "import sys; import tfgrpo.store.journal, tfgrpo.store.postgres.copying;"
        "print([m for m in sys.modules if m.startswith('psycopg')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tables ----------------------------------------------------------------------------------


@pytest.fixture
def migrations(tmp_path: Path) -> Path:
    """The package's migrations and one more."""
    folder = tmp_path / "migrations"
    folder.mkdir()
    for file in schema.FOLDER.glob("*.sql"):
        (folder / file.name).write_text(file.read_text())
    (folder / "0002_more.sql").write_text("ALTER TABLE tfgrpo.runs ADD COLUMN note text;")
    return folder


def test_old_tables_are_refused_with_the_command_and_brought_up_to_date(
    postgres: PostgresServer, migrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres.new_database()
    with Journal.open(f"{database}#r", create=True) as store:
        store.record_decision("kind", 1)
    monkeypatch.setattr(schema.check_schema, "__defaults__", (migrations,))
    monkeypatch.setattr(schema.migrate, "__defaults__", (migrations,))
    with pytest.raises(StoreError, match="tables of version 1, this tfgrpo needs version 2: stop"):
        Journal.open(f"{database}#r", create=True)
    assert migrate_database(parse_address(database)) == [2]
    assert migrate_database(parse_address(database)) == []
    with Journal.open(f"{database}#r") as store:
        assert store.decisions("kind") == [("", 1)]
    monkeypatch.undo()
    with pytest.raises(StoreError, match="tables of version 2, this tfgrpo knows 1: use a newer"):
        Journal.open(f"{database}#r", readonly=True)
    rows = postgres.query(
        "SELECT version, name FROM tfgrpo.schema_version ORDER BY 1", name_of(database)
    )
    assert rows == "1|0001_start\n2|0002_more"


def test_a_migration_that_fails_leaves_nothing(postgres: PostgresServer, migrations: Path) -> None:
    (migrations / "0003_wrong.sql").write_text("CREATE TABLE tfgrpo.x (); SELECT no_such_thing;")
    connection = Link(parse_address(postgres.new_database()))
    with pytest.raises(StoreError, match="no_such_thing"):
        connection.retry("migrate", lambda c: schema.migrate(c, migrations))
    assert connection.retry("read", schema.schema_version) == 0
    connection.close()


def test_of_many_that_come_at_once_one_makes_the_tables_and_the_run(
    postgres: PostgresServer,
) -> None:
    database, failed = postgres.new_database(), []

    def come(number: int) -> None:
        try:
            with Journal.open(f"{database}#r", create=True, role="writer") as store:
                store.record_decision("kind", number)
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=come, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with Journal.open(f"{database}#r", readonly=True) as store:
        assert sorted(p for _, p in store.decisions("kind")) == list(range(6))
        assert store.state().sessions == 6


def test_a_purged_run_is_gone_and_no_other(on_server: Where) -> None:
    for name in ("one", "two"):
        run_whole(on_server(name), CountingServer(), Settings(steps=1))
    with (
        Journal.open(on_server("one"), role="writer"),
        pytest.raises(StoreError, match=r"in use by process .*; nothing was deleted"),
    ):
        purge_run(parse_address(on_server("one")))
    purge_run(parse_address(on_server("one")))
    with pytest.raises(StoreError, match="there is no run"):
        Journal.open(on_server("one"))
    with pytest.raises(StoreError, match="there is no run"):
        purge_run(parse_address(on_server("one")))
    with Journal.open(on_server("two"), readonly=True) as store:
        assert store.state().rollouts == 12


def test_a_user_may_write_without_changing_tables_and_read_without_writing(
    postgres: PostgresServer,
) -> None:
    database = postgres.new_database()
    name = name_of(database)
    migrate_database(parse_address(database))
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    grants = page.split("```sql\n")[1].split("```")[0]
    for statement in grants.split(";"):
        if statement.strip():
            postgres.query(statement.strip(), name)
    as_writer = database.replace("tester@", "tfgrpo_writer@")
    as_reader = database.replace("tester@", "tfgrpo_reader@")
    run_whole(f"{as_writer}#r", CountingServer(), Settings(steps=1))
    with Journal.open(f"{as_reader}#r", readonly=True) as store:
        assert store.state().rollouts == 12
    with pytest.raises(StoreError, match="this user may not"):
        Journal.open(f"{as_reader}#r")
    with pytest.raises(StoreError, match="this user may not"):
        Link(parse_address(as_writer)).retry(
            "drop", lambda c: c.execute("DROP TABLE tfgrpo.results")
        )
