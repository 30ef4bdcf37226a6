"""Rows behind the pictures of a report: categories, growth, cost, and what entries came with.

Pure functions of a view or of parts of its summary, in JSON form. Does not know how they are drawn.
Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report.history import gate_means
from tfgrpo.report.library_rows import entries_of
from tfgrpo.report.view import RunView, step_of
from tfgrpo.rollout import Task

__all__ = ["arrivals", "categories", "category_of", "growth", "paid"]

_KEYS = ("category", "topic", "kind", "type", "label", "family", "domain", "difficulty")
_MOST = 12
"""Categories that a picture can show; a reference with more values is none."""
_LONGEST = 40


def category_of(task: Task) -> str:
    """Return what a task says of its kind, else its reference where that is a short text."""
    for key in _KEYS:
        value = task.metadata.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)[:_LONGEST]
    tags = task.metadata.get("tags")
    if isinstance(tags, Sequence) and not isinstance(tags, str) and tags:
        return str(tags[0])[:_LONGEST]
    reference = task.reference
    return reference if isinstance(reference, str) and len(reference) <= _LONGEST else ""


def categories(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean rewards before and after for each category of test tasks.

    Args:
        rows: the summary's tasks. Where nearly every task has a category of its own, or all the
            same, there is nothing to compare and the list is empty.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["category"] and row["difference"] is not None:
            found.setdefault(row["category"], []).append(row)
    known = sum(map(len, found.values()))
    if not 2 <= len(found) <= _MOST or known < 2 * len(found):
        return []
    return [
        {
            "name": name,
            "tasks": len(members),
            "before": sum(r["before"] for r in members) / len(members),
            "after": sum(r["after"] for r in members) / len(members),
        }
        for name, members in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def growth(view: RunView) -> list[dict[str, Any]]:
    """Return how many entries the library in use had after each step."""
    sizes = {"empty": {"lessons": 0, "exemplars": 0}}
    for version, library in view.libraries:
        shown = [e for e in entries_of(library) if e.get("status", "active") in _SHOWN]
        lessons = sum(e.get("kind", "lesson") == "lesson" for e in shown)
        sizes[version] = {"lessons": lessons, "exemplars": len(shown) - lessons}
    return [
        {"step": step, **sizes.get(version, sizes["empty"])}
        for step, version in _in_use(view).items()
    ]


_SHOWN = ("active", "pinned")


def _in_use(view: RunView) -> dict[int, str]:
    """Return the version in use after each gated step."""
    after: dict[int, str] = {}
    current = "empty"
    for decision in view.of_kind("gate"):
        if decision.get("accepted"):
            current = str(decision.get("proposed"))
        after[decision.step or 0] = current
    return dict(sorted(after.items()))


def paid(view: RunView, level: float, seed: int) -> list[dict[str, Any]]:
    """Return the gate's reward of the library in use after each step, and the tokens that practice
    and gate had taken by then."""
    spent: dict[int, int] = {}
    for group in (*view.of_stage("practice"), *view.of_stage("gate")):
        spent[step_of(group)] = spent.get(step_of(group), 0) + group.tokens
    means = gate_means(view, level, seed)
    rows = []
    for step, version in _in_use(view).items():
        mean = means.get(version)
        if mean is not None:
            tokens = sum(n for s, n in spent.items() if s <= step)
            rows.append({"step": step, "tokens": tokens, **mean})
    return rows


def arrivals(
    versions: Sequence[Mapping[str, Any]], curve: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return, for each entry, what the gate saw when it came in, and with how many others.

    Args:
        versions: of the summary.
        curve: of the summary.
    """
    looks = {p["version"]: p["difference"] for p in curve if p["accepted"] and p["difference"]}
    found: dict[str, dict[str, Any]] = {}
    for row in versions:
        difference = looks.get(row["version_id"])
        if difference is None:
            continue
        for entry_id, _ in row["added"]:
            found.setdefault(entry_id, {**difference, "others": len(row["added"]) - 1})
    return found
