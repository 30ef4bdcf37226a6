"""The event log of a search: one JSON line an event, appended as things happen.

Results are written when they arrive, before they are committed, so that a crash loses no paid
result. The tree is a fold of the log: `selected` and `commit` say the order, the others what came.

    created   settings            selected  ticket, node, samples, arm, prefix
    executed  the node's outcome  proposed  proposals, usage
    child     one child's outcome scored    scores, usage
    verified  reward              failed    error, usage
    unscored  error, usage        unverified  error
    commit    ticket              budget    resource refused        stop  reason

Does not know how events are applied (`replay.py`). Source: own; event sourcing is common ground.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.runtime.texts.text_lines import numbered_lines

__all__ = ["EventLog", "FileLog", "LOG_VERSION", "MemoryLog"]

log = logging.getLogger(__name__)

LOG_VERSION = 1

Event = Mapping[str, Any]


def _opener(path: str, flags: int) -> int:
    """Open a log for its owner alone, and never through a link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


class EventLog(Protocol):
    """Where events go, in order."""

    def events(self) -> list[dict[str, Any]]:
        """Return everything written so far."""
        ...

    def append(self, event: Event) -> None:
        """Write one event."""
        ...


class MemoryLog:
    """Events in a list, for tests and for searches that need no resume."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = [dict(e) for e in events]

    def events(self) -> list[dict[str, Any]]:
        """Return the events."""
        return list(self._events)

    def append(self, event: Event) -> None:
        """Keep one event, as JSON would carry it."""
        self._events.append(json.loads(json.dumps(event)))


class FileLog:
    """Events in a JSON-lines file; a last line that was cut off is taken away when it is opened.

    Args:
        path: made where it does not exist.
        sync: force each event to the disk (a power cut then loses nothing; milliseconds each).
    """

    def __init__(self, path: str | Path, *, sync: bool = False) -> None:
        self.path = Path(path)
        self._sync = sync
        self._file: TextIO | None = None
        self._known = self._read()

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            log.warning(
                "search log %s: line %d is cut off and taken away: what it held is done again",
                self.path,
                whole.count(b"\n") + 1,
            )
            with open(self.path, "r+b", opener=_opener) as file:
                file.truncate(len(whole))
        events = []
        for number, line, _ in numbered_lines(whole.decode("utf-8", "replace")):
            try:
                events.append(json.loads(line))
            except ValueError as exc:
                raise StoreError(
                    f"search log {self.path}: line {number} is no JSON: {exc}"
                ) from exc
        return events

    def events(self) -> list[dict[str, Any]]:
        """Return everything written so far."""
        return list(self._known)

    def append(self, event: Event) -> None:
        """Write one line and hand it to the system."""
        line = json.dumps(event, ensure_ascii=True, separators=(",", ":"))
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "a", encoding="ascii", opener=_opener)  # noqa: SIM115 - held open
            self._file.write(line + "\n")
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as exc:
            raise StoreError(f"search log {self.path}: {exc}") from exc
        self._known.append(json.loads(line))

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def check_version(events: list[dict[str, Any]]) -> None:
    """Raise `ConfigError` where a log is of another version or does not start with `created`."""
    if not events:
        return
    first = events[0]
    if first.get("event") != "created" or first.get("version") != LOG_VERSION:
        raise ConfigError(
            f"this search log starts with event {first.get('event')!r} of version "
            f"{first.get('version')!r}; readable: 'created' of version {LOG_VERSION}. "
            "Give another path, or resume with the release that wrote it"
        )
