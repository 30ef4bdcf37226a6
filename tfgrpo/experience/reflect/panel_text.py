"""Panels in words: what stands after the fixed text of a critic's prompt.

Tasks, attempts and replies stand between data marks. An attempt of several steps is told in a line
each step, with the step in full from which it went another way than its siblings. Pure. Does not
know prompts' fixed text or models. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfgrpo.experience.critic.evidence import cut, data_block
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.informative import usable
from tfgrpo.experience.library import Library
from tfgrpo.experience.reflect.panels import Panel
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import Rollout, RolloutGroup, Step
from tfgrpo.runtime.canonical import canonical_json

_STEP_TOKENS = 40
_LINE_TOKENS = 240


@dataclass(frozen=True, slots=True)
class Attempts:
    """Rollouts of a group that did the same, as one."""

    rollout: Rollout
    """The first of them."""
    text: str
    count: int


def distinct(rollouts: Sequence[Rollout]) -> list[Attempts]:
    """Return the attempts that differ in what was done or in their reward, best first."""
    found: dict[tuple[str, float | None], list[Rollout]] = {}
    for rollout in rollouts:
        done = "\n".join(_action(s) for s in rollout.steps)
        found.setdefault((done.strip(), rollout.reward), []).append(rollout)
    rows = [Attempts(same[0], text, len(same)) for (text, _), same in found.items()]
    return sorted(rows, key=lambda a: (-(a.rollout.reward or 0.0), -a.count))


def part_lines(attempts: Sequence[Attempts], rollouts: Sequence[Rollout]) -> list[str]:
    """Return one line for each named part of the reward: how often it was right.

    A part is right where it has the most that any attempt of this group or full marks (1) has.
    """
    scored = [r for r in rollouts if r.score is not None and r.score.parts]
    lines = []
    for part in dict.fromkeys(p for r in scored for p in (r.score.parts if r.score else ())):
        values = [r.score.parts.get(part, 0.0) for r in scored if r.score is not None]
        full = max(1.0, *values)
        wrong = [
            str(i)
            for i, a in enumerate(attempts, 1)
            if a.rollout.score is not None and a.rollout.score.parts.get(part, 0.0) < full - 1e-9
        ]
        right = sum(v >= full - 1e-9 for v in values)
        tail = f"; wrong in attempt {', '.join(wrong)}" if wrong else ""
        lines.append(f"part {part}: right in {right} of {len(values)}{tail}")
    return lines


class PanelText:
    """Words one panel within a limit in tokens."""

    def __init__(self, settings: ExperienceSettings, count: TokenCounter) -> None:
        self._settings = settings
        self._count = count

    def panel(self, panel: Panel, share: int) -> str:
        """Return the panel with about `share` tokens for each group in full."""
        blocks = [self.group(g, share) for g in panel.groups]
        lines = [self.line(g) for g in panel.others]
        lines = [line for line in lines if line]
        if lines:
            kept: list[str] = []
            room = max(share * 4, 1000)
            for line in lines:
                room -= self._count(line)
                if room < 0:
                    break
                kept.append(line)
            head = (
                "Other tasks that were practised, each with its right answer, or with what the "
                "verifier said of the best attempt:"
            )
            blocks.append(f"{head}\n{self.data(chr(10).join(kept), 'others')}")
        return "\n\n".join(blocks)

    def group(self, group: RolloutGroup, share: int) -> str:
        """Return one group in full: task, distinct attempts, parts, key, entries shown."""
        settings = self._settings
        rollouts = usable(group, settings)
        attempts = distinct(rollouts)
        task_id = group.task.task_id
        each = max(24, share // max(2, len(attempts) + 1))
        rows = [self._attempt(i, a, attempts[0], each, group) for i, a in enumerate(attempts, 1)]
        parts = part_lines(attempts, rollouts) if settings.ground_truth else []
        lines = [
            f"### Task {task_id}",
            self.data(cut(group.task.text, max(40, share // 2), self._count), task_id),
            *rows,
            *parts,
        ]
        key = self.key(group, max(40, share // 3))
        if key:
            lines.append(f"Right answer:\n{self.data(key, task_id + ' key')}")
        entries = [p.source for p in group.context.parts if p.source]
        if entries:
            lines.append(f"Entries the agent was shown: {', '.join(entries)}")
        return "\n".join(lines)

    def line(self, group: RolloutGroup) -> str:
        """Return a task with its right answer, or else with what was said of its best attempt.

        Empty where neither is known: such a task is evidence of nothing.
        """
        key = self.key(group, _LINE_TOKENS)
        best = max(usable(group, self._settings), key=lambda r: r.reward or 0.0, default=None)
        full = self._settings.exemplar_reward
        if not key and best is not None and full is not None and (best.reward or 0.0) >= full:
            key = cut(best.answer, _LINE_TOKENS, self._count)
        task = (
            f"task {group.task.task_id}: {_flat(cut(group.task.text, _LINE_TOKENS, self._count))}"
        )
        if key:
            return f"{task} → {_flat(key)}"
        if best is None or best.score is None or not best.score.feedback:
            return ""
        if not self._settings.ground_truth:
            return ""
        answer = _flat(cut(best.answer, _LINE_TOKENS, self._count))
        said = _flat(cut(best.score.feedback, _LINE_TOKENS, self._count))
        return f"{task}\nBest attempt, reward {best.score.reward:.3g}:\n{answer}\nverifier: {said}"

    def key(self, group: RolloutGroup, limit: int) -> str:
        """Return a task's right answer, where there is one that may be shown."""
        reference = group.task.reference
        if not self._settings.ground_truth or reference is None:
            return ""
        text = reference if isinstance(reference, str) else canonical_json(reference)
        return cut(text, limit, self._count)

    def library(self, library: Library, share: int) -> str:
        """Return the entries in force with what they rest on."""
        rows = []
        for entry in library.shown:
            if entry.kind != "lesson":
                continue
            claim = entry.claim
            facts: list[str] = [claim.state or "of another flow"]
            facts += [f"topic {claim.topic}"] if claim.topic else []
            facts += [f"for {', '.join(claim.support)}"] if claim.support else []
            facts += [f"against {', '.join(claim.against)}"] if claim.against else []
            if entry.value is not None:
                facts.append(f"measured effect {entry.value.estimate:+.2f}")
            rows.append(f"[{entry.experience_id}] {cut(entry.text, share, self._count)}")
            rows.append(f"    ({'; '.join(facts)})")
        return self.data("\n".join(rows), "library") if rows else "(none yet)"

    def agent(self, share: int) -> str:
        """Return the agent's instructions and tools."""
        text = cut(self._settings.agent, share, self._count)
        return self.data(text, "agent") if text.strip() else "(none)"

    def _attempt(
        self, number: int, attempts: Attempts, best: Attempts, each: int, group: RolloutGroup
    ) -> str:
        rollout = attempts.rollout
        head = f"Attempt {number}"
        if attempts.count > 1:
            head += f", made {attempts.count} times"
        if self._settings.ground_truth and rollout.score is not None:
            head += f", reward {rollout.score.reward:.3g}"
        text = summary(rollout, best.rollout, each, self._count)
        if rollout.steps and rollout.steps[-1].action.reasoning and number == 1:
            thought = cut(rollout.steps[-1].action.reasoning, each // 2, self._count)
            text += f"\n(thought: {_flat(thought)})"
        said = "" if rollout.score is None else rollout.score.feedback
        # Where the key is shown, the parts' lines say the rest for the other attempts.
        if said and self._settings.ground_truth and (number == 1 or group.task.reference is None):
            text += f"\nverifier: {cut(said, max(60, each), self._count)}"
        return f"{head}:\n{self.data(text, f'{group.task.task_id} {number}')}"

    def data(self, text: str, label: str) -> str:
        """Return a record between marks."""
        return data_block(text, self._settings, label)


def summary(rollout: Rollout, sibling: Rollout, limit: int, count: TokenCounter) -> str:
    """Return an attempt: whole where it is one step, else a line each step.

    The decisive step stands in full: the first one that differs from the best sibling's, or the
    last one for the best attempt itself.
    """
    if len(rollout.steps) == 1 and not rollout.steps[0].observations:
        text = _action(rollout.steps[0])
        mark = "\n(the reply reached its length limit)" if rollout.is_truncated else ""
        return cut(text, limit, count) + mark
    decisive = _decisive(rollout.steps, sibling.steps)
    lines = []
    for i, step in enumerate(rollout.steps):
        share = max(_STEP_TOKENS, limit // 2) if i == decisive else _STEP_TOKENS
        mark = " (decisive)" if i == decisive and len(rollout.steps) > 1 else ""
        lines.append(f"step {i + 1}{mark}: {cut(_action(step), share, count)}")
        lines += [f"  result: {_flat(cut(m.content, share, count))}" for m in step.observations]
    return cut("\n".join(lines), max(limit, 4 * _STEP_TOKENS), count)


def _decisive(steps: Sequence[Step], others: Sequence[Step]) -> int:
    for i, step in enumerate(steps):
        if i >= len(others) or _action(step) != _action(others[i]):
            return i
    return len(steps) - 1


def _action(step: Step) -> str:
    calls = [f"call {c.name}({c.arguments})" for c in step.action.tool_calls]
    return "\n".join([t for t in (step.action.content.strip(),) if t] + calls)


def _flat(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines() if line.strip())


def means(groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
    """Return the mean reward by task."""
    return {g.task.task_id: g.mean_reward for g in groups if g.mean_reward is not None}
