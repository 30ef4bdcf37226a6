"""Replies shared over runs: one SQLite file of content keys and JSON values.

Convenience, not truth: a hit is copied into the run's journal, and losing the file costs only calls
that would have been saved. A damaged value is a miss. The key holds the credential's fingerprint
and the address, so that nobody is given what another account or server answered.

Does not know requests or money. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from tfgrpo.protocols import Completion
from tfgrpo.store.codec import (
    DamagedValue,
    completion_from_dict,
    completion_to_dict,
    pack,
    unpack,
)
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.disk.files import (
    check_file,
    connect,
    create_file,
    refuse_network_disk,
    store_errors,
)

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE replies (key BLOB PRIMARY KEY, body NOT NULL, digest BLOB NOT NULL) WITHOUT ROWID;
"""


class CallCache:
    """A cache of replies that several runs and processes may use at once.

    Args:
        path: the file; made, with access for its owner only, where there is none.

    Raises:
        StoreError: the file cannot be used.
    """

    def __init__(self, path: Path | str) -> None:
        file = Path(path)
        with store_errors(file, "open"):
            if not file.parent.exists():
                file.parent.mkdir(parents=True, mode=0o700)
            refuse_network_disk(file.parent)
        if not file.exists():
            create_file(file, _SCHEMA)
        with store_errors(file, "open"):
            connection = connect(file)
            connection.execute("PRAGMA wal_autocheckpoint=1000")
        check_file(connection, file, thorough=False)
        self._writer = DatabaseWriter(connection, file)

    def find(self, key: bytes) -> Completion | None:
        """Return the reply under a key, or None."""
        rows = self._writer.read("SELECT body, digest FROM replies WHERE key = ?", (key,))
        if not rows:
            return None
        try:
            return completion_from_dict(unpack(*rows[0]))
        except DamagedValue as exc:
            log.warning("%s: a reply %s; it is asked for again", self._writer.path, exc)
            self._writer.commit_now([("DELETE FROM replies WHERE key = ?", (key,))])
            return None

    def keep(self, replies: Iterable[tuple[bytes, Completion]]) -> None:
        """Keep replies under their keys; the first reply of a key stays."""
        rows = [(key, *pack(completion_to_dict(reply), "reply")) for key, reply in replies]
        self._writer.commit_now(
            [("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", r) for r in rows]
        )

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
