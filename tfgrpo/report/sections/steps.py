"""Sections on the course of a run: rewards step by step, help for failed tasks, reflection.

Does not know statistics or the frame around it. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import chart_card

__all__ = ["curve", "nudge", "reflection"]


def curve(s: Mapping[str, Any]) -> Html:
    """Reward by step, what each proposal changed, what groups can teach, growth, cost."""
    cards: list[Child] = []
    if s["curve"]:
        cards.append(chart_card("Reward by step", charts.curve(s["curve"])))
    gated = [
        (
            f"step {p['step']} {'✓' if p['accepted'] else '✗'} {p['what']}",
            p["difference"],
            "good" if p["accepted"] else "soft",
        )
        for p in s["curve"]
        if p["difference"]
    ]
    if gated:
        chart = charts.intervals(
            gated[-16:], title="Proposals", xlabel="proposed − current, gate tasks", band=None
        )
        note = "Green was accepted, grey was rejected: the gate asks for more than an average."
        cards.append(chart_card("What each proposal changed", chart, note))
    if s["informative"]:
        chart = charts.informative(s["informative"])
        note = "A group of attempts teaches where they differ in reward."
        cards.append(chart_card("What practice groups can teach", chart, note))
    if any(row["lessons"] or row["exemplars"] for row in s["growth"]):
        cards.append(chart_card("Library after each step", charts.growth(s["growth"])))
    if len(s["paid"]) > 1:
        chart = charts.reward_by_tokens(s["paid"])
        cards.append(chart_card("Reward against tokens spent", chart))
    return h("div", cards or h("p", "No steps yet.", class_="note"), class_="pictures")


def nudge(s: Mapping[str, Any]) -> Html | None:
    """What help for practice tasks on which everything failed came to; None without any."""
    totals = s.get("nudge")
    if totals is None:
        return None
    lines = [h("p", f"{line}.") for line in totals["lines"]]
    return h("div", h("h3", "Help for tasks that failed throughout"), lines, class_="card")


def reflection(s: Mapping[str, Any]) -> Html | None:
    """Panels, replays, topics and what a point cost; None for runs of other flows."""
    found = s.get("reflection")
    if found is None:
        return None
    lines = [h("p", f"{line}.") for line in found["lines"]]
    return h("div", h("h3", "Reflection over panels"), lines, class_="card")
