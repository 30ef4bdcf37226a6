"""The section on the test tasks: before and after, by task, by category, by cost.

Does not know statistics or the frame around it. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, chart_card, number, signed, table
from tfgrpo.report.wording import ARM_WORDS

__all__ = ["tasks"]


def tasks(s: Mapping[str, Any]) -> Html:
    """Before and after, task by task."""
    rows = [
        [
            cell("task", _linked(r)),
            *([cell("category", r["category"] or "–")] if s["categories"] else []),
            number("without", r["before"]),
            number("with", r["after"]),
            signed("change", r["difference"]),
            cell("attempts", f"{r['n_before']} / {r['n_after']}", "n"),
        ]
        for r in s["tasks"]
    ]
    if not rows:
        return h("p", "No test task has been tried yet.", class_="note")
    heads = ["task", *(["category"] if s["categories"] else []), "without", "with", "change"]
    listed = table([*heads, "attempts"], rows, numbers_from=len(heads) - 3)
    return h(
        "div",
        h("div", _pictures(s), class_="pictures"),
        h(
            "details",
            h("summary", f"All {len(rows)} test tasks, the largest loss first"),
            h("div", listed, class_="tall"),
            class_="card",
            open=len(rows) <= 60,
        ),
        class_="grid wide",
    )


def _linked(row: Mapping[str, Any]) -> Child:
    group = row["groups"].get("final") or row["groups"].get("empty")
    return h("a", row["task_id"], href="#groups", data_group=group) if group else row["task_id"]


def _pictures(s: Mapping[str, Any]) -> list[Child]:
    known = [r for r in s["tasks"] if r["difference"] is not None]
    cards: list[Child] = []
    if known:
        cards.append(chart_card("Task by task", charts.tasks(known)))
    if s["categories"]:
        cards.append(chart_card("By category", charts.categories(s["categories"])))
    if len(known) > 1:
        chart = charts.before_and_after([r["before"] for r in known], [r["after"] for r in known])
        cards.append(chart_card("How many tasks reach what", chart))
    rows = [
        {"name": ARM_WORDS[a["arm"]], "tokens": a["tokens_per_rollout"], "mean": a["mean"],
         "is_kept": a["arm"] == "final"}
        for a in s["arms"]
    ]  # fmt: skip
    if len(rows) > 1:
        note = "What the library adds to each prompt, and what it brings."
        cards.append(chart_card("Reward against cost", charts.cost_and_reward(rows), note))
    return cards
