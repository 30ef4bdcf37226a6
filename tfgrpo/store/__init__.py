"""Where paid work is kept: journal, cache, budget and ledger, resume, export.

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.store.budget import Budget, Ledger
    from tfgrpo.store.disk.cache import CallCache
    from tfgrpo.store.export import read_groups, write_groups
    from tfgrpo.store.fold import RunState, SpendRow
    from tfgrpo.store.journal import Journal, OpenOptions
    from tfgrpo.store.journaled_lm import JournaledLM
    from tfgrpo.store.tracing import TracedLM

__all__ = [
    "Budget",
    "CallCache",
    "JournaledLM",
    "Ledger",
    "RunState",
    "Journal",
    "OpenOptions",
    "SpendRow",
    "TracedLM",
    "read_groups",
    "write_groups",
]

_HOME = {
    "Budget": "budget",
    "CallCache": "disk.cache",
    "JournaledLM": "journaled_lm",
    "Ledger": "budget",
    "RunState": "fold",
    "Journal": "journal",
    "OpenOptions": "journal",
    "SpendRow": "fold",
    "TracedLM": "tracing",
    "read_groups": "export",
    "write_groups": "export",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
