"""Where paid work is kept: journal, cache, budget and ledger, resume, export.

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgrpo.store.budget import Budget, Ledger
    from tfgrpo.store.cache import CallCache
    from tfgrpo.store.export import read_groups, write_groups
    from tfgrpo.store.fold import RunState, SpendRow
    from tfgrpo.store.journal import Journal
    from tfgrpo.store.journaled_lm import JournaledLM
    from tfgrpo.store.tracing import TracedLM

__all__ = [
    "Budget",
    "CallCache",
    "JournaledLM",
    "Ledger",
    "RunState",
    "Journal",
    "SpendRow",
    "TracedLM",
    "read_groups",
    "write_groups",
]

_HOME = {
    "Budget": "budget",
    "CallCache": "cache",
    "JournaledLM": "journaled_lm",
    "Ledger": "budget",
    "RunState": "fold",
    "Journal": "journal",
    "SpendRow": "fold",
    "TracedLM": "tracing",
    "read_groups": "export",
    "write_groups": "export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
