"""From learning to a large trainer: a run's tasks, verifier and library in the form that TRL, verl,
SkyRL, verifiers (prime-rl) or slime read, ready to start.

Knows finished runs; no other room knows this one. Names are loaded on first use. Source: own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.handover.bundle import Bundle, read_bundle
    from tfgrpo.handover.scoring import RunVerifier
    from tfgrpo.handover.writing import TARGETS, hand_over

__all__ = ["TARGETS", "Bundle", "RunVerifier", "hand_over", "read_bundle"]

_HOME = {
    "TARGETS": "writing",
    "Bundle": "bundle",
    "RunVerifier": "scoring",
    "hand_over": "writing",
    "read_bundle": "bundle",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
