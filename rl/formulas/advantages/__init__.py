"""The registry of advantages: pure functions of a `RewardBatch`, one value a rollout (R)."""

from tfgrpo.rl.formulas.advantages.table import ADVANTAGES

__all__ = ["ADVANTAGES"]
