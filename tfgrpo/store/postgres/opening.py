"""Opens a run on a server: tables, the run, a seat, the caps.

Does not know what a run holds. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.store.budget import UNIT, Budget, Ledger
from tfgrpo.store.postgres.address import Address
from tfgrpo.store.postgres.batches import BatchWriter
from tfgrpo.store.postgres.database import PostgresDatabase
from tfgrpo.store.postgres.link import PATIENCE_S, Link
from tfgrpo.store.postgres.places import FILE, Place
from tfgrpo.store.postgres.schema import check_schema, migrate, schema_version
from tfgrpo.store.postgres.seat import Role, Seat, Terms, reap
from tfgrpo.store.postgres.statements import TABLES
from tfgrpo.store.postgres.tranches import SharedLedger, set_caps
from tfgrpo.store.rows import OpenRun

__all__ = [
    "find_run",
    "list_runs",
    "look_at_run",
    "migrate_database",
    "open_run",
    "purge_run",
    "refuse_a_left_behind_file",
    "refuse_writers",
]

_OPENING_S = 30.0
"""How long the first connection is tried."""
_MADE_WITH_THE_RUN = ("writers", "draws", "leases", "ledgers", "tranches")


def refuse_a_left_behind_file(place: Place, *, create: bool) -> None:
    """Refuse to begin anew on a server what a folder's own journal has paid for.

    Raises:
        StoreError: with the command that copies it.
    """
    address = place.address
    assert address is not None
    if create and (place.folder / FILE).exists() and address.run not in list_runs(address):
        raise StoreError(
            f"run {str(place.folder)!r} has its journal in {FILE}, and none in {str(address)!r}: "
            f"copy it first (tfgrpo runs copy {place.folder} '{address}'), or choose another folder"
        )


def open_run(
    address: Address,
    *,
    create: bool = False,
    role: Role = "learner",
    budget: Budget | None = None,
    terms: Terms | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> OpenRun:
    """Open a run for writing.

    Args:
        address: of the run.
        create: make the run, and the tables of an empty database, where there are none.
        role: what this process is to the run.
        budget: the run's caps; None keeps those it has.
        terms: of the seat.
        clock: of the ledger.

    Raises:
        StoreError: no such run, the server cannot be used, tables of another version, another
            learner at work, or other writers under other caps.
    """
    with _links(address) as (writing, reading):
        number, existed = writing.retry("open", lambda c: find_run(c, address, create))
        for link in (writing, reading):
            link.see(number)
        seat = Seat(address.run, role, terms or Terms())
        asked = SharedLedger(budget or Budget(), clock=clock)

        def sit(connection: Any) -> dict[str, int]:
            with connection.transaction():
                seat.take(connection)
                live = connection.execute("SELECT count(*) FROM live").fetchone()[0]
                caps = None if budget is None else dict(asked.caps)
                return set_caps(connection, address.run, caps, is_alone=int(live) == 1)

        try:
            caps = writing.retry("open", sit)
            ledger = asked if budget is not None else _ledger_of(caps, clock)
            for link in (writing, reading):
                link.patience_s = PATIENCE_S
            database = PostgresDatabase(address, reading, BatchWriter(writing, seat, ledger))
        except BaseException:
            seat.leave()
            raise
        return OpenRun(database, ledger, existed)


def look_at_run(
    address: Address, *, budget: Budget | None = None, clock: Callable[[], float] = time.monotonic
) -> OpenRun:
    """Open a run for looking only; works beside its writers and on a replica.

    Raises:
        StoreError: no such run, the server cannot be used, or tables of another version.
    """
    with _links(address, readonly=True) as (_, reading):
        number = reading.retry("open", lambda c: find_run(c, address, create=False))[0]
        reading.see(number)
        ledger = Ledger(budget or Budget(), clock=clock)
        return OpenRun(PostgresDatabase(address, reading), ledger, True)


@contextmanager
def _links(address: Address, *, readonly: bool = False) -> Iterator[tuple[Link, Link]]:
    """Give two connections; closed where opening fails."""
    links = (
        Link(address, patience_s=_OPENING_S),
        Link(address, readonly=readonly, durable=False, patience_s=_OPENING_S),
    )
    try:
        yield links
    except BaseException:
        for link in links:
            link.close()
        raise


def _ledger_of(caps: dict[str, int], clock: Callable[[], float]) -> SharedLedger:

    return SharedLedger(Budget(**{name: cap / UNIT for name, cap in caps.items()}), clock=clock)


def find_run(connection: Any, address: Address, create: bool) -> tuple[int, bool]:
    """Return the run's number and whether it was there; with `create` make it, and the tables of
    an empty database.

    Raises:
        StoreError: there is none, or the tables are of another version.
    """
    if schema_version(connection) == 0 and create:
        migrate(connection)
    elif schema_version(connection) == 0:
        raise StoreError(f"there is no run {address.run!r} in {address.shown!r}: check the address")
    check_schema(connection, address)
    find = "SELECT run FROM tfgrpo.runs WHERE name = %s"
    row = connection.execute(find, (address.run,)).fetchone()
    if row is not None:
        return int(row[0]), True
    if not create:
        raise StoreError(f"there is no run {address.run!r} in {address.shown!r}: check the address")
    made = connection.execute(
        "INSERT INTO tfgrpo.runs (name) VALUES (%s) ON CONFLICT DO NOTHING RETURNING run",
        (address.run,),
    ).fetchone()
    row = made or connection.execute(find, (address.run,)).fetchone()
    return int(row[0]), made is None


def migrate_database(address: Address) -> list[int]:
    """Bring a database's tables up to date; return the versions applied.

    Raises:
        StoreError: the server cannot be used, or the tables are newer than this package.
    """
    link = Link(address, patience_s=_OPENING_S)
    try:
        applied = link.retry("migrate", migrate)
        link.retry("migrate", lambda c: check_schema(c, address))
        return applied
    finally:
        link.close()


def list_runs(address: Address) -> list[str]:
    """Return the names of a database's runs.

    Raises:
        StoreError: the server cannot be used, or has tables of another version.
    """
    link = Link(address, readonly=True, patience_s=_OPENING_S)
    try:
        if link.retry("list", schema_version) == 0:
            return []
        link.retry("list", lambda c: check_schema(c, address))
        rows = link.retry(
            "list", lambda c: c.execute("SELECT name FROM tfgrpo.runs ORDER BY name").fetchall()
        )
        return [name for (name,) in rows]
    finally:
        link.close()


def refuse_writers(connection: Any, address: Address, so: str) -> None:
    """Refuse where somebody writes to the run that a connection sees, in the caller's transaction.

    Raises:
        StoreError: naming the process.
    """
    reap(connection, Terms())
    row = connection.execute(
        "SELECT pid, host FROM tfgrpo.writers WHERE run = tfgrpo.run() AND closed_at IS NULL"
    ).fetchone()
    if row is not None:
        raise StoreError(
            f"run {address.run!r} is in use by process {row[0]} on host {row[1]}: wait for it or "
            f"stop it; {so}"
        )


def purge_run(address: Address) -> None:
    """Delete a run and all that it holds.

    Raises:
        StoreError: it is in use, or the server cannot be used.
    """
    link = Link(address, patience_s=_OPENING_S)

    def purge(connection: Any) -> None:
        with connection.transaction():
            row = connection.execute(
                "SELECT run FROM tfgrpo.runs WHERE name = %s FOR UPDATE", (address.run,)
            ).fetchone()
            if row is None:
                raise StoreError(f"there is no run {address.run!r} in {address.shown!r}")
            link.see(row[0])
            refuse_writers(connection, address, "nothing was deleted")
            for table in (*TABLES, *_MADE_WITH_THE_RUN, "runs"):
                connection.execute(f"DELETE FROM tfgrpo.{table} WHERE run = tfgrpo.run()")

    try:
        link.retry("purge", purge)
    finally:
        link.close()
