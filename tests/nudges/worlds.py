"""Worlds in which no rollout succeeds unless something in the prompt helps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.learning.worlds import HELPFUL, World, journal, make_tasks
from tests.learning.worlds import settings as plain_settings
from tfgrpo.config.learn import Config
from tfgrpo.lm.scripted import Reply
from tfgrpo.protocols import Request
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed

HINTS = ("Look at the label.", "Look at the label, then at the seal.")


def hinted_tasks(count: int = 36, **metadata: Any) -> list[Task]:
    """The tasks of `make_tasks` with hints in their metadata."""
    given = {"hints": list(HINTS)} | metadata
    return [replace(t, metadata=given) for t in make_tasks(count)]


@dataclass
class HardWorld(World):
    """Every attempt fails without the helpful lesson or something that `helps`."""

    base: float = 0.0
    tasks: list[Task] = field(default_factory=hinted_tasks)
    helps: Callable[[str, Task], float] = lambda text, task: 0.5 if HINTS[0][:-1] in text else 0.0
    """The chance of success by prompt, beside the lesson."""
    prompts: list[tuple[str, str, str]] = field(default_factory=list)
    """(stage, task id, whole prompt) of every call of the policy."""
    replies: list[str] = field(default_factory=list)
    """What the LM that writes texts says, in turn; the last one stays."""
    written: list[str] = field(default_factory=list)
    """Prompts of that LM."""

    def _policy(self, request: Request, seed: int | None) -> Reply:
        self._count(seed)
        last = request.messages[-1].content
        task = next(t for t in self.tasks if str(t.prompt) in last)
        text = "\n".join(m.content for m in request.messages)
        self.prompts.append((self.asked[-1][0], task.task_id, text))
        chance = 0.95 if HELPFUL in text else max(self.base, self.helps(text, task))
        drawn = derive_seed("draw", task.task_id, seed) % 1000
        return str(task.reference) if drawn < 1000 * chance else f"guess {drawn}"

    def _critic(self, request: Request, seed: int | None) -> Reply:
        prompt = request.messages[0].content
        if "An agent failed at the task below" not in prompt:
            return super()._critic(request, seed)
        self._count(seed)
        self.written.append(prompt)
        at = min(len(self.written) - 1, len(self.replies) - 1)
        return self.replies[at]


def settings(folder: Path, **sections: Any) -> Config:
    """Settings under which only differing rewards teach, so that failed tasks need help."""
    learn = {"preset": "contrast"} | sections.pop("learn", {})
    return plain_settings(folder, learn=learn, **sections)


def nudged(folder: Path, kind: str = "hints", **sections: Any) -> Config:
    """Settings of a run of two steps of six practice tasks, with nudging."""
    options = {"kind": kind} | sections.pop("nudge", {})
    return settings(folder, nudge=options, **sections)


def groups_of(folder: Path, *stages: str) -> list[RolloutGroup]:
    """The groups of some stages, in the order recorded."""
    with journal(folder) as store:
        return [g for stage in stages for g in store.groups(stage)]


def records(folder: Path) -> list[dict[str, Any]]:
    """What nudging recorded, step by step."""
    with journal(folder) as store:
        return [row for _, row in store.decisions("nudge")]


def strategies_reply(*texts: str) -> str:
    """What an obedient writer says."""
    return json.dumps({"strategies": list(texts)})


def parcels_in(text: str) -> set[str]:
    """Answers of tasks that stand in a text."""
    return set(re.findall(r"parcel\d\dx", text))
