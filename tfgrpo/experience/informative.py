"""Which groups teach: those whose rewards differ, or that show what was wanted and missed.

Does not know what is learnt from them. Source: GRPO's zero-advantage groups; the published
filters (defects 5, 14 and 21) as switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Teaching:
    """The groups of a step, sorted by what they are good for."""

    groups: tuple[RolloutGroup, ...]
    """All of them, in order."""
    informative: tuple[RolloutGroup, ...]
    all_failed: tuple[RolloutGroup, ...]
    """Every graded rollout has the lowest reward of the step, and that is a failure: not above 0,
    or below what others reached."""
    too_few: tuple[RolloutGroup, ...]
    """Fewer usable rollouts than a comparison needs."""
    differing: int = 0
    """Groups whose rewards differ; in the flow `reflect` others teach too."""

    @property
    def total(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    @property
    def share(self) -> float:
        """Informative groups among all, 0 to 1."""
        return len(self.informative) / self.total if self.total else 0.0

    @property
    def message(self) -> str:
        """One line for people."""
        return (
            f"{len(self.informative)} of {self.total} groups ({self.share:.0%}) can teach, "
            f"{self.differing} by differing rewards; {len(self.all_failed)} failed throughout, "
            f"{len(self.too_few)} have too few rollouts"
        )


def teaching_groups(groups: Sequence[RolloutGroup], settings: ExperienceSettings) -> Teaching:
    """Sort groups by what they can teach."""
    if not settings.repairs.group_by_id:
        groups = _by_text(groups)
    rewards = [r for g in groups for r in g.rewards_G]
    worst, best = min(rewards, default=0.0), max(rewards, default=0.0)
    can_fail = worst <= 0.0 or best - worst > settings.tolerance
    if settings.flow == "reflect":
        informative = tuple(g for g in groups if is_improvable(g, settings, best))
    else:
        informative = tuple(g for g in groups if _teaches(g, settings))
    contrasting = [g for g in informative if settings.flow != "reflect" or g.is_informative()]
    ids = {g.group_id for g in contrasting}
    rest = [g for g in groups if g.group_id not in ids]
    all_failed = tuple(
        g for g in rest if g.graded and can_fail and max(g.rewards_G) - worst <= settings.tolerance
    )
    too_few = tuple(g for g in rest if len(g.graded) < 2)
    differing = sum(g.is_informative(settings.tolerance) for g in groups)
    return Teaching(tuple(groups), informative, all_failed, too_few, differing)


def is_improvable(group: RolloutGroup, settings: ExperienceSettings, best: float = 0.0) -> bool:
    """True when a group can teach: rewards differ, or its best is below full marks and a reference
    or feedback says what was wanted.

    Without rewards (`ground_truth` off) every group with a finished attempt can: the critic judges.

    Args:
        group: a practised group.
        settings: `exemplar_reward` is full marks.
        best: stands for full marks where those are not known; a reward of 0 or less is none.
    """
    rollouts = usable(group, settings)
    if not rollouts:
        return False
    if not settings.ground_truth or group.is_informative(settings.tolerance):
        return True
    full, top = settings.exemplar_reward, max(group.rewards_G)
    if full is None and top >= best - settings.tolerance and top > 0.0:
        return False
    if full is not None and top >= full - settings.tolerance:
        return False
    feedback = any(r.score is not None and r.score.feedback for r in rollouts)
    return feedback or group.task.reference is not None


def usable(group: RolloutGroup, settings: ExperienceSettings) -> tuple[Rollout, ...]:
    """Return the rollouts a critic may read: graded ones, or finished ones without rewards."""
    if settings.ground_truth:
        return tuple(r for r in group.graded if r.steps)
    return tuple(r for r in group.rollouts if r.steps and r.outcome in ("graded", "ungraded"))


def _teaches(group: RolloutGroup, settings: ExperienceSettings) -> bool:
    repairs = settings.repairs
    least = 2 if repairs.typed_outcomes else 1
    if len(usable(group, settings)) < least:
        return False
    is_single = settings.flow == "paper-preview" and len(group.rollouts) == 1
    if not settings.ground_truth or is_single:
        return True
    if repairs.spread_filter:
        return group.is_informative(settings.tolerance)
    rewards_G = list(group.rewards_G)
    if not repairs.typed_outcomes and settings.flow == "paper-preview":
        rewards_G += [0.0] * (len(group.rollouts) - len(rewards_G))
    return 0.0 < sum(rewards_G) / len(rewards_G) < 1.0


def _by_text(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Pool groups whose tasks read the same, under the first one's id (defect 14)."""
    pools: dict[str, RolloutGroup] = {}
    for group in groups:
        first = pools.get(group.task.text)
        if first is None:
            pools[group.task.text] = group
            continue
        moved = tuple(replace(r, task_id=first.task.task_id) for r in group.rollouts)
        pools[group.task.text] = replace(first, rollouts=first.rollouts + moved)
    return list(pools.values())
