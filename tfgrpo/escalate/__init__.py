"""From learning to training: a finished run's journal trains a local model and says what it won.

Knows the core and `tfgrpo.rl`; neither knows this. Names are loaded on first use. Source: own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.escalate.comparison import Table
    from tfgrpo.escalate.pipeline import escalate, preview
    from tfgrpo.escalate.result import Escalated, Preview
    from tfgrpo.escalate.settings import EscalateSettings

__all__ = ["EscalateSettings", "Escalated", "Preview", "Table", "escalate", "preview"]

_HOME = {
    "EscalateSettings": "settings",
    "Escalated": "result",
    "Preview": "result",
    "Table": "comparison",
    "escalate": "pipeline",
    "preview": "pipeline",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
