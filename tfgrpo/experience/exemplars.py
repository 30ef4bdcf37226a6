"""Worked examples: verified rollouts of practice tasks, kept as chat turns.

A small model follows examples where advice is lost on it. An exemplar holds its practice task's
answer by design, so it is never shown for that task (`Library.context`) and never made of a gate
or test task (only groups of practice are given here).
Does not know whether examples help (the gate does). Idea: few-shot bootstrapping from verified
attempts, as in DSPy; diversity by farthest-point choice (Gonzalez 1985).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfgrpo.errors import ConfigError
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Provenance, Trust
from tfgrpo.experience.guards import has_third_party
from tfgrpo.experience.informative import Teaching
from tfgrpo.experience.library import Library
from tfgrpo.experience.patterns import IGNORE_ORDER, MEMORY_ORDER, PERSONAL, ROLE_CLAIM
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.experience.similarity import share, shingles
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.canonical import canonical_json


def exemplar_edits(
    teaching: Teaching, library: Library, settings: ExperienceSettings
) -> list[Edit]:
    """Return adds for at most as many exemplars as the library has room for, unlike each other.

    Verified rollouts come first; references of tasks where every rollout failed fill up, where
    the settings allow them.
    """
    have = [e for e in library.entries if e.kind == "exemplar"]
    room = settings.exemplars - sum(e.is_shown for e in have)
    if room <= 0:
        return []
    used = {t for e in have for t in e.provenance.task_ids}
    verified = _verified(teaching.groups, settings)
    edits = [rollout_exemplar(g, r) for g, r in verified if g.task.task_id not in used]
    chosen = diverse(edits, room, [e.cue for e in have if e.is_shown])
    if settings.reference_exemplars and settings.repairs.all_fail_path:
        edits = [
            reference_exemplar(g)
            for g in _failed(teaching, settings)
            if g.task.reference is not None and g.task.task_id not in used
        ]
        cues = [e.cue for e in have if e.is_shown] + [_cue(e) for e in chosen]
        chosen += diverse(edits, room - len(chosen), cues)
    return chosen


def _verified(
    groups: Sequence[RolloutGroup], settings: ExperienceSettings
) -> list[tuple[RolloutGroup, Rollout]]:
    """Return the best rollout of each group that reached the reward an exemplar needs."""
    if not settings.ground_truth:
        return []
    rewards = [r for g in groups for r in g.rewards_G]
    if not rewards:
        return []
    best, worst = max(rewards), min(rewards)
    least = settings.exemplar_reward
    if least is None:
        if best <= 0 and best - worst <= settings.tolerance:
            return []
        least = best
    found: list[tuple[RolloutGroup, Rollout]] = []
    for group in groups:
        usable = [r for r in group.graded if r.steps and not r.is_truncated]
        good = [r for r in usable if (r.reward or 0.0) >= least - settings.tolerance]
        sized = [(len(r.answer), r) for r in good if r.answer.strip()]
        sized.sort(key=lambda pair: (-(pair[1].reward or 0.0), pair[0], pair[1].sample_index))
        fenced = settings.repairs.fenced_data
        fit = (r for _, r in sized if not fenced or is_fit(r, group.task))
        if (chosen := next(fit, None)) is not None:
            found.append((group, chosen))
    return found


def _failed(teaching: Teaching, settings: ExperienceSettings) -> Sequence[RolloutGroup]:
    """Return the groups in which no rollout succeeded: by the settings' least reward, if any."""
    least = settings.exemplar_reward
    if least is None:
        return teaching.all_failed
    return [
        g for g in teaching.groups if g.graded and max(g.rewards_G) < least - settings.tolerance
    ]


def is_fit(rollout: Rollout, task: Task) -> bool:
    """False where a worked example would carry orders of a third party or a key into prompts."""
    observed = "\n".join(m.content for s in rollout.steps for m in s.observations)
    if any(p.search(observed) for p in (IGNORE_ORDER, ROLE_CLAIM, MEMORY_ORDER)):
        return False
    whole = "\n".join([task.text, *(m.content for m in rollout.messages)])
    return not (IGNORE_ORDER.search(whole) or PERSONAL["a key or token"].search(whole))


def rollout_exemplar(group: RolloutGroup, rollout: Rollout) -> Edit:
    """Return the edit that keeps a rollout as a worked example.

    The answer alone is kept of a single-turn rollout; a tool-using one keeps its calls and results.
    """
    actions = [Message("assistant", m.content) for m in rollout.messages[:1]]
    turns = actions if len(rollout.messages) == 1 else list(rollout.messages)
    trust: Trust = "third_party" if has_third_party([rollout]) else "verified"
    return _edit(
        group.task,
        tuple(Message(m.role, m.content, m.tool_calls, m.tool_call_id) for m in turns),
        Provenance((rollout.rollout_id,), (group.group_id,), (group.task.task_id,)),
        trust,
        f"reward {rollout.reward:g}",
    )


def reference_exemplar(group: RolloutGroup) -> Edit:
    """Return the edit that keeps a task with its reference, where no rollout succeeded.

    Raises:
        ConfigError: the task has no reference.
    """
    reference = group.task.reference
    if reference is None:
        raise ConfigError(f"task {group.task.task_id!r} has no reference to make an exemplar of")
    text = reference if isinstance(reference, str) else canonical_json(reference)
    return _edit(
        group.task,
        (Message("assistant", text),),
        Provenance((), (group.group_id,), (group.task.task_id,)),
        "verified",
        "the reference of a task where every rollout failed",
    )


def _edit(
    task: Task, answer: tuple[Message, ...], provenance: Provenance, trust: Trust, reason: str
) -> Edit:
    asked = tuple(m for m in task.messages if m.role != "system")
    return Edit(
        "add",
        text=f"example: {task.task_id}",
        kind="exemplar",
        turns=(*asked, *answer),
        provenance=provenance,
        trust=trust,
        reason=reason,
        edit_id=f"X:{task.task_id}",
    )


def _cue(edit: Edit) -> str:
    return "\n".join(m.content for m in edit.turns if m.role == "user")


def _answer(edit: Edit) -> str:
    return edit.turns[-1].content.strip().casefold()


def diverse(edits: Sequence[Edit], room: int, taken: Sequence[str] = ()) -> list[Edit]:
    """Return at most `room` edits, each as unlike the others as can be.

    Answers that were not chosen yet come first (so that each class of a classification has its
    example), then the task text that shares least with what is there. Deterministic.
    """
    if room <= 0:
        return []
    rest = [_Candidate(e, _answer(e), len(_cue(e)), shingles(_cue(e), 1)) for e in edits]
    for cue in taken:
        _compare(rest, shingles(cue, 1))
    chosen: list[Edit] = []
    answers: dict[str, int] = {}
    while rest and len(chosen) < room:
        best = min(
            rest, key=lambda c: (answers.get(c.answer, 0), c.nearest, c.length, c.edit.edit_id)
        )
        rest.remove(best)
        chosen.append(best.edit)
        _compare(rest, best.words)
        answers[best.answer] = answers.get(best.answer, 0) + 1
    return chosen


@dataclass(slots=True, eq=False)
class _Candidate:
    """An edit that may be chosen, and what it is compared by."""

    edit: Edit
    answer: str
    length: int
    """Of its task's text."""
    words: set[tuple[str, ...]]
    nearest: float = 0.0
    """Largest share of words in common with what is there."""


def _compare(candidates: Sequence[_Candidate], words: set[tuple[str, ...]]) -> None:
    """Note how near the candidates are to one text more."""
    for candidate in candidates:
        candidate.nearest = max(candidate.nearest, share(candidate.words, words))
