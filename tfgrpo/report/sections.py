"""The page's sections below the result: each turns its part of the summary into markup.

Does not know statistics or the frame around it. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.embedded_groups import Islands
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import (
    cell,
    chart_card,
    money,
    number,
    signed,
    table,
    tag,
    tokens,
    words,
)
from tfgrpo.report.wording import range_words

__all__ = [
    "advice",
    "curve",
    "groups",
    "library",
    "method",
    "nudge",
    "reflection",
    "rejected",
    "spend",
    "tasks",
]


def curve(s: Mapping[str, Any]) -> Html:
    """Reward by step, what each proposal changed, what groups can teach."""
    cards: list[Child] = []
    if s["curve"]:
        cards.append(chart_card("Reward by step", charts.curve(s["curve"])))
    gated = [
        (f"step {p['step']} {'✓' if p['accepted'] else '✗'} {p['what']}", p["difference"])
        for p in s["curve"]
        if p["difference"]
    ]
    if gated:
        chart = charts.intervals(
            gated[-16:], title="Proposals", xlabel="proposed − current on the gate tasks", band=None
        )
        cards.append(chart_card("What each proposal changed", chart))
    if s["informative"]:
        chart = charts.informative(s["informative"])
        cards.append(chart_card("Share of groups that can teach", chart))
    return h("div", cards or h("p", "No steps yet.", class_="note"), class_="grid")


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


def tasks(s: Mapping[str, Any]) -> Html:
    """Before and after, task by task."""
    rows = [
        [
            cell("task", r["task_id"]),
            number("without", r["before"]),
            number("with", r["after"]),
            signed("change", r["difference"]),
            cell("draws", f"{r['n_before']} / {r['n_after']}", "n"),
        ]
        for r in s["tasks"]
    ]
    if not rows:
        return h("p", "No test tasks in this run.", class_="note")
    listed = table(["task", "without", "with", "change", "draws"], rows, numbers_from=1)
    known = any(r["difference"] is not None for r in s["tasks"])
    return h(
        "div",
        known and chart_card(None, charts.tasks(s["tasks"])),
        h(
            "details",
            h("summary", f"All {len(rows)} test tasks"),
            h("div", listed, class_="tall"),
            class_="card",
            open=True,
        ),
        class_="grid",
    )


def library(s: Mapping[str, Any]) -> Html:
    """Entries with value and provenance, and the versions."""
    entries = s["library"]["entries"]
    if not entries:
        empty = h("p", "The library is empty.", class_="note")
        return h("div", empty, _versions(s["versions"]), class_="grid wide")
    rows = [
        [
            cell("id", e["experience_id"]),
            cell("text", [e["text"], *_claim(e)], "text"),
            cell("value", _value(e["value"])),
            cell("shown", e["shown"], "n"),
            cell("from", _sources(e["provenance"], e["created_step"])),
            cell("status", [tag(e["status"], _STATUS.get(e["status"], "")), " ", e["trust"]]),
        ]
        for e in entries
    ]
    listed = table(["id", "text", "value", "shown", "from", "status"], rows)
    cards: list[Child] = [h("div", listed, class_="card")]
    valued = [(e["experience_id"], e["value"]) for e in entries if e["value"]]
    if valued:
        chart = charts.intervals(
            valued[:24], title="Value", xlabel="effect on the mean reward", band=None
        )
        left = chart_card("Value of each entry", chart)
        cards.append(h("div", left, _versions(s["versions"]), class_="grid"))
    else:
        cards.append(_versions(s["versions"]))
    return h("div", cards, class_="grid wide")


_STATUS = {"active": "good", "pinned": "accent", "banned": "bad", "quarantined": "bad"}


def _claim(entry: Mapping[str, Any]) -> list[Child]:
    words = entry.get("claim", "")
    return [h("br"), h("span", words, class_="note")] if words else []


def _value(value: Mapping[str, Any] | None) -> Child:
    if value is None:
        return h("span", "not measured", class_="note")
    kind = "good" if value["low"] > 0 else "bad" if value["high"] < 0 else ""
    return [h("b", f"{value['estimate']:+.3f}", class_=kind), h("br"),
            h("span", range_words(value), class_="note")]  # fmt: skip


def _sources(provenance: Mapping[str, Any], step: Any) -> Child:
    groups = list(provenance.get("group_ids", ()))
    links: list[Child] = [f"step {step}"] if step is not None else []
    for group_id in groups[:6]:
        links += [" ", h("a", "group", href="#groups", data_group=str(group_id))]
    if len(groups) > 6:
        links.append(f" and {len(groups) - 6} more")
    return links


def _versions(versions: Sequence[Mapping[str, Any]]) -> Html:
    items = []
    for v in reversed(versions):
        changes: list[Child] = [h("ins", f"+ {k}  {text}") for k, text in v["added"]]
        changes += [h("del", f"− {k}  {text}") for k, text in v["removed"]]
        for key, before, after in v["changed"]:
            changes += [h("del", f"~ {key}  {before}"), h("ins", f"~ {key}  {after}")]
        step = "" if v["step"] is None else f"step {v['step']} · "
        head = f"{step}{v['entries']} entries, {len(changes)} changes"
        mark = {True: tag("accepted", "good"), False: tag("rejected", "bad")}.get(v["accepted"])
        items.append(
            h(
                "details",
                h("summary", head, " ", mark, " ", h("span", v["version_id"], class_="note mono")),
                changes or h("p", "Nothing changed in the prompt.", class_="note"),
            )
        )
    return h("div", h("h3", "Versions"), items or "none", class_="card")


def groups(s: Mapping[str, Any], islands: Islands) -> Html:
    """Outcomes, and the browser of groups."""
    stages = [h("option", "all stages", value="")]
    stages += [h("option", stage, value=stage) for stage in s["outcomes"]]
    kinds = [h("option", "mixed and equal", value=""), h("option", "mixed only", value="mixed"),
             h("option", "equal only", value="equal")]  # fmt: skip
    cut = None
    if islands.n_cut:
        cut = h("p", f"{islands.n_cut} texts longer than {islands.text_limit} characters keep "
                     "head and tail here; the journal has them whole.", class_="note")  # fmt: skip
    some = None
    if islands.n_groups < s["run"]["groups"]:
        some = h("p", f"{islands.n_groups:,} of {s['run']['groups']:,} groups are shown here, some "
                      "of each stage; all figures are of all groups.", class_="note")  # fmt: skip
    outcomes = [
        [cell("stage", stage), *(cell(kind.replace("_", " "), n or "", "n") for kind, n in row)]
        for stage, row in _outcome_rows(s["outcomes"])
    ]
    names = _outcome_names(s["outcomes"])
    return h(
        "div",
        h(
            "div",
            h("h3", "Outcomes"),
            table(["stage", *(n.replace("_", " ") for n in names)], outcomes, numbers_from=1),
            class_="card",
        ),
        h("br"),
        h(
            "div",
            h(
                "div",
                h("select", stages, id="stage", aria_label="stage"),
                h("select", kinds, id="kind", aria_label="kind of group"),
                h("input", id="find", type="search", placeholder="task id", aria_label="task id"),
                class_="controls",
            ),
            h(
                "div",
                h(
                    "table",
                    h("thead", h("tr", [h("th", x) for x in ("task", "stage", "step", "arm",
                                                              "rewards")])),
                    h("tbody", id="group-rows"),
                    class_="stack compact",
                ),
                class_="scroll",
            ),
            h(
                "div",
                h("button", "previous", id="previous", type="button"),
                h("button", "next", id="next", type="button"),
                h("span", id="page-words", class_="note"),
                class_="controls",
            ),
            some,
            cut,
            h("noscript", h("p", "The browser of groups needs JavaScript; all else is static.")),
            class_="card",
        ),
    )  # fmt: skip


def _outcome_names(outcomes: Mapping[str, Mapping[str, int]]) -> list[str]:
    return sorted(
        {name for row in outcomes.values() for name in row}, key=lambda n: (n == "cut", n)
    )


def _outcome_rows(
    outcomes: Mapping[str, Mapping[str, int]],
) -> list[tuple[str, list[tuple[str, int]]]]:
    names = _outcome_names(outcomes)
    return [(stage, [(n, row.get(n, 0)) for n in names]) for stage, row in outcomes.items()]


def rejected(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Everything refused, and why."""
    if not rows:
        return h("p", "Nothing was rejected.", class_="note")
    cells = [
        [
            cell("step", "–" if r["step"] is None else r["step"]),
            cell("what", f"{r['what']} {r['target']}"),
            cell("text", r["text"], "text"),
            cell("why", r["reason"], "text"),
        ]
        for r in rows
    ]
    return h("div", table(["step", "what", "text", "why"], cells), class_="card")


def spend(s: Mapping[str, Any]) -> Html:
    """Tokens and money by stage and model."""
    rows = [
        [
            cell("stage", r["stage"]),
            cell("model", r["model"]),
            cell("calls", f"{r['calls']:,}", "n"),
            cell("from cache", f"{r['hits']:,}", "n"),
            cell("failed", f"{r['failed_calls']:,}", "n"),
            cell("prompt", f"{r['prompt_tokens']:,}", "n"),
            cell("completion", f"{r['completion_tokens']:,}", "n"),
            cell("money", money(r), "n"),
        ]
        for r in s["spend"]["rows"]
    ]
    if not rows:
        return h("p", "Nothing was spent.", class_="note")
    heads = ["stage", "model", "calls", "from cache", "failed", "prompt", "completion", "money"]
    booked = s["spend"]["booked"]
    cards: list[Child] = [
        chart_card(None, charts.spend(s["spend"]["rows"])),
        h(
            "div",
            table(heads, rows, numbers_from=2),
            booked["calls"] > 0
            and h("p", f"{booked['calls']} calls whose end nobody saw are booked at their worst "
                       f"case: {tokens(booked)} tokens, {money(booked)}.", class_="note"),
            s["forecast"] is not None
            and h("p", "Forecast before spending: ",
                  h("span", words(s["forecast"]), class_="mono")),
            class_="card",
        ),
    ]  # fmt: skip
    return h("div", cards, class_="grid wide")


def advice(rows: Sequence[Mapping[str, Any]]) -> Html:
    """What pays next."""
    cards = []
    for rank, a in enumerate(rows, 1):
        gain = a["gain"]
        kind = {"measured": "good", "ceiling": "accent"}.get(a["kind"], "")
        cards.append(
            h(
                "div",
                h("h3", f"{rank}. {a['headline']} ", tag(a["kind"], kind)),
                gain and h("p", h("b", f"{gain['estimate']:+.3f}"), f" {range_words(gain)}"),
                h("p", a["evidence"]),
                h("p", f"Cost: {a['cost']}.", class_="note"),
                class_="card",
            )
        )
    return h("div", cards, class_="grid")


def method(s: Mapping[str, Any]) -> Html:
    """How the figures are made, in a few words."""
    level = s["gain"]["level"] if s["gain"] else 0.95
    return h(
        "p",
        f"Intervals are {level:.0%}, over tasks: draws of one task are not independent. Before and "
        "after are paired by task; p comes from swapping the arms of whole tasks. A value is the "
        "measured effect of showing an entry. Failed rollouts have no reward and count in no mean.",
        class_="note",
    )
