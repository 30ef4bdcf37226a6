"""What a person sees while a run is open."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tfgrpo.learning.progress import BarView, PlainView, QuietView, choose_view
from tfgrpo.sampling import Progress


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_plain_lines_come_at_the_edges_of_a_stage_and_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    view = PlainView(lambda: "12 calls", clock)
    with view:
        for done in range(1, 41):
            clock.now += 1.0
            view.update(Progress("gate", done, 40, 2, 4))
        clock.now += 0.1
        view.update(Progress("test", 1, 9, 0, 3))
    assert lines(capsys) == [
        "gate: 1/40 rollouts, 4 in flight, 2 failed, 12 calls",
        "gate: 11/40 rollouts, 4 in flight, 2 failed, 12 calls",
        "gate: 21/40 rollouts, 4 in flight, 2 failed, 12 calls",
        "gate: 31/40 rollouts, 4 in flight, 2 failed, 12 calls",
        "gate: 40/40 rollouts, 4 in flight, 2 failed, 12 calls",
        "test: 1/9 rollouts, 3 in flight, 0 failed, 12 calls",
    ]


def test_nothing_is_shown_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with QuietView() as view:
        view.update(Progress("gate", 1, 2, 0, 1))
        view.say("hello")
    assert lines(capsys) == []


class Terminal(io.StringIO):
    """A terminal of 60 columns."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_no_markup_is_read_from_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    view = choose_view(lambda: "3 calls")
    assert isinstance(view, BarView)
    with view:
        view.update(Progress("practice", 2, 8, 0, 1))
        view.update(Progress("practice", 8, 8, 1, 0))
        view.say("[red]a line[/red]")
    said = terminal.getvalue()
    assert "8/8" in said and "[red]a line[/red]" in said and "1 failed" in said
    assert "\x1b[?25h" in said, "the cursor comes back"


def test_counts_and_time_stay_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with choose_view(lambda: "1,234 calls, 118,930 tokens, $0.1043") as view:
        view.update(Progress("practice", 512, 1024, 3, 32))
        view.update(Progress("practice", 1024, 1024, 3, 4))
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.getvalue())
    assert "512/1024" in plain and "1024/1024" in plain and "32 in flight" in plain
    last = plain[plain.rindex("1024/1024") :]
    assert "done, 3 failed" in last and "in flight" not in last


def test_no_color_and_pipes_are_respected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(choose_view(str), PlainView)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with choose_view(str) as view:
        view.update(Progress("practice", 8, 8, 1, 0))
    assert "\x1b[3" not in terminal.getvalue(), "no colour"
