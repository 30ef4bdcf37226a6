"""Curves over the steps of a training run.

Does not know what a figure means. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.report.charts.axes import COLOURS, canvas, if_possible, legend, step_axis

__all__ = ["lines"]

_COLOURS = ("accent", "good", "bad", "soft")


@if_possible
def lines(
    title: str, series: Sequence[tuple[str, Sequence[tuple[int, float]]]], *, share: bool = False
) -> str:
    """Curves by step; a single point is drawn as one.

    Args:
        title: what is drawn, and below the axis how its texts are told apart from others'.
        series: name and (step, value) of each curve.
        share: values are shares, from 0 to 1.
    """
    with canvas(title, title) as (axes, finish):
        steps = sorted({step for _, points in series for step, _ in points})
        for (name, points), colour in zip(series, _COLOURS, strict=False):
            marker = "o" if len(points) < 25 else ""
            axes.plot(
                [s for s, _ in points], [v for _, v in points], color=COLOURS[colour],
                linewidth=2.2, marker=marker, markersize=6, label=name,
            )  # fmt: skip
        if share:
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        step_axis(axes, steps)
        if len(series) > 1:
            legend(axes)
        return finish()
