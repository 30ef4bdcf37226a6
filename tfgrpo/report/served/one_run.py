"""The report of one run, made anew when its journal has grown; it follows a run that goes on.

The page is the same as the written one. Its script asks for `status`: a version, which changes with
the journal, and how far the run says it is. Does not know the job: it reads the run's folder.
Source: own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from tfgrpo.diagnosis.progress import read_progress
from tfgrpo.errors import StoreError
from tfgrpo.report.page import render_page
from tfgrpo.report.served.server import NOT_FOUND, Answer, LiveServer
from tfgrpo.report.view import RunView, load_view
from tfgrpo.store import Journal
from tfgrpo.store.postgres.places import place_of

__all__ = ["RunSite", "serve_live"]


def serve_live(
    folder: Path | str, port: int = 0, *, load: Callable[[Path], RunView] = load_view
) -> LiveServer:
    """Serve the live report of a run's folder in a thread of its own.

    Args:
        folder: the run's folder; it may still be empty.
        port: to listen on; 0 takes a free one.
        load: how the view is read.

    Raises:
        ConfigError: the port cannot be used.
    """
    return LiveServer(RunSite(Path(folder), load=load), port)


class RunSite:
    """The newest page of a run, made once a version.

    Args:
        folder: the run's folder.
        home: address of the list of all runs, where there is one.
        load: how the view is read.
    """

    def __init__(
        self, folder: Path, *, home: str = "", load: Callable[[Path], RunView] = load_view
    ) -> None:
        self._folder = folder
        self._home = home
        self._load = load
        self._lock = threading.Lock()
        self._made: tuple[str, str] = ("", "")

    def answer(self, path: str) -> Answer:
        """Return the page, or where the run stands."""
        if path == "status":
            row = {"version": self.version(), "progress": read_progress(self._folder)}
            return Answer(json.dumps(row), "application/json")
        if path:
            return NOT_FOUND
        try:
            return Answer(self._page())
        except StoreError as exc:
            told = f"no report yet: {exc}\n"
            return Answer(told, "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)

    def version(self) -> str:
        """Changes whenever the journal was written."""
        try:
            place = place_of(self._folder)
            if place.address is not None:
                with Journal.open(self._folder, readonly=True) as store:
                    return store.change_mark()
        except StoreError:
            return "none"  # the page tells why
        marks = []
        for name in ("run.db", "run.db-wal"):
            file = self._folder / name
            if file.exists():
                stat = file.stat()
                marks.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
        return "-".join(marks) or "none"

    def _page(self) -> str:
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                view = self._load(self._folder)
                self._made = (version, render_page(view, live_version=version, home=self._home))
            return self._made[1]
