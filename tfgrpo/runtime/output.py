"""Standard output and error made safe for a command: no known secret, no encoding that fails.

Does not know what is printed. Source: own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tfgrpo.runtime.redaction import redact_known

__all__ = ["safe_output"]


class _Redacting:
    """A text stream that takes known secrets out of what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write without secrets; the length of what was given, as the stream's users expect."""
        self._stream.write(redact_known(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Run a command whose output holds no known secret, and in which a character that the
    terminal's code page lacks is shown as an escape."""
    before = sys.stdout, sys.stderr
    for stream in before:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (_Redacting(s) for s in before)  # type: ignore[assignment]  # quacks
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
