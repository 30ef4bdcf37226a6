"""The section with the browser of groups: outcomes, sort, filters; a script fills the rows.

Does not know how groups are packed. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.report.embedded_groups import Islands
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, table

__all__ = ["groups"]

_FILTERS = (
    ("", "all groups"),
    ("worse", "made worse by the library"),
    ("failed", "all failed"),
    ("right", "all right"),
    ("mixed", "attempts differ"),
    ("equal", "all equal"),
    ("cut", "with cut replies"),
    ("unscored", "with attempts not scored"),
)
_COLUMNS = ("task", "stage", "step", "shown", "mean", "spread", "rewards")
_OUTCOMES = {
    "graded": "scored",
    "ungraded": "not judged",
    "policy_failed": "agent failed",
    "verifier_failed": "verifier failed",
    "provider_failed": "server failed",
    "refused": "refused",
    "timed_out": "out of time",
    "truncated": "cut, not scored",
    "cancelled": "cancelled",
    "cut": "cut at the limit",
}


def groups(s: Mapping[str, Any], islands: Islands) -> Html:
    """Outcomes, and the browser of groups."""
    return h("div", _outcomes(s["outcomes"]), _browser(s, islands), class_="grid wide")


def _outcomes(outcomes: Mapping[str, Mapping[str, int]]) -> Html | None:
    if not outcomes:
        return None
    names = sorted({n for row in outcomes.values() for n in row}, key=lambda n: (n == "cut", n))
    words = [_OUTCOMES.get(n, n.replace("_", " ")) for n in names]
    rows = [
        [cell("stage", stage)]
        + [cell(word, f"{row[n]:,}" if n in row else "–", "n")
           for n, word in zip(names, words, strict=True)]
        for stage, row in outcomes.items()
    ]  # fmt: skip
    listed = table(["stage", *words], rows, numbers_from=1)
    return h("div", h("h3", "How attempts ended"), listed, class_="card")


def _browser(s: Mapping[str, Any], islands: Islands) -> Html:
    stages = [h("option", "all stages", value="")]
    stages += [h("option", stage, value=stage) for stage in s["outcomes"]]
    kinds = [h("option", words, value=kind) for kind, words in _FILTERS]
    heads = [
        h("th", h("button", name, type="button", class_="sort", data_sort=name), scope="col")
        if name != "rewards"
        else h("th", name, scope="col")
        for name in _COLUMNS
    ]
    sorts = [h("option", f"by {name}", value=name) for name in _COLUMNS if name != "rewards"]
    return h(
        "div",
        h(
            "div",
            h("select", stages, id="stage", aria_label="stage"),
            h("select", kinds, id="kind", aria_label="which groups"),
            h("select", h("option", "as they came", value=""), sorts, id="order",
              aria_label="order"),
            h("input", id="find", type="search", placeholder="task id", aria_label="task id"),
            class_="controls",
        ),
        h(
            "div",
            h("table", h("thead", h("tr", heads)), h("tbody", id="group-rows"),
              class_="stack compact"),
            class_="scroll",
            tabindex="0",
        ),
        h(
            "div",
            h("button", "previous", id="previous", type="button"),
            h("button", "next", id="next", type="button"),
            h("span", id="page-words", class_="note", aria_live="polite"),
            class_="controls",
        ),
        _remarks(s, islands),
        h("noscript", h("p", "The browser of groups needs JavaScript; all else is static.")),
        class_="card",
    )  # fmt: skip


def _remarks(s: Mapping[str, Any], islands: Islands) -> list[Child]:
    found: list[Child] = []
    if islands.n_groups < s["run"]["groups"]:
        found.append(
            h(
                "p",
                f"{islands.n_groups:,} of {s['run']['groups']:,} groups are shown here,"
                " some of each stage; all figures are of all groups.",
                class_="note",
            )
        )
    if islands.n_cut:
        found.append(
            h(
                "p",
                f"{islands.n_cut} texts longer than {islands.text_limit} characters "
                "keep head and tail here; the journal has them whole.",
                class_="note",
            )
        )
    return found  # fmt: skip
