"""`RunView`: what a report needs of a run, in plain records. The border to the journal.

Everything behind it (`summary`, `page`, `markdown`, `advise`) is a pure function of a view.

Groups carry in their metadata `stage` (`practice`, `gate`, `test`), `step`, `arm` (`empty`,
`current`, `proposed`, `final`) and `library_version`; where entries were randomised, `offered` and
`keep`. A library version is scored on the gate split once, however often it is compared. Of
decisions the following kinds are read, every key optional:

    gate           step (or the number that begins the key), look, current and proposed (library
                   versions), accepted, reason, what
    final          version_id (`empty` for no library), reason
    rejected_edit  step, reason, and edit, edits or text
    summary        group_id, rollout_id, text
    contrast       group_id, text (or lessons)
    forecast       any object; shown as it is
    nudge          what `tfgrpo.nudges` records of a step: help for failed tasks, and the recheck

Does not know statistics or HTML. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.store.fold import SpendRow

__all__ = ["DECISION_KINDS", "Decision", "RunView", "load_view", "scores_of"]

DECISION_KINDS = (
    "step",
    "gate",
    "final",
    "rejected_edit",
    "summary",
    "contrast",
    "aa",
    "forecast",
    "nudge",
)
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that was decided or said on the way."""

    kind: str
    key: str
    payload: Any

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the payload, `default` where the payload is no object."""
        return self.payload.get(name, default) if isinstance(self.payload, Mapping) else default

    @property
    def step(self) -> int | None:
        """The step it belongs to: told by the payload, or by a number that begins the key."""
        step = self.get("step")
        if isinstance(step, int):
            return step
        digits = re.match(r"\d+", self.key)
        return int(digits[0]) if digits else None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment."""

    name: str
    groups: tuple[RolloutGroup, ...] = ()
    decisions: tuple[Decision, ...] = ()
    libraries: tuple[tuple[str, Any], ...] = ()
    """(version id, JSON form) of every version, oldest first."""
    spend: tuple[SpendRow, ...] = ()
    config: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    damaged: tuple[str, ...] = ()
    """Rows of the journal that were set aside, in words."""

    def of_stage(self, stage: str, arm: str | None = None) -> Iterator[RolloutGroup]:
        """Yield the groups of one stage, of one arm or of all."""
        for group in self.groups:
            if stage_of(group) == stage and arm in (None, group.metadata.get("arm")):
                yield group

    def of_kind(self, kind: str) -> Iterator[Decision]:
        """Yield the decisions of one kind, oldest first."""
        return (d for d in self.decisions if d.kind == kind)

    def newest(self, kind: str) -> Decision | None:
        """Return the last decision of a kind: a run that went on decided again."""
        return next((d for d in reversed(self.decisions) if d.kind == kind), None)

    def tasks(self, *stages: str) -> list[Task]:
        """Return the tasks of some stages, each once."""
        found = {g.task.task_id: g.task for g in self.groups if stage_of(g) in stages}
        return list(found.values())

    @property
    def proof_stage(self) -> str:
        """The stage that tells what the library is worth: `test`, or `eval` in a run that only
        evaluates."""
        stages = {stage_of(g) for g in self.groups}
        return "eval" if "eval" in stages and "test" not in stages else "test"

    @property
    def final_arm(self) -> str:
        """The arm that was kept: `final`, or `empty` where no library won."""
        chosen = self._final_version
        return "empty" if chosen == "empty" else "final"

    @property
    def _final_version(self) -> str:
        for decision in reversed(self.decisions):
            if decision.kind == "final":
                return str(decision.get("version_id") or "")
        return ""

    @property
    def final_library(self) -> tuple[str, Any]:
        """The version that was kept, or the newest; without payload where there is none."""
        chosen = self._final_version.partition("/")[0]  # a selection of entries has a suffix
        if chosen == "empty":
            return "empty", None
        by_id = dict(self.libraries)
        if chosen in by_id:
            return chosen, by_id[chosen]
        return self.libraries[-1] if self.libraries else ("", None)


def stage_of(group: RolloutGroup) -> str:
    """Return the stage that a group was made in; `other` where it does not say."""
    return str(group.metadata.get("stage") or "other")


def step_of(group: RolloutGroup) -> int:
    """Return the step that a group belongs to; 0 where it does not say."""
    step = group.metadata.get("step")
    return step if isinstance(step, int) else 0


def scores_of(groups: Iterable[RolloutGroup]) -> dict[str, list[float]]:
    """Return rewards by task id; a task whose rollouts were not graded has an empty list."""
    scores: dict[str, list[float]] = {}
    for group in groups:
        scores.setdefault(group.task.task_id, []).extend(group.rewards_G)
    return scores


def load_view(folder: Path | str, *, stages: Sequence[str] | None = None) -> RunView:
    """Read a run's journal; works beside a running process.

    Args:
        folder: the run's folder.
        stages: read the groups of these stages only; None reads all.

    Raises:
        StoreError: there is no journal, or it cannot be read.
    """
    from tfgrpo.store.journal import Journal

    with Journal.open(folder, readonly=True) as store:
        wanted = [None] if stages is None else list(stages)
        return RunView(
            name=store.folder.resolve().name,
            groups=tuple(g for stage in wanted for g in store.groups(stage)),
            decisions=tuple(
                Decision(kind, key, payload)
                for kind in DECISION_KINDS
                for key, payload in store.decisions(kind)
            ),
            libraries=tuple(store.libraries()),
            spend=tuple(store.spend()),
            config=store.config or {},
            damaged=tuple(store.damaged),
        )
