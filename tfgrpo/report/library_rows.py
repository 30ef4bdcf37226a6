"""A library as the journal holds it: its entries and what each puts into prompts.

Reads the JSON form leniently, so that a report opens whatever a run has recorded. Does not know
how libraries change. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["entries_of", "entry_text", "library_texts"]


def entries_of(library: Any) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a library in JSON form; none where it is no library."""
    if not isinstance(library, Mapping):
        return ()
    return [e for e in library.get("entries", ()) if isinstance(e, Mapping)]


def entry_text(entry: Mapping[str, Any]) -> str:
    """Return the words of a lesson, or the turns of an exemplar."""
    turns = entry.get("turns") or ()
    if not turns:
        return str(entry.get("text", ""))
    return "\n".join(f"{t.get('role')}: {t.get('content')}" for t in turns)


def library_texts(library: Any) -> dict[str, str]:
    """Return what each shown entry of a library (in JSON form) puts into prompts."""
    return {
        str(e.get("experience_id")): entry_text(e)
        for e in entries_of(library)
        if e.get("status", "active") in ("active", "pinned")
    }
