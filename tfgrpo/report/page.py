"""The report as one HTML file: no network, no build step, light and dark, readable on a phone.

Everything is static markup except the browser of groups, a small script allowed by its hash.
Texts of models, tools and files enter as text (`elements.h`) or as data (`islands`).

Does not know statistics: it shows a summary. Threats: active content (content security policy,
text nodes only), control characters (shown as escapes). Source: own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.elements import Child, Html, h, trusted
from tfgrpo.report.islands import Islands, pack_groups
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import RunView

__all__ = ["render_page"]

_SECTIONS = (
    ("result", "Result"),
    ("curve", "Curve"),
    ("tasks", "Tasks"),
    ("library", "Library"),
    ("groups", "Groups"),
    ("rejected", "Rejected"),
    ("spend", "Spend"),
    ("advice", "Next"),
)


def render_page(
    view: RunView, summary: Mapping[str, Any] | None = None, *, live_version: str = ""
) -> str:
    """Return the report of a run as an HTML document.

    Args:
        view: the run.
        summary: its summary; made here where it is None.
        live_version: for the live view: the page reloads when its server tells another version.
    """
    summary = summarise(view) if summary is None else summary
    islands = pack_groups(view)
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    connect = "'self'" if live_version else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'unsafe-inline'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    name = summary["run"]["name"]
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", f"{name} · tfgrpo report"),
        h("style", trusted(style)),
    )
    body = h(
        "body",
        _navigation(name),
        h("main", _sections(summary, islands), id="report"),
        h("main", id="group-view", hidden=True),
        _data("index", islands.index),
        [_data(str(i), chunk) for i, chunk in enumerate(islands.chunks)],
        h("script", trusted(script)),
    )
    root = h("html", head, body, lang="en", data_version=live_version or None)
    return f"<!doctype html>\n{root}\n"


def _asset(name: str) -> str:
    return files("tfgrpo.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _data(name: str, packed: str) -> Html:
    return h("script", trusted(packed), type="application/octet-stream", id=f"groups-{name}")


def _navigation(name: str) -> Html:
    links = [h("a", title, href=f"#{anchor}") for anchor, title in _SECTIONS]
    return h("nav", h("b", name), links, class_="top", aria_label="Sections")


def _sections(s: Mapping[str, Any], islands: Islands) -> list[Child]:
    return [
        _result(s),
        _warnings(s),
        h("h2", "Learning curve", id="curve"),
        _curve(s),
        h("h2", "Task by task", id="tasks"),
        _tasks(s),
        h("h2", "Library", id="library"),
        _library(s),
        h("h2", "Groups", id="groups"),
        _groups(s, islands),
        h("h2", "Rejected, and why", id="rejected"),
        _rejected(s["rejected"]),
        h("h2", "Spend", id="spend"),
        _spend(s),
        h("h2", "What pays next", id="advice"),
        _advice(s["advice"]),
        _method(s),
    ]


# ---- result ------------------------------------------------------------------------------------


def _result(s: Mapping[str, Any]) -> Html:
    verdict, run = s["verdict"], s["run"]
    facts = [run["policy"], run["preset"], f"{run['steps']} steps", f"{run['rollouts']} rollouts"]
    tiles = [_tile(_reward(a["mean"]), f"{_ARM_WORDS[a['arm']]} · {_range(a['mean'])}")
             for a in s["arms"]]  # fmt: skip
    if s["gain"]:
        p = f"p = {s['p_value']:.3f}" if s["p_value"] >= 0.001 else "p < 0.001"
        tiles.append(_tile(f"{s['gain']['estimate']:+.3f}", f"gain · {_range(s['gain'])} · {p}"))
    if s["noise"]:
        tiles.append(
            _tile(f"±{s['noise']['width']:.3f}", "A/A noise: a repetition moves by this much")
        )
    if s["detectable"]:
        tiles.append(_tile(f"{s['detectable']:.3f}", "smallest effect found with 80% power"))
    tiles.append(_tile(_tokens(s["spend"]["total"]), f"tokens · {_money(s['spend']['total'])}"))
    chart = None
    if s["gain"]:
        noise = s["noise"]["width"] if s["noise"] else None
        chart = trusted(
            charts.intervals(
                [("gain", s["gain"])], title="Gain", xlabel="change of mean reward", band=noise
            )
        )
    kept = "the library" if s["kept"] != "empty" else "no library"
    return h(
        "section",
        h(
            "div",
            h("p", " · ".join(str(f) for f in facts if f), class_="note"),
            h("h1", _headline(s)),
            h("p", verdict["text"]),
            h("p", f"Kept: {kept}. {s['why_kept']}", class_="note"),
            h("div", tiles, class_="tiles"),
            class_=f"card hero {verdict['status']}",
        ),
        chart and h("div", chart, class_="card"),
        id="result",
        class_="grid wide",
    )


_ARM_WORDS = {"empty": "no library", "final": "with the library"}


def _headline(s: Mapping[str, Any]) -> str:
    verdict = s["verdict"]
    if verdict["rule"]["kind"] != "gain":
        return f"{verdict['rule_text']}: {verdict['status'].replace('_', ' ')}"
    if s["kept"] == "empty" and verdict["status"] != "inconclusive":
        return "No library was better than none: the empty one is kept"
    if verdict["status"] == "inconclusive":
        return "No verdict: too little could be scored"
    if verdict["status"] == "met":
        return f"It helped: {s['gain']['estimate']:+.3f} mean reward, beyond noise"
    if verdict["is_beyond_noise"]:
        return "It did not help, and that is beyond noise"
    return "No gain beyond noise was found"


def _tile(value: str, words: str) -> Html:
    return h("div", h("b", value), h("span", words), class_="tile")


def _warnings(s: Mapping[str, Any]) -> list[Child]:
    found: list[Child] = []
    leaks = s["leaks"]
    if leaks["contaminated"]:
        rows = [
            [_cell("task", x["task_id"]), _cell("how", x["kind"].replace("_", " ")),
             _cell("from", x["source"]), _cell("evidence", x["evidence"][:120], "text")]
            for x in leaks["leaks"][:50]
        ]  # fmt: skip
        words = (
            f"{len(leaks['contaminated'])} of {leaks['held_out']} held-out tasks are contaminated "
            "and stand in no figure of this report."
        )
        table = _table(["task", "how", "from", "evidence"], rows)
        found.append(h("div", h("h3", "Leaks"), h("p", words), table, class_="card warn"))
    if s["damaged"]:
        lines = h("pre", "\n".join(s["damaged"][:50]))
        found.append(h("div", h("h3", "Damaged rows set aside"), lines, class_="card warn"))
    return found


# ---- curve and tasks ---------------------------------------------------------------------------


def _curve(s: Mapping[str, Any]) -> Html:
    cards: list[Child] = []
    if s["curve"]:
        cards.append(h("div", h("h3", "Reward by step"), trusted(charts.curve(s["curve"])),
                       class_="card"))  # fmt: skip
    gated = [
        (f"step {p['step']} {'✓' if p['accepted'] else '✗'} {p['what']}", p["difference"])
        for p in s["curve"]
        if p["difference"]
    ]
    if gated:
        chart = charts.intervals(
            gated[-16:], title="Proposals", xlabel="proposed − current on the gate tasks", band=None
        )
        cards.append(h("div", h("h3", "What each proposal changed"), trusted(chart), class_="card"))
    if s["informative"]:
        chart = charts.informative(s["informative"])
        cards.append(h("div", h("h3", "Share of groups that can teach"), trusted(chart),
                       class_="card"))  # fmt: skip
    return h("div", cards or h("p", "No steps yet.", class_="note"), class_="grid")


def _tasks(s: Mapping[str, Any]) -> Html:
    rows = [
        [
            _cell("task", r["task_id"]),
            _number("without", r["before"]),
            _number("with", r["after"]),
            _signed("change", r["difference"]),
            _cell("draws", f"{r['n_before']} / {r['n_after']}", "n"),
        ]
        for r in s["tasks"]
    ]
    if not rows:
        return h("p", "No test tasks in this run.", class_="note")
    table = _table(["task", "without", "with", "change", "draws"], rows)
    known = any(r["difference"] is not None for r in s["tasks"])
    return h(
        "div",
        known and h("div", trusted(charts.tasks(s["tasks"])), class_="card"),
        h(
            "details",
            h("summary", f"All {len(rows)} test tasks"),
            h("div", table, class_="tall"),
            class_="card",
            open=True,
        ),
        class_="grid",
    )


# ---- library -----------------------------------------------------------------------------------


def _library(s: Mapping[str, Any]) -> Html:
    entries = s["library"]["entries"]
    if not entries:
        empty = h("p", "The library is empty.", class_="note")
        return h("div", empty, _versions(s["versions"]), class_="grid wide")
    rows = [
        [
            _cell("id", e["experience_id"]),
            _cell("text", e["text"], "text"),
            _cell("value", _value(e["value"])),
            _cell("shown", e["shown"], "n"),
            _cell("from", _sources(e["provenance"], e["created_step"])),
            _cell("status", [_tag(e["status"], _STATUS.get(e["status"], "")), " ", e["trust"]]),
        ]
        for e in entries
    ]
    table = _table(["id", "text", "value", "shown", "from", "status"], rows)
    cards: list[Child] = [h("div", table, class_="card")]
    valued = [(e["experience_id"], e["value"]) for e in entries if e["value"]]
    if valued:
        chart = charts.intervals(
            valued[:24], title="Value", xlabel="effect on the mean reward", band=None
        )
        left = h("div", h("h3", "Value of each entry"), trusted(chart), class_="card")
        cards.append(h("div", left, _versions(s["versions"]), class_="grid"))
    else:
        cards.append(_versions(s["versions"]))
    return h("div", cards, class_="grid wide")


_STATUS = {"active": "good", "pinned": "accent", "banned": "bad", "quarantined": "bad"}


def _value(value: Mapping[str, Any] | None) -> Child:
    if value is None:
        return h("span", "not measured", class_="note")
    kind = "good" if value["low"] > 0 else "bad" if value["high"] < 0 else ""
    return [h("b", f"{value['estimate']:+.3f}", class_=kind), h("br"),
            h("span", _range(value), class_="note")]  # fmt: skip


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
        tag = {True: _tag("accepted", "good"), False: _tag("rejected", "bad")}.get(v["accepted"])
        items.append(
            h(
                "details",
                h("summary", head, " ", tag, " ", h("span", v["version_id"], class_="note mono")),
                changes or h("p", "Nothing changed in the prompt.", class_="note"),
            )
        )
    return h("div", h("h3", "Versions"), items or "none", class_="card")


# ---- groups, rejected, spend, advice -----------------------------------------------------------


def _groups(s: Mapping[str, Any], islands: Islands) -> Html:
    stages = [h("option", "all stages", value="")]
    stages += [h("option", stage, value=stage) for stage in s["outcomes"]]
    kinds = [h("option", "mixed and equal", value=""), h("option", "mixed only", value="mixed"),
             h("option", "equal only", value="equal")]  # fmt: skip
    cut = None
    if islands.n_cut:
        cut = h("p", f"{islands.n_cut} texts longer than {islands.text_limit} characters keep "
                     "head and tail here; the journal has them whole.", class_="note")  # fmt: skip
    outcomes = [
        [_cell("stage", stage), *(_cell(kind.replace("_", " "), n or "", "n") for kind, n in row)]
        for stage, row in _outcome_rows(s["outcomes"])
    ]
    names = _outcome_names(s["outcomes"])
    return h(
        "div",
        h(
            "div",
            h("h3", "Outcomes"),
            _table(["stage", *(n.replace("_", " ") for n in names)], outcomes, numbers_from=1),
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


def _rejected(rows: Sequence[Mapping[str, Any]]) -> Html:
    if not rows:
        return h("p", "Nothing was rejected.", class_="note")
    cells = [
        [
            _cell("step", "–" if r["step"] is None else r["step"]),
            _cell("what", f"{r['what']} {r['target']}"),
            _cell("text", r["text"], "text"),
            _cell("why", r["reason"], "text"),
        ]
        for r in rows
    ]
    return h("div", _table(["step", "what", "text", "why"], cells), class_="card")


def _spend(s: Mapping[str, Any]) -> Html:
    rows = [
        [
            _cell("stage", r["stage"]),
            _cell("model", r["model"]),
            _cell("calls", f"{r['calls']:,}", "n"),
            _cell("from cache", f"{r['hits']:,}", "n"),
            _cell("failed", f"{r['failed_calls']:,}", "n"),
            _cell("prompt", f"{r['prompt_tokens']:,}", "n"),
            _cell("completion", f"{r['completion_tokens']:,}", "n"),
            _cell("money", _money(r), "n"),
        ]
        for r in s["spend"]["rows"]
    ]
    if not rows:
        return h("p", "Nothing was spent.", class_="note")
    heads = ["stage", "model", "calls", "from cache", "failed", "prompt", "completion", "money"]
    booked = s["spend"]["booked"]
    cards: list[Child] = [
        h("div", trusted(charts.spend(s["spend"]["rows"])), class_="card"),
        h(
            "div",
            _table(heads, rows, numbers_from=2),
            booked["calls"] > 0
            and h("p", f"{booked['calls']} calls whose end nobody saw are booked at their worst "
                       f"case: {_tokens(booked)} tokens, {_money(booked)}.", class_="note"),
            s["forecast"] is not None
            and h("p", "Forecast before spending: ",
                  h("span", _words(s["forecast"]), class_="mono")),
            class_="card",
        ),
    ]  # fmt: skip
    return h("div", cards, class_="grid wide")


def _advice(rows: Sequence[Mapping[str, Any]]) -> Html:
    cards = []
    for rank, a in enumerate(rows, 1):
        gain = a["gain"]
        kind = {"measured": "good", "ceiling": "accent"}.get(a["kind"], "")
        cards.append(
            h(
                "div",
                h("h3", f"{rank}. {a['headline']} ", _tag(a["kind"], kind)),
                gain and h("p", h("b", f"{gain['estimate']:+.3f}"), f" {_range(gain)}"),
                h("p", a["evidence"]),
                h("p", f"Cost: {a['cost']}.", class_="note"),
                class_="card",
            )
        )
    return h("div", cards, class_="grid")


def _method(s: Mapping[str, Any]) -> Html:
    level = s["gain"]["level"] if s["gain"] else 0.95
    return h(
        "p",
        f"Intervals are {level:.0%}, over tasks: draws of one task are not independent. Before and "
        "after are paired by task; p comes from swapping the arms of whole tasks. A value is the "
        "measured effect of showing an entry. Failed rollouts have no reward and count in no mean.",
        class_="note",
    )


# ---- small pieces ------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[Child]], numbers_from: int = 99) -> Html:
    head = h("tr", [h("th", x, class_="n" if i >= numbers_from else None)
                    for i, x in enumerate(heads)])  # fmt: skip
    body = h("tbody", [h("tr", row) for row in rows])
    return h("div", h("table", h("thead", head), body, class_="stack"), class_="scroll")


def _cell(label: str, value: Child, class_: str | None = None) -> Html:
    return h("td", value, class_=class_, data_label=label)


def _number(label: str, value: float | None) -> Html:
    return _cell(label, "–" if value is None else f"{value:.3f}", "n")


def _signed(label: str, value: float | None) -> Html:
    if value is None:
        return _cell(label, "–", "n")
    kind = "good" if value > 0 else "bad" if value < 0 else ""
    return _cell(label, h("span", f"{value:+.3f}", class_=kind), "n")


def _tag(word: str, kind: str) -> Html:
    return h("span", word, class_=f"tag {kind}".strip())


def _reward(row: Mapping[str, Any]) -> str:
    return f"{row['estimate']:.3f}"


def _range(row: Mapping[str, Any]) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}"


def _tokens(amounts: Mapping[str, Any]) -> str:
    total = amounts["prompt_tokens"] + amounts["completion_tokens"]
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if total >= size:
            return f"{total / size:.1f}{letter}"
    return str(total)


def _money(amounts: Mapping[str, Any]) -> str:
    cost = amounts["cost_usd"]
    return "price unknown" if cost is None else f"${cost:.4f}" if cost < 1 else f"${cost:,.2f}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
