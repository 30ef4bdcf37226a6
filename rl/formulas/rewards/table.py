"""The registry of reward shaping: pure functions of a `RewardBatch` that return new rewards, R.

Apply one before an advantage with `dataclasses.replace(batch, reward_R=...)`; a verifier's own
reward is never overwritten. One family a file: length, and the rest. Does not know verifiers.
"""

from __future__ import annotations

from tfgrpo.rl.formulas.registry import Entry, merged
from tfgrpo.rl.formulas.rewards.group import GROUP_REWARDS
from tfgrpo.rl.formulas.rewards.length import LENGTH_REWARDS

__all__ = ["REWARDS"]

REWARDS: dict[str, Entry] = merged(LENGTH_REWARDS, GROUP_REWARDS)
