"""One line a stage on standard error: done, in flight, failed, tokens, money, time left.

On a terminal a `rich` bar that updates in place; elsewhere one plain line every ten seconds. Never
writes to standard output, so `--json` stays clean; `NO_COLOR` and narrow terminals are respected.

Does not know: what a stage means. Source: own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tfgrpo.diagnosis.progress import ProgressFile
from tfgrpo.sampling import Progress


class ProgressView(Protocol):
    """Something that shows progress while a run is open."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def update(self, progress: Progress) -> None:
        """Show the newest state of a stage."""
        ...

    def say(self, text: str) -> None:
        """Show one line that stays."""
        ...


class QuietView:
    """Shows nothing; the default of the Python interface."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """Ignore the state."""

    def say(self, text: str) -> None:
        """Ignore the line."""


class PlainView:
    """One line at the start and end of a stage, and every ten seconds between.

    Args:
        cost: returns the spend so far as text, such as `12,400 tokens $0.02`.
        clock: monotonic seconds.
    """

    def __init__(
        self, cost: Callable[[], str] = str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cost = cost
        self._clock = clock
        self._last = float("-inf")
        self._stage = ""
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """Print a line when a stage starts or ends or ten seconds have passed."""
        now = self._clock()
        edge = progress.stage != self._stage or progress.done == progress.total
        if not edge and now - self._last < 10.0:
            return
        self._last, self._stage = now, progress.stage
        self.say(
            f"{progress.stage}: {progress.done}/{progress.total} rollouts, "
            f"{progress.in_flight} in flight, {progress.failed} failed, {self._cost()}"
        )

    def say(self, text: str) -> None:
        """Print one line; a closed terminal ends the view and not the run."""
        if self._is_closed:
            return
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            self._is_closed = True


class BarView:
    """A live bar a stage, for terminals.

    Args:
        cost: returns the spend so far as text.
    """

    def __init__(self, cost: Callable[[], str] = str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self._cost = cost
        self._bars = Bars(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            # The last column alone gives way on a narrow terminal: counts and time stay readable.
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, ratio=1)),
            expand=True,
            console=Console(stderr=True),
            auto_refresh=False,  # a thread of its own could not end the view on a closed terminal
        )
        self._ids: dict[str, Any] = {}
        self._drawn = float("-inf")
        self._is_closed = False

    def __enter__(self) -> Self:
        self._draw(self._bars.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(self._bars.stop)

    def _draw(self, draw: Callable[[], None]) -> None:
        """Draw on the terminal; a closed one ends the view and not the run."""
        if self._is_closed:
            return
        try:
            draw()
        except OSError:
            self._is_closed = True

    def update(self, progress: Progress) -> None:
        """Move the stage's bar; redrawn at most ten times a second."""
        now = time.monotonic()
        if progress.done < progress.total and now - self._drawn < 0.1:
            return
        self._drawn = now
        if progress.stage not in self._ids:
            self._ids[progress.stage] = self._bars.add_task(progress.stage, note="")
        is_over = progress.done >= progress.total
        doing = "done" if is_over else f"{progress.in_flight} in flight"
        note = f"{doing}, {progress.failed} failed, {self._cost()}"
        self._bars.update(
            self._ids[progress.stage], total=progress.total, completed=progress.done, note=note
        )
        self._draw(self._bars.refresh)

    def say(self, text: str) -> None:
        """Print a line above the bars, without markup."""
        self._draw(lambda: self._bars.console.print(text, markup=False, highlight=False))


class NotedView:
    """Another view, and a file beside the journal that pages read.

    Args:
        view: what shows progress here.
        cost: returns the spend so far as text.
    """

    def __init__(self, view: ProgressView, cost: Callable[[], str] = str) -> None:
        self._view = view
        self._cost = cost
        self._file: ProgressFile | None = None

    def note_in(self, folder: Path) -> None:
        """Write into this folder from here on."""
        self._file = ProgressFile(folder)

    def __enter__(self) -> Self:
        self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.end()
        self._view.__exit__(kind, error, trace)

    def update(self, progress: Progress) -> None:
        """Show and note the newest state of a stage."""
        self._view.update(progress)
        if self._file is not None:
            self._file.update(progress, self._cost())

    def say(self, text: str) -> None:
        """Show one line that stays."""
        self._view.say(text)


def choose_view(cost: Callable[[], str]) -> ProgressView:
    """Return the view that fits standard error."""
    return BarView(cost) if sys.stderr.isatty() else PlainView(cost)
