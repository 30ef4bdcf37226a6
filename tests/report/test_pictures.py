"""Rows behind the pictures, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.made import made_run
from tfgrpo.report.pictures import categories, category_of
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import scores_of
from tfgrpo.report.wording import plain_lines
from tfgrpo.rollout import Task


@pytest.mark.parametrize(
    ("task", "category"),
    [
        (Task("a", "p", metadata={"topic": "refunds", "lang": "en"}), "refunds"),
        (Task("a", "p", metadata={"tags": ["order", "late"]}), "order"),
        (Task("a", "p", reference="positive"), "positive"),
        (Task("a", "p", reference="x" * 41), ""),
        (Task("a", "p", reference={"order": 4711}), ""),
        (Task("a", "p", reference="no", metadata={"difficulty": 3}), "3"),
    ],
)
def test_a_tasks_category_is_what_it_says_of_itself(task: Task, category: str) -> None:
    assert category_of(task) == category


def row(category: str, before: float, after: float) -> dict[str, object]:
    return {
        "category": category, "before": before, "after": after, "difference": after - before
    }  # fmt: skip


def test_means_are_by_category_the_largest_first() -> None:
    rows = [row("b", 0.0, 1.0), row("a", 0.2, 0.4), row("a", 0.4, 0.8), row("b", 0.5, 0.5)]
    rows.append(row("a", 0.0, 0.0))
    found = categories(rows)
    assert [(r["name"], r["tasks"]) for r in found] == [("a", 3), ("b", 2)]
    assert found[0]["before"] == pytest.approx(0.2) and found[0]["after"] == pytest.approx(0.4)
    assert categories([row("a", 0, 1), row("a", 0, 1)]) == []  # nothing to compare
    assert categories([row(f"answer {i}", 0, 1) for i in range(9)]) == []  # each its own


def test_growth_and_price_follow_what_the_gate_accepted() -> None:
    view = made_run()
    summary = summarise(view)
    assert [(r["step"], r["lessons"], r["exemplars"]) for r in summary["growth"]] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 2, 0),  # the third proposal was rejected
        (3, 0, 0),  # the version that was accepted was not recorded
    ]
    paid = summary["paid"]
    used = [g for g in view.figures if g.metadata["stage"] in ("practice", "gate")]
    assert paid[-1]["tokens"] <= sum(g.tokens for g in used)
    first = [g for g in used if g.metadata["step"] == 0]
    assert paid[0]["tokens"] == sum(g.tokens for g in first)
    accepted = scores_of(g for g in view.of_stage("gate") if g.metadata["library_version"] == "v1")
    means = [sum(r) / len(r) for r in accepted.values() if r]
    assert paid[0]["estimate"] == pytest.approx(sum(means) / len(means))


def test_an_entry_tells_what_the_gate_saw_when_it_came() -> None:
    view = made_run()
    bare = [
        (name, {**library, "entries": [{**e, "value": None} for e in library["entries"]]})
        for name, library in view.libraries
    ]
    entries = summarise(replace(view, libraries=tuple(bare)))["library"]["entries"]
    looks = [p for p in summarise(view)["curve"] if p["kind"] == "gate"]
    arrived = {e["experience_id"]: e["arrived"] for e in entries}
    assert arrived["E1"]["estimate"] == looks[0]["difference"]["estimate"]
    assert arrived["E2"]["estimate"] == looks[1]["difference"]["estimate"]
    assert arrived["E1"]["others"] == 0
    assert arrived["E3"] is None  # its version was rejected


def test_a_reference_is_shown_in_lines() -> None:
    lines = plain_lines({"order": 1, "gift": True, "items": [{"n": 0}, "tea"], "none": []})
    assert lines == ["order: 1", "gift: yes", "items:", "  -", "    n: 0", "  - tea",
                     "none: nothing"]  # fmt: skip
