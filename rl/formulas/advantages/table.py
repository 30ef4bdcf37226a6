"""The registry of advantages: pure functions of a `RewardBatch`, one value a rollout (R).

One family a file: rewards of a group alone, difficulty, other facts of a rollout, several rewards
and ranks, what is known of a task besides, tokens. Advantages finer than a rollout are in
`credit.py`, changes of the reward itself in `rewards.py`. Does not know how any of them works.
"""

from __future__ import annotations

from tfgrpo.rl.formulas.advantages.difficulty import DIFFICULTY_ADVANTAGES
from tfgrpo.rl.formulas.advantages.group import GROUP_ADVANTAGES
from tfgrpo.rl.formulas.advantages.history import HISTORY_ADVANTAGES
from tfgrpo.rl.formulas.advantages.multi_reward import SEVERAL_ADVANTAGES
from tfgrpo.rl.formulas.advantages.tokens import TOKEN_ADVANTAGES
from tfgrpo.rl.formulas.advantages.weighted import WEIGHTED_ADVANTAGES
from tfgrpo.rl.formulas.registry import Entry, merged

__all__ = ["ADVANTAGES"]

ADVANTAGES: dict[str, Entry] = merged(
    GROUP_ADVANTAGES,
    DIFFICULTY_ADVANTAGES,
    WEIGHTED_ADVANTAGES,
    SEVERAL_ADVANTAGES,
    TOKEN_ADVANTAGES,
    HISTORY_ADVANTAGES,
)
