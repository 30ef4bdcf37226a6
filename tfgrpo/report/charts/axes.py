"""What every chart is drawn on: matplotlib's axes in the page's style, finished as SVG text.

Colours are drawn as marker values and replaced by `var(--name)`, so that one chart serves light and
dark. A chart is 331 units wide, what a phone of 400 pixels leaves for it, so that its texts are
read there as large as the page's. Texts stay text (no glyph outlines), escaped by matplotlib and
free of its formula syntax. Where matplotlib is not installed every chart is an empty text, and the
page does without.

Does not know what is drawn. Source: own.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

from tfgrpo.errors import MissingExtraError
from tfgrpo.runtime.terminal import one_line

__all__ = [
    "COLOURS",
    "are_possible",
    "canvas",
    "errorbars",
    "if_possible",
    "legend",
    "name_rows",
    "short",
    "step_axis",
]

_WIDTH_IN = 4.6
_TEXT = 12.5
"""Units of a text; a phone of 400 pixels shows a unit as a pixel."""
COLOURS: Mapping[str, str] = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "accent": "#040404",
    "good": "#050505",
    "bad": "#060606",
    "soft": "#070707",
    "band": "#080808",
}
"""Marker values by CSS variable; nothing else in a chart has these colours."""


_Rows = ParamSpec("_Rows")


def are_possible() -> bool:
    """True where matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def if_possible(draw: Callable[_Rows, str]) -> Callable[_Rows, str]:
    """Make a chart an empty text where nothing can draw it."""

    @functools.wraps(draw)
    def drawn(*args: _Rows.args, **kwargs: _Rows.kwargs) -> str:
        return draw(*args, **kwargs) if are_possible() else ""

    return drawn


def errorbars(
    axes: Any,
    rows: Sequence[tuple[float, Mapping[str, Any]]],
    colour: str,
    label: str,
    *,
    line: bool = True,
    marker: str = "o",
) -> None:
    """Draw estimates with their intervals at their places."""
    x = [step for step, _ in rows]
    y = [row["estimate"] for _, row in rows]
    low = [row["estimate"] - row["low"] for _, row in rows]
    high = [row["high"] - row["estimate"] for _, row in rows]
    axes.errorbar(
        x, y, yerr=[low, high], color=COLOURS[colour], label=label, marker=marker, markersize=7,
        linewidth=2.2 if line else 0, elinewidth=1.8, capsize=0,
    )  # fmt: skip


def step_axis(axes: Any, steps: Sequence[int], label: str = "step") -> None:
    """Name the steps below, with room beside a single one."""
    axes.set_xlabel(label)
    axes.set_xticks(steps[:: max(1, -(-len(steps) // 7))])
    if steps:
        axes.set_xlim(steps[0] - 0.7, steps[-1] + 0.7)


def name_rows(axes: Any, names: Sequence[str], most: int = 20) -> None:
    """Put one name on each row, the first on top."""
    axes.set_yticks(range(len(names)), [one_line(name, most) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def legend(axes: Any) -> None:
    """Put the legend below the axes; nothing where nothing has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 1 if max(map(len, labels)) > 18 else 2
        axes.figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, frameon=False,
            fontsize=_TEXT, labelcolor=COLOURS["muted"], handlelength=1.2, columnspacing=1.0,
            borderaxespad=0.1,
        )  # fmt: skip


def short(value: float) -> str:
    """Return a count in short form."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


@contextmanager
def canvas(
    title: str, salt: str, height_in: float = 3.1
) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Axes in the page's style, and a function that returns the finished SVG."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingExtraError.of("report", "charts", "matplotlib") from exc

    ink, muted, line = (COLOURS[name] for name in ("ink", "muted", "line"))
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": _TEXT,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.labelsize": _TEXT,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": line,
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelsize": _TEXT,
        "ytick.labelsize": _TEXT,
        "ytick.left": False,
        "xtick.bottom": False,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        axes = figure.subplots()
        axes.locator_params(nbins=5)  # few ticks: room for their labels is measured once

        def finish() -> str:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            return _themed(out.getvalue(), title, salt)

        yield axes, finish


def _themed(svg: str, title: str, salt: str) -> str:
    """The bare `<svg>` element with CSS variables for the marker colours."""
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    for name, marker in COLOURS.items():
        svg = svg.replace(marker, f"var(--{name})")
    svg = re.sub(r'font-family: [^;"]*', "font-family: var(--font)", svg)
    prefix = re.sub(r"\W", "", salt)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    label = escape(title, quote=True)
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"', 1)
