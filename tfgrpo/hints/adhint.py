"""ADHint-style hints: the harder a task was without help, the longer the forced prefix.

Approximation throughout: the paper's formulas are not public. Ours: a linear ratio, an exponential
consistency weight, and the cross-weighted advantages of `merge.side_by_side`. Does not know how a
prefix is forced or where entropies come from.

Source: ADHint (arXiv 2512.13095), abstract and summaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import HintPlan, PlannedGroup
from tfgrpo.hints.answer_leaks import cut_before_leak
from tfgrpo.hints.merge import mixed, side_by_side, with_advantages
from tfgrpo.hints.metadata import share_of, solution_of
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed


def difficulty(group: RolloutGroup) -> float | None:
    """Return 1 − mean reward of the rollouts without help; None where none was graded.

    Raises:
        ConfigError: a mean outside [0, 1].
    """
    mean = group.mean_reward
    if mean is None:
        return None
    if not 0 <= mean <= 1:
        raise ConfigError(f"mean reward {mean} is outside [0, 1]; difficulty is 1 minus it")
    return 1 - mean


def hint_ratio(
    difficulty: float, *, w_min: float = 0.0, w_max: float = 0.5, noise: float = 0.0
) -> float:
    """Return the share of the reference to give, in [0, 1], rising with difficulty.

    Approximation: linear, w_min + (w_max − w_min) · difficulty + noise.

    Args:
        difficulty: in [0, 1].
        w_min: share at difficulty 0.
        w_max: share at difficulty 1, at least `w_min`.
        noise: a draw that the caller adds; the result is clipped to [0, 1].

    Raises:
        ConfigError: an argument out of its range.

    >>> hint_ratio(0.0), hint_ratio(0.5), hint_ratio(1.0)
    (0.0, 0.25, 0.5)
    """
    if not (0 <= difficulty <= 1 and 0 <= w_min <= w_max <= 1):
        raise ConfigError(
            f"difficulty {difficulty}, w_min {w_min}, w_max {w_max}: all must be in [0, 1] and "
            "w_min at most w_max"
        )
    return min(1.0, max(0.0, w_min + (w_max - w_min) * difficulty + noise))


def prefix_plan(task: Task, solution: str, ratio: float, *, n: int | None) -> HintPlan:
    """Return the plan of n rollouts that continue the first `ratio` of a reference solution.

    The prefix ends before the answer; with `ratio` 0 the plan is the bare task.
    """
    cut = share_of(solution, ratio)
    safe = cut_before_leak(solution, task)
    prefix = cut if len(cut) <= len(safe) else safe
    if not prefix:
        return HintPlan(n=n)
    return HintPlan(
        response_prefix=prefix,
        n=n,
        level=1,
        source="reference",
        train_on="generated_and_prefix_if_positive",
        condition="original",
    )


def consistency_weights_T(prefix_entropy_T: Sequence[float], continuation: float) -> list[float]:
    """Return a weight in (0, 1] for each forced token: 1 where its entropy is the policy's own.

    Approximation: exp(−|H_t − H| / H) with H the mean entropy of the rollout's own continuation.

    Args:
        prefix_entropy_T: the policy's entropy at each forced token, nats.
        continuation: mean entropy of the tokens that the policy wrote, nats, above 0.

    Raises:
        ConfigError: `continuation` is not above 0.

    >>> [round(w, 3) for w in consistency_weights_T([1.0, 2.0], 1.0)]
    [1.0, 0.368]
    """
    if continuation <= 0:
        raise ConfigError(f"mean entropy of the continuation is {continuation}; it must be above 0")
    return [math.exp(-abs(h - continuation) / continuation) for h in prefix_entropy_T]


@dataclass(frozen=True, slots=True)
class PrefixShare:
    """How much of the solution a prefix is, by how hard the task was.

    Raises:
        ConfigError: shares out of range.
    """

    w_min: float = 0.0
    """At difficulty 0, in [0, 1]."""
    w_max: float = 0.5
    """At difficulty 1, at least `w_min`."""
    noise: float = 0.0
    """Half-width of the uniform noise on the share, fixed by task and visit."""

    def __post_init__(self) -> None:
        hint_ratio(0.0, w_min=self.w_min, w_max=self.w_max)  # checks the range


_SHARE = PrefixShare()


class AdHint(RecordedScheduler):
    """A `HintScheduler` that rolls each task bare, then again from a prefix as long as it was hard.

    Both sets are trained side by side. A task that is never missed, or that has no solution, is
    trained bare. Approximation, as this module says.

    Args:
        bare: rollouts without help; None is the group size.
        hinted: rollouts from the prefix; None is the group size.
        share: length of the prefix.
        weigh_prefix: weigh prefix tokens by `consistency_weights_T`; costs a pass over those rows.
        solution_key: where the solution stands in a task's metadata.
        missing_is_error: a task without a solution is an error; False trains it bare.
        success_above: a rollout with a larger reward is a success, in the figures.
    """

    name = "adhint"

    def __init__(
        self,
        *,
        bare: int | None = None,
        hinted: int | None = None,
        share: PrefixShare = _SHARE,
        weigh_prefix: bool = True,
        solution_key: str = "solution",
        missing_is_error: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._n = (bare, hinted)
        self._share = share
        self._weigh_prefix = weigh_prefix
        self._key = solution_key
        self._missing_is_error = missing_is_error
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task.

        Raises:
            ConfigError: the task has no solution and that is an error.
        """
        if self._missing_is_error and not solution_of(task, self._key):
            raise ConfigError(
                f"task {task.task_id!r} has no metadata.{self._key}: give it a worked solution, or "
                "set hints.missing = 'plain' to train such tasks without hints"
            )
        return [HintPlan(n=self._n[0])]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the rollouts from a prefix, its length by the bare set's difficulty."""
        if len(made) > 1 or (ratio := self._ratio(task, made[0].group)) is None:
            return ()
        plan = prefix_plan(task, solution_of(task, self._key), ratio, n=self._n[1])
        return () if plan.is_bare else [replace(plan, weigh_prefix=self._weigh_prefix)]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return both sets as one group with advantages of their own."""
        bare, hinted = made[0].group, made[-1].group
        if len(made) == 1 or not bare.rewards_G or not hinted.rewards_G:
            self.record.close(made, made[0].plan, bare)
            return bare
        found = side_by_side(bare, hinted)
        group = with_advantages(mixed(made), (*found.bare_G, *found.hinted_G))
        self.record.close(made, made[-1].plan, group)
        return group

    def _ratio(self, task: Task, bare: RolloutGroup) -> float | None:
        hard = difficulty(bare)
        if not hard:
            return None
        visit = self.record.of(task.task_id).visits
        draw = derive_seed("hint length", task.task_id, visit) % 2**20 / 2**20
        share = self._share
        noise = share.noise * (2 * draw - 1)
        return hint_ratio(hard, w_min=share.w_min, w_max=share.w_max, noise=noise)
