"""Help for practice tasks on which every rollout failed, so that they can teach over an API too.

`Nudger` rolls failed tasks again under hints, strategies, drafts, perturbing text or examples, and
checks afterwards without help; one file a method. Does not know the loop, the critic or the gate.
Sources: named in each file.
"""

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
