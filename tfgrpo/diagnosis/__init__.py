"""Why a run kept nothing: the causes that its own records show, each with what to do next.

`outcome` says what became of a run's libraries, one word for each state; `why_not_kept` names the
causes. Both read the records that a journal keeps. Does not know how a run learns, or markup.
"""

from tfgrpo.diagnosis.outcome import NOT_KEPT, RunOutcome, edited_version, outcome_of
from tfgrpo.diagnosis.reasons import KINDS, Cause, Reason, reward_range_of, why_not_kept

__all__ = [
    "KINDS",
    "NOT_KEPT",
    "Cause",
    "Reason",
    "RunOutcome",
    "edited_version",
    "outcome_of",
    "reward_range_of",
    "why_not_kept",
]
