"""Replays: do rules do what they say on the tasks that they cite?

Which supporting practice tasks are rolled again, and what the new draws say about each rule: a task
is turned where its reward, or the reward part that the rule's topic names, rose. Pure. Does not
know how rollouts are made. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tfgrpo.experience.entry import Experience, Value
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.statistics import Scores, paired_difference

_TASKS_A_RULE = 2


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """What replays say about one rule."""

    experience_id: str
    tasks: tuple[str, ...]
    """Supporting tasks that were rolled again."""
    turned: tuple[str, ...]
    """Those that did better than before in one of the draws."""
    already_right: tuple[str, ...]
    """Those where there was nothing left to turn."""
    value: Value | None
    groups: tuple[RolloutGroup, ...] = ()

    @property
    def is_idle(self) -> bool:
        """True when the rule could have turned a task and turned none."""
        return not self.turned and len(self.already_right) < len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "entry": self.experience_id,
            "tasks": list(self.tasks),
            "turned": list(self.turned),
            "already_right": list(self.already_right),
            "value": None if self.value is None else self.value.to_dict(),
        }


def replay_tasks(
    rules: Sequence[Experience], groups: Sequence[RolloutGroup], settings: ExperienceSettings
) -> list[Task]:
    """Return the supporting tasks to roll again: up to two a rule, the fewest that cover them.

    Tasks that support most rules come first; tasks without headroom are never rolled.
    """
    full = settings.exemplar_reward
    open_groups = {
        g.task.task_id: g
        for g in groups
        if g.rewards_G and (full is None or (g.mean_reward or 0.0) < full - settings.tolerance)
    }
    need = {r.experience_id: _TASKS_A_RULE for r in rules}
    supports = {
        task_id: [r.experience_id for r in rules if task_id in r.claim.support]
        for task_id in open_groups
    }
    chosen: list[Task] = []
    while len(chosen) < settings.reflect.replays:
        gain = {t: sum(need[r] > 0 for r in ids) for t, ids in supports.items()}
        best = max(
            gain, key=lambda t: (gain[t], -(open_groups[t].mean_reward or 0.0)), default=None
        )
        if best is None or not gain[best]:
            break
        for rule in supports.pop(best):
            need[rule] -= 1
        chosen.append(open_groups[best].task)
    return chosen


def check_replays(
    rules: Sequence[Experience],
    before: Sequence[RolloutGroup],
    after: Sequence[RolloutGroup],
    settings: ExperienceSettings,
) -> list[ReplayCheck]:
    """Return what the replays say about each rule with a replayed supporting task."""
    old = {g.task.task_id: g for g in before}
    new = {g.task.task_id: g for g in after if g.graded and g.task.task_id in old}
    checks = []
    for rule in rules:
        tasks = tuple(t for t in rule.claim.support if t in new)
        if not tasks:
            continue
        was = {t: _scores(old[t], rule.claim.topic) for t in tasks}
        now = {t: _scores(new[t], rule.claim.topic) for t in tasks}
        turned = tuple(t for t in tasks if max(now[t]) > _mean_reward(was[t]) + settings.tolerance)
        best = {t: _best(old[t], rule.claim.topic, settings) for t in tasks}
        right = tuple(
            t
            for t in tasks
            if t not in turned and _mean_reward(was[t]) >= best[t] - settings.tolerance
        )
        checks.append(
            ReplayCheck(
                rule.experience_id, tasks, turned, right, _value(was, now),
                tuple(new[t] for t in tasks),
            )
        )  # fmt: skip
    return checks


def joined(first: Sequence[RolloutGroup], second: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return one group a task with the rollouts of both draws."""
    more = {g.task.task_id: g.rollouts for g in second}
    return [replace(g, rollouts=g.rollouts + more.get(g.task.task_id, ())) for g in first]


def _scores(group: RolloutGroup, topic: str) -> list[float]:
    return [_score(r, topic) for r in group.graded]


def _score(rollout: Rollout, topic: str) -> float:
    """Return the part that a topic names, or the reward where none is named so."""
    assert rollout.score is not None
    folded = {name.casefold(): value for name, value in rollout.score.parts.items()}
    return folded.get(topic.casefold(), rollout.score.reward)


def _best(group: RolloutGroup, topic: str, settings: ExperienceSettings) -> float:
    """Return full marks of the part or the reward; infinite where they are not known."""
    named = any(
        topic.casefold() in {n.casefold() for n in r.score.parts} for r in group.graded if r.score
    )
    if named:
        return 1.0
    return float("inf") if settings.exemplar_reward is None else settings.exemplar_reward


def _value(was: Scores, now: Scores) -> Value | None:
    """Return the paired change over tasks; one task alone has no interval."""
    return Value.of(paired_difference(was, now)) if len(was) > 1 else None


def _mean_reward(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
