"""What every test shares: an empty home, no network, and a count of the browser tests that ran."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

# Imported early: first in the deep call stack of pytest's summary, CPython 3.11 can fail on it
# with "AST constructor recursion depth mismatch".
import hypothesis
import pytest

from tests.patience import LONG_S
from tfgrpo.runtime import redaction

# A test asserts no duration, so neither does hypothesis on its behalf.
hypothesis.settings.register_profile("tfgrpo", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("tfgrpo")

# Tests run beside each other: torch's threads must not take the cores while they wait. Read as
# torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests marked `long` their own limit."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_S))


_LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid connections to anything but this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(_LOOPBACK):
            raise AssertionError(f"a test connects to {address!r}: tests need no network")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _without_later_secrets() -> Iterator[None]:
    known = frozenset(redaction._KNOWN.values)
    yield
    if redaction._KNOWN.values != known:
        redaction.forget_secrets()
        for value in known:
            redaction.register(value)


# A made-up key may be a piece of a sentence that another test expects: each keeps its own.
_secrets_of_a_module = pytest.fixture(autouse=True, scope="module")(_without_later_secrets)
_secrets_of_a_test = pytest.fixture(autouse=True)(_without_later_secrets)


@pytest.fixture
def shared() -> Path:
    """The folder of public benchmark data; tests that need it skip where it is absent."""
    root = Path(__file__).parent.parent
    folder = Path(os.environ.get("TFGRPO_SHARED", root / ".." / "shared")).resolve()
    if not (folder / "data").is_dir():
        pytest.skip("the public benchmark data (TFGRPO_SHARED) is not here")
    return folder


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty home and no key in the environment."""
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_TOKEN")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path


@pytest.fixture
def steps_of() -> Any:
    """A function that counts the lines Python runs in a call: time, without a clock."""

    def count(fn: Any, *args: Any) -> int:
        lines = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            fn(*args)
        finally:
            sys.settrace(before)
        return lines

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many browser tests ran, so that a skipped browser is seen, and name the tests that
    would not survive a machine twenty times slower."""
    limit_s = limit_of(terminalreporter.config)
    ran = skipped = 0
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if "browser" in getattr(report, "keywords", ()) and getattr(report, "when", "") in (
                "call",
                "setup",
            ):
                if outcome == "skipped":
                    skipped += 1
                elif report.when == "call":
                    ran += 1
    terminalreporter.write_line(f"browser tests: {ran} ran, {skipped} skipped")
    for line in slow_lines(terminalreporter.getreports(""), limit_s):
        terminalreporter.write_line(line)


def limit_of(config: pytest.Config) -> float:
    """Return the limit of one test in seconds; 0 where there is none."""
    try:
        from pytest_timeout import get_env_settings

        return float(get_env_settings(config).timeout or 0)
    except (ImportError, ValueError):  # the plugin is not installed, or was switched off
        return 0.0


def slow_lines(reports: Iterable[Any], limit_s: float) -> list[str]:
    """Return a line for each report that took over a twentieth of the limit; none without one."""
    return [
        f"over a twentieth of the limit: {report.duration:.0f} s {report.when} {report.nodeid}"
        for report in reports
        if limit_s > 0
        and getattr(report, "duration", 0) > limit_s / 20
        and "long" not in report.keywords
    ]


_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    """Headless Chromium; the test skips where it or playwright is absent."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH: `make browser` installs Debian's")
    async with playwright.async_playwright() as tools:
        running = await tools.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        await running.close()
