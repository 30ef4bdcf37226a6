"""Statistics of a group that formulas share: means, deviations, ranks, columns.

numpy in double precision. Means are summed exactly, so a permutation of rollouts changes no digit.
Does not know any estimator. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tfgrpo.advantage import TOLERANCE
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import Floats, Ints, RewardBatch
from tfgrpo.rl.formulas.registry import required


def filled_groups(batch: RewardBatch) -> list[Ints]:
    """Return the row numbers of each group that has rows."""
    return [rows for rows in batch.groups() if len(rows)]


def mean_of(value_G: Floats) -> float:
    """Return the mean, summed exactly."""
    return math.fsum(value_G) / len(value_G)


def deviation_of(value_G: Floats, ddof: float = 1) -> float:
    """Return the standard deviation, summed exactly; 0 where fewer than 1 + ddof values exist."""
    if len(value_G) <= ddof:
        return 0.0
    mean = mean_of(value_G)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in value_G) / (len(value_G) - ddof))


def is_flat(value_G: Floats) -> bool:
    """Return whether the values differ by rounding at most."""
    return len(value_G) < 2 or float(np.ptp(value_G)) <= TOLERANCE


def by_group(batch: RewardBatch, rule: Callable[[Floats], Floats]) -> Floats:
    """Apply a rule to the rewards of each group that is not flat; the rest is 0: R."""
    advantage_R = np.zeros(len(batch.reward_R))
    for rows in filled_groups(batch):
        rewards_G = batch.reward_R[rows]
        if not is_flat(rewards_G):
            advantage_R[rows] = rule(rewards_G)
    return advantage_R


def centred(rewards_G: Floats) -> Floats:
    """Return the rewards minus their mean: G."""
    return rewards_G - mean_of(rewards_G)


def average_ranks(value_G: Floats) -> Floats:
    """Return 0-based ascending ranks; ties share their average, so order does not matter: G.

    >>> average_ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [1.5, 0.0, 1.5]
    """
    below_G = (value_G[None, :] < value_G[:, None]).sum(1)
    equal_G = (value_G[None, :] == value_G[:, None]).sum(1)
    result: Floats = below_G + (equal_G - 1) / 2
    return result


def column(batch: RewardBatch, entry: str, name: str) -> Floats:
    """Return an extra column.

    Raises:
        ConfigError: it is absent.
    """
    return required(batch.extra.get(name), entry, f"extra[{name!r}]")


def refuse_negative(batch: RewardBatch, entry: str) -> None:
    """Refuse rewards below 0.

    Raises:
        ConfigError: there is one.
    """
    least = float(batch.reward_R.min(initial=0.0))
    if least < 0:
        raise ConfigError(
            f"{entry!r} multiplies rewards by a factor from 0 to 1, which would raise the reward "
            f"{least:g} of a wrong answer: let the verifier give 0 for it"
        )


def part_weights(batch: RewardBatch, entry: str, options: dict[str, float]) -> Floats:
    """Return the weight of each named part: M.

    Raises:
        ConfigError: an option names no part.
    """
    names = {f"weight_{name}": i for i, name in enumerate(batch.part_names)}
    weight_M = np.ones(len(names))
    for option, value in options.items():
        if option not in names:
            raise ConfigError(f"{entry!r} has no option {option!r}; parts give {sorted(names)}")
        weight_M[names[option]] = value
    return weight_M
