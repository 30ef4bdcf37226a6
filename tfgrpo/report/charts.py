"""The report's charts: static SVG by matplotlib, coloured by the page's CSS variables.

Every chart takes plain rows of the summary and returns an `<svg>` element as text. Colours are
drawn as marker values and replaced by `var(--name)`, so that one chart serves light and dark.
Texts stay text (no glyph outlines), escaped by matplotlib and free of its formula syntax. Where
matplotlib is not installed every chart is an empty text, and the page does without.

Does not know where the rows come from. Source: own.
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

__all__ = ["are_possible", "curve", "informative", "intervals", "spend", "tasks"]

_WIDTH_IN = 4.6
_COLOURS: Mapping[str, str] = {
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
_KIND_COLOURS = {
    "mixed": "accent",
    "all_fail": "bad",
    "all_pass": "good",
    "equal": "soft",
    "unusable": "line",
}


_Rows = ParamSpec("_Rows")


def are_possible() -> bool:
    """True where matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _if_possible(draw: Callable[_Rows, str]) -> Callable[_Rows, str]:
    """Make a chart an empty text where nothing can draw it."""

    @functools.wraps(draw)
    def drawn(*args: _Rows.args, **kwargs: _Rows.kwargs) -> str:
        return draw(*args, **kwargs) if are_possible() else ""

    return drawn


@_if_possible
def curve(points: Sequence[Mapping[str, Any]]) -> str:
    """Reward by step with intervals: practice, the library in use, each proposal and its fate."""
    steps = sorted({p["step"] for p in points})
    looks: dict[int, int] = {}
    with _axes("Learning curve", "lc") as (axes, finish):
        for arm, colour, label in (
            ("practice", "soft", "practice"),
            ("current", "accent", "library in use (gate)"),
        ):
            rows = {p["step"]: p[arm] for p in points if p[arm]}
            if rows:
                _errorbars(axes, sorted(rows.items()), colour, label)
        for is_accepted, colour, label in (
            (True, "good", "proposal accepted"),
            (False, "bad", "proposal rejected"),
        ):
            rows_ = []
            for p in points:
                if p["proposed"] and bool(p["accepted"]) == is_accepted:
                    looks[p["step"]] = looks.get(p["step"], 0) + 1
                    rows_.append((p["step"] + 0.08 + 0.09 * looks[p["step"]], p["proposed"]))
            if rows_:
                _errorbars(axes, rows_, colour, label, line=False, marker="D")
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward")
        axes.set_xticks(steps[:: max(1, len(steps) // 8)])
        _legend(axes)
        return finish()


@_if_possible
def intervals(
    rows: Sequence[tuple[str, Mapping[str, Any]]], *, title: str, xlabel: str, band: float | None
) -> str:
    """Estimates with intervals, one a line, zero marked; `band` is a half-width of noise."""
    height = 0.85 + 0.3 * (len(rows) + (band is not None))
    with _axes(title, title, height) as (axes, finish):
        if band is not None:
            axes.axvspan(-band, band, color=_COLOURS["band"], linewidth=0, label="A/A noise")
        axes.axvline(0, color=_COLOURS["muted"], linewidth=1)
        for i, (_, row) in enumerate(rows):
            colour = "good" if row["low"] > 0 else "bad" if row["high"] < 0 else "accent"
            axes.plot(
                [row["low"], row["high"]], [i, i], color=_COLOURS[colour], linewidth=2.4,
                solid_capstyle="round",
            )  # fmt: skip
            axes.plot(row["estimate"], i, "o", color=_COLOURS[colour], markersize=6)
        axes.set_yticks(range(len(rows)), [one_line(name, 24) for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(xlabel)
        if band is not None:
            _legend(axes)
        return finish()


@_if_possible
def tasks(rows: Sequence[Mapping[str, Any]], most: int = 32) -> str:
    """Before and after a task; with more than `most` tasks those that changed the most."""
    known = [r for r in rows if r["difference"] is not None]
    shown = sorted(known, key=lambda r: (-abs(r["difference"]), r["task_id"]))[:most]
    shown.sort(key=lambda r: (r["difference"], r["before"]))
    title = "Task by task" if len(shown) == len(known) else f"The {most} tasks that changed most"
    with _axes(title, "tasks", 0.9 + 0.19 * max(4, len(shown))) as (axes, finish):
        for i, row in enumerate(shown):
            gain = row["difference"]
            colour = "good" if gain > 0 else "bad" if gain < 0 else "soft"
            axes.plot(
                [row["before"], row["after"]], [i, i], color=_COLOURS[colour], linewidth=2, zorder=1
            )
            axes.plot(row["before"], i, "o", color=_COLOURS["soft"], markersize=4.5, zorder=2)
            axes.plot(row["after"], i, "o", color=_COLOURS[colour], markersize=5.5, zorder=3)
        axes.set_yticks(range(len(shown)), [one_line(r["task_id"], 18) for r in shown], fontsize=7)
        axes.set_ylim(-0.7, len(shown) - 0.3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("mean reward: grey without, colour with the library")
        return finish()


@_if_possible
def informative(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of practice groups by what they can teach, step by step."""
    with _axes("What practice groups can teach", "informative") as (axes, finish):
        steps = [r["step"] for r in rows]
        bottom = [0.0] * len(rows)
        for kind, colour in _KIND_COLOURS.items():
            sizes = [r[kind] / max(1, sum(r[k] for k in _KIND_COLOURS)) for r in rows]
            if any(sizes):
                axes.bar(
                    steps, sizes, 0.72, bottom, color=_COLOURS[colour], linewidth=0,
                    label=kind.replace("_", " "),
                )  # fmt: skip
            bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]
        axes.set_ylim(0, 1)
        axes.set_xticks(steps[:: max(1, len(steps) // 8)])
        axes.set_xlabel("step")
        axes.set_ylabel("share of groups")
        _legend(axes)
        return finish()


@_if_possible
def spend(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens by stage, prompt and completion."""
    totals: dict[str, list[int]] = {}
    for row in rows:
        stage = totals.setdefault(row["stage"], [0, 0])
        stage[0] += row["prompt_tokens"]
        stage[1] += row["completion_tokens"]
    ordered = sorted(totals.items(), key=lambda item: sum(item[1]))
    with _axes("Tokens by stage", "spend", 0.9 + 0.32 * max(1, len(ordered))) as (axes, finish):
        names = [one_line(name or "other", 18) for name, _ in ordered]
        prompt = [t[0] for _, t in ordered]
        replies = [t[1] for _, t in ordered]
        axes.barh(names, prompt, 0.62, color=_COLOURS["accent"], linewidth=0, label="prompt")
        axes.barh(
            names, replies, 0.62, prompt, color=_COLOURS["good"], linewidth=0, label="completion"
        )
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        axes.grid(axis="y", visible=False)
        _legend(axes)
        return finish()


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _errorbars(
    axes: Any,
    rows: Sequence[tuple[float, Mapping[str, Any]]],
    colour: str,
    label: str,
    *,
    line: bool = True,
    marker: str = "o",
) -> None:
    x = [step for step, _ in rows]
    y = [row["estimate"] for _, row in rows]
    low = [row["estimate"] - row["low"] for _, row in rows]
    high = [row["high"] - row["estimate"] for _, row in rows]
    axes.errorbar(
        x, y, yerr=[low, high], color=_COLOURS[colour], label=label, marker=marker, markersize=5,
        linewidth=1.8 if line else 0, elinewidth=1.4, capsize=0,
    )  # fmt: skip


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(
            handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8,
            labelcolor=_COLOURS["muted"], handlelength=1.4, columnspacing=1.2,
        )  # fmt: skip


@contextmanager
def _axes(title: str, salt: str, height_in: float = 2.9) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Axes in the page's style, and a function that returns the finished SVG."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingExtraError.of("report", "charts", "matplotlib") from exc

    ink, muted, line = (_COLOURS[name] for name in ("ink", "muted", "line"))
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": line,
        "grid.linewidth": 0.7,
        "xtick.color": muted,
        "ytick.color": muted,
        "ytick.left": False,
        "xtick.bottom": False,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        axes = figure.subplots()

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
    for name, marker in _COLOURS.items():
        svg = svg.replace(marker, f"var(--{name})")
    svg = re.sub(r'font-family: [^;"]*', "font-family: var(--font)", svg)
    prefix = re.sub(r"\W", "", salt)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    label = escape(title, quote=True)
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"', 1)
