"""Help for practice tasks on which every rollout failed, so that they can teach over an API too.

`Nudger` rolls failed tasks again under hints, strategies, drafts, perturbing text or examples, and
checks afterwards without help; one file a method. Does not know the loop, the critic or the gate.
Sources: named in each file.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.nudges.factory import (
        check_nudge,
        make_method,
        make_nudger,
        named_scheduler,
        with_scheduler,
    )
    from tfgrpo.nudges.method import Nudge, NudgeMethod, StepView
    from tfgrpo.nudges.record import Recheck, Rolled, nudge_totals, total_lines
    from tfgrpo.nudges.rounds import Nudger

__all__ = [
    "Nudge",
    "NudgeMethod",
    "Nudger",
    "Recheck",
    "Rolled",
    "StepView",
    "check_nudge",
    "make_method",
    "make_nudger",
    "named_scheduler",
    "nudge_totals",
    "total_lines",
    "with_scheduler",
]

_HOME = {
    "Nudge": "method",
    "NudgeMethod": "method",
    "Nudger": "rounds",
    "Recheck": "record",
    "Rolled": "record",
    "StepView": "method",
    "check_nudge": "factory",
    "make_method": "factory",
    "make_nudger": "factory",
    "named_scheduler": "factory",
    "nudge_totals": "record",
    "total_lines": "record",
    "with_scheduler": "factory",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
