"""All runs of a folder as one site: learning, evaluation, training, escalation, search, routing.

The list is read anew each time it is asked for, and so is what a page shows: it may stay open while
runs go on. A page is found by its place in the list, never by a path of the asker's.

Does not know how a run's page is made. Source: own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from tfgrpo.diagnosis.progress import read_progress
from tfgrpo.errors import StoreError
from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, chart_card, copyable, table, tag
from tfgrpo.report.page import document
from tfgrpo.report.served.one_run import RunSite
from tfgrpo.report.served.rows import METRICS, run_row, training_row, when_words
from tfgrpo.report.served.server import NOT_FOUND, Answer, LiveServer
from tfgrpo.report.served.training import load_training, render_training
from tfgrpo.store.postgres.places import is_run

__all__ = ["AllRuns", "Found", "find_all", "serve_all"]

Kind = Literal["run", "training", "escalation", "search", "routing"]
_DEPTH = 4
_SKIPPED = {"checkpoints", "model", "tensorboard", "cache", "node_modules", "__pycache__"}
_MARKS: Mapping[str, Kind] = {"tfgrpo search": "search", "tfgrpo routing": "routing"}
_HEAD = 2000
"""Characters of a page in which it says who made it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something that has a page."""

    kind: Kind
    path: Path
    name: str
    """Its place below the root."""


def find_all(root: Path) -> list[Found]:
    """Return everything below a folder that has a page, by name."""
    found = []
    for folder, inner, files in os.walk(root):
        place = Path(folder)
        depth = len(place.relative_to(root).parts)
        inner[:] = sorted(
            d for d in inner if d not in _SKIPPED and not d.startswith(".") and depth < _DEPTH
        )
        found += [Found(kind, path, str(path.relative_to(root)))
                  for kind, path in _in_folder(place, files)]  # fmt: skip
    named = [Found(f.kind, f.path, root.resolve().name if f.name == "." else f.name) for f in found]
    return sorted(named, key=lambda f: f.name)


def _in_folder(folder: Path, files: list[str]) -> Iterator[tuple[Kind, Path]]:
    if is_run(folder):
        yield "run", folder
    elif METRICS in files:
        yield "training", folder
    if "escalate.json" in files:
        yield "escalation", folder
    for name in sorted(files):
        if name.endswith(".html") and name != "report.html":
            kind = _kind_of(folder / name)
            if kind:
                yield kind, folder / name


def _kind_of(page: Path) -> Kind | None:
    try:
        with page.open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    return next((kind for mark, kind in _MARKS.items() if f'content="{mark}"' in head), None)


def serve_all(root: Path, port: int = 0) -> LiveServer:
    """Serve all runs below a folder in a thread of its own.

    Raises:
        ConfigError: the port cannot be used.
    """
    return LiveServer(AllRuns(root), port)


class AllRuns:
    """The list of a folder's runs, and the page of each.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sites: dict[str, RunSite] = {}

    def answer(self, path: str) -> Answer:
        """Return the list, its status, or a page of one thing in it."""
        kind, _, rest = path.partition("/")
        name, _, inner = rest.partition("/")
        site = self._sites.get(unquote(name)) if kind == "run" else None
        if site is not None and inner == "status":
            return site.answer(inner)  # asked every few seconds
        found = find_all(self._root)
        if path == "":
            return Answer(render_list(self._root, found, _version(found)))
        if path == "status":
            return Answer(json.dumps({"version": _version(found)}), "application/json")
        wanted = next((f for f in found if (f.kind, f.name) == (kind, unquote(name))), None)
        return NOT_FOUND if wanted is None else self._page(wanted, inner)

    def _page(self, found: Found, inner: str) -> Answer:
        home = "../../"
        if found.kind == "run":
            site = self._sites.setdefault(found.name, RunSite(found.path, home=home))
            return site.answer(inner)
        if found.kind == "training":
            version = _mark(found.path / METRICS)
            if inner == "status":
                return Answer(json.dumps({"version": version}), "application/json")
            view = load_training(found.path)
            return Answer(render_training(view, live_version=version, home=home))
        try:
            if found.kind == "escalation":
                return Answer(render_escalation(found.path, found.name, home))
            return Answer(found.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError) as exc:
            told = f"{found.name} cannot be shown: {type(exc).__name__}: {exc}\n"
            return Answer(told, "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)


def _version(found: Sequence[Found]) -> str:
    return str(hash(tuple(f"{f.kind}:{f.name}:{_mark(_journal(f))}" for f in found)))


def _journal(found: Found) -> Path:
    return {"run": found.path / "run.db", "training": found.path / METRICS}.get(
        found.kind, found.path
    )


def _mark(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError:
        return "none"
    return f"{stat.st_mtime_ns:x}.{stat.st_size:x}"


# ---- the list ----------------------------------------------------------------------------------

_TITLES: Mapping[Kind, str] = {
    "run": "Learning and evaluation",
    "training": "Training",
    "escalation": "From learning to training",
    "search": "Search trees",
    "routing": "Routing",
}


def render_list(root: Path, found: Sequence[Found], version: str = "") -> str:
    """Return the page that lists what was found below a folder."""
    parts: list[Child] = [h("h1", f"Runs in {root}")]
    if not found:
        parts.append(
            h("p", "Nothing is here yet. A run writes into runs/ unless its settings say else:")
        )
        parts.append(copyable("tfgrpo init first\ntfgrpo learn first/config.toml"))
    for kind, title in _TITLES.items():
        rows = [_row(f) for f in found if f.kind == kind]
        if rows:
            heads = ["name", "changed", "what came of it", "spent"]
            listed = table(heads, rows)
            parts += [h("h2", title), h("div", listed, class_="card")]
    nav = h("nav", h("b", "tfgrpo"), h("span", "all runs", class_="note"), class_="top")
    return document("tfgrpo: all runs", [nav, h("main", parts, id="report")], live_version=version)


def _row(found: Found) -> list[Child]:
    link = h("a", found.name, href=f"{found.kind}/{quote(found.name, safe='')}/")
    when, outcome, spent = _cells(found)
    return [
        cell("name", link),
        cell("changed", when),
        cell("what came of it", outcome),
        cell("spent", spent),
    ]


def _cells(found: Found) -> tuple[str, Child, str]:
    if found.kind == "run":
        try:
            return _run_cells(run_row(found.path), read_progress(found.path))
        except StoreError as exc:
            return "–", h("span", str(exc), class_="bad"), "–"
    when = when_words(found.path.stat().st_mtime)
    if found.kind == "training":
        row = training_row(found.path)
        reward = row["reward_mean"]
        mean = "" if reward is None else f", mean reward {reward:.3f} in the last"
        return str(row["changed"]), f"{row['trained_steps']} steps{mean}", "–"
    if found.kind == "escalation":
        kept = _json(found.path / "escalate.json").get("kept", "")
        return when, f"{kept} is kept" if kept else "–", "–"
    return when, "a tree" if found.kind == "search" else "cost against quality", "–"


def _run_cells(
    row: Mapping[str, Any], progress: Mapping[str, Any] | None
) -> tuple[str, Child, str]:
    if "error" in row:
        return "–", h("span", row["error"], class_="bad"), "–"
    state = row["state"] or "evaluated or drawn"
    if progress is not None and not progress["ended"] and not progress["is_quiet"]:
        state = f"running: {progress['stages'][-1]['stage']}" if progress["stages"] else "running"
    kind = {"kept": "good", "not ended": "accent"}.get(row["state"], "")
    kind = "accent" if state.startswith("running") else kind
    gain = "" if row["gain"] is None else f" gain {row['gain']:+.3f}"
    money = "price unknown" if row["cost_usd"] is None else f"${row['cost_usd']:.4f}"
    return row["changed"], [tag(state, kind), gain], f"{row['calls']:,} calls, {money}"


# ---- an escalation -----------------------------------------------------------------------------

_ARMS = {
    "base": "base",
    "base_library": "base + library",
    "trained": "trained",
    "trained_library": "trained + library",
}


def render_escalation(folder: Path, name: str, home: str) -> str:
    """Return the page of an escalation: the arms side by side, what was kept and why.

    Raises:
        OSError: its file cannot be read.
        ValueError: it is no JSON.
        KeyError: it is of another form.
    """
    row = _json(folder / "escalate.json")
    arms = [(_ARMS.get(k, k.replace("_", " ")), v, "accent") for k, v in row["arms"].items()]
    changes = [(k.replace("_", " "), v, "") for k, v in row["differences"].items()]
    pictures = [
        chart_card("Mean reward on the test tasks", charts.intervals(
            arms, title="Arms", xlabel="mean reward", band=None)),
        chart_card("Differences, paired by task", charts.intervals(
            changes, title="Differences", xlabel="change of mean reward", band=None)),
    ]  # fmt: skip
    nav = h("nav", h("a", "← all runs", href=home), h("b", name), class_="top")
    main: Html = h(
        "main",
        h("section", h("p", "from learning to training", class_="note"),
          h("h1", f"{row['kept']} is kept"), h("p", row["verdict"]["text"]),
          h("p", f"Chosen on the {row['choice']}.", class_="note"), class_="card hero open"),
        h("h2", "Comparison"),
        h("div", pictures, class_="grid"),
        h("h2", "The model"),
        copyable(f"tfgrpo serve-model {row['model']}"),
        id="report",
    )  # fmt: skip
    return document(f"{name} · tfgrpo escalation", [nav, main])


def _json(path: Path) -> dict[str, Any]:
    row = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"{path.name} holds no object")
    return row
