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
    edited         from and to: versions of the kept library before and after a person's change
    rewards        low and high: the verifier's range of rewards, null where it has no bound
    forecast       any object; shown as it is
    nudge          what `tfgrpo.nudges` records of a step: help for failed tasks, and the recheck

Does not know figures or HTML. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfgrpo.diagnosis import (
    KINDS,
    Reason,
    RunOutcome,
    edited_version,
    outcome_of,
    reward_range_of,
    why_not_kept,
)
from tfgrpo.group_figures import GroupFigures
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.import_string import noted_config
from tfgrpo.statistics import Interval
from tfgrpo.store.fold import SpendRow

__all__ = ["DECISION_KINDS", "Decision", "RunView", "load_view", "sampled", "scores_of"]

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
    "rewards",
    "edited",
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
    """A run at one moment.

    `groups` are those whose texts a page shows, all of a small run and some of a large one; figures
    are of all groups, and are made from `groups` where `all_figures` are not given.
    """

    name: str
    groups: tuple[RolloutGroup, ...] = ()
    all_figures: tuple[GroupFigures, ...] | None = None
    read_tasks: Callable[[tuple[str, ...]], Iterable[Task]] | None = None
    """Reads the tasks of some stages; None takes those of `groups`."""
    decisions: tuple[Decision, ...] = ()
    libraries: tuple[tuple[str, Any], ...] = ()
    """(version id, JSON form) of every version, oldest first."""
    spend: tuple[SpendRow, ...] = ()
    config: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    damaged: tuple[str, ...] = ()
    """Rows of the journal that were set aside, in words."""
    folder: str = ""
    """The run's folder or address as it was given, without password."""
    config_path: str = "CONFIG.toml"
    """Where its settings lay, for commands that go on from it."""
    instructions: str = ""
    """What was kept as one plain text, as the run wrote it; empty where nothing was."""

    _made: list[GroupFigures] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def figures(self) -> Sequence[GroupFigures]:
        """The figures of all groups."""
        if self.all_figures is not None:
            return self.all_figures
        if not self._made:
            self._made.extend(map(GroupFigures.of, self.groups))
        return self._made

    def of_stage(self, stage: str, arm: str | None = None) -> Iterator[GroupFigures]:
        """Yield the figures of the groups of one stage, of one arm or of all."""
        for group in self.figures:
            if stage_of(group) == stage and arm in (None, group.metadata.get("arm")):
                yield group

    def of_kind(self, kind: str) -> Iterator[Decision]:
        """Yield the decisions of one kind, oldest first."""
        return (d for d in self.decisions if d.kind == kind)

    def newest(self, kind: str) -> Decision | None:
        """Return the last decision of a kind: a run that went on decided again."""
        return next((d for d in reversed(self.decisions) if d.kind == kind), None)

    def payloads(self, *kinds: str) -> dict[str, list[Mapping[str, Any]]]:
        """Return the payloads of some kinds of decisions that are objects, oldest first."""
        return {
            kind: [d.payload for d in self.of_kind(kind) if isinstance(d.payload, Mapping)]
            for kind in kinds
        }

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The verifier's least and largest reward, where the run recorded bounds."""
        return reward_range_of(self.payloads("rewards")["rewards"])

    def within(self, interval: Interval, *, of_difference: bool = False) -> Interval:
        """Return an interval cut to what the run's rewards can be."""
        known = self.reward_range
        return interval if known is None else interval.within(known, of_difference=of_difference)

    @property
    def outcome(self) -> RunOutcome:
        """What became of the run's libraries."""
        finals = self.payloads("final")["final"]
        return outcome_of(finals[-1] if finals else None, bool(self.libraries))

    def why_not_kept(self) -> list[Reason]:
        """Return why nothing was kept, or why what was kept is unproven."""
        return why_not_kept(self.figures, self.payloads(*KINDS), self.config)

    def tasks(self, *stages: str) -> Iterable[Task]:
        """Return the tasks of some stages, each once; read from the journal where they are many."""
        if self.read_tasks is not None:
            return _Reading(self.read_tasks, stages)
        found = {g.task.task_id: g.task for g in self.groups if stage_of(g) in stages}
        return list(found.values())

    @property
    def proof_stage(self) -> str:
        """The stage that tells what the library is worth: `test`, or `eval` in a run that only
        evaluates."""
        stages = {stage_of(g) for g in self.figures}
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
        edits = self.payloads("edited")["edited"]
        chosen = edited_version(self._final_version, edits)
        chosen = chosen.partition("/")[0]  # a selection of entries has a suffix
        if chosen == "empty":
            return "empty", None
        by_id = dict(self.libraries)
        if chosen in by_id:
            return chosen, by_id[chosen]
        return self.libraries[-1] if self.libraries else ("", None)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Tasks that are read anew each time they are gone through, and never held."""

    read: Callable[[tuple[str, ...]], Iterable[Task]]
    stages: tuple[str, ...]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.read(self.stages))


def stage_of(group: RolloutGroup | GroupFigures) -> str:
    """Return the stage that a group was made in; `other` where it does not say."""
    return str(group.metadata.get("stage") or "other")


def step_of(group: RolloutGroup | GroupFigures) -> int:
    """Return the step that a group belongs to; 0 where it does not say."""
    step = group.metadata.get("step")
    return step if isinstance(step, int) else 0


def scores_of(groups: Iterable[GroupFigures]) -> dict[str, list[float]]:
    """Return rewards by task id; a task whose rollouts were not graded has an empty list."""
    scores: dict[str, list[float]] = {}
    for group in groups:
        scores.setdefault(group.task_id, []).extend(group.rewards_G)
    return scores


MOST_SHOWN = 2000
"""Groups whose texts a view holds: all of a run, or some of each stage of a larger one."""


def load_view(
    folder: Path | str, *, stages: Sequence[str] | None = None, shown: int = MOST_SHOWN
) -> RunView:
    """Read a run's journal; works beside a running process.

    Args:
        folder: the run's folder.
        stages: read the groups of these stages only; None reads all.
        shown: groups whose texts are read; 0 where only figures are wanted.

    Raises:
        StoreError: there is no journal, or it cannot be read.
    """
    from tfgrpo.store.journal import Journal
    from tfgrpo.store.postgres.places import shown as shown_place

    def read_tasks(stages: tuple[str, ...]) -> Iterator[Task]:
        with Journal.open(folder, readonly=True) as again:
            yield from again.tasks(*stages)

    with Journal.open(folder, readonly=True) as store:
        wanted = [None] if stages is None else list(stages)
        figures = tuple(g for stage in wanted for g in store.figures(stage))
        names = [g.group_id for g in sampled(figures, shown)]
        return RunView(
            name=store.folder.resolve().name,
            groups=tuple(store.groups_named(names)),
            all_figures=figures,
            read_tasks=read_tasks,
            decisions=tuple(
                Decision(kind, key, payload)
                for kind in DECISION_KINDS
                for key, payload in store.decisions(kind)
            ),
            libraries=tuple(store.libraries()),
            spend=tuple(store.spend()),
            config=store.config or {},
            damaged=tuple(store.damaged),
            folder=shown_place(folder),
            config_path=noted_config(store.folder),
            instructions=_instructions(store.folder),
        )


def _instructions(folder: Path) -> str:
    try:
        return (folder / "instructions.txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""  # not written yet


def sampled(groups: Sequence[GroupFigures], most: int) -> list[GroupFigures]:
    """Return at most so many groups: all, or evenly spread ones of each stage, which share the
    places equally and leave what they do not need to the others.

    >>> made = [GroupFigures(f"g{i}", "t", metadata={"stage": "test" if i < 2 else "practice"})
    ...         for i in range(12)]
    >>> [g.group_id for g in sampled(made, 6)]
    ['g0', 'g1', 'g2', 'g4', 'g7', 'g9']
    """
    if len(groups) <= most:
        return list(groups)
    stages: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        stages.setdefault(stage_of(group), []).append(place)
    chosen: list[int] = []
    left = most
    for number, places in enumerate(sorted(stages.values(), key=len)):
        share = min(len(places), left // (len(stages) - number))
        chosen += [places[i * len(places) // share] for i in range(share)]
        left -= share
    return [groups[place] for place in sorted(chosen)]
