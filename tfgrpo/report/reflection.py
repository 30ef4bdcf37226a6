"""What the flow `reflect` did: panels, replays, topics, and what a point of gain cost.

Reads the `step` decisions leniently; runs of other flows give None. Does not know statistics or
markup. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfgrpo.report.library_rows import entries_of
from tfgrpo.report.view import RunView

__all__ = ["claim_words", "cost_of_gain", "reflection"]

_LEARNING = ("practice", "nudge", "replay", "gate")


def reflection(view: RunView, gain: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return panels, replays, topics and the cost of the gain, with lines for people."""
    steps = [d.payload for d in view.of_kind("step") if isinstance(d.payload, Mapping)]
    panels = [p for s in steps for p in _rows(s, "panels")]
    if not panels:
        return None
    replays = [r for s in steps for r in _rows(s, "replays")]
    verdicts = [v for s in steps for v in _rows(s, "verdicts")]
    turned = sum(bool(r.get("turned")) for r in replays)
    found: dict[str, Any] = {
        "groups": sum(int(s.get("groups", 0)) for s in steps),
        "improvable": sum(int(s.get("informative", 0)) for s in steps),
        "differing": sum(int(s.get("differing", 0)) for s in steps),
        "panels": len(panels),
        "groups_a_panel": sum(len(p.get("tasks", ())) for p in panels) / len(panels),
        "rules": sum(int(p.get("rules", 0)) for p in panels),
        "replayed_rules": len(replays),
        "turned_rules": turned,
        "verdicts": {
            kind: sum(v.get("verdict") == kind for v in verdicts)
            for kind in ("confirmed", "refuted", "ignored")
        },
        "topics": topics(entries_of(view.final_library[1])),
        "questions": [q for s in steps[-1:] for q in s.get("questions", ()) if isinstance(q, str)],
        "cost": cost_of_gain(view, gain),
    }
    return found | {"lines": list(_lines(found))}


def topics(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each topic with its entries by state."""
    by_topic: dict[str, dict[str, int]] = {}
    for entry in entries:
        claim = entry.get("claim")
        if isinstance(claim, Mapping):
            row = by_topic.setdefault(str(claim.get("topic", "")) or "no topic", {})
            state = str(claim.get("state", "")) or "confirmed"
            row[state] = row.get(state, 0) + 1
    return [{"topic": topic, **states} for topic, states in by_topic.items()]


def cost_of_gain(view: RunView, gain: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return calls and tokens of learning (everything but the test), and for each 0.01 gained."""
    rows = [r for r in view.spend if r.stage not in ("test", "eval")]
    calls = sum(r.usage.calls for r in rows)
    tokens = sum(r.usage.total_tokens for r in rows)
    rollouts = sum(r.usage.calls for r in rows if r.stage in _LEARNING)
    points = None if gain is None or gain["estimate"] <= 0 else 100 * gain["estimate"]
    return {
        "calls": calls,
        "tokens": tokens,
        "rollout_calls": rollouts,
        "calls_a_point": None if points is None else calls / points,
        "tokens_a_point": None if points is None else tokens / points,
    }


def claim_words(entry: Mapping[str, Any]) -> str:
    """Return what an entry rests on in words; empty for entries of other flows."""
    claim = entry.get("claim")
    if not isinstance(claim, Mapping):
        return ""
    words = [str(claim.get("state") or "")]
    words += [f"topic {claim['topic']}"] if claim.get("topic") else []
    for name, word in (("support", "for"), ("against", "against")):
        tasks = claim.get(name)
        if isinstance(tasks, Sequence) and not isinstance(tasks, str) and tasks:
            listed = ", ".join(str(t) for t in list(tasks)[:4])
            words.append(f"{word} {len(tasks)}: {listed}{', …' if len(tasks) > 4 else ''}")
    return "; ".join(w for w in words if w)


def _rows(step: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = step.get(name)
    return [r for r in rows if isinstance(r, Mapping)] if isinstance(rows, list) else []


def _lines(found: Mapping[str, Any]) -> Iterable[str]:
    verdicts = found["verdicts"]
    yield (
        f"{found['improvable']} of {found['groups']} practice groups could teach, "
        f"{found['differing']} by differing rewards"
    )
    yield (
        f"{found['panels']} panels of {found['groups_a_panel']:.1f} groups gave {found['rules']} "
        f"rules; entries were confirmed {verdicts['confirmed']} times, refuted "
        f"{verdicts['refuted']}, ignored {verdicts['ignored']}"
    )
    if found["replayed_rules"]:
        yield (
            f"{found['turned_rules']} of {found['replayed_rules']} replayed rules turned a "
            "supporting task"
        )
    for row in found["topics"]:
        states = ", ".join(f"{n} {state}" for state, n in row.items() if state != "topic")
        yield f"topic {row['topic']}: {states}"
    for question in found["questions"][:5]:
        yield f"open: {question}"
    cost = found["cost"]
    line = f"learning took {cost['calls']} calls and {cost['tokens']} tokens"
    if cost["tokens_a_point"] is not None:
        line += (
            f": {cost['calls_a_point']:.1f} calls and {cost['tokens_a_point']:.0f} tokens for "
            "each 0.01 of mean reward gained on the test tasks"
        )
    yield line
