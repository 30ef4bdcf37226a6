"""The registry of reward shaping: pure functions of a `RewardBatch` that return new rewards, R."""

from tfgrpo.rl.formulas.rewards.table import REWARDS

__all__ = ["REWARDS"]
