"""What a learning run leaves for training: splits, groups, the kept library, how it is injected.

Practice tasks are trained on, gate tasks choose, test tasks make the final table; groups of gate
and test tasks never become training rows. Everything is read from the journal, without a lock.

Does not know models or training. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.context import Context
from tfgrpo.diagnosis import edited_version
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.experience import (
    EMPTY_LIBRARY,
    ExperienceSettings,
    Library,
    TopK,
    prompt_context,
)
from tfgrpo.experience.select import embedder_of
from tfgrpo.learning.experience_settings import experience_settings
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import digest
from tfgrpo.store import Journal

SPLITS = ("practice", "gate", "test")


@dataclass(frozen=True, slots=True)
class Material:
    """A finished learning run as training material."""

    folder: Path
    config: Config
    practice: tuple[Task, ...]
    gate: tuple[Task, ...]
    test: tuple[Task, ...]
    groups: tuple[RolloutGroup, ...]
    """Groups of practice and gate tasks. Those of test tasks are not read at all."""
    library: Library = EMPTY_LIBRARY
    """The kept version; empty where none won."""
    version_id: str = "empty"
    settings: ExperienceSettings = field(default_factory=ExperienceSettings)
    selector: TopK | None = None

    @property
    def has_library(self) -> bool:
        """True when the run kept something."""
        return bool(self.library.shown)

    def context(self, task: Task) -> Context:
        """What the library adds to a task's prompt; no task sees an exemplar of itself."""
        if not self.has_library:
            return Context()
        return prompt_context(
            self.library, self.settings, use="evaluation", task=task, selector=self.selector
        )

    @property
    def practice_groups(self) -> tuple[RolloutGroup, ...]:
        """Groups of practice tasks, of any stage and context."""
        ids = {t.task_id for t in self.practice}
        return tuple(g for g in self.groups if g.task.task_id in ids)

    @property
    def gate_groups(self) -> tuple[RolloutGroup, ...]:
        """Groups of gate tasks."""
        ids = {t.task_id for t in self.gate}
        return tuple(g for g in self.groups if g.task.task_id in ids)

    def full_marks(self, largest: float) -> float:
        """Return the reward of a success: the verifier's largest, else the largest seen in
        practice (infinite where nothing was graded)."""
        if math.isfinite(largest):
            return largest
        rewards = [r for g in self.practice_groups for r in g.rewards_G]
        return max(rewards, default=math.inf)

    @property
    def identity(self) -> str:
        """Fixed by what is trained on, chosen with and tested on."""
        tasks = [[t.to_dict() for t in split] for split in (self.practice, self.gate, self.test)]
        groups = sorted(g.group_id for g in self.practice_groups)
        return digest([tasks, groups, self.version_id, self.library.to_dict()], 16)


def read_material(folder: Path | str, tasks: Sequence[Task] | None = None) -> Material:
    """Read a learning run.

    Args:
        folder: of the run, or its address on a server.
        tasks: the tasks that the run was given; needed only where it drew no groups of some, as
            with a gate that was switched off or a budget that ended before the test.

    Raises:
        StoreError: there is no journal, or it cannot be read.
        ConfigError: it is no finished learning run, has no test split, its policy is not a plain
            chat, or the given tasks are not the run's.
    """
    with Journal.open(folder, readonly=True) as store:
        path = store.folder
        config = _config_of(store, path)
        ids = _newest(store, "splits")
        final = _newest(store, "final")
        if not ids or not final:
            raise ConfigError(
                f"{str(path)!r} holds no finished learning run: let `tfgrpo learn` end first"
            )
        if config.policy.kind != "chat":
            raise ConfigError(
                f"the policy of {str(path)!r} is of kind {config.policy.kind!r}: only single "
                "replies (kind 'chat') can be trained on"
            )
        known, groups = _read_groups(store, ids)
        libraries = dict(store.libraries())
        edits = [payload for _, payload in store.decisions("edited")]
        if tasks is not None:
            known |= _given(tasks, (store.config or {})["tasks"].get("content"), path)
    for split in SPLITS:
        missing = [t for t in ids.get(split, ()) if t not in known]
        if missing or not ids.get(split):
            lack = f"{len(missing)} {split} tasks without groups, such as {missing[:1]}"
            raise ConfigError(
                f"{str(path)!r} has {lack}: give its task file (--tasks FILE)"
                if missing
                else f"{str(path)!r} has no {split} tasks: a run that practised on tasks and has a "
                "gate and a test split is needed"
            )
    version = edited_version(str(final.get("version_id") or "empty"), edits)
    library, selector = _library(version, libraries, config)
    practice, gate, test = (tuple(known[t] for t in ids[s]) for s in SPLITS)
    return Material(
        folder=path,
        config=config,
        practice=practice,
        gate=gate,
        test=test,
        groups=groups,
        library=library,
        version_id=version,
        settings=experience_settings(config),
        selector=selector,
    )


def _given(tasks: Sequence[Task], content: Any, path: Path) -> dict[str, Task]:
    """Return tasks by id, after checking that they are those that the run was given."""
    if digest([t.to_dict() for t in tasks], 16) != content:
        raise ConfigError(
            f"the {len(tasks)} tasks given are not those of {str(path)!r}: name the very file that "
            "the run learnt from, unchanged"
        )
    return {t.task_id: t for t in tasks}


def _newest(store: Journal, kind: str) -> Mapping[str, Any]:
    found = store.decisions(kind)
    return found[-1][1] if found else {}


def _config_of(store: Journal, path: Path) -> Config:
    values = dict(store.config or {})
    if "tasks" not in values:
        raise ConfigError(f"{str(path)!r} is not a learning run: it has no settings of `learn`")
    added = ("content", "traces_content")  # what the journal keeps beside the settings
    values["tasks"] = {k: v for k, v in values["tasks"].items() if k not in added}
    for name, section in values.items():  # an empty key of an older build may be gone since
        if isinstance(section, Mapping):
            values[name] = {k: v for k, v in section.items() if v is not None}
    return Config.from_mapping(values, f"settings of {path}")


def _read_groups(
    store: Journal, ids: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Task], tuple[RolloutGroup, ...]]:
    """Return all tasks by id, and the groups of practice and gate tasks."""
    tested = set(ids.get("test", ()))
    tasks: dict[str, Task] = {}
    groups: list[RolloutGroup] = []
    for group in store.groups():
        tasks[group.task.task_id] = group.task
        if group.task.task_id not in tested:
            groups.append(group)
    return tasks, tuple(groups)


def _library(
    version: str, libraries: Mapping[str, Any], config: Config
) -> tuple[Library, TopK | None]:
    name, _, choice = version.partition("/top-")
    if name == "empty":
        return EMPTY_LIBRARY, None
    if name not in libraries:
        raise StoreError(f"library version {name!r} is not in the journal: the run is damaged")
    selector = None
    if choice:
        selector = TopK(int(choice), embedder_of(config.learn.embedder))
    return Library.from_dict(libraries[name]), selector


@dataclass(frozen=True, slots=True)
class PracticeState:
    """What the run knows about one practice task."""

    task: Task
    rewards: tuple[float, ...]
    """Of all graded rollouts, whatever their context."""
    verified: int
    """How many reached full marks."""
    hint_from: str
    """`hints` or `solution`, the metadata that hints can be cut from; empty for none."""

    @property
    def state(self) -> str:
        """`all_fail`, `all_pass` or `mixed`; `unknown` where nothing was graded."""
        if not self.rewards:
            return "unknown"
        if not self.verified:
            return "all_fail"
        return "all_pass" if self.verified == len(self.rewards) else "mixed"

    def marked(self) -> Task:
        """Return the task with what is known in its metadata, for a file of training tasks."""
        known = {"state": self.state, "verified": self.verified, "hint_from": self.hint_from}
        return Task(
            self.task.task_id,
            self.task.prompt,
            self.task.reference,
            {**self.task.metadata, "escalate": known},
        )


def task_states(
    tasks: Sequence[Task], groups: Iterable[RolloutGroup], full_marks: float
) -> list[PracticeState]:
    """Return what is known about each task from groups of it."""
    rewards: dict[str, list[float]] = {t.task_id: [] for t in tasks}
    for group in groups:
        if group.task.task_id in rewards:
            rewards[group.task.task_id].extend(group.rewards_G)
    return [
        PracticeState(
            task,
            tuple(rewards[task.task_id]),
            sum(r >= full_marks for r in rewards[task.task_id]),
            next((key for key in ("hints", "solution") if task.metadata.get(key)), ""),
        )
        for task in tasks
    ]
