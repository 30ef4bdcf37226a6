"""What can be shipped: a library and the way it is injected.

Does not know scores or decisions. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfgrpo.experience import Library, TopK

EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Version:
    """A library, injected whole or as the nearest k entries a task."""

    library: Library
    selector: TopK | None = None

    @property
    def version_id(self) -> str:
        """`empty`, the library's version, or that with `/top-k`."""
        if not self.library.shown:
            return EMPTY
        suffix = f"/top-{self.selector.k}" if self.selector else ""
        return self.library.version_id + suffix
