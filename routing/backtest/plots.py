"""Curves of label efficiency and of cost against quality, with matplotlib.

Does not know where the rows come from. Source: own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.errors import MissingExtraError
from tfgrpo.routing.backtest.backtest import BacktestRow
from tfgrpo.routing.backtest.metrics import CostCurve, hull

__all__ = ["cost_curves", "label_curves"]


def _figure(title: str) -> tuple[Any, Any]:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError.of("report", "a plot", "matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def label_curves(rows: Sequence[BacktestRow], path: str | Path, *, title: str = "") -> None:
    """Write Brier score against labels of the new model, a line a method."""
    figure, axes = _figure(title)
    for method in dict.fromkeys(r.method for r in rows):
        mine = sorted((r.n, r.brier) for r in rows if r.method == method)
        strong = method == "full"
        axes.plot(*zip(*mine, strict=True), marker="o", label=method, lw=2.5 if strong else 1.0)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("labels of the new model")
    axes.set_ylabel("Brier score (lower is better)")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)


def cost_curves(curves: Mapping[str, CostCurve], path: str | Path, *, title: str = "") -> None:
    """Write quality against cost, the hull of each router."""
    figure, axes = _figure(title)
    for name, curve in curves.items():
        axes.plot(*hull(curve.cost, curve.quality), marker=".", label=name)
    axes.set_xlabel("mean cost a prompt, US dollars")
    axes.set_ylabel("mean quality")
    axes.legend(fontsize="small")
    figure.savefig(path)
