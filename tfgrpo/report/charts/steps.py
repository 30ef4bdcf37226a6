"""Charts of a run's course: rewards, what groups can teach, the library's growth, spend.

Does not know the test split. Source: own.
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
    short,
    step_axis,
)

__all__ = ["curve", "growth", "informative", "reward_by_tokens", "spend"]

_KINDS: Mapping[str, tuple[str, str]] = {
    "mixed": ("accent", "differ: can teach"),
    "all_fail": ("bad", "all failed"),
    "all_pass": ("good", "all right"),
    "equal": ("soft", "all equal"),
    "unusable": ("line", "not scored"),
}


@if_possible
def curve(points: Sequence[Mapping[str, Any]]) -> str:
    """Reward by step with intervals: practice, the library in use, each proposal and its fate."""
    steps = sorted({p["step"] for p in points})
    looks: dict[int, int] = {}
    with canvas("Reward by step", "lc") as (axes, finish):
        for arm, colour, label in (
            ("practice", "soft", "practice"),
            ("current", "accent", "gate: library so far"),
        ):
            rows = {p["step"]: p[arm] for p in points if p[arm]}
            if rows:
                errorbars(axes, sorted(rows.items()), colour, label)
        for is_accepted, colour, label in (
            (True, "good", "gate: accepted"),
            (False, "bad", "gate: rejected"),
        ):
            rows_ = []
            for p in points:
                if p["proposed"] and bool(p["accepted"]) == is_accepted:
                    looks[p["step"]] = looks.get(p["step"], 0) + 1
                    rows_.append((p["step"] + 0.08 + 0.09 * looks[p["step"]], p["proposed"]))
            if rows_:
                errorbars(axes, rows_, colour, label, line=False, marker="D")
        axes.set_ylabel("mean reward")
        step_axis(axes, steps)
        legend(axes)
        return finish()


def _stack(
    axes: Any, steps: Sequence[int], layers: Sequence[tuple[Sequence[float], str, str]]
) -> None:
    """Draw bars on top of each other; a layer is (heights, colour, label), left out where empty."""
    bottom = [0.0] * len(steps)
    for sizes, colour, label in layers:
        if any(sizes):
            axes.bar(steps, sizes, 0.72, bottom, color=COLOURS[colour], linewidth=0, label=label)
        bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]


@if_possible
def informative(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of practice groups by what they can teach, step by step."""
    with canvas("What practice groups can teach", "informative") as (axes, finish):
        steps = [r["step"] for r in rows]
        wholes = [max(1, sum(r[k] for k in _KINDS)) for r in rows]
        _stack(
            axes,
            steps,
            [
                ([r[kind] / n for r, n in zip(rows, wholes, strict=True)], colour, label)
                for kind, (colour, label) in _KINDS.items()
            ],
        )
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylabel("groups")
        step_axis(axes, steps)
        legend(axes)
        return finish()


@if_possible
def growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Entries of the library that was kept so far, after each step, by kind."""
    with canvas("Entries in the library", "growth") as (axes, finish):
        steps = [r["step"] for r in rows]
        lessons, exemplars = ([r[kind] for r in rows] for kind in ("lessons", "exemplars"))
        _stack(
            axes, steps, [(lessons, "accent", "lessons"), (exemplars, "good", "worked examples")]
        )
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("entries")
        step_axis(axes, steps)
        legend(axes)
        return finish()


@if_possible
def reward_by_tokens(rows: Sequence[Mapping[str, Any]]) -> str:
    """Gate reward of the library in use against the tokens that learning had taken by then."""
    with canvas("Reward against tokens spent", "paid") as (axes, finish):
        x = [r["tokens"] for r in rows]
        axes.fill_between(
            x, [r["low"] for r in rows], [r["high"] for r in rows], step="post",
            color=COLOURS["band"], linewidth=0,
        )  # fmt: skip
        axes.step(
            x, [r["estimate"] for r in rows], where="post", color=COLOURS["accent"], linewidth=2.4,
            marker="o", markersize=7,
        )  # fmt: skip
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.xaxis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel("tokens of practice and gate so far")
        axes.set_ylabel("gate reward")
        return finish()


@if_possible
def spend(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens by stage, prompt and completion."""
    totals: dict[str, list[int]] = {}
    for row in rows:
        stage = totals.setdefault(row["stage"], [0, 0])
        stage[0] += row["prompt_tokens"]
        stage[1] += row["completion_tokens"]
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    with canvas("Tokens by stage", "spend", 1.1 + 0.36 * max(1, len(ordered))) as (axes, finish):
        places = range(len(ordered))
        prompt = [t[0] for _, t in ordered]
        replies = [t[1] for _, t in ordered]
        axes.barh(places, prompt, 0.62, color=COLOURS["accent"], linewidth=0, label="prompt")
        axes.barh(
            places, replies, 0.62, prompt, color=COLOURS["good"], linewidth=0, label="replies"
        )
        name_rows(axes, [name or "other" for name, _ in ordered], 14)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.xaxis.get_major_locator().set_params(nbins=5)
        legend(axes)
        return finish()
