"""The summary of a run: everything a report says, as one JSON object.

HTML, Markdown and JSON show this object and compute nothing of their own, so they cannot disagree.
Figures on held-out tasks leave contaminated tasks out and say so.

Keys: `state`, `why_not_kept`, `verdict`, `arms`, `gain`, `noise`, `curve`, `tasks`, `categories`,
`informative`, `growth`, `paid`, `outcomes`, `spend`, `library`, `versions`, `rejected`, `leaks`,
`use`, `advice`, `forecast`; `nudge` where failed tasks were helped. Intervals are objects with
`estimate`, `low`, `high`, `level`, `n_tasks`.

Does not know HTML, files or how groups were made. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tfgrpo.experience.entry_value import observations_of, value_entries
from tfgrpo.group_figures import GroupFigures
from tfgrpo.nudges.record import nudge_totals, total_lines
from tfgrpo.report import history, pictures
from tfgrpo.report.library_rows import entries_of, entry_text, library_texts
from tfgrpo.report.next_steps import advise_on
from tfgrpo.report.reflection import claim_words, reflection
from tfgrpo.report.view import RunView, sampled, scores_of, stage_of, step_of
from tfgrpo.rollout import Usage
from tfgrpo.statistics import (
    Scores,
    mean_interval,
    min_detectable,
    noise_floor,
    paired_difference,
    permutation_p,
)
from tfgrpo.statistics import pass_at_k_interval as best_of
from tfgrpo.statistics.verdict import VerdictRule, judge_gain, reach_verdict
from tfgrpo.tasks.contamination import LeakReport, find_leaks

__all__ = ["FORMAT", "FORMAT_VERSION", "leaks_of", "summarise"]

FORMAT = "tfgrpo.report"
FORMAT_VERSION = 1
_MOST_MEASURED = 20_000
"""Groups that entries' values are measured on; more would tell no more."""


def summarise(
    view: RunView, *, rule: VerdictRule | None = None, level: float = 0.95, seed: int = 0
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
    arms = {
        a: leaks.clean(scores_of(view.of_stage(view.proof_stage, a))) for a in ("empty", "final")
    }
    arms = {a: s for a, s in arms.items() if any(s.values())}
    if view.final_arm == "empty" and "empty" in arms:
        arms = {"empty": arms["empty"]}
    summary: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    summary["run"] = _run(view)
    summary |= _benefit(view, arms, leaks, level, seed)
    summary["verdict"] = _verdict(view, arms, leaks, rule or VerdictRule("gain", 0.0), level, seed)
    summary["curve"] = history.curve(view, level, seed)
    summary["tasks"] = _tasks(view, arms, leaks)
    summary["categories"] = pictures.categories(summary["tasks"])
    summary["informative"] = history.informative(view)
    summary["growth"] = pictures.growth(view)
    summary["paid"] = pictures.paid(view, level, seed)
    summary["outcomes"] = _outcomes(view.figures)
    summary["spend"] = _spend(view)
    summary["versions"] = history.versions(view)
    arrived = pictures.arrivals(summary["versions"], summary["curve"])
    summary["library"] = _library(view, level, arrived)
    summary["rejected"] = history.rejected(view)
    summary["leaks"] = leaks.to_dict()
    why = view.why_not_kept()
    summary["state"] = view.outcome.state
    summary["why_not_kept"] = [r.to_dict() | {"command": r.command(view.config_path)} for r in why]
    summary["use"] = {"folder": view.folder or view.name, "instructions": view.instructions}
    summary["advice"] = [a.to_dict() for a in advise_on(view, why=why, seed=seed)]
    plan = view.newest("forecast")
    summary["forecast"] = None if plan is None else plan.payload
    summary["damaged"] = list(view.damaged)
    summary |= _nudge(view)
    reflected = reflection(view, summary["gain"])
    return summary if reflected is None else summary | {"reflection": reflected}


def leaks_of(view: RunView) -> LeakReport:
    """Return the leaks into the test tasks from practice, gate and the final library."""
    return find_leaks(
        view.tasks("practice", "gate"),
        view.tasks(view.proof_stage),
        library_texts(view.final_library[1]),
    )


def _nudge(view: RunView) -> dict[str, Any]:
    """Totals of the newest record of each step, and the same in words."""
    newest = {d.key: d.payload for d in view.of_kind("nudge")}
    totals = nudge_totals(newest.values())
    return {} if totals is None else {"nudge": totals | {"lines": total_lines(totals)}}


def _run(view: RunView) -> dict[str, Any]:
    learn, policy = (view.config.get(name) or {} for name in ("learn", "policy"))
    return {
        "name": view.name,
        "policy": policy.get("lm", "") or next((g.policy_id for g in view.figures), ""),
        "preset": learn.get("preset", ""),
        "seed": learn.get("seed"),
        "groups": len(view.figures),
        "rollouts": sum(g.n_rollouts for g in view.figures),
        "steps": len({step_of(g) for g in view.figures if stage_of(g) == "practice"}),
        "policies": sorted({g.policy_id for g in view.figures}),
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
    # One measure for all arms: pass@k of one beside max@k of another compares nothing.
    is_binary = {x for s in arms.values() for r in s.values() for x in r} <= {0.0, 1.0}
    for row in found["arms"]:
        row["is_binary"] = is_binary
    if any(r and final.get(t) for t, r in empty.items()):
        gain = paired_difference(empty, final, level=level, seed=seed)
        found["gain"] = asdict(view.within(gain, of_difference=True))
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
    rule: VerdictRule,
    level: float,
    seed: int,
) -> dict[str, Any]:
    attempted = sum(t.task_id not in leaks.contaminated for t in view.tasks(view.proof_stage))
    how: dict[str, Any] = {"n_attempted": attempted, "level": level, "seed": seed}
    if rule.kind == "gain":
        empty = arms.get("empty", {})
        # Where no library won, what is shipped is the empty one: no gain.
        final = arms.get(view.final_arm, {})
        verdict = judge_gain(empty, final, min_gain=rule.score, **how)
        if view.newest("final") is not None and not view.outcome.is_kept:
            verdict = verdict.of_nothing_kept()
    else:
        verdict = reach_verdict(arms.get(view.final_arm, {}), rule, **how)
    known = view.reward_range
    return (verdict if known is None else verdict.within(known)).to_dict()


def _arm(view: RunView, arm: str, scores: Scores, level: float, seed: int) -> dict[str, Any]:
    groups = list(view.of_stage(view.proof_stage, arm))
    rollouts = sum(g.n_rollouts for g in groups)
    counts = sorted(len(r) for r in scores.values() if r)
    draws = counts[len(counts) // 10] if counts else 0  # what nine tenths of the tasks have
    return {
        "arm": arm,
        "mean": asdict(view.within(mean_interval(scores, level=level, seed=seed))),
        "best_of": [
            {"k": k, **asdict(view.within(best_of(scores, k, level=level, seed=seed)))}
            for k in (2, 4, 8, 16)
            if k <= draws
        ],
        "draws": draws,
        "rollouts": rollouts,
        "truncated": sum(g.truncated for g in groups),
        "tokens_per_rollout": sum(g.tokens for g in groups) / max(1, rollouts),
    }


def _tasks(view: RunView, arms: Mapping[str, Scores], leaks: LeakReport) -> list[dict[str, Any]]:
    """Test tasks before and after, the largest loss first."""
    rows = []
    shown = {a: {g.task_id: g.group_id for g in view.of_stage(view.proof_stage, a)} for a in arms}
    for task in view.tasks(view.proof_stage):
        before, after = (arms.get(a, {}).get(task.task_id, ()) for a in ("empty", "final"))
        row: dict[str, Any] = {
            "task_id": task.task_id,
            "text": task.text[:300],
            "before": sum(before) / len(before) if before else None,
            "after": sum(after) / len(after) if after else None,
            "n_before": len(before),
            "n_after": len(after),
            "contaminated": task.task_id in leaks.contaminated,
            "category": pictures.category_of(task),
            "groups": {a: shown[a][task.task_id] for a in shown if task.task_id in shown[a]},
        }
        both = row["before"] is not None and row["after"] is not None
        row["difference"] = row["after"] - row["before"] if both else None
        rows.append(row)
    return sorted(rows, key=lambda r: (r["difference"] is None, r["difference"] or 0, r["task_id"]))


def _outcomes(groups: Iterable[GroupFigures]) -> dict[str, dict[str, int]]:
    """Rollouts by stage and outcome; `cut` counts replies that hit their token limit."""
    found: dict[str, Counter[str]] = {}
    for group in groups:
        row = found.setdefault(stage_of(group), Counter())
        row.update(group.outcomes)
        row["cut"] += group.truncated
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


def _library(
    view: RunView, level: float, arrived: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    version, library = view.final_library
    tasks = {g.group_id: g.task_id for g in view.figures}
    shown: Counter[str] = Counter()
    for group in view.figures:
        for source in set(group.sources):
            shown[source] += group.n_rollouts
    measured = {
        v.experience_id: {**asdict(v.effect), "n_with": v.n_with, "n_without": v.n_without,
                          "p_value": v.p_value}
        for v in value_entries(observations_of(sampled(view.figures, _MOST_MEASURED)), level=level)
    }  # fmt: skip
    rows = [
        {
            "experience_id": str(e.get("experience_id")),
            "kind": e.get("kind", "lesson"),
            "text": entry_text(e),
            "status": e.get("status", "active"),
            "status_reason": e.get("status_reason", ""),
            "trust": e.get("trust", ""),
            "claim": claim_words(e),
            "created_step": e.get("created_step"),
            "shown": max(e.get("shown", 0), shown[str(e.get("experience_id"))]),
            "provenance": e.get("provenance") or {},
            "sources": [[g, tasks[g]] for g in _group_ids(e) if g in tasks],
            "arrived": arrived.get(str(e.get("experience_id"))),
            "value": measured.get(str(e.get("experience_id"))) or e.get("value"),
        }
        for e in entries_of(library)
    ]
    return {"version_id": version, "entries": sorted(rows, key=_by_value)}


def _group_ids(entry: Mapping[str, Any]) -> list[str]:
    return [str(g) for g in (entry.get("provenance") or {}).get("group_ids", ())]


def _by_value(row: Mapping[str, Any]) -> tuple[float, str]:
    value = row["value"]
    return (-value["low"] if value else 0.0, row["experience_id"])
