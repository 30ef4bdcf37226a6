"""The groups that a view holds as compressed data inside the page, small enough for one file.

A page stays under `MAX_BYTES` for 10,000 rollouts: groups are gzipped in chunks that the browser
unpacks when they are looked at, and where that is not enough long texts keep head and tail.
Base64 has no `<`, so no text can end the element it stands in.

Does not know HTML or how groups are shown. Source: own.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.context import render_messages
from tfgrpo.messages import Message
from tfgrpo.report.view import RunView, stage_of, step_of
from tfgrpo.report.wording import plain_lines
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.redaction import redact
from tfgrpo.runtime.terminal import printable

__all__ = ["MAX_BYTES", "Islands", "pack_groups", "reward_range"]

MAX_BYTES = 4_000_000
"""For the groups; charts and tables come on top."""
_CHUNK_GROUPS = 40
_LIMITS = (20_000, 6_000, 2_000, 700, 240, 80)
"""Characters a text may keep, tried in order."""


@dataclass(frozen=True, slots=True)
class Islands:
    """What goes into the page."""

    index: str
    """Base64 of gzipped JSON: where each group is, and its rewards."""
    chunks: tuple[str, ...]
    text_limit: int
    """Characters that a text could keep; longer ones were cut in the middle."""
    n_cut: int
    """Texts that were cut."""
    n_groups: int = 0

    @property
    def size(self) -> int:
        """Bytes in the page."""
        return len(self.index) + sum(map(len, self.chunks))


def pack_groups(view: RunView, *, max_bytes: int = MAX_BYTES) -> Islands:
    """Return the groups of a run as islands of at most `max_bytes`, if cutting texts can do it."""
    notes = _Notes.of(view)
    cleaned: dict[str, str] = {}
    for limit in _LIMITS[:-1]:
        if _raw_size(view, limit) > 12 * max_bytes:
            continue  # no text compresses that well
        packed = _pack(view, notes, _Clip(limit, cleaned))
        if packed.size <= max_bytes:
            return packed
    return _pack(view, notes, _Clip(_LIMITS[-1], cleaned))


def _raw_size(view: RunView, limit: int) -> int:
    return sum(
        min(limit, sum(len(m.content) for m in r.messages)) for g in view.groups for r in g.rollouts
    )


def _pack(view: RunView, notes: _Notes, clip: _Clip) -> Islands:
    system = str((view.config.get("policy") or {}).get("system") or "")
    chunks = [
        _squeeze([_group(g, system, notes, clip) for g in view.groups[i : i + _CHUNK_GROUPS]])
        for i in range(0, len(view.groups), _CHUNK_GROUPS)
    ]
    low, high = reward_range(view)
    worse = _made_worse(view)
    index = {
        "range": [low, high],
        "is_function": (view.config.get("policy") or {}).get("kind") == "function",
        "groups": [_entry(i, g, (low, high), worse) for i, g in enumerate(view.groups)],
    }
    return Islands(_squeeze(index), tuple(chunks), clip.limit, clip.n_cut, len(view.groups))


def reward_range(view: RunView) -> tuple[float, float]:
    """Return the verifier's least and largest reward, else what the run has seen, 0 and 1 with it:
    a reward has the same colour in every run of a verifier."""
    known = view.reward_range or (None, None)
    rewards = [r for g in view.groups for r in g.rewards_G]
    low = min((0.0, *rewards)) if known[0] is None else known[0]
    high = max((1.0, *rewards)) if known[1] is None else known[1]
    return low, high


def _made_worse(view: RunView) -> set[tuple[str, str]]:
    """Return stage and task of held-out tasks whose mean fell with the library."""
    means: dict[tuple[str, str], dict[str, float]] = {}
    for group in view.groups:
        arm = str(group.metadata.get("arm") or "")
        if stage_of(group) in ("test", "eval") and group.rewards_G:
            found = means.setdefault((stage_of(group), group.task.task_id), {})
            found[arm] = sum(group.rewards_G) / len(group.rewards_G)
    return {
        key for key, m in means.items() if "empty" in m and "final" in m and m["final"] < m["empty"]
    }


def _kinds(group: RolloutGroup, bounds: tuple[float, float], is_worse: bool) -> list[str]:
    """Return what a person may look for: the words are the options of the page's filter."""
    rewards = group.rewards_G
    found = ["mixed" if group.is_informative() else "equal"]
    if rewards and max(rewards) <= bounds[0] + 1e-9:
        found.append("failed")
    if rewards and min(rewards) >= bounds[1] - 1e-9:
        found.append("right")
    if is_worse:
        found.append("worse")
    if any(r.is_truncated for r in group.rollouts):
        found.append("cut")
    if any(r.reward is None for r in group.rollouts):
        found.append("unscored")
    return found


def _squeeze(value: Any) -> str:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Without a time stamp equal views give equal pages.
    return base64.b64encode(gzip.compress(data.encode("utf-8"), 9, mtime=0)).decode("ascii")


def _entry(
    number: int,
    group: RolloutGroup,
    bounds: tuple[float, float],
    worse: set[tuple[str, str]],
) -> dict[str, Any]:
    is_worse = (stage_of(group), group.task.task_id) in worse
    return {
        "number": number,
        "chunk": number // _CHUNK_GROUPS,
        "place": number % _CHUNK_GROUPS,
        "group_id": _safe(group.group_id),
        "task_id": _safe(group.task.task_id),
        "stage": _safe(stage_of(group)),
        "step": step_of(group),
        "arm": _safe(str(group.metadata.get("arm") or "")),
        "kinds": _kinds(group, bounds, is_worse),
        "rewards": [r.reward for r in group.rollouts],
    }


def _group(group: RolloutGroup, system: str, notes: _Notes, clip: _Clip) -> dict[str, Any]:
    reference = group.task.reference
    return {
        "group_id": _safe(group.group_id),
        "task_id": _safe(group.task.task_id),
        "stage": _safe(stage_of(group)),
        "step": step_of(group),
        "arm": _safe(str(group.metadata.get("arm") or "")),
        "policy_id": _safe(group.policy_id),
        "text": clip(group.task.text),
        "reference": None
        if reference is None
        else clip("\n".join(plain_lines(jsonable(reference)))),
        "messages": [
            [m.role, clip(_message_text(m))]
            for m in render_messages(group.task.messages, group.context, system=system)
        ],
        "context": [
            clip(f"{p.source or p.kind}: " + (p.text or "\n".join(m.content for m in p.turns)))
            for p in group.context.parts
        ],
        "contrast": clip(notes.contrasts.get(group.group_id, "")),
        "rollouts": [_rollout(r, notes, clip) for r in group.rollouts],
    }


def _rollout(rollout: Rollout, notes: _Notes, clip: _Clip) -> dict[str, Any]:
    return {
        "sample_index": rollout.sample_index,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "is_truncated": rollout.is_truncated,
        "tokens": rollout.usage.completion_tokens,
        "text": clip(_trajectory(rollout)),
        "error": clip(rollout.error),
        "feedback": clip(rollout.score.feedback if rollout.score else ""),
        "summary": clip(notes.summaries.get(rollout.rollout_id, "")),
    }


def _trajectory(rollout: Rollout) -> str:
    """Actions and observations in order, roles named where there is more than one turn."""
    parts = [(m.role, _message_text(m)) for m in rollout.messages]
    if len(parts) == 1:
        return parts[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in parts)


def _message_text(message: Message) -> str:
    calls = "".join(f"\n→ {c.name}({c.arguments})" for c in message.tool_calls)
    reasoning = f"(thinking) {message.reasoning}\n" if message.reasoning else ""
    return reasoning + message.content + calls


@dataclass(frozen=True, slots=True)
class _Notes:
    """What the critic said, by what it is about."""

    contrasts: Mapping[str, str]
    summaries: Mapping[str, str]

    @classmethod
    def of(cls, view: RunView) -> _Notes:
        contrasts: dict[str, str] = {}
        for decision in view.of_kind("contrast"):
            group_id = str(decision.get("group_id") or decision.key)
            text = decision.get("text") or _lines(decision.get("lessons"))
            contrasts[group_id] = "\n\n".join(filter(None, [contrasts.get(group_id), text]))
        summaries = {
            str(d.get("rollout_id") or d.key): str(d.get("text") or "")
            for d in view.of_kind("summary")
        }
        return cls(contrasts, summaries)


def _lines(lessons: Any) -> str:
    if not isinstance(lessons, Sequence) or isinstance(lessons, str):
        return str(lessons or "")
    return "\n".join("• " + str(x.get("text", x) if isinstance(x, Mapping) else x) for x in lessons)


class _Clip:
    """Makes a text safe to show and keeps at most `limit` characters: the head and the tail.

    Secrets are removed before the cut, so that no half of one is left; `cleaned` remembers safe
    texts, since a text may be asked for under several limits.
    """

    def __init__(self, limit: int, cleaned: dict[str, str]) -> None:
        self.limit = limit
        self.n_cut = 0
        self._cleaned = cleaned

    def __call__(self, text: str) -> str:
        if not text:
            return ""
        safe = self._cleaned.get(text)
        if safe is None:
            safe = self._cleaned[text] = _safe(text)
        if len(safe) <= self.limit:
            return safe
        self.n_cut += 1
        head, tail = self.limit * 2 // 3, self.limit // 3
        return f"{safe[:head]} […{len(safe) - head - tail} characters…] {safe[-tail:]}"


def _safe(text: str) -> str:
    return printable(redact(text))
