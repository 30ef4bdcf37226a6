"""The tables on a server, and their versions: numbered SQL files, each applied once.

An empty database gets them when the first run is made there; an older one is brought up to date by
`tfgrpo runs migrate ADDRESS` and by nothing else, so that no process changes tables under another.
One process at a time applies them.

Does not know runs. Source: own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.store.postgres.address import Address

__all__ = ["FOLDER", "check_schema", "migrate", "schema_version"]

FOLDER = Path(__file__).parent / "migrations"
_LOCK = 0x54464752
_VERSIONS = """
CREATE SCHEMA IF NOT EXISTS tfgrpo;
CREATE TABLE IF NOT EXISTS tfgrpo.schema_version (
  version integer PRIMARY KEY, name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
"""


def _files(folder: Path) -> list[tuple[int, str, str]]:
    """Return (version, name, SQL) in order."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        match = re.fullmatch(r"(\d{4})_\w+", path.stem)
        if match is not None:
            found.append((int(match[1]), path.stem, path.read_text(encoding="utf-8")))
    return found


def schema_version(connection: Any) -> int:
    """Return the version of a database's tables; 0 where there are none."""
    row = connection.execute("SELECT to_regclass('tfgrpo.schema_version') IS NOT NULL").fetchone()
    if not row[0]:
        return 0
    rows = connection.execute("SELECT coalesce(max(version), 0) FROM tfgrpo.schema_version")
    return int(rows.fetchone()[0])


def check_schema(connection: Any, address: Address, folder: Path = FOLDER) -> None:
    """Refuse tables of another version.

    Raises:
        StoreError: with the command to run, or what else to do.
    """
    found, newest = schema_version(connection), _files(folder)[-1][0]
    if found == newest:
        return
    if found > newest:
        raise StoreError(
            f"{str(address)!r} has tables of version {found}, this tfgrpo knows {newest}: use a "
            "newer tfgrpo"
        )
    what = "no tables of tfgrpo" if found == 0 else f"tables of version {found}"
    raise StoreError(
        f"{str(address)!r} has {what}, this tfgrpo needs version {newest}: stop all writers and "
        f"run `tfgrpo runs migrate {address.shown}`"
    )


def migrate(connection: Any, folder: Path = FOLDER) -> list[int]:
    """Apply what a database lacks, all or nothing a file; return the versions applied.

    Several processes may call it at once: one applies, the others find nothing to do.
    """
    applied = []
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        connection.execute(_VERSIONS)
        known = schema_version(connection)
        for version, name, sql in _files(folder):
            if version > known:
                connection.execute(sql)
                connection.execute(
                    "INSERT INTO tfgrpo.schema_version (version, name) VALUES (%s, %s)",
                    (version, name),
                )
                applied.append(version)
    return applied
