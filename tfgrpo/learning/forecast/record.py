"""A forecast as a record, and as a table for people.

Does not know how its figures are made. Source: own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tfgrpo.runtime.durations import duration_words

__all__ = ["Forecast", "StageForecast"]


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage's range; tokens are totals, `cost_usd` is None where no price is known."""

    stage: str
    calls_low: int
    calls_high: int
    prompt_low: int
    prompt_high: int
    completion_low: int
    completion_high: int
    cost_low_usd: float | None
    cost_high_usd: float | None
    seconds_low: float | None = None
    """Wall time; None where nothing is known of the model's speed."""
    seconds_high: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The stages in order, and what gate and test split could show."""

    stages: tuple[StageForecast, ...]
    min_detectable: float | None
    """Smallest true difference that the test split finds with 80 % power; None without one."""
    notes: tuple[str, ...]
    keepable: float | None = None
    """Smallest true gain that the gate keeps with 80 % power after one comparison, in the worst
    case; None without a gate."""
    warnings: tuple[str, ...] = ()
    """What is likely to make the run vain."""

    @property
    def calls_high(self) -> int:
        """Calls at most."""
        return sum(s.calls_high for s in self.stages)

    @property
    def cost_high_usd(self) -> float | None:
        """Money at most, or None where a price is unknown."""
        costs = [s.cost_high_usd for s in self.stages]
        return None if any(c is None for c in costs) else math.fsum(c for c in costs if c)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Wall time of all stages, or None where the speed of one is unknown."""
        lows, highs = ([getattr(s, name) for s in self.stages] for name in _SECONDS)
        if any(x is None for x in (*lows, *highs)):
            return None
        return math.fsum(lows), math.fsum(highs)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return a table for people, then notes and warnings."""
        rows = [
            f"{'stage':<10}{'calls':>16}{'prompt tokens':>20}{'reply tokens':>20}"
            f"{'cost $':>18}{'time':>20}"
        ]
        for s in self.stages:
            cost = (
                "unknown"
                if s.cost_high_usd is None
                else f"{s.cost_low_usd:.4f} to {s.cost_high_usd:.4f}"
            )
            rows.append(
                f"{s.stage:<10}{_range(s.calls_low, s.calls_high):>16}"
                f"{'≈' + _range(s.prompt_low, s.prompt_high):>20}"
                f"{'≈' + _range(s.completion_low, s.completion_high):>20}{cost:>18}"
                f"{_times(s.seconds_low, s.seconds_high):>20}"
            )
        low, high = self.seconds or (None, None)
        total = f"in all: at most {self.calls_high} calls, {_times(low, high)}"
        warnings = [f"warning: {words}" for words in self.warnings]
        return [*rows, total, *self.notes, *warnings]


_SECONDS = ("seconds_low", "seconds_high")


def _range(low: int, high: int) -> str:
    return f"{low} to {high}" if low != high else f"{low}"


def _times(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "time unknown"
    if high < 1:
        return "under 1 s"
    return f"{duration_words(low)} to {duration_words(high)}"
