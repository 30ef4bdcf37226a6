"""Hint schedulers: when a task gets which hint. Imports no torch.

`make_scheduler` reads the `[hints]` section of a training run; `writer.write_hints` has a model
write the hints beforehand; `shaping` tells a training row what its plan asks for. Does not know
tokens or weights. Sources: named in each file.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.hints.settings import make_scheduler

__all__ = ["make_scheduler"]

_HOME = {
    "make_scheduler": "settings",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
