"""From informative groups to a candidate library: the critic and gate of `tfgrpo learn`.

The groups are a learning run's saved traces; with a verifier, tasks whose split is `gate` are
rolled out to compare libraries offline. The run has a folder and a budget of its own. What it finds
is added to the library in force, marked as learnt from outside.

Does not know HTTP, states or live tests. Source: own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.experience.artefact import Artefact, scan
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.library import Library
from tfgrpo.learning.learn import learn
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import Stop
from tfgrpo.serve.settings import LearnSettings
from tfgrpo.store import write_groups
from tfgrpo.verifiers import make_verifier

__all__ = ["AskedQuestion", "PendingLibrary", "limit_sources", "propose", "split_of"]


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """What a proposal is made from."""

    folder: Path
    groups: Sequence[RolloutGroup]
    gate_tasks: Sequence[Task]
    current: Artefact
    policy: str
    """Spec of the route's first upstream."""
    options: Mapping[str, Any]
    settings: LearnSettings
    stop: Stop = field(default_factory=Stop)
    """Requested when the gateway ends."""


@dataclass(frozen=True, slots=True)
class PendingLibrary:
    """A candidate, or why there is none."""

    artefact: Artefact | None
    evidence: Mapping[str, Any]
    """Figures for the journal and the page."""


Proposer = Callable[[AskedQuestion], PendingLibrary]


def split_of(secret: bytes, task_id: str) -> str:
    """Return a task's split, fixed at its arrival: practice 60 %, gate 30 %, test 10 %."""
    digest = hmac.digest(secret, b"split\0" + task_id.encode(), hashlib.sha256)
    share = int.from_bytes(digest[:8]) / 2**64
    return "practice" if share < 0.6 else "gate" if share < 0.9 else "test"


def limit_sources(groups: Sequence[RolloutGroup], most: float) -> list[RolloutGroup]:
    """Return groups of which no source gives more than its share, where there are enough sources.

    With fewer sources than 1 / `most` nobody can stay under the share, and all groups count.
    """
    names = [s for g in groups for s in _sources(g)]
    if len(set(names)) * most < 1.0:
        return list(groups)
    limit = max(1, int(most * len(groups)))
    counts: Counter[str] = Counter()
    kept = []
    for group in groups:
        sources = _sources(group)
        if all(counts[s] < limit for s in sources):
            counts.update(sources)
            kept.append(group)
    return kept


def _sources(group: RolloutGroup) -> list[str]:
    """Return who gave a group's evidence; the gateway's own draws (`~…`) are nobody's."""
    found = (str(s) for s in group.metadata.get("sources", ()))
    return [s for s in found if not s.startswith("~")]


def propose(asked: AskedQuestion) -> PendingLibrary:
    """Learn from groups and return a candidate; runs in a thread of its own.

    Raises:
        TfgrpoError: as `learn`.
    """
    asked.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    traces = asked.folder / "traces.jsonl"
    write_groups(traces, asked.groups)
    settings = asked.settings
    judge = _judge(settings.verifier)
    gate_tasks = [t for t in asked.gate_tasks if _is_judged(t, judge)]
    has_gate = len(gate_tasks) >= 2
    values: dict[str, Any] = {
        "run": {"folder": str(asked.folder / "run"), "probe": 0},
        "tasks": {"traces": str(traces)},
        "policy": {"lm": asked.policy, "options": dict(asked.options)},
        "critic": {"lm": settings.critic},
        "learn": {"preset": "default", **_learn(asked, judge)},
        "gate": {"group_size": settings.group_size},
    }
    if settings.verifier is not None:
        values["verifier"] = dict(settings.verifier)
    if settings.usd is not None:
        values["budget"] = {"cost_usd": settings.usd}
    tasks = None
    if has_gate:
        tasks = [replace(t, metadata={**t.metadata, "split": "gate"}) for t in gate_tasks]
    result = learn(Config.from_mapping(values, "the route's learn section"), tasks=tasks,
                   stop=asked.stop)  # fmt: skip
    artefact = _merged(asked.current, result.library)
    evidence = {
        "groups": len(asked.groups),
        "gate_tasks": len(gate_tasks) if has_gate else 0,
        "choice": result.learned.choice.to_dict(),
        "spend": [row.to_dict() for row in result.spend],
        "notes": list(result.notes),
        "stopped_by": result.learned.stopped_by,
    }
    return PendingLibrary(artefact, evidence)


def _learn(asked: AskedQuestion, judge: Verifier | Literal["later"] | None) -> dict[str, Any]:
    """Return the `learn` section; rules are tried by replays only where those can be judged."""
    settings = dict(asked.settings.settings)
    tasks = [g.task for g in asked.groups]
    if all(_is_judged(t, judge) for t in tasks):
        return settings
    own = dict(settings.get("settings", {}))
    return {**settings, "settings": {**own, "reflect": {**own.get("reflect", {}), "replays": 0}}}


def _judge(verifier: Mapping[str, Any] | None) -> Verifier | Literal["later"] | None:
    """Return the route's verifier; `later` where it wants what the learning run gives it, such as a
    judge's model."""
    if verifier is None:
        return None
    try:
        return make_verifier(verifier)
    except ConfigError:
        return "later"


def _is_judged(task: Task, judge: Verifier | Literal["later"] | None) -> bool:
    """True where the route's verifier can judge a further attempt at a task."""
    if judge is None or judge == "later":
        return judge is not None
    try:
        judge.check_task(task)
    except ConfigError:
        return False
    return True


def _merged(current: Artefact, found: Library) -> Artefact | None:
    """Return the library in force with what was found; None where nothing new is in it."""
    edits = [
        Edit("add", e.text, kind=e.kind, turns=e.turns, provenance=e.provenance,
             trust="third_party", reason="learnt from traffic")
        for e in found.shown
    ]  # fmt: skip
    library = current.library.apply(edits).library
    if library.version_id == current.library.version_id:
        return None
    return replace(current, library=library)


def flagged(artefact: Artefact) -> list[tuple[str, str]]:
    """Return (entry, why) for each entry that a person must look at on its own."""
    return scan(artefact.library)
