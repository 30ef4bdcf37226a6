"""The live test of a candidate: pure functions from closed units to a decision.

Units enter in order of assignment, each once all earlier ones have closed, so news that arrives
faster cannot be seen first. Beside the betting test stand guards that need no statistics: errors,
cost and latency. A difference in how often feedback comes holds a promotion back.

Does not know journals, clocks or who approves. Source: own; the test is `statistics.sequential`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfgrpo.serve.settings import CanarySettings
from tfgrpo.statistics.sequential import (
    DriftAlarm,
    EffectInterval,
    EffectTest,
    Unit,
    effect_interval,
    effect_of,
    looks_level,
)

__all__ = ["LiveUnit", "CanaryVerdict", "drift", "live_verdict", "worth"]

Action = Literal["wait", "grow", "promote", "roll_back", "expire"]
NEXT_SHARE = 3.0
"""Evidence for a gain that the next share needs."""
HARM = 20.0
"""Evidence for harm that ends a test."""
GUARD_UNITS = 50
DRIFT = 1e4


@dataclass(frozen=True, slots=True)
class LiveUnit:
    """One unit whose window has closed."""

    arm: str
    share: float
    """Probability of the candidate when it was assigned, outside the holdout."""
    at: float
    outcome: float | None
    """In [0, 1]; None where nobody said anything and the rule is to leave it out."""
    has_feedback: bool = True
    prediction: float = 0.5
    failures: int = 0
    requests: int = 1
    cost_usd: float = 0.0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What the units say so far."""

    action: Action
    reason: str
    units: int
    gain: float
    """Evidence for a gain; promotes at `needed`."""
    harm: float
    needed: float
    interval: EffectInterval
    feedback_differs: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, for the journal."""
        return {
            "action": self.action,
            "reason": self.reason,
            "units": self.units,
            "gain": self.gain,
            "harm": self.harm,
            "needed": self.needed,
            "low": self.interval.low,
            "high": self.interval.high,
            "mean": self.interval.mean,
            "feedback_differs": self.feedback_differs,
        }


def live_verdict(
    units: Sequence[LiveUnit], settings: CanarySettings, *, number: int, share_index: int
) -> CanaryVerdict:
    """Return the decision over the closed units of one experiment.

    Args:
        units: in order of assignment; the holdout's are left out.
        settings: of the route.
        number: which candidate of the route this is, from 1.
        share_index: which share it is on.
    """
    arms = [u for u in units if u.arm in ("current", "candidate") and 0 < u.share < 1]
    test = EffectTest(min_difference=settings.min_difference, max_harm=settings.max_harm)
    told = EffectTest(max_harm=0.0)
    rows: list[tuple[float, float]] = []
    needed = 1.0 / looks_level(settings.level, number)
    on_share = sum(u.share >= settings.shares[share_index] for u in arms)
    decided = ""
    for unit in arms:
        has = Unit(unit.arm == "candidate", unit.share, float(unit.has_feedback))
        told.observe(*effect_of(has))
        if unit.outcome is None:
            continue
        row = effect_of(Unit(unit.arm == "candidate", unit.share, unit.outcome, unit.prediction))
        rows.append(row)
        test.observe(*row)
        if not decided and test.log_harm >= math.log(HARM):
            decided = "roll_back"
        if not decided and test.log_gain >= math.log(needed):
            decided = "promote"
    differs = bool(max(told.log_gain, told.log_harm) >= math.log(HARM))
    shown = _Shown(decided, _guard(arms, settings), differs, float(test.gain), len(arms), on_share)
    action, reason = _decide(shown, settings, share_index)
    return CanaryVerdict(
        action, reason, len(arms), float(test.gain), float(test.harm), needed,
        effect_interval(rows, level=settings.level), differs,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the units of one experiment show."""

    decided: str
    """`promote` or `roll_back` by the test; empty for neither."""
    guard: str
    """Why the candidate must go at once; empty for no reason."""
    feedback_differs: bool
    gain: float
    units: int
    on_share: int
    """Units assigned on the current share or a larger one."""


def _decide(shown: _Shown, settings: CanarySettings, share_index: int) -> tuple[Action, str]:
    if shown.guard:
        return "roll_back", shown.guard
    if shown.decided == "roll_back":
        return "roll_back", f"harm of more than {settings.max_harm:g} is shown"
    if shown.decided == "promote" and not shown.feedback_differs:
        return "promote", f"a gain of more than {settings.min_difference:g} is shown"
    if shown.units >= settings.max_units:
        return "expire", f"no decision after {shown.units} units"
    if shown.decided == "promote":
        return "wait", "a gain is shown, but the arms differ in how often feedback comes"
    last = share_index + 1 >= len(settings.shares)
    if not last and shown.gain >= NEXT_SHARE and shown.on_share >= settings.min_units:
        return "grow", f"evidence {shown.gain:.1f} after {shown.on_share} units on this share"
    return "wait", f"{shown.units} units"


def _guard(units: Iterable[LiveUnit], settings: CanarySettings) -> str:
    """Return why the candidate must go at once, or nothing."""
    by_arm: dict[str, list[LiveUnit]] = {"current": [], "candidate": []}
    for unit in units:
        by_arm[unit.arm].append(unit)
    candidate, current = by_arm["candidate"], by_arm["current"]
    if len(candidate) < GUARD_UNITS or len(current) < GUARD_UNITS:
        return ""
    failed = [sum(u.failures for u in arm) / max(1, sum(u.requests for u in arm))
              for arm in (candidate, current)]  # fmt: skip
    if failed[0] > 3 * failed[1] + 0.02:
        return f"{failed[0]:.1%} of its requests failed, {failed[1]:.1%} of the others"
    cost = [sum(u.cost_usd for u in arm) / len(arm) for arm in (candidate, current)]
    if cost[1] > 0 and cost[0] > settings.max_cost_factor * cost[1]:
        return f"a unit costs ${cost[0]:.4g} against ${cost[1]:.4g}"
    slow = [sorted(u.duration_s for u in arm)[int(0.95 * len(arm))]
            for arm in (candidate, current)]  # fmt: skip
    if slow[1] > 0.05 and slow[0] > 2 * slow[1]:
        return f"its slow replies take {slow[0]:.1f} s against {slow[1]:.1f} s"
    return ""


def worth(units: Sequence[LiveUnit], holdout: float, *, level: float = 0.05) -> EffectInterval:
    """Return what the library is worth today: current against holdout, at every look at once."""
    rows = []
    for unit in units:
        if unit.arm not in ("current", "holdout") or unit.outcome is None:
            continue
        current = (1.0 - holdout) * (1.0 - unit.share)
        p = current / (current + holdout)
        rows.append(effect_of(Unit(unit.arm == "current", p, unit.outcome, unit.prediction)))
    return effect_interval(rows, level=level)


def drift(units: Sequence[LiveUnit], floor: float) -> tuple[bool, bool]:
    """Return whether the current library's outcomes, and the holdout's, have fallen below a floor.

    Args:
        units: since the promotion, in order.
        floor: mean that the current library's outcomes should keep.
    """
    if not 0.0 < floor < 1.0:
        return False, False
    alarms = {"current": DriftAlarm(floor), "holdout": DriftAlarm(floor)}
    fell = {"current": False, "holdout": False}
    for unit in units:
        if unit.arm in alarms and unit.outcome is not None:
            alarms[unit.arm].observe(unit.outcome)
            fell[unit.arm] |= bool(alarms[unit.arm].evidence >= DRIFT)
    return fell["current"], fell["holdout"]
