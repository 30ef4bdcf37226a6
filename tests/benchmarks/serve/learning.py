"""The live test on simulated traffic: false promotions, power, units needed, harm, coverage.

    python -m tests.benchmarks.serve.learning

Each run is one experiment of the gateway's own decision function (shares 0.05, 0.2, 0.5 as
configured by default), looked at after every 25th unit, with the route's first candidate.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.serve.learning.canary import LiveUnit, live_verdict, worth
from tfgrpo.serve.settings import CanarySettings
from tfgrpo.statistics.sequential import EffectTest, Unit, effect_of, looks_level

EVERY = 25


def units(effect: float, rng: random.Random, settings: CanarySettings, share_of: list[int],
          base: float) -> Iterator[LiveUnit]:  # fmt: skip
    """Yield units without end; `share_of` holds the index of the present share."""
    at = 0.0
    while True:
        share = settings.shares[share_of[0]]
        arm = "candidate" if rng.random() < share else "current"
        hard = rng.random() < 0.5  # tasks differ; the value model knows it only in part
        p = base + (-0.2 if hard else 0.2) + (effect if arm == "candidate" else 0.0)
        guess = 0.5 + (-0.1 if hard else 0.1)
        yield LiveUnit(arm, share, at, float(rng.random() < min(1.0, max(0.0, p))), True, guess)
        at += 1.0


def run_units(
    effect: float, seed: int, settings: CanarySettings, base: float
) -> tuple[str, int, int]:
    """Return (how it ended, units, units that the candidate served)."""
    rng = random.Random(seed)
    share_of = [0]
    log_needed = looks_level(settings.level, 1)
    test = EffectTest(min_difference=settings.min_difference, max_harm=settings.max_harm)
    served = on_share = 0
    for n, unit in enumerate(units(effect, rng, settings, share_of, base), 1):
        served += unit.arm == "candidate"
        on_share += 1
        assert unit.outcome is not None
        test.observe(*effect_of(Unit(unit.arm == "candidate", unit.share, unit.outcome,
                                     unit.prediction)))  # fmt: skip
        if n % EVERY:
            continue
        if test.harm >= 20:
            return "roll_back", n, served
        if test.gain >= 1.0 / log_needed:
            return "promote", n, served
        if n >= settings.max_units:
            return "expire", n, served
        if (share_of[0] + 1 < len(settings.shares) and test.gain >= 3.0
                and on_share >= settings.min_units):  # fmt: skip
            share_of[0] += 1
            on_share = 0
    raise AssertionError


def agrees(seed: int, settings: CanarySettings) -> bool:
    """Tell whether the gateway's decision over all units equals the one made unit by unit."""
    rng = random.Random(seed)
    rows = []
    stream = units(0.2, rng, settings, [len(settings.shares) - 1], 0.5)
    for _ in range(400):
        rows.append(next(stream))
    verdict = live_verdict(rows, settings, number=1, share_index=len(settings.shares) - 1)
    test = EffectTest(min_difference=settings.min_difference, max_harm=settings.max_harm)
    for unit in rows:
        assert unit.outcome is not None
        test.observe(*effect_of(Unit(unit.arm == "candidate", unit.share, unit.outcome,
                                     unit.prediction)))  # fmt: skip
    return abs(float(test.gain) - verdict.gain) <= 1e-9 * verdict.gain


def coverage(runs: int, *, effect: float, holdout: float, n: int) -> float:
    """Return the share of runs in which the holdout's interval held the effect at every look."""
    held = 0
    for seed in range(runs):
        rng = random.Random(seed)
        rows = []
        for i in range(n):
            arm = "holdout" if rng.random() < holdout else "current"
            y = float(rng.random() < 0.5 + effect * (arm == "current"))
            rows.append(LiveUnit(arm, 0.0, float(i), y))
        found = worth(rows, holdout)
        held += found.low <= effect <= found.high
    return held / runs


def ended(effect: float, runs: int, settings: CanarySettings, base: float = 0.5) -> dict[str, Any]:
    rows = [run_units(effect, seed, settings, base) for seed in range(runs)]
    shares = {how: sum(r[0] == how for r in rows) / runs for how in
              ("promote", "roll_back", "expire")}  # fmt: skip
    promoted = [r[1] for r in rows if r[0] == "promote"]
    stopped = [r for r in rows if r[0] == "roll_back"]
    return {
        **shares,
        "units_to_promote": statistics.median(promoted) if promoted else None,
        "units_to_roll_back": statistics.median(r[1] for r in stopped) if stopped else None,
        "served_before_roll_back": statistics.median(r[2] for r in stopped) if stopped else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--quick", type=int, default=200)
    asked = parser.parse_args()
    settings = CanarySettings(max_units=3000)
    null = ended(0.0, asked.runs, settings)
    small, large = (ended(e, asked.quick, settings) for e in (0.1, 0.2))
    harmful = ended(-0.2, asked.quick, settings)
    figures = {
        "runs_null": asked.runs,
        "runs_other": asked.quick,
        "looked_at_every": EVERY,
        "max_units": settings.max_units,
        "shares": list(settings.shares),
        "false_promotions": null["promote"],
        "power": {"0.1": small["promote"], "0.2": large["promote"]},
        "units_needed": {"0.1": small["units_to_promote"], "0.2": large["units_to_promote"]},
        "harmful_promoted": harmful["promote"],
        "harmful_stopped": harmful["roll_back"],
        "harmful_units": harmful["units_to_roll_back"],
        "harmful_served_badly": harmful["served_before_roll_back"],
        "coverage": coverage(200, effect=0.15, holdout=0.2, n=1000),
        "decision_function_agrees": all(agrees(s, settings) for s in range(20)),
    }
    record("serve_learning", figures, "python -m tests.benchmarks.serve.learning")


if __name__ == "__main__":
    main()
