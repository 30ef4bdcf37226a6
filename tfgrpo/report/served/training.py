"""The page of a training run: its curves, its held-out scores, some of its replies.

Reads what the run writes each step, leniently: a line that is cut off is left out. Does not know
how training works. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, chart_card, copyable, table, tag
from tfgrpo.report.page import document
from tfgrpo.report.wording import count_words
from tfgrpo.runtime.durations import duration_words

__all__ = ["TrainingView", "load_training", "render_training"]

_CHARTS: Sequence[tuple[str, tuple[tuple[str, str], ...], bool, str]] = (
    ("Reward by step", (("reward_mean", "mean reward"),), False, "Of the attempts of a step."),
    (
        "What can teach, what is cut",
        (("informative_share", "groups that differ"), ("truncated_share", "replies cut"),
         ("graded_share", "attempts scored")),
        True,
        "A step without groups that differ moves no weight.",
    ),
    ("Gradient norm", (("grad_norm", "gradient norm"),), False, ""),
    ("Length of a reply", (("length_mean", "mean"), ("length_max", "longest")), False, "Tokens."),
    ("Entropy", (("entropy", "entropy"),), False, "Nats a token: how unsure the model still is."),
    (
        "Seconds of a step",
        (("rollout_seconds", "attempts"), ("update_seconds", "update")),
        False,
        "",
    ),
)  # fmt: skip


_SHOWN_STEPS = 40
"""Newest steps whose replies a page shows."""


@dataclass(frozen=True, slots=True)
class TrainingView:
    """A training run at one moment."""

    name: str
    steps: tuple[Mapping[str, Any], ...] = ()
    """Figures of each step."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Held-out scores, the one before training first."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Some groups of each step."""
    model: str = ""
    """Folder of the trained model; empty while there is none."""
    total: int | None = None
    """Steps that were asked for, where the run said so."""


def load_training(folder: Path) -> TrainingView:
    """Read what a training run has written so far."""
    model = folder / "model"
    samples = tuple(_rows(folder / "samples.jsonl"))
    return TrainingView(
        name=folder.resolve().name,
        steps=tuple(_rows(folder / "metrics.jsonl")),
        evaluations=tuple(_rows(folder / "evaluations.jsonl")),
        samples=samples[-_SHOWN_STEPS:],
        model=str(model) if (model / "config.json").exists() else "",
        total=samples[-1].get("of_steps") if samples else None,
    )


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # being written
        if isinstance(row, dict):
            yield row


def render_training(view: TrainingView, *, live_version: str = "", home: str = "") -> str:
    """Return the page of a training run.

    Args:
        view: the run.
        live_version: as of `render_page`.
        home: address of the list of all runs, where there is one.
    """
    sections = (("curves", "Curves"), ("held-out", "Held out"), ("replies", "Replies"))
    links: list[Child] = [h("a", "← all runs", href=home)] if home else []
    links += [h("b", view.name), [h("a", title, href=f"#{name}") for name, title in sections]]
    body: list[Child] = [
        h("nav", links, class_="top", aria_label="Sections"),
        h(
            "main",
            _head(view),
            h("h2", "Curves", id="curves"),
            _curves(view),
            h("h2", "Held-out tasks", id="held-out"),
            _held_out(view),
            h("h2", "Some replies", id="replies"),
            _samples(view),
            id="report",
        ),
    ]
    return document(f"{view.name} · tfgrpo training", body, live_version=live_version)


def _head(view: TrainingView) -> Html:
    done = len(view.steps)
    asked = f" of {view.total}" if view.total else ""
    tiles: list[Child] = []
    if view.steps:
        last = view.steps[-1]
        tiles = [
            _tile(f"{last['step']}{asked}", "steps"),
            _tile(_three(last.get("reward_mean")), "mean reward of the last step"),
            _tile(_share(last.get("informative_share")), "of its groups differ"),
            _tile(_share(last.get("truncated_share")), "of its replies were cut"),
        ]
        left = _left(view)
        if left:
            tiles.append(_tile(left, "left at this pace"))
    gain = view.evaluations[-1].get("gain") if view.evaluations else None
    return h(
        "section",
        h("p", "training run", class_="note"),
        h("h1", _headline(view, gain)),
        [h("p", words, class_="bad") for words in remarks(view.steps)],
        h("div", tiles, class_="tiles") if done else h("p", "No step has ended yet."),
        view.model and copyable(f"tfgrpo serve-model local:{view.model}"),
        class_=f"card hero {'met' if gain and gain['low'] > 0 else 'open'}",
        id="result",
    )


def _headline(view: TrainingView, gain: Mapping[str, Any] | None) -> str:
    if gain:
        words = "beyond noise" if gain["low"] > 0 or gain["high"] < 0 else "within noise"
        return f"Held-out reward {gain['estimate']:+.3f} by training, {words}"
    return "Trained" if view.model else "Training"


def remarks(steps: Sequence[Mapping[str, Any]], k: int = 3) -> list[str]:
    """Return what keeps the newest steps from teaching, in words.

    Args:
        steps: figures of each step.
        k: steps in a row after which a thing is no accident.
    """
    last = steps[-k:]
    found = []
    if last and all(row.get("truncated_share", 0) >= 0.999 for row in last[-1:]):
        found.append("All replies of the last step were cut: raise rollout.max_tokens.")
    if len(last) == k and all(row.get("informative_share") == 0 for row in last):
        found.append(
            f"No group differed in reward for {k} steps: nothing is learnt. Easier or harder "
            "tasks, more attempts a group, or [hints] (docs/hints.md)."
        )
    return found


def _left(view: TrainingView) -> str:
    if not view.total or view.model:
        return ""
    seconds = [row["seconds"] for row in view.steps if isinstance(row.get("seconds"), (int, float))]
    left = view.total - int(view.steps[-1]["step"])
    return duration_words(left * sum(seconds) / len(seconds)) if seconds and left > 0 else ""


def _curves(view: TrainingView) -> Html:
    cards: list[Child] = []
    for title, names, share, note in _CHARTS:
        series = [(label, _points(view.steps, key)) for key, label in names]
        series = [(label, points) for label, points in series if points]
        if series:
            cards.append(chart_card(title, charts.lines(title, series, share=share), note))
    if not cards:
        return h("p", "The curves come with the first step.", class_="note")
    return h("div", cards, class_="pictures")


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [
        (int(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), (int, float)) and isinstance(row.get("step"), int)
    ]


def _held_out(view: TrainingView) -> Html:
    if not view.evaluations:
        words = "No held-out tasks were tried; tasks.held_out names them."
        return h("p", words, class_="note")
    rows = [
        [
            cell("after step", "before training" if row["step"] == 0 else row["step"]),
            cell("mean reward", f"{row['mean']:.3f}", "n"),
            cell("95% interval", f"{row['low']:.3f} to {row['high']:.3f}", "n"),
            cell("tasks", row["tasks"], "n"),
        ]
        for row in view.evaluations
    ]
    listed = table(["after step", "mean reward", "95% interval", "tasks"], rows, numbers_from=1)
    chart = charts.lines("Held-out mean reward", [("held out", _points(view.evaluations, "mean"))])
    return h(
        "div", chart_card("Held-out mean reward", chart), h("div", listed, class_="card"),
        class_="grid",
    )  # fmt: skip


def _samples(view: TrainingView) -> Html:
    shown = [(row["step"], group) for row in reversed(view.samples) for group in row["groups"]]
    if not shown:
        return h("p", "None were kept (run.keep_samples).", class_="note")
    cards = []
    for step, row in shown:
        replies = [
            h("div", tag(_reward(r["reward"]), _colour(r["reward"])), " ",
              r.get("cut") and tag("cut", ""), h("pre", r["text"] or "(nothing)"), class_="turn")
            for r in row.get("replies", ())
        ]  # fmt: skip
        head = f"step {step}: {row['task_id']}, {count_words(len(replies), 'reply')} shown"
        cards.append(
            h("details", h("summary", head), h("pre", row.get("prompt", "")), replies,
              class_="card")
        )  # fmt: skip
    return h("div", cards, class_="grid wide")


def _reward(value: float | None) -> str:
    return "no reward" if value is None else f"{value:.2f}"


def _colour(value: float | None) -> str:
    if value is None:
        return ""
    return "good" if value >= 1 else "bad" if value <= 0 else "accent"


def _tile(value: str, words: str) -> Html:
    return h("div", h("b", value), h("span", words), class_="tile")


def _three(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "–"


def _share(value: Any) -> str:
    return f"{value:.0%}" if isinstance(value, (int, float)) else "–"
