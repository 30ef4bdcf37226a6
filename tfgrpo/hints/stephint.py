"""StepHint: one group whose rollouts start after 0, 1, … k steps of a teacher's chain.

The chain is cut where the teacher would most likely have ended its thinking; each rollout continues
from a forced prefix, all share a baseline, and a prefix is never pushed down. Does not know how a
prefix is forced.

Source: StepHint (arXiv 2507.02841), second hand. Approximation: how peaks that are too near each
other are chosen (the highest wins) and how many rollouts each prefix gets are our reading.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.merge import mixed
from tfgrpo.hints.metadata import steps_of
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task


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


class StepHint(RecordedScheduler):
    """A `HintScheduler` that spreads a group over 0 to k steps of a solution.

    Steps are `metadata.steps` (cut by a teacher, see `cut_points`), else the solution's clauses.

    Args:
        most_steps: most steps that a solution is cut into, at least 2.
        bare: rollouts without a prefix, at least 1.
        steps_key: where steps stand in a task's metadata.
        solution_key: where the solution stands.
        missing_is_error: a task without either is an error; False trains it bare.
        success_above: a rollout with a larger reward is a success, in the figures.
    """

    name = "stephint"

    def __init__(
        self,
        *,
        most_steps: int = 4,
        bare: int = 2,
        steps_key: str = "steps",
        solution_key: str = "solution",
        missing_is_error: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._most = most_steps
        self._bare = bare
        self._keys = (steps_key, solution_key)
        self._missing_is_error = missing_is_error
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the plans of the mixed group.

        Raises:
            ConfigError: the task has no steps and that is an error, or `bare` passes the group.
        """
        steps = steps_of(task, steps_key=self._keys[0], solution_key=self._keys[1], most=self._most)
        if not steps:
            if self._missing_is_error:
                raise ConfigError(
                    f"task {task.task_id!r} has neither metadata.{self._keys[0]} nor "
                    f"metadata.{self._keys[1]}: give it a solution, or set hints.missing = 'plain'"
                )
            return [BARE]
        return step_plans(steps, group_key=task.task_id, rollouts=group_size, bare=self._bare)

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return nothing: one round a visit."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return all sets as one group, counted at the longest prefix's level."""
        group = mixed(made)
        self.record.close(made, made[-1].plan, group)
        return group
