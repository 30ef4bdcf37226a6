"""Minutes from calls and tokens, guessed from the kind of backend before anything was asked.

Hosted models: a second or several until a reply begins, then some dozens of tokens a second, as
many calls at once as the run allows. The embedded model: measured on two to eight CPU cores. A
function of the user's and other local models: unknown, and said so. All figures are approximations
that a run's own progress replaces. Does not know stages. Source: own measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfgrpo.config.learn import Config
from tfgrpo.learning.forecast.record import StageForecast
from tfgrpo.lm.spec import parse_spec

__all__ = ["with_times"]


@dataclass(frozen=True, slots=True)
class _Speed:
    """Slow or fast end of what a backend does."""

    wait_s: float
    """Before a reply begins, each call."""
    decode: float
    """Reply tokens a second: of one call, or of all where calls share one engine."""
    prefill: float
    """Prompt tokens a second, the same way."""


_HOSTED = (_Speed(0.5, 120.0, 50_000.0), _Speed(4.0, 30.0, 5_000.0))
_EMBEDDED = (_Speed(0.0, 200.0, 2_000.0), _Speed(0.0, 40.0, 400.0))
_POLICY_STAGES = ("practice", "nudge", "replay", "gate", "test")


def with_times(stage: StageForecast, config: Config, *, is_own: bool) -> StageForecast:
    """Return a stage with its wall time, where the backend's speed can be guessed.

    Args:
        is_own: the policy is a function or an object of the user's.
    """
    is_policy = stage.stage in _POLICY_STAGES
    if is_policy and is_own:
        return stage
    spec = parse_spec(config.policy.lm if is_policy else config.critic.lm or config.policy.lm)
    if spec.backend == "scripted":
        return replace(stage, seconds_low=0.0, seconds_high=0.0)
    if spec.backend in ("openai", "litellm"):
        fast, slow = _HOSTED
    elif spec.backend == "local" and spec.model.startswith("smollm2-135m"):
        fast, slow = _EMBEDDED
    else:
        return stage
    width = config.run.concurrency if spec.backend != "local" else 1
    low = _seconds(fast, stage.calls_low, stage.prompt_low, stage.completion_low, width)
    high = _seconds(slow, stage.calls_high, stage.prompt_high, stage.completion_high, width)
    return replace(stage, seconds_low=low, seconds_high=high)


def _seconds(speed: _Speed, calls: int, prompt: int, completion: int, width: int) -> float:
    work = speed.wait_s * calls + completion / speed.decode + prompt / speed.prefill
    return work / max(1, min(width, calls))
