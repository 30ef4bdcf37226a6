"""The page of a router's replay: cost against quality, and a row for each way to decide.

Does not know how anything was replayed. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import h
from tfgrpo.report.html_parts import cell, chart_card, number, table
from tfgrpo.report.page import document

__all__ = ["ORACLE", "OURS", "SINGLES", "render_routing"]

OURS, SINGLES, ORACLE = "ours", "single models", "oracle"


def render_routing(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    models: Sequence[tuple[str, float, float]],
    standing: Mapping[str, Any],
) -> str:
    """Return the page.

    Args:
        title: what was replayed.
        curves: (cost, quality) of each way to decide.
        models: name, cost and quality of each single model.
        standing: how each way stands.
    """
    chart = charts.cost_and_quality(curves, ours=OURS, singles=SINGLES, oracle=ORACLE)
    note = (
        "Each point is one weight of cost against quality: left is cheap, up is good. The dashed "
        "line is what a coin between single models reaches; the oracle knows each outcome."
    )
    single = [
        [cell("model", name), cell("US dollars a prompt", f"{cost:.6f}", "n"),
         number("mean quality", quality)]
        for name, cost, quality in models
    ]  # fmt: skip
    ways = [
        [
            cell("decided by", "this router" if name == OURS else name),
            number("quality, cost aside", s.routed),
            cell("way from best model to oracle", f"{s.gap_closed:.0%}", "n"),
            number("quality over all costs", s.aiq),
        ]
        for name, s in standing.items()
    ]
    heads = ["decided by", "quality, cost aside", "way from best model to oracle",
             "quality over all costs"]  # fmt: skip
    main = h(
        "main",
        h("section", h("p", "routing, replayed on recorded outcomes", class_="note"),
          h("h1", title), class_="card hero open"),
        h("h2", "Cost against quality"),
        h("div", chart_card(None, chart, note),
          h("div", h("h3", "Single models"),
            table(["model", "US dollars a prompt", "mean quality"], single, numbers_from=1),
            class_="card"), class_="grid"),
        h("h2", "Ways to decide"),
        h("div", table(heads, ways, numbers_from=1), class_="card"),
        id="report",
    )  # fmt: skip
    nav = h("nav", h("b", "tfgrpo"), h("span", "routing", class_="note"), class_="top")
    return document(f"{title} · tfgrpo routing", [nav, main], made_by="tfgrpo routing")
