"""Removes what was kept of requests' content, wherever it stands; figures stay.

Content is in the captured turns and draws, in replies kept for retries, in comments and right
answers, in the groups that were made of the requests, and in the folders of proposals that learnt
from those groups. Removed rows are overwritten in the file. What has become a library entry is
named, not removed: that is a person's decision.

Does not know when content is too old or whose it is. Source: own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.experience.artefact import from_row
from tfgrpo.serve.identity import private_hash
from tfgrpo.store import Journal
from tfgrpo.store.disk.mending import damaged_files

__all__ = ["Removed", "forget", "remove"]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, and what came from it."""

    requests: int = 0
    groups: int = 0
    folders: tuple[str, ...] = ()
    """Folders of proposals."""
    entries: tuple[tuple[str, str, str], ...] = ()
    """(library version, entry, text) of library entries that were drawn from removed groups."""
    left: tuple[str, ...] = ()
    """Damaged files that were kept when the journal was mended: nothing is removed from them."""


def forget(
    journal: Journal, folder: Path, secret: bytes, end_user: str, key: str | None = None
) -> Removed:
    """Remove all content of one end user.

    Args:
        journal, folder, secret: the gateway's.
        end_user: as clients name it.
        key: of this API key's clients alone; None is all.

    Raises:
        ConfigError: no end user is named: nobody's requests are all those without one.
        StoreError: it could not be written.
    """
    if not end_user:
        raise ConfigError("the end user is empty: name whose content is to be removed")
    where, values = "end_user = ?", [private_hash(secret, end_user)]
    if key is not None:
        where, values = f"{where} AND key = ?", [*values, key]
    removed = remove(journal, folder, where, tuple(values))
    # The log still holds the rows as they were, until it is moved into the file.
    journal.writer.empty_log()
    return replace(removed, left=tuple(map(str, damaged_files(folder))))


def remove(journal: Journal, folder: Path, where: str, values: tuple[Any, ...]) -> Removed:
    """Remove the content of the requests that a condition on their table names.

    Raises:
        StoreError: it could not be written.
    """
    writer = journal.writer
    writer.flush()
    chosen = f"SELECT response_id FROM requests WHERE {where}"
    sessions = f"SELECT session_id FROM requests WHERE session_id <> '' AND {where}"
    theirs = f"SELECT group_id FROM group_responses WHERE response_id IN ({chosen})"
    count = int(writer.read(f"SELECT count(*) FROM requests WHERE {where}", values)[0][0])
    groups = {group_id for (group_id,) in writer.read(theirs, values)}
    said = "kind IN ('comment', 'answer')"
    statements = [
        f"DELETE FROM choices WHERE response_id IN ({chosen})",
        f"DELETE FROM idempotency WHERE response_id IN ({chosen})",
        f"DELETE FROM feedback WHERE target_kind = 'response' AND {said} AND target IN ({chosen})",
        f"DELETE FROM feedback WHERE target_kind = 'session' AND {said} AND target IN ({sessions})",
        f"DELETE FROM rollouts WHERE group_id IN ({theirs})",
        f"DELETE FROM groups WHERE group_id IN ({theirs})",
        f"DELETE FROM group_responses WHERE group_id IN ({theirs})",
        f"UPDATE requests SET prompt = NULL, metadata = '{{}}' WHERE {where}",
    ]
    unused = ("DELETE FROM texts WHERE digest NOT IN (SELECT task FROM groups)"
              " AND digest NOT IN (SELECT context FROM groups)")  # fmt: skip
    writer.commit_now([*((sql, values) for sql in statements), (unused, ())])
    folders = _folders(journal, folder, groups)
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    return Removed(count, len(groups), tuple(p.name for p in folders), _entries(journal, groups))


def _folders(journal: Journal, folder: Path, groups: set[str]) -> list[Path]:
    """Return the folders of the proposals that learnt from some groups."""
    found = []
    for route, version, body in journal.writer.read(
        "SELECT route, version, body FROM transitions WHERE event = 'propose'"
    ):
        row = json.loads(body)
        used = {*row.get("group_ids", ()), *row.get("gate_group_ids", ())}
        path = folder / "learn" / f"{route}-{version}"
        if used & groups and path.is_dir():
            found.append(path)
    return found


def _entries(journal: Journal, groups: set[str]) -> tuple[tuple[str, str, str], ...]:
    found: dict[str, tuple[str, str, str]] = {}
    for version, payload in journal.libraries():
        for entry in from_row(payload, f"library {version} of the journal").library.entries:
            if groups & set(entry.provenance.group_ids):
                found[entry.experience_id] = (version, entry.experience_id, entry.body)
    return tuple(found.values())
