"""The last sections: what was rejected, what was spent beside the forecast, what pays next.

Does not know statistics or the frame around it. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, chart_card, copyable, money, table, tag, tokens
from tfgrpo.report.wording import range_words, span_words, time_words

__all__ = ["advice", "method", "rejected", "spend"]


def rejected(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Everything refused, and why."""
    if not rows:
        return h("p", "Nothing was rejected.", class_="note")
    cells = [
        [
            cell("step", "–" if r["step"] is None else r["step"]),
            cell("what", f"{r['what']} {r['target']}"),
            cell("text", r["text"] or "–", "text"),
            cell("why", r["reason"], "text"),
        ]
        for r in rows
    ]
    return h("div", table(["step", "what", "text", "why"], cells), class_="card")


def spend(s: Mapping[str, Any]) -> Html:
    """Tokens and money by stage and model, and what was forecast."""
    rows = [
        [
            cell("stage", r["stage"] or "other"),
            cell("model", r["model"]),
            cell("calls", f"{r['calls']:,}", "n"),
            cell("from cache", f"{r['hits']:,}", "n"),
            cell("failed", f"{r['failed_calls']:,}", "n"),
            cell("prompt tokens", f"{r['prompt_tokens']:,}", "n"),
            cell("reply tokens", f"{r['completion_tokens']:,}", "n"),
            cell("money", money(r), "n"),
        ]
        for r in s["spend"]["rows"]
    ]
    forecast = _forecast(s)
    if not rows:
        return h("div", h("p", "Nothing was spent yet.", class_="note"), forecast, class_="grid")
    heads = ["stage", "model", "calls", "from cache", "failed", "prompt tokens", "reply tokens",
             "money"]  # fmt: skip
    booked = s["spend"]["booked"]
    remark = booked["calls"] > 0 and h(
        "p", f"{booked['calls']} calls whose end nobody saw are booked at their worst case: "
             f"{tokens(booked)} tokens, {money(booked)}.", class_="note"
    )  # fmt: skip
    pictures = h("div", chart_card("Tokens by stage", charts.spend(s["spend"]["rows"])), forecast,
                 class_="grid")  # fmt: skip
    listed = h("div", table(heads, rows, numbers_from=2), remark, class_="card")
    return h("div", pictures, listed, class_="grid wide")


def _forecast(s: Mapping[str, Any]) -> Html | None:
    """What was expected beside what it took, stage by stage, and what was said beforehand."""
    plan = s["forecast"]
    stages = plan.get("stages") if isinstance(plan, Mapping) else None
    if not stages:
        return None
    calls: dict[str, int] = {}
    for row in s["spend"]["rows"]:
        calls[row["stage"]] = calls.get(row["stage"], 0) + row["calls"]
    rows = [
        [
            cell("stage", x["stage"]),
            cell("calls expected", span_words(x["calls_low"], x["calls_high"]), "n"),
            cell("calls made", f"{calls.get(x['stage'], 0):,}", "n"),
            cell("money", _dollars(x), "n"),
            cell("time", time_words(x.get("seconds_low"), x.get("seconds_high")), "n"),
        ]
        for x in stages
    ]
    said = [*plan.get("notes", ()), *plan.get("warnings", ())]
    return h(
        "div",
        h("h3", "Forecast before spending"),
        table(["stage", "calls expected", "calls made", "money", "time"], rows, numbers_from=1),
        [h("p", str(line), class_="note") for line in said],
        class_="card",
    )


def _dollars(row: Mapping[str, Any]) -> str:
    words = span_words(row.get("cost_low_usd"), row.get("cost_high_usd"), ",.4f")
    return words if words == "unknown" else f"${words}"


_KINDS = {
    "measured": ("measured", "good"),
    "ceiling": ("at most", "accent"),
    "unknown": ("not known", ""),
}


def advice(rows: Sequence[Mapping[str, Any]]) -> Html:
    """What pays next."""
    cards: list[Child] = []
    for rank, a in enumerate(rows, 1):
        gain = a["gain"]
        word, kind = _KINDS.get(a["kind"], (a["kind"], ""))
        cards.append(
            h(
                "div",
                h("h3", f"{rank}. {a['headline']} ", tag(word, kind)),
                gain and h("p", h("b", f"{gain['estimate']:+.3f}"), f" ({range_words(gain)})"),
                h("p", a["evidence"]),
                h("p", f"Cost: {a['cost']}.", class_="note"),
                a["command"] and copyable(a["command"]),
                class_="card",
            )
        )
    order = (
        "What was measured in this run comes first, then what can bring at most so much, then what "
        "is not known; among equals, what is least likely to disappoint."
    )
    return h("div", h("p", order, class_="note"), h("div", cards, class_="grid"))


def method(s: Mapping[str, Any]) -> Html:
    """How the figures are made, in a few words."""
    level = s["gain"]["level"] if s["gain"] else 0.95
    return h(
        "p",
        f"Intervals are {level:.0%}, over tasks, since attempts at one task are not independent. "
        "Before and after are compared task by task; p comes from swapping "
        "the two sides of whole tasks. An entry's effect is that of showing it. An attempt that "
        "failed for outer reasons has no reward and counts in no mean.",
        class_="note",
    )
