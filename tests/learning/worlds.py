"""Small worlds for tests of a whole run: tasks, a policy that a given lesson makes better or worse,
a critic that proposes exactly that lesson. Every reply is fixed by (request, seed)."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.errors import ProviderError
from tfgrpo.learning.learn import learn
from tfgrpo.learning.result import Result
from tfgrpo.lm.scripted import Reply, ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.rollout import Task
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.store import Journal

HELPFUL = "When a parcel is named, check its label twice before answering."
NEUTRAL = "When a question is short, read it slowly and stay calm."
HARMFUL = "When unsure, answer with the first thing that comes to mind."

_TEXT = """
amber anchor basil beacon candle canyon cedar cobalt copper coral crimson delta ember falcon
fennel garnet glacier harbor hazel indigo ivory jasmine juniper kelp lantern lilac lumber magnet
maple marble meadow mellow mosaic nectar nickel oasis onyx opal orchid otter pebble pepper
pewter pine plume poplar quartz quiver raven reef ridge river rocket saffron sage sienna silver
sparrow spruce sulfur thistle timber topaz tulip tundra umber velvet violet walnut willow zephyr
"""
WORDS = _TEXT.split()


def make_tasks(count: int = 36) -> list[Task]:
    """Tasks that share no three words; the reference of each is a word of its own."""
    chance = random.Random(7)
    return [
        Task(f"t{i:02d}", " ".join(chance.sample(WORDS, 6)) + " ?", f"parcel{i:02d}x")
        for i in range(count)
    ]


@dataclass
class World:
    """What the policy and the critic do, and what they were asked."""

    lesson: str | Callable[[str], str] = HELPFUL
    """What the critic proposes: one lesson, or by the prompt that it is shown."""
    base: float = 0.5
    """Chance of a right answer without any context."""
    turns_help: bool = False
    """True where worked examples as chat turns make the policy better."""
    tasks: list[Task] = field(default_factory=make_tasks)
    fail_at: int = 0
    """The LM call, from 1, at which the process dies; 0 never."""
    fail_test_call: int = 0
    """The call of the stage `test`, from 1, that the provider refuses; 0 none."""
    answer: Callable[[Request, int | None], Reply] | None = None
    """Replaces the policy's reply."""
    calls: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    draws: Counter[Any] = field(default_factory=Counter)
    """How often each draw (stage, task, rollout, index, seed) was asked for."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(stage, task id) of every call in order."""

    def opener(self, spec: str, **options: Any) -> ScriptedLM:
        """Stands for `open_lm`."""
        script = self._critic if "critic" in spec else self._policy
        return ScriptedLM(script, model_id=spec)

    def _count(self, seed: int | None) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise Killed
        scope = current_scope()
        self.stages[scope.stage] += 1
        self.asked.append((scope.stage, scope.task_id))
        self.draws[scope.stage, scope.task_id, scope.rollout_id, scope.sample_index, seed] += 1

    def _policy(self, request: Request, seed: int | None) -> Reply:
        self._count(seed)
        if self.asked[-1][0] == "test" and self.stages["test"] == self.fail_test_call:
            return ProviderError("the answer is not to be had", kind="bad_request")
        if self.answer is not None:
            return self.answer(request, seed)
        last = request.messages[-1].content
        task = next(t for t in self.tasks if str(t.prompt) in last)
        text = "\n".join(m.content for m in request.messages)
        chance = self.base
        if HELPFUL in text or (self.turns_help and len(request.messages) > 2):
            chance = 0.95
        if HARMFUL in text:
            chance = 0.05
        drawn = derive_seed("draw", task.task_id, seed) % 1000
        return str(task.reference) if drawn < 1000 * chance else f"guess {drawn}"

    def _critic(self, request: Request, seed: int | None) -> Reply:
        self._count(seed)
        prompt = request.messages[0].content
        lesson = self.lesson if isinstance(self.lesson, str) else self.lesson(prompt)
        return critic_reply(prompt, lesson)

    def learn(self, config: Config, **parts: Any) -> Result:
        """Run or continue."""
        return learn(config, tasks=self.tasks, opener=self.opener, **parts)


class Killed(BaseException):
    """Stands for the end of a process in the middle of a call."""


def critic_reply(prompt: str, lesson: str) -> str:
    """Return what an obedient critic says to a prompt of any flow."""
    if "Write the rules now" in prompt:
        shown = re.findall(r"^### Task (\S+)", prompt, re.MULTILINE)
        row = {"id": None, "topic": "", "text": lesson, "support": shown, "against": []}
        return json.dumps(
            {"rules": [row] if lesson and lesson not in prompt else [], "entries": []}
        )
    if "That was all." in prompt:
        found = sorted(set(re.findall(r"^\[([ER]\d+)\]", prompt, re.MULTILINE)))
        return json.dumps({"rules": [{"id": i, "text": lesson} for i in found]})
    found = sorted(set(re.findall(r"\bC\d+\b", prompt)))
    if '{"lessons"' in prompt:
        return json.dumps({"lessons": [{"lesson": lesson, "attempts": [1]}] if lesson else []})
    if "Reconcile them into one list" in prompt:
        return json.dumps([{"op": "add", "text": lesson, "from": found}])
    if "Decide for each of them" in prompt:
        ids = re.findall(r"\[([^\]\s]+)\]", prompt.split("The library:")[1])
        return json.dumps([{"op": "keep", "id": ids[0], "text": "", "from": found}])
    if "<Experiences>" in prompt:
        return f"<Experiences>\n{lesson}\n</Experiences>"
    if "ADD it, UPDATE" in prompt or "exactly one operation" in prompt:
        row = {"operation": "ADD", "id": None, "content": f"parcels: {lesson}"}
        return f"```json\n{json.dumps([row])}\n```"
    if "Operations that name no entry" in prompt:
        row = {"operation": "ADD", "id": None, "content": f"parcels: {lesson}"}
        return f"```json\n{json.dumps([row])}\n```"
    if "Give the final operations" in prompt:
        return "```json\n[]\n```"
    return "The attempt looked at the label and then answered."


def settings(folder: Path, **sections: dict[str, Any]) -> Config:
    """Settings of a small run; sections change single keys."""
    values: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "run"), "concurrency": 4},
        "tasks": {"practice": 12, "gate": 12, "test": 12},
        "policy": {"lm": "scripted:policy", "sampling": {"temperature": 0.7, "max_tokens": 40}},
        "critic": {"lm": "scripted:critic"},
        "verifier": {"kind": "exact"},
        "learn": {"epochs": 1, "batch": 6, "group_size": 4, "entries": "lessons"},
        "gate": {"group_size": 4, "test_group_size": 4},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return Config.from_mapping(values)


def comparable(result: Result) -> dict[str, Any]:
    """Return a result without times and without counts of cache hits."""
    row = result.to_dict()
    row.pop("folder")
    for spent in row["spend"]:
        spent.pop("cache_hits", None)
        spent.pop("hits", None)
        spent.pop("seconds", None)
        spent.pop("duration_s", None)
    return row


def journal(folder: Path) -> Journal:
    """Open a finished run to look at it."""
    return Journal.open(folder / "run", readonly=True)


def group_ids(folder: Path, stage: str) -> list[str]:
    """Return the task ids of a stage's groups, in order."""
    with journal(folder) as store:
        return [g.task.task_id for g in store.groups(stage)]


def flat(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return all items of the rows."""
    return [item for row in rows for item in row]
