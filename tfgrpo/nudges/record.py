"""What nudging came to: one record a step for the journal, and totals over a run.

The share of tasks that turned from all-fail to success without help stands beside the same share
under the library before the step, since a task that failed eight times can succeed by chance.
Does not know how anything was rolled. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.nudges.method import has_success
from tfgrpo.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class Recheck:
    """Nudged tasks rolled out once more without help, after the step's library was accepted."""

    version: str
    before: str
    """Library versions after and before the step."""
    draws: int
    """Draws a task and arm."""
    turned: tuple[str, ...]
    """Ids of tasks with a success under the library after the step."""
    control: tuple[str, ...] | None
    """Those with a success under the library before it; None where that was not drawn."""
    tasks: int
    """Tasks that were graded in every arm; only these count."""

    @classmethod
    def of(
        cls,
        now: Sequence[RolloutGroup],
        before: Sequence[RolloutGroup] | None,
        versions: tuple[str, str],
        *,
        draws: int,
        above: float,
    ) -> Recheck:
        """Compare groups of the same tasks in the same order; `versions` is (after, before)."""
        paired = list(zip(now, now if before is None else before, strict=True))
        graded = [(a, b) for a, b in paired if a.rewards_G and b.rewards_G]
        turned = tuple(a.task.task_id for a, _ in graded if has_success(a, above))
        control = tuple(b.task.task_id for _, b in graded if has_success(b, above))
        told = None if before is None else control
        return cls(versions[0], versions[1], draws, turned, told, len(graded))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "before": self.before,
            "draws": self.draws,
            "turned": list(self.turned),
            "control": None if self.control is None else list(self.control),
            "tasks": self.tasks,
        }


@dataclass(frozen=True, slots=True)
class Rolled:
    """The rounds of one step."""

    step: int
    epoch: int
    kind: str
    failed: tuple[RolloutGroup, ...] = ()
    """Practice groups in which nothing succeeded."""
    nudged: Mapping[str, tuple[RolloutGroup, ...]] = field(default_factory=dict)
    """By task id, in the order rolled."""
    shown: tuple[RolloutGroup, ...] = ()
    """What the critic gets in place of the step's practice groups."""
    taught: tuple[str, ...] = ()
    """Ids of tasks with a difference to learn from that the failed group did not have."""
    without: tuple[str, ...] = ()
    """Ids of failed tasks for which there was no help."""
    capped: tuple[str, ...] = ()
    """Ids of failed tasks that the cap kept from a group under help, or from a further one."""
    leaks: int = 0
    """Texts refused because the answer stands in them."""
    above: float = 0.0

    @property
    def solved(self) -> tuple[str, ...]:
        """Ids of tasks with a success under help."""
        return tuple(
            task_id
            for task_id, groups in self.nudged.items()
            if any(has_success(g, self.above) for g in groups)
        )

    @property
    def rollouts(self) -> int:
        """Rollouts under help."""
        return sum(len(g.rollouts) for groups in self.nudged.values() for g in groups)

    def to_dict(self, recheck: Recheck | None = None) -> dict[str, Any]:
        """Return the JSON form for the journal, with what the recheck found."""
        arms = 0 if recheck is None else 1 if recheck.control is None else 2
        own = {g.task.task_id: len(g.context.parts) for g in self.failed}
        return {
            "step": self.step,
            "epoch": self.epoch,
            "kind": self.kind,
            "failed": [g.task.task_id for g in self.failed],
            "nudged": {
                task_id: [
                    {
                        "group_id": g.group_id,
                        "sources": [p.source for p in g.context.parts[own[task_id] :]],
                        "rewards": list(g.rewards_G),
                    }
                    for g in groups
                ]
                for task_id, groups in self.nudged.items()
            },
            "solved": list(self.solved),
            "taught": list(self.taught),
            "without": list(self.without),
            "capped": list(self.capped),
            "leaks": self.leaks,
            "rollouts": self.rollouts,
            "recheck_rollouts": arms * len(self.nudged) * (recheck.draws if recheck else 0),
            "recheck": None if recheck is None else recheck.to_dict(),
        }


def nudge_totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the sums over a run's step records, or None where there are none.

    Counts are visits: a task that failed in two epochs counts twice. `control` counts only rechecks
    that had one, `turned_with_control` is `turned` over the same.
    """
    rows = list(rows)
    if not rows:
        return None
    checks = [row["recheck"] for row in rows if row.get("recheck")]
    paired = [c for c in checks if c["control"] is not None]
    return {
        "kind": rows[-1]["kind"],
        "steps": len(rows),
        **{name: sum(len(row[name]) for row in rows) for name in _LISTS},
        **{name: sum(row[name] for row in rows) for name in _NUMBERS},
        "rechecked": sum(c["tasks"] for c in checks),
        "turned": sum(len(c["turned"]) for c in checks),
        "rechecked_with_control": sum(c["tasks"] for c in paired),
        "turned_with_control": sum(len(c["turned"]) for c in paired),
        "control": sum(len(c["control"]) for c in paired),
    }


_LISTS = ("failed", "nudged", "solved", "taught", "without", "capped")
_NUMBERS = ("leaks", "rollouts", "recheck_rollouts")


def total_lines(totals: Mapping[str, Any]) -> list[str]:
    """Return the totals in words, one fact a line."""
    lines = [
        f"{totals['failed']} practice groups failed throughout; {totals['nudged']} of them were "
        f"rolled again with {totals['kind']}, {totals['solved']} then had a success and "
        f"{totals['taught']} had something to compare ({totals['rollouts']} rollouts)"
    ]
    if totals["rechecked"]:
        lines.append(
            f"without help, under the library of their step: {totals['turned']} of "
            f"{totals['rechecked']} turned to a success"
            + (
                f"; under the library before it {totals['control']} of "
                f"{totals['rechecked_with_control']}"
                if totals["rechecked_with_control"]
                else "; no control was drawn, and chance alone turns some"
            )
            + f" ({totals['recheck_rollouts']} rollouts)"
        )
    if totals["leaks"]:
        lines.append(f"{totals['leaks']} texts were refused because the answer stands in them")
    if totals["without"]:
        lines.append(f"for {totals['without']} of the failed groups there was no help")
    if totals["capped"]:
        lines.append(f"nudge.max_share left out or cut short {totals['capped']} of them")
    return lines
