"""The summary of a run: everything a report says, as one JSON object.

HTML, Markdown and JSON show this object and compute nothing of their own, so they cannot disagree.
Figures on held-out tasks leave contaminated tasks out and say so.

Keys: `verdict`, `arms`, `gain`, `noise`, `curve`, `tasks`, `informative`, `outcomes`, `spend`,
`library`, `versions`, `rejected`, `leaks`, `advice`, `forecast`. Intervals are objects with
`estimate`, `low`, `high`, `level`, `n_tasks`.

Does not know HTML, files or how groups were made. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tfgrpo.advise import advise
from tfgrpo.entry_value import observations_of, value_entries
from tfgrpo.leaks import LeakReport, find_leaks
from tfgrpo.report.view import RunView, scores_of, stage_of, step_of
from tfgrpo.rollout import RolloutGroup, Usage
from tfgrpo.statistics import (
    Interval,
    Scores,
    mean_interval,
    min_detectable,
    noise_floor,
    paired_difference,
    pass_at_k_interval,
    permutation_p,
)
from tfgrpo.verdict import Rule, judge, judge_gain

__all__ = ["FORMAT", "FORMAT_VERSION", "library_texts", "summarise"]

GROUP_KINDS = ("mixed", "all_fail", "all_pass", "equal", "unusable")
"""What a practice group can teach: mixed ones only; `equal` is between worst and best."""
FORMAT = "tfgrpo.report"
FORMAT_VERSION = 1


def summarise(
    view: RunView, *, rule: Rule | None = None, level: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Return the summary of a run; equal views give equal summaries.

    Args:
        view: the run.
        rule: what the verdict is about; None asks for a gain over no library, beyond noise. Rules
            about one arm judge the arm that was kept.
        level: of all intervals.
        seed: of all bootstraps.
    """
    leaks = leaks_of(view)
    arms = {a: leaks.clean(scores_of(view.of_stage("test", a))) for a in ("empty", "final")}
    arms = {a: s for a, s in arms.items() if any(s.values())}
    if view.final_arm == "empty" and "empty" in arms:
        arms = {"empty": arms["empty"]}
    summary: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    summary["run"] = _run(view)
    summary |= _benefit(view, arms, leaks, level, seed)
    summary["verdict"] = _verdict(view, arms, leaks, rule or Rule("gain", 0.0), level, seed)
    summary["curve"] = _curve(view, level, seed)
    summary["tasks"] = _tasks(view, arms, leaks)
    summary["informative"] = _informative(view)
    summary["outcomes"] = _outcomes(view.groups)
    summary["spend"] = _spend(view)
    summary["library"] = _library(view, level)
    summary["versions"] = _versions(view)
    summary["rejected"] = _rejected(view)
    summary["leaks"] = leaks.to_dict()
    summary["advice"] = [a.to_dict() for a in advise(view.groups, seed=seed)]
    plan = view.newest("forecast")
    summary["forecast"] = None if plan is None else plan.payload
    summary["damaged"] = list(view.damaged)
    return summary


def leaks_of(view: RunView) -> LeakReport:
    """Return the leaks into the test tasks from practice, gate and the final library."""
    return find_leaks(
        view.tasks("practice", "gate"), view.tasks("test"), library_texts(view.final_library[1])
    )


def library_texts(library: Any) -> dict[str, str]:
    """Return what each shown entry of a library (in JSON form) puts into prompts."""
    return {
        str(e.get("experience_id")): _entry_text(e)
        for e in _entries(library)
        if e.get("status", "active") in ("active", "pinned")
    }


def _run(view: RunView) -> dict[str, Any]:
    learn, policy = (view.config.get(name) or {} for name in ("learn", "policy"))
    return {
        "name": view.name,
        "policy": policy.get("lm", "") or next((g.policy_id for g in view.groups), ""),
        "preset": learn.get("preset", ""),
        "seed": learn.get("seed"),
        "groups": len(view.groups),
        "rollouts": sum(len(g.rollouts) for g in view.groups),
        "steps": len({step_of(g) for g in view.groups if stage_of(g) == "practice"}),
        "policies": sorted({g.policy_id for g in view.groups}),
    }


def _benefit(
    view: RunView, arms: Mapping[str, Scores], leaks: LeakReport, level: float, seed: int
) -> dict[str, Any]:
    """Did it help, by how much, how sure is it, what could have been seen."""
    empty, final = arms.get("empty", {}), arms.get("final", {})
    choice = view.newest("final")
    found: dict[str, Any] = {
        "kept": view.final_arm,
        "why_kept": "" if choice is None else str(choice.get("reason") or ""),
        "arms": [_arm(view, arm, scores, level, seed) for arm, scores in arms.items()],
        "gain": None,
        "p_value": None,
        "noise": None,
        "detectable": None,
    }
    if any(r and final.get(t) for t, r in empty.items()):
        found["gain"] = asdict(paired_difference(empty, final, level=level, seed=seed))
        found["p_value"] = permutation_p(empty, final, seed=seed)
    if any(len(r) >= 2 for r in empty.values()):
        floor = noise_floor(empty, level=level, seed=seed)
        found["noise"] = asdict(floor)
        if floor.n_tasks >= 2:
            draws = max(1, round(floor.draws))
            found["detectable"] = min_detectable(floor.n_tasks, draws, pilot=empty, level=level)
    return found


def _verdict(
    view: RunView,
    arms: Mapping[str, Scores],
    leaks: LeakReport,
    rule: Rule,
    level: float,
    seed: int,
) -> dict[str, Any]:
    attempted = sum(t.task_id not in leaks.contaminated for t in view.tasks("test"))
    how: dict[str, Any] = {"n_attempted": attempted, "level": level, "seed": seed}
    if rule.kind == "gain":
        empty = arms.get("empty", {})
        # Where no library won, what is shipped is the empty one: no gain.
        final = arms.get(view.final_arm, {})
        return judge_gain(empty, final, min_gain=rule.score, **how).to_dict()
    return judge(arms.get(view.final_arm, {}), rule, **how).to_dict()


def _arm(view: RunView, arm: str, scores: Scores, level: float, seed: int) -> dict[str, Any]:
    groups = list(view.of_stage("test", arm))
    rollouts = [r for g in groups for r in g.rollouts]
    counts = sorted(len(r) for r in scores.values() if r)
    draws = counts[len(counts) // 10] if counts else 0  # what nine tenths of the tasks have
    return {
        "arm": arm,
        "mean": asdict(mean_interval(scores, level=level, seed=seed)),
        "best_of": [
            {"k": k, **asdict(pass_at_k_interval(scores, k, level=level, seed=seed))}
            for k in (2, 4, 8, 16)
            if k <= draws
        ],
        "is_binary": {x for r in scores.values() for x in r} <= {0.0, 1.0},
        "draws": draws,
        "rollouts": len(rollouts),
        "truncated": sum(r.is_truncated for r in rollouts),
        "tokens_per_rollout": sum(r.usage.total_tokens for r in rollouts) / max(1, len(rollouts)),
    }


def _curve(view: RunView, level: float, seed: int) -> list[dict[str, Any]]:
    """Practice rewards step by step, and every look of the gate in order: the two versions that
    it compared, their difference, and what it decided."""
    by_version = _gate_scores(view)
    points = []
    for step, scores in sorted(_practice_scores(view).items()):
        points.append(_point(step, None, "practice", _mean(scores, level, seed)))
    for decision in view.of_kind("gate"):
        pair = [by_version.get(str(decision.get(name)), {}) for name in ("current", "proposed")]
        point = _point(decision.step or 0, decision.get("look"), "gate", None)
        point["current"], point["proposed"] = (_mean(s, level, seed) for s in pair)
        if any(r and pair[1].get(t) for t, r in pair[0].items()):
            point["difference"] = asdict(paired_difference(*pair, level=level, seed=seed))
        point["accepted"] = bool(decision.get("accepted"))
        point["reason"] = str(decision.get("reason") or "")
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
    }


def _practice_scores(view: RunView) -> dict[int, dict[str, list[float]]]:
    steps: dict[int, list[RolloutGroup]] = {}
    for group in view.of_stage("practice"):
        steps.setdefault(step_of(group), []).append(group)
    return {step: scores_of(groups) for step, groups in steps.items()}


def _gate_scores(view: RunView) -> dict[str, dict[str, list[float]]]:
    """Gate rewards by library version."""
    versions: dict[str, list[RolloutGroup]] = {}
    for group in view.of_stage("gate"):
        versions.setdefault(str(group.metadata.get("library_version")), []).append(group)
    return {version: scores_of(groups) for version, groups in versions.items()}


def _what(edits: Any) -> str:
    """What a look tried, such as `2 lessons, 1 exemplar`."""
    if not isinstance(edits, Sequence):
        return ""
    kinds = Counter(str(e.get("kind", "edit")) for e in edits if isinstance(e, Mapping))
    return ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in sorted(kinds.items()))


def _mean(scores: Scores, level: float, seed: int) -> dict[str, Any] | None:
    if not any(scores.values()):
        return None
    return asdict(mean_interval(scores, level=level, seed=seed))


def _tasks(view: RunView, arms: Mapping[str, Scores], leaks: LeakReport) -> list[dict[str, Any]]:
    """Test tasks before and after, the largest loss first."""
    rows = []
    for task in view.tasks("test"):
        before, after = (arms.get(a, {}).get(task.task_id, ()) for a in ("empty", "final"))
        row: dict[str, Any] = {
            "task_id": task.task_id,
            "text": task.text[:300],
            "before": sum(before) / len(before) if before else None,
            "after": sum(after) / len(after) if after else None,
            "n_before": len(before),
            "n_after": len(after),
            "contaminated": task.task_id in leaks.contaminated,
        }
        both = row["before"] is not None and row["after"] is not None
        row["difference"] = row["after"] - row["before"] if both else None
        rows.append(row)
    return sorted(rows, key=lambda r: (r["difference"] is None, r["difference"] or 0, r["task_id"]))


def _informative(view: RunView) -> list[dict[str, Any]]:
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


def _group_kind(group: RolloutGroup, worst: float, best: float) -> str:
    if len(group.rewards_G) < 2:
        return "unusable"
    if group.is_informative():
        return "mixed"
    if group.rewards_G[0] == best and best > worst:
        return "all_pass"
    return "all_fail" if group.rewards_G[0] == worst else "equal"


def _outcomes(groups: Iterable[RolloutGroup]) -> dict[str, dict[str, int]]:
    """Rollouts by stage and outcome; `cut` counts replies that hit their token limit."""
    found: dict[str, Counter[str]] = {}
    for group in groups:
        row = found.setdefault(stage_of(group), Counter())
        for rollout in group.rollouts:
            row[rollout.outcome] += 1
            row["cut"] += rollout.is_truncated
    return {stage: dict(sorted((+row).items())) for stage, row in sorted(found.items())}


def _spend(view: RunView) -> dict[str, Any]:
    total = Usage()
    booked = Usage()
    rows = []
    for row in view.spend:
        total, booked = total + row.usage, booked + row.booked
        rows.append(
            {
                "stage": row.stage,
                "model": row.model,
                **_amounts(row.usage),
                "hits": row.hits,
                "failed_calls": row.failed_calls,
                "duration_s": row.duration_s,
            }
        )
    return {"rows": rows, "total": _amounts(total), "booked": _amounts(booked)}


def _amounts(usage: Usage) -> dict[str, Any]:
    return {
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cache_read_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost_usd": usage.cost_usd,
        "is_estimated": usage.is_estimated,
    }


def _library(view: RunView, level: float) -> dict[str, Any]:
    version, library = view.final_library
    shown = Counter(
        source
        for g in view.groups
        for source in {p.source for p in g.context.parts}
        for _ in g.rollouts
    )
    measured = {
        v.experience_id: {**asdict(v.effect), "n_with": v.n_with, "n_without": v.n_without,
                          "p_value": v.p_value}
        for v in value_entries(observations_of(view.groups), level=level)
    }  # fmt: skip
    rows = [
        {
            "experience_id": str(e.get("experience_id")),
            "kind": e.get("kind", "lesson"),
            "text": _entry_text(e),
            "status": e.get("status", "active"),
            "status_reason": e.get("status_reason", ""),
            "trust": e.get("trust", ""),
            "created_step": e.get("created_step"),
            "shown": max(e.get("shown", 0), shown[str(e.get("experience_id"))]),
            "provenance": e.get("provenance") or {},
            "value": measured.get(str(e.get("experience_id"))) or e.get("value"),
        }
        for e in _entries(library)
    ]
    return {"version_id": version, "entries": sorted(rows, key=_by_value)}


def _by_value(row: Mapping[str, Any]) -> tuple[float, str]:
    value = row["value"]
    return (-value["low"] if value else 0.0, row["experience_id"])


def _versions(view: RunView) -> list[dict[str, Any]]:
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


def _rejected(view: RunView) -> list[dict[str, Any]]:
    """Every edit and step that was refused, with its reason."""
    rows = []
    for decision in view.of_kind("rejected_edit"):
        edits = decision.get("edits") or [decision.get("edit")]
        why = decision.get("reason") or _reason(decision.get("decision"))
        for edit in edits:
            row = edit if isinstance(edit, Mapping) else {}
            text = row.get("text") or decision.get("text") or decision.get("row")
            rows.append(
                {
                    "step": decision.step,
                    "what": str(row.get("op") or "edit"),
                    "target": str(row.get("target") or ""),
                    "text": str(text or _entry_text(row)),
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


def _reason(decision: Any) -> Any:
    return decision.get("reason") if isinstance(decision, Mapping) else None


def _entries(library: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(library, Mapping):
        return ()
    return [e for e in library.get("entries", ()) if isinstance(e, Mapping)]


def _entry_text(entry: Mapping[str, Any]) -> str:
    turns = entry.get("turns") or ()
    if not turns:
        return str(entry.get("text", ""))
    return "\n".join(f"{t.get('role')}: {t.get('content')}" for t in turns)


def interval_of(row: Mapping[str, Any]) -> Interval:
    """Return an interval from its place in a summary."""
    return Interval(row["estimate"], row["low"], row["high"], row["level"], row["n_tasks"])
