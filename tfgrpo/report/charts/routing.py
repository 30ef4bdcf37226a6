"""Cost against quality of routers, single models and the best that could be had.

Does not know how anything was decided. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfgrpo.report.charts.axes import COLOURS, canvas, if_possible, legend

__all__ = ["cost_and_quality"]

Points = Sequence[tuple[float, float]]


@if_possible
def cost_and_quality(curves: Mapping[str, Points], *, ours: str, singles: str, oracle: str) -> str:
    """Quality against dollars a prompt.

    Args:
        curves: points (cost, quality) of each, from cheap to dear.
        ours: whose curve is the router's.
        singles: single models; the line between them is random mixing.
        oracle: who knows every outcome beforehand.
    """
    looks = {
        ours: ("accent", "this router", "-", 2.8),
        singles: ("ink", "single models, mixed", "--", 1.4),
        oracle: ("good", "oracle", ":", 2.2),
    }
    with canvas("Cost against quality", "routing", 3.8) as (axes, finish):
        others = [name for name in curves if name not in looks]
        for name in others:
            cost, quality = zip(*curves[name], strict=True)
            label = "other estimators" if name == others[0] else None
            axes.plot(cost, quality, color=COLOURS["soft"], linewidth=1.2, label=label)
        for name, (colour, label, style, width) in looks.items():
            if name not in curves:
                continue
            cost, quality = zip(*curves[name], strict=True)
            axes.plot(
                cost, quality, color=COLOURS[colour], linewidth=width, linestyle=style,
                marker="o" if name == singles else "", markersize=7, label=label,
            )  # fmt: skip
        axes.xaxis.get_major_locator().set_params(nbins=4)
        axes.set_xlabel("US dollars a prompt")
        axes.set_ylabel("mean quality")
        legend(axes)
        return finish()
