"""What happened step by step: rewards, looks of the gate, informative groups, versions, refusals.

Pure functions of a view, in JSON form for the summary. Does not know the test split, money, markup.
Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tfgrpo.group_figures import GroupFigures
from tfgrpo.report.library_rows import entry_text, library_texts
from tfgrpo.report.view import RunView, scores_of, step_of
from tfgrpo.statistics import Scores, mean_interval, paired_difference

__all__ = ["GROUP_KINDS", "curve", "gate_means", "informative", "rejected", "versions"]

GROUP_KINDS = ("mixed", "all_fail", "all_pass", "equal", "unusable")
"""What a practice group can teach: mixed ones only; `equal` is between worst and best."""


def curve(view: RunView, level: float, seed: int) -> list[dict[str, Any]]:
    """Practice rewards step by step, and every look of the gate in order: the two versions that
    it compared, their difference, and what it decided."""
    by_version = _gate_scores(view)
    points = []
    for step, scores in sorted(_practice_scores(view).items()):
        points.append(_point(step, None, "practice", _mean_row(view, scores, level, seed)))
    for decision in view.of_kind("gate"):
        pair = [by_version.get(str(decision.get(name)), {}) for name in ("current", "proposed")]
        point = _point(decision.step or 0, decision.get("look"), "gate", None)
        point["current"], point["proposed"] = (_mean_row(view, s, level, seed) for s in pair)
        if any(r and pair[1].get(t) for t, r in pair[0].items()):
            found = paired_difference(*pair, level=level, seed=seed)
            point["difference"] = asdict(view.within(found, of_difference=True))
        point["accepted"] = bool(decision.get("accepted"))
        point["reason"] = str(decision.get("reason") or "")
        point["version"] = str(decision.get("proposed") or "")
        point["what"] = str(decision.get("what") or _what(decision.get("edits")))
        points.append(point)
    return sorted(points, key=lambda p: (p["step"], p["look"] or 0))


def _point(step: int, look: Any, kind: str, practice: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "step": step,
        "look": look if isinstance(look, int) else None,
        "kind": kind,
        "practice": practice,
        "current": None,
        "proposed": None,
        "difference": None,
        "accepted": None,
        "reason": "",
        "what": "",
        "version": "",
    }


def _practice_scores(view: RunView) -> dict[int, dict[str, list[float]]]:
    steps: dict[int, list[GroupFigures]] = {}
    for group in view.of_stage("practice"):
        steps.setdefault(step_of(group), []).append(group)
    return {step: scores_of(groups) for step, groups in steps.items()}


def _gate_scores(view: RunView) -> dict[str, dict[str, list[float]]]:
    """Gate rewards by library version."""
    versions: dict[str, list[GroupFigures]] = {}
    for group in view.of_stage("gate"):
        versions.setdefault(str(group.metadata.get("library_version")), []).append(group)
    return {version: scores_of(groups) for version, groups in versions.items()}


def gate_means(view: RunView, level: float, seed: int) -> dict[str, dict[str, Any]]:
    """Mean gate reward of each library version that was scored."""
    found = {v: _mean_row(view, scores, level, seed) for v, scores in _gate_scores(view).items()}
    return {version: mean for version, mean in found.items() if mean is not None}


def _what(edits: Any) -> str:
    """What a look tried, such as `2 lessons, 1 exemplar`."""
    if not isinstance(edits, Sequence):
        return ""
    kinds = Counter(str(e.get("kind", "edit")) for e in edits if isinstance(e, Mapping))
    return ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in sorted(kinds.items()))


def _mean_row(view: RunView, scores: Scores, level: float, seed: int) -> dict[str, Any] | None:
    if not any(scores.values()):
        return None
    return asdict(view.within(mean_interval(scores, level=level, seed=seed)))


def informative(view: RunView) -> list[dict[str, Any]]:
    """Practice groups of each step by what they can teach."""
    rewards = [r for g in view.of_stage("practice") for r in g.rewards_G]
    worst, best = (min(rewards), max(rewards)) if rewards else (0.0, 1.0)
    steps: dict[int, Counter[str]] = {}
    for group in view.of_stage("practice"):
        steps.setdefault(step_of(group), Counter())[_group_kind(group, worst, best)] += 1
    return [
        {
            "step": step,
            **{
                kind: counts[kind]
                for kind in ("mixed", "all_fail", "all_pass", "equal", "unusable")
            },
            "share": counts["mixed"] / counts.total(),
        }
        for step, counts in sorted(steps.items())
    ]


def _group_kind(group: GroupFigures, worst: float, best: float) -> str:
    if len(group.rewards_G) < 2:
        return "unusable"
    if group.is_informative():
        return "mixed"
    if group.rewards_G[0] == best and best > worst:
        return "all_pass"
    return "all_fail" if group.rewards_G[0] == worst else "equal"


def versions(view: RunView) -> list[dict[str, Any]]:
    """What each version changed: over the version it was proposed against, or the one before."""
    texts: dict[str, dict[str, str]] = {"empty": {}}
    texts |= {version: library_texts(library) for version, library in view.libraries}
    against: dict[str, str] = {}
    verdicts: dict[str, bool] = {}
    for decision in view.of_kind("gate"):
        version = str(decision.get("proposed"))
        against.setdefault(version, str(decision.get("current")))
        verdicts[version] = verdicts.get(version, False) or bool(decision.get("accepted"))
    rows: dict[str, dict[str, Any]] = {}
    previous = "empty"
    for version, library in view.libraries:
        if version in rows:
            continue
        now, before = texts[version], texts.get(against.get(version, previous), {})
        previous = version
        rows[version] = {
            "version_id": version,
            "step": library.get("step") if isinstance(library, Mapping) else None,
            "against": against.get(version),
            "accepted": verdicts.get(version),
            "entries": len(now),
            "added": [[k, now[k]] for k in now if k not in before],
            "removed": [[k, before[k]] for k in before if k not in now],
            "changed": [[k, before[k], now[k]] for k in now if k in before and before[k] != now[k]],
        }
    return list(rows.values())


def rejected(view: RunView) -> list[dict[str, Any]]:
    """Every edit and step that was refused, with its reason."""
    rows = []
    for decision in view.of_kind("rejected_edit"):
        edits = decision.get("edits") or [decision.get("edit")]
        why = decision.get("reason") or _reason(decision.get("decision"))
        for edit in edits:
            row = edit if isinstance(edit, Mapping) else {}
            text = entry_text(row) or decision.get("text") or decision.get("row")
            rows.append(
                {
                    "step": decision.step,
                    "what": _words_of(row),
                    "target": str(row.get("target") or ""),
                    "text": str(text or ""),
                    "reason": str(why or ""),
                }
            )
    told = {(row["step"], row["reason"]) for row in rows}
    for decision in view.of_kind("gate"):
        reason = str(decision.get("reason") or "the gate did not let it pass")
        if decision.get("accepted") is False and (decision.step, reason) not in told:
            rows.append(
                {
                    "step": decision.step,
                    "what": str(decision.get("what") or "whole step"),
                    "target": "",
                    "text": "",
                    "reason": reason,
                }
            )
    return sorted(rows, key=lambda r: (r["step"] is None, r["step"] or 0))


def _words_of(edit: Mapping[str, Any]) -> str:
    """Say what an edit would have done."""
    kind = {"exemplar": "worked example"}.get(str(edit.get("kind")), str(edit.get("kind") or ""))
    return f"{edit.get('op') or 'edit'} {kind}".strip()


def _reason(decision: Any) -> Any:
    return decision.get("reason") if isinstance(decision, Mapping) else None
