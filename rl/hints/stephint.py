"""StepHint: one group whose rollouts start after 0, 1, … k steps of a teacher's chain.

The chain is cut where the teacher would most likely have ended its thinking; each rollout continues
from a forced prefix, all share a baseline, and a prefix is never pushed down (`loss_mask_T`). Pure
functions; does not know how a prefix is forced.

Source: StepHint (arXiv 2507.02841), second hand. Approximation: how peaks that are too near each
other are chosen (the highest wins) and how many rollouts each prefix gets are our reading.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.rl.hints.plan import HintPlan


def cut_points(p_end_T: Sequence[float], *, most: int, min_distance: int = 1) -> tuple[int, ...]:
    """Return the prefix lengths, in tokens and rising, at which a chain is cut.

    A cut after token t needs the end of thinking to be likelier at t than at t + 1. The highest
    such points win, as long as they lie `min_distance` tokens apart.

    Args:
        p_end_T: probability that thinking ends after each token.
        most: most cuts, at least 0.
        min_distance: tokens between cuts, at least 1.

    >>> cut_points([0.1, 0.6, 0.2, 0.5, 0.1], most=2)
    (2, 4)
    """
    if most < 0 or min_distance < 1:
        raise ConfigError(f"most {most} must be at least 0 and min_distance {min_distance} above 0")
    falls = [t for t in range(len(p_end_T) - 1) if p_end_T[t] > p_end_T[t + 1]]
    chosen: list[int] = []
    for t in sorted(falls, key=lambda t: (-p_end_T[t], t)):
        if len(chosen) < most and all(abs(t - c) >= min_distance for c in chosen):
            chosen.append(t)
    return tuple(sorted(t + 1 for t in chosen))


def step_plans(
    steps: Sequence[str], *, group_key: str, rollouts: int, bare: int = 1
) -> tuple[HintPlan, ...]:
    """Return the plans of one mixed group: the bare task, then 1 … k steps as forced prefixes.

    The last step is never given, since it ends in the answer. Rollouts are spread evenly, earlier
    (weaker) prefixes first.

    Args:
        steps: the chain's texts in order; at least one.
        group_key: the shared baseline.
        rollouts: rollouts of the whole group, at least `bare`.
        bare: rollouts without a prefix, at least 1.

    Raises:
        ConfigError: no steps, or counts out of range.
    """
    if not steps or bare < 1 or rollouts < bare:
        raise ConfigError(
            f"{len(steps)} steps, {rollouts} rollouts of which {bare} bare: give one step or more, "
            "and at least one bare rollout within the group"
        )
    prefixes = ["".join(steps[:k]) for k in range(1, len(steps))]
    each, rest = divmod(rollouts - bare, len(prefixes)) if prefixes else (0, 0)
    n_bare = bare if prefixes else rollouts
    plans = [HintPlan(n=n_bare, group_key=group_key)]
    for level, prefix in enumerate(prefixes, 1):
        n = each + (level <= rest)
        if n:
            plans.append(
                HintPlan(
                    response_prefix=prefix,
                    n=n,
                    level=level,
                    source="teacher",
                    group_key=group_key,
                    train_on="generated_and_prefix_if_positive",
                    condition="original",
                )
            )
    return tuple(plans)
