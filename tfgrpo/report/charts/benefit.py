"""Charts of what a library is worth: intervals, before and after by task, category and cost.

Does not know the steps of a run. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report.charts.axes import (
    COLOURS,
    canvas,
    errorbars,
    if_possible,
    legend,
    name_rows,
)

__all__ = ["before_and_after", "categories", "cost_and_reward", "intervals", "tasks"]

_BARS = 8


@if_possible
def intervals(
    rows: Sequence[tuple[str, Mapping[str, Any], str]],
    *,
    title: str,
    xlabel: str,
    band: float | None,
) -> str:
    """Estimates with intervals, one a line, zero marked.

    Args:
        rows: name, interval, colour; an empty colour goes by which side of zero it lies.
        title: what it shows.
        xlabel: below the axis.
        band: half-width of noise, drawn around zero.
    """
    height = 0.95 + 0.36 * (len(rows) + (band is not None))
    with canvas(title, title, height) as (axes, finish):
        if band is not None:
            axes.axvspan(
                -band, band, color=COLOURS["band"], linewidth=0, label="a repetition moves by this"
            )
        axes.axvline(0, color=COLOURS["muted"], linewidth=1.2)
        for i, (_, row, given) in enumerate(rows):
            by_side = "good" if row["low"] > 0 else "bad" if row["high"] < 0 else "accent"
            colour = COLOURS[given or by_side]
            axes.plot(
                [row["low"], row["high"]], [i, i], color=colour, linewidth=3,
                solid_capstyle="round",
            )  # fmt: skip
            axes.plot(row["estimate"], i, "o", color=colour, markersize=8)
        name_rows(axes, [name for name, _, _ in rows])
        axes.xaxis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel(xlabel)
        if band is not None:
            legend(axes)
        return finish()


@if_possible
def tasks(rows: Sequence[Mapping[str, Any]], most: int = 24) -> str:
    """Before and after a task; with more than `most` tasks those that changed the most."""
    known = [r for r in rows if r["difference"] is not None]
    shown = sorted(known, key=lambda r: (-abs(r["difference"]), r["task_id"]))[:most]
    shown.sort(key=lambda r: (-r["difference"], -r["before"]))
    title = "Task by task" if len(shown) == len(known) else f"The {most} tasks that changed most"
    with canvas(title, "tasks", 1.3 + 0.25 * max(4, len(shown))) as (axes, finish):
        _pairs(axes, [(r["before"], r["after"]) for r in shown])
        name_rows(axes, [r["task_id"] for r in shown], 16)
        axes.set_xlabel("mean reward")
        legend(axes)
        return finish()


@if_possible
def categories(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean before and after, one line a category."""
    with canvas("By category", "categories", 1.3 + 0.34 * max(2, len(rows))) as (axes, finish):
        _pairs(axes, [(r["before"], r["after"]) for r in rows])
        name_rows(axes, [f"{r['name']} ({r['tasks']})" for r in rows], 18)
        axes.set_xlabel("mean reward (number of tasks)")
        legend(axes)
        return finish()


def _pairs(axes: Any, pairs: Sequence[tuple[float, float]]) -> None:
    """Draw a line from before to after on each row."""
    for i, (before, after) in enumerate(pairs):
        colour = "good" if after > before else "bad" if after < before else "soft"
        axes.plot([before, after], [i, i], color=COLOURS[colour], linewidth=2.6, zorder=1)
        axes.plot(before, i, "o", color=COLOURS["soft"], markersize=6, zorder=2)
        axes.plot(after, i, "o", color=COLOURS[colour], markersize=8, zorder=3)
    for colour, label in (("soft", "without"), ("good", "with: better"), ("bad", "with: worse")):
        if colour != "bad" or any(after < before for before, after in pairs):
            axes.plot([], [], "o", color=COLOURS[colour], markersize=7, label=label)


@if_possible
def before_and_after(before: Sequence[float], after: Sequence[float]) -> str:
    """How many tasks reach which mean reward, without and with the library."""
    low, high = min((*before, *after)), max((*before, *after))
    width = (high - low) / _BARS or 1.0
    with canvas("Tasks by reward", "histogram") as (axes, finish):
        for values, colour, label, side in (
            (before, "soft", "without", 0.0),
            (after, "good", "with the library", 0.42),
        ):
            counts = [0] * _BARS
            for value in values:
                counts[min(_BARS - 1, int((value - low) / width))] += 1
            places = [low + (i + 0.29 + side) * width for i in range(_BARS)]
            axes.bar(places, counts, 0.4 * width, color=COLOURS[colour], linewidth=0, label=label)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel("mean reward of a task")
        axes.set_ylabel("tasks")
        legend(axes)
        return finish()


@if_possible
def cost_and_reward(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean reward against what an attempt costs, for each arm."""
    with canvas("Reward against cost", "cost") as (axes, finish):
        for row in rows:
            errorbars(
                axes, [(row["tokens"], row["mean"])], "good" if row["is_kept"] else "soft",
                row["name"], line=False,
            )  # fmt: skip
        places = [row["tokens"] for row in rows]
        room = 0.35 * (max(places) - min(places)) or 0.5 * max(places) or 1.0
        axes.set_xlim(max(0.0, min(places) - room), max(places) + room)
        axes.xaxis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel("tokens of an attempt, prompt included")
        axes.set_ylabel("mean reward")
        legend(axes)
        return finish()
