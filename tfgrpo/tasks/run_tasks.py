"""The tasks of a run: read, split in three, refused where what is learnt from would be tested on.

Saved traces take the place of the practice split; their tasks must not be held out. Does not know
rollouts, scores or the journal. Source: own; the rules are in `experience.splits` and `leaks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.store import read_groups
from tfgrpo.tasks.contamination import find_leaks, refuse_contaminated
from tfgrpo.tasks.files import read_tasks
from tfgrpo.tasks.splits import Splits, split_tasks

__all__ = ["RunTasks", "read_run_tasks"]


@dataclass(frozen=True, slots=True)
class RunTasks:
    """What a run learns from and is judged on."""

    tasks: Sequence[Task]
    """As given or read, before the split."""
    traces: Sequence[RolloutGroup]
    """Saved groups to learn from; empty where practice tasks are rolled out."""
    splits: Splits
    practised: tuple[Task, ...]
    """What is learnt from: the practice split, or the tasks of the traces in its place."""
    notes: tuple[str, ...]
    """Which held-out tasks resemble practised ones."""


def read_run_tasks(config: Config, given: Sequence[Task] | None = None) -> RunTasks:
    """Read the tasks and traces that the settings name, split them and check the splits.

    Args:
        config: the settings.
        given: tasks in place of those of `tasks.path`.

    Raises:
        ConfigError: there are no tasks, they cannot be split as asked, or the held-out tasks are
            among the practised ones.
    """
    tasks, traces = _read(config, given)
    splits = _split(config, tasks)
    practised = _practised(splits, traces)
    return RunTasks(tasks, traces, splits, practised, _check_leaks(practised, splits))


def _read(config: Config, given: Sequence[Task] | None) -> tuple[list[Task], list[RolloutGroup]]:
    traces = list(read_groups(Path(config.tasks.traces))) if config.tasks.traces else []
    if given is not None:
        if not (given or traces):
            raise ConfigError("there are no tasks: give at least one of each split")
        return list(given), traces
    if config.tasks.path:
        return read_tasks(config.tasks.path), traces
    if not traces:
        raise ConfigError("tasks.path is empty: name a JSONL file of tasks, or tasks.traces")
    return [], traces


def _split(config: Config, tasks: Sequence[Task]) -> Splits:
    if not tasks:
        return Splits((), (), ())
    wanted = config.tasks
    if wanted.stratify and not any(wanted.stratify in t.metadata for t in tasks):
        raise ConfigError(
            f"tasks.stratify is {wanted.stratify!r}, which is in the metadata of no task"
        )
    gate = wanted.gate if config.gate.enabled else (wanted.gate or 0)
    return split_tasks(
        tasks,
        practice=wanted.practice,
        gate=gate,
        test=wanted.test,
        seed=wanted.seed,
        stratify=wanted.stratify,
    )


def _practised(splits: Splits, traces: Sequence[RolloutGroup]) -> tuple[Task, ...]:
    """Return what is learnt from: the practice split, or the tasks of saved traces in its place."""
    if not traces:
        return splits.practice
    practised = {g.task.task_id: g.task for g in traces}
    held_out = sorted(practised.keys() & {t.task_id for t in (*splits.gate, *splits.test)})
    if held_out:
        raise ConfigError(
            f"tasks.traces holds groups of {len(held_out)} gate or test tasks, such as "
            f"{held_out[:3]}: what is learnt from must not be tested on. Leave those tasks out of "
            "tasks.path, or set metadata split = 'practice' for them"
        )
    return tuple(practised.values())


def _check_leaks(practised: Sequence[Task], splits: Splits) -> tuple[str, ...]:
    """Refuse splits that overlap as a whole; name what overlaps otherwise."""
    notes = []
    for name, held_out in (("gate", splits.gate), ("test", splits.test)):
        if not (practised and held_out):
            continue
        report = find_leaks(practised, held_out)
        refuse_contaminated(report)
        if report.contaminated:
            notes.append(
                f"{len(report.contaminated)} of {len(held_out)} {name} tasks resemble practice "
                f"tasks: {', '.join(sorted(report.contaminated)[:5])}"
            )
    return tuple(notes)
