"""What a run will ask for and what it can show, before anything is spent.

`stages` counts calls and tokens per stage, `times` turns them into minutes, `power` says which
gains the gate can keep and the test can find, `rehearsal` opens what the run will open. Does not
know how calls are made.
"""

from tfgrpo.learning.forecast.record import Forecast, StageForecast
from tfgrpo.learning.forecast.rehearsal import rehearse
from tfgrpo.learning.forecast.stages import (
    Price,
    forecast,
    library_tokens,
    nudge_rollouts,
    text_tokens,
)

__all__ = [
    "Forecast",
    "Price",
    "StageForecast",
    "forecast",
    "library_tokens",
    "nudge_rollouts",
    "rehearse",
    "text_tokens",
]
