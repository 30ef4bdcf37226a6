"""Lines of a text file, ended by a line feed and nothing else.

`str.splitlines` also ends lines at U+2028, form feeds and other characters that JSON text may hold.
Does not know formats. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["numbered_lines"]


def numbered_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (number from 1, line, whether a line feed ends it) of every line that is not blank.

    A carriage return before the line feed belongs to the line end. A last line without a line feed
    may have been cut off: who reads it says so.

    >>> list(numbered_lines("a\\u2028b\\r\\n\\nc"))
    [(1, 'a\\u2028b', True), (3, 'c', False)]
    """
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if line.strip():
            yield number, line, number < len(lines)
