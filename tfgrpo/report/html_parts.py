"""Tables, cells, tags, numbers and texts to copy, as the pages show them.

Does not know what they say. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report.html import Child, Html, h, trusted

__all__ = [
    "cell",
    "chart_card",
    "copyable",
    "money",
    "number",
    "signed",
    "table",
    "tag",
    "tokens",
]


def chart_card(title: str | None, svg: str, note: Child = None) -> Html | None:
    """Return a chart under its title; None where there is no chart."""
    if not svg:
        return None
    return h(
        "div", title and h("h3", title), trusted(svg), note and h("p", note, class_="note"),
        class_="card",
    )  # fmt: skip


def copyable(text: str, word: str = "copy") -> Html:
    """Return a text with a button that copies it."""
    return h(
        "div", h("button", word, type="button", class_="copy"), h("pre", text), class_="copyable"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[Child]], numbers_from: int = 99) -> Html:
    """Return a table; columns from `numbers_from` on are aligned right."""
    head = h("tr", [h("th", x, class_="n" if i >= numbers_from else None)
                    for i, x in enumerate(heads)])  # fmt: skip
    body = h("tbody", [h("tr", row) for row in rows])
    return h(
        "div", h("table", h("thead", head), body, class_="stack"), class_="scroll", tabindex="0"
    )


def cell(label: str, value: Child, class_: str | None = None) -> Html:
    """Return a table cell that carries its column's name for narrow screens."""
    return h("td", value, class_=class_, data_label=label)


def number(label: str, value: float | None) -> Html:
    """Return a cell with three decimals."""
    return cell(label, "–" if value is None else f"{value:.3f}", "n")


def signed(label: str, value: float | None) -> Html:
    """Return a cell with a signed, coloured change."""
    if value is None:
        return cell(label, "–", "n")
    kind = "good" if value > 0 else "bad" if value < 0 else ""
    return cell(label, h("span", f"{value:+.3f}", class_=kind), "n")


def tag(word: str, kind: str) -> Html:
    """Return a small coloured word."""
    return h("span", word, class_=f"tag {kind}".strip())


def tokens(amounts: Mapping[str, Any]) -> str:
    """Return a token count in short form."""
    total = amounts["prompt_tokens"] + amounts["completion_tokens"]
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if total >= size:
            return f"{total / size:.1f}{letter}"
    return str(total)


def money(amounts: Mapping[str, Any]) -> str:
    """Return a cost; an unknown one says so."""
    cost = amounts["cost_usd"]
    return "price unknown" if cost is None else f"${cost:.4f}" if cost < 1 else f"${cost:,.2f}"
