"""The report as one HTML file: no network, no build step, light and dark, readable on a phone.

Everything is static markup except the browser of groups, a small script allowed by its hash.
Texts of models, tools and files enter as text (`elements.h`) or as data (`islands`).

Does not know statistics: it shows a summary. Threats: active content (content security policy,
text nodes only), control characters (shown as escapes). Source: own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tfgrpo.report import charts, sections
from tfgrpo.report.embedded_groups import Islands, pack_groups
from tfgrpo.report.html import Child, Html, h, trusted
from tfgrpo.report.html_parts import cell, chart_card, copyable, money, table, tokens
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import RunView
from tfgrpo.report.wording import (
    ARM_WORDS,
    best_of_lines,
    count_words,
    range_words,
    reward_words,
)

__all__ = ["document", "render_page"]

_SECTIONS = (
    ("result", "Result"),
    ("tasks", "Tasks"),
    ("library", "Library"),
    ("curve", "Steps"),
    ("groups", "Groups"),
    ("rejected", "Rejected"),
    ("spend", "Spend"),
    ("advice", "Next"),
)

WITHOUT_CHARTS = "Charts need matplotlib: pip install 'tfgrpo[report]', then write the page again."


def render_page(
    view: RunView,
    summary: Mapping[str, Any] | None = None,
    *,
    live_version: str = "",
    home: str = "",
) -> str:
    """Return the report of a run as an HTML document.

    Args:
        view: the run.
        summary: its summary; made here where it is None.
        live_version: for the live view: the page reloads when its server tells another version.
        home: address of the list of all runs, where there is one.
    """
    summary = summarise(view) if summary is None else summary
    islands = pack_groups(view)
    name = summary["run"]["name"]
    body: list[Child] = [
        _navigation(name, home),
        h("main", _sections(summary, islands, is_live=bool(live_version)), id="report"),
        h("main", id="group-view", hidden=True),
        _data("index", islands.index),
        [_data(str(i), chunk) for i, chunk in enumerate(islands.chunks)],
    ]
    return document(f"{name} · tfgrpo report", body, live_version=live_version)


def document(title: str, body: Child, *, live_version: str = "", made_by: str = "tfgrpo") -> str:
    """Return a whole page in the report's style, with its script and nothing from elsewhere.

    Args:
        title: in the browser's tab.
        body: the page's elements.
        live_version: where it is given the script follows the server's status.
        made_by: what kind of page it is, for the list of all runs.
    """
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    connect = "'self'" if live_version else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'unsafe-inline'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="generator", content=made_by),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", title),
        h("style", trusted(style)),
    )
    whole = h("body", body, h("script", trusted(script)))
    root = h("html", head, whole, lang="en", data_version=live_version or None)
    return f"<!doctype html>\n{root}\n"


def _asset(name: str) -> str:
    return files("tfgrpo.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _data(name: str, packed: str) -> Html:
    return h("script", trusted(packed), type="application/octet-stream", id=f"groups-{name}")


def _navigation(name: str, home: str) -> Html:
    links: list[Child] = [h("a", "← all runs", href=home)] if home else []
    links += [h("b", name)]
    links += [h("a", title, href=f"#{anchor}") for anchor, title in _SECTIONS]
    return h("nav", links, class_="top", aria_label="Sections")


def _sections(s: Mapping[str, Any], islands: Islands, *, is_live: bool) -> list[Child]:
    used = sections.use(s)
    return [
        is_live and h("section", id="live", class_="card live", hidden=True, aria_live="polite"),
        _result(s),
        _warnings(s),
        used and h("h2", "Use what was learnt", id="use"),
        used,
        h("h2", "Test tasks, before and after", id="tasks"),
        sections.tasks(s),
        h("h2", "Library", id="library"),
        sections.library(s),
        h("h2", "Step by step", id="curve"),
        sections.curve(s),
        sections.nudge(s),
        sections.reflection(s),
        h("h2", "Groups of attempts", id="groups"),
        sections.groups(s, islands),
        h("h2", "Rejected, and why", id="rejected"),
        sections.rejected(s["rejected"]),
        h("h2", "Spend", id="spend"),
        sections.spend(s),
        h("h2", "What pays next", id="advice"),
        sections.advice([a for a in s["advice"] if a["lever"] != "setup"]),
        sections.method(s),
    ]


# ---- result ------------------------------------------------------------------------------------


def _result(s: Mapping[str, Any]) -> Html:
    verdict, run = s["verdict"], s["run"]
    is_open = _is_open(s)
    preset = run["preset"] and f"preset {run['preset']}"
    facts = [
        run["policy"], preset, count_words(run["steps"], "step"),
        count_words(run["rollouts"], "attempt"),
    ]  # fmt: skip
    chart = ""
    if s["gain"]:
        noise = s["noise"]["width"] if s["noise"] else None
        chart = charts.intervals(
            [("gain", s["gain"], "")], title="Gain", xlabel="change of mean reward", band=noise
        )
    return h(
        "section",
        h(
            "div",
            h("p", " · ".join(str(f) for f in facts if f), class_="note"),
            h("h1", _headline(s)),
            h("p", _open_words(s) if is_open else verdict["text"]),
            not is_open and h("p", _kept_words(s), class_="note"),
            [h("p", line, class_="note") for line in best_of_lines(s)],
            h("div", _tiles(s), class_="tiles"),
            class_=f"card hero {'open' if is_open else verdict['status']}",
        ),
        _reasons(s),
        chart_card("Gain, beside the noise of a repetition", chart),
        id="result",
        class_="grid wide",
    )


def _tiles(s: Mapping[str, Any]) -> list[Child]:
    tiles: list[Child] = [
        _tile(reward_words(a["mean"]), f"{ARM_WORDS[a['arm']]} ({range_words(a['mean'])})")
        for a in s["arms"]
    ]
    if s["gain"]:
        p = f"p = {s['p_value']:.3f}" if s["p_value"] >= 0.001 else "p < 0.001"
        gain = f"gain ({range_words(s['gain'])}), {p}"
        tiles.append(_tile(f"{s['gain']['estimate']:+.3f}", gain))
    if s["noise"]:
        tiles.append(_tile(f"±{s['noise']['width']:.3f}", "moves by chance when repeated"))
    if s["detectable"]:
        words = "smallest gain that so many tasks find, four times in five"
        tiles.append(_tile(f"{s['detectable']:.3f}", words))
    tiles.append(_tile(tokens(s["spend"]["total"]), f"tokens, {money(s['spend']['total'])}"))
    return tiles


def _is_open(s: Mapping[str, Any]) -> bool:
    """True for a run that learns and has not chosen yet."""
    return s["state"] == "not ended" and not s["arms"] and bool(s["forecast"] or s["curve"])


def _open_words(s: Mapping[str, Any]) -> str:
    looks = [p for p in s["curve"] if p["kind"] == "gate"]
    kept = sum(bool(p["accepted"]) for p in looks)
    tried = f"{count_words(len(looks), 'proposal')} tried so far, {kept} accepted. "
    return (tried if looks else "") + (
        "The verdict comes last, from tasks that nothing has seen. Where the run was stopped, the "
        "same command goes on."
    )


def _kept_words(s: Mapping[str, Any]) -> str:
    kept = "the library" if s["kept"] != "empty" else "no library"
    return f"Kept: {kept}. {s['why_kept']}"


def _reasons(s: Mapping[str, Any]) -> Html | None:
    """Why nothing was kept, or why what was kept is unproven, each with what to do."""
    if not s["why_not_kept"] or _is_open(s):
        return None
    title = "Why nothing was kept" if s["kept"] == "empty" else "What is unproven"
    rows = [
        h("li", h("b", r["text"]), h("p", r["remedy"]), r["command"] and copyable(r["command"]))
        for r in s["why_not_kept"]
    ]
    return h("div", h("h3", title), h("ol", rows, class_="reasons"), class_="card")


def _headline(s: Mapping[str, Any]) -> str:
    verdict = s["verdict"]
    if _is_open(s):
        return "Not ended: learning so far"
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
            [cell("task", x["task_id"]), cell("how", x["kind"].replace("_", " ")),
             cell("from", x["source"]), cell("evidence", x["evidence"][:120], "text")]
            for x in leaks["leaks"][:50]
        ]  # fmt: skip
        words = (
            f"{len(leaks['contaminated'])} of {leaks['held_out']} held-out tasks are contaminated "
            "and stand in no figure of this report."
        )
        listed = table(["task", "how", "from", "evidence"], rows)
        found.append(h("div", h("h3", "Leaks"), h("p", words), listed, class_="card warn"))
    if s["damaged"]:
        lines = h("pre", "\n".join(s["damaged"][:50]))
        found.append(h("div", h("h3", "Damaged rows set aside"), lines, class_="card warn"))
    if not charts.are_possible():
        found.append(h("p", WITHOUT_CHARTS, class_="note"))
    return found
