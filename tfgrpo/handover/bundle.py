"""What of a run travels to another trainer: prompts as practised, references, replies that passed.

Practice tasks become training rows and gate tasks the validation file; test tasks stay behind.
Does not know the forms that trainers read. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, render_messages
from tfgrpo.escalate.run_data import Material, read_material
from tfgrpo.lm.wire import message_json
from tfgrpo.messages import Message
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import digest, jsonable

__all__ = ["Bundle", "TaskRow", "read_bundle"]

SPLIT_FILES = {"practice": "train", "gate": "validation"}
"""Split of the run to name of the file that holds it."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task as a trainer sees it."""

    task: Task
    split: str
    """`practice` or `gate`."""
    prompt: tuple[Message, ...]
    """System text, library and task, as the run's policy was given them."""

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The prompt as `{role, content}` turns, with their tool calls as chat APIs write them."""
        return [message_json(turn) for turn in self.prompt]

    @property
    def reference(self) -> str:
        """The reference as text, JSON where it is no text, empty where there is none."""
        reference = "" if self.task.reference is None else self.task.reference
        if isinstance(reference, str):
            return reference
        return json.dumps(jsonable(reference), ensure_ascii=False)

    @property
    def hints(self) -> list[str]:
        """Texts that a curriculum may reveal, from the task's metadata; what is no text is none."""
        found = self.task.metadata.get("hints") or self.task.metadata.get("solution") or ()
        hints = [found] if isinstance(found, str) else found
        return [h for h in hints if isinstance(h, str)] if isinstance(hints, list | tuple) else []


@dataclass(frozen=True, slots=True)
class Bundle:
    """A run as other trainers need it."""

    material: Material
    rows: tuple[TaskRow, ...]
    with_library: bool
    """True when prompts hold the kept library."""

    def of(self, split: str) -> list[TaskRow]:
        """Return the rows of a split."""
        return [row for row in self.rows if row.split == split]

    @property
    def name(self) -> str:
        """Name of the data set, a Python identifier."""
        stem = "".join(c if c.isalnum() and c.isascii() else "_" for c in self.material.folder.name)
        return f"tfgrpo_{stem.strip('_').lower() or 'run'}"

    def verified(self, largest: float) -> list[tuple[Task, str]]:
        """Return each practice task with each different reply of full marks.

        Args:
            largest: the verifier's largest reward.
        """
        full_marks = self.material.full_marks(largest)
        replies = {
            (group.task.task_id, rollout.answer): group.task
            for group in self.material.practice_groups
            for rollout in group.rollouts
            if rollout.reward is not None
            and rollout.reward >= full_marks
            and len(rollout.steps) == 1
            and rollout.answer
        }
        return [(task, reply) for (_, reply), task in replies.items()]


def read_bundle(
    run: Path | str,
    *,
    library: bool = True,
    tasks: Sequence[Task] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> Bundle:
    """Read a finished run. Prompts are the policy's; the settings of its verifier are not tried.

    Args:
        run: its folder or address.
        library: put the kept library into the prompts, as in practice; else bare prompts.
        tasks: the run's tasks, where it drew no groups of some.
        verifier: settings of the verifier, for a run that was given one in Python.

    Raises:
        ConfigError: no finished run of single replies.
    """
    material = read_material(run, tasks)
    if verifier is not None:
        config = material.config.model_copy(update={"verifier": dict(verifier)})
        material = replace(material, config=config)
    rows = []
    for split in SPLIT_FILES:
        for task in getattr(material, split):
            context = material.context(task) if library else EMPTY_CONTEXT
            turns = render_messages(task.messages, context, system=material.config.policy.system)
            rows.append(TaskRow(task, split, turns))
    return Bundle(material, tuple(rows), library and material.has_library)


def identity(bundle: Bundle) -> str:
    """Return what fixes the rows: 16 hex digits."""
    return digest([[r.split, r.task.to_dict(), r.turns] for r in bundle.rows], 16)
