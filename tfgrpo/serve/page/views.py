"""The pages as HTML: every text enters as text, nothing runs, nothing is loaded from elsewhere.

Does not know HTTP or what a command does. Source: own, on the report's elements and style.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from tfgrpo.experience.artefact import Artefact
from tfgrpo.report.html import Child, Html, h, trusted
from tfgrpo.report.html_parts import cell, table, tag
from tfgrpo.serve.content import Removed
from tfgrpo.serve.learning import canary
from tfgrpo.serve.learning.proposing import flagged
from tfgrpo.serve.learning.route import RouteLearning
from tfgrpo.serve.learning.states import Transition
from tfgrpo.statistics.sequential import EffectInterval

__all__ = ["document", "forgotten", "login", "overview", "policy", "route_page"]

_COLOURS = {"waiting": "accent", "canary": "accent", "watched": "good", "frozen": "bad",
            "paused": "bad"}  # fmt: skip


@cache
def _style() -> str:
    own = "form{display:inline-block;margin:.3rem .5rem .3rem 0}button,input{font:inherit}"
    return files("tfgrpo.report").joinpath("page.css").read_text(encoding="utf-8") + own


@cache
def policy() -> str:
    """Return the content security policy: our one style sheet, our forms, nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


def document(title: str, *body: Child) -> bytes:
    """Return a whole page."""
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="referrer", content="same-origin"),
        h("title", f"{title} · tfgrpo gateway"),
        h("style", trusted(_style())),
    )
    top = h("nav", h("b", "Gateway"), h("a", "Routes", href="/"), class_="top")
    page = h("html", head, h("body", top, h("main", h("h1", title), *body)), lang="en")
    return f"<!doctype html>\n{page}\n".encode()


def login(wrong: bool) -> bytes:
    """Return the form that asks for the admin secret."""
    return document(
        "Sign in",
        h("p", "The secret is wrong.", class_="bad") if wrong else None,
        h(
            "form",
            h("label", "Admin secret ", h("input", type="password", name="secret",
                                          autocomplete="off")),
            h("button", "Sign in", type="submit"),
            method="post",
            action="/login",
        ),
        h("p", "It was printed when the gateway started, or is in the variable that "
          "serve.admin_key_env names.", class_="note"),
    )  # fmt: skip


def overview(
    rows: Sequence[dict[str, Any]],
    caps: Sequence[tuple[str, str, float, float]],
    spend: Sequence[Any],
    trouble: Sequence[str],
    token: str,
) -> bytes:
    """Return all routes, caps and what was spent."""
    routes = table(
        ("Route", "State", "Library", "Upstreams", "Requests today"),
        [
            [
                cell("Route", h("a", r["name"], href=f"/routes/{r['name']}")),
                cell("State", tag(r["state"], _COLOURS.get(r["state"], ""))),
                cell("Library", h("span", r["library"], class_="mono")),
                cell("Upstreams", r["upstreams"]),
                cell("Requests today", r["requests"], "n"),
            ]
            for r in rows
        ],
        4,
    )
    limits = table(
        ("Cap of", "Limit", "Spent", "Cap"),
        [[cell("Cap of", a), cell("Limit", b), cell("Spent", f"{c:.6g}", "n"),
          cell("Cap", f"{d:.6g}", "n")] for a, b, c, d in caps],
        2,
    )  # fmt: skip
    spent = table(
        ("Stage", "Model", "Calls", "Cost", "Kept apart (worst case)"),
        [[cell("Stage", s.stage), cell("Model", s.model), cell("Calls", s.usage.calls, "n"),
          cell("Cost", _money(s.usage.cost_usd), "n"),
          cell("Kept apart (worst case)", _money(s.booked.cost_usd), "n")] for s in spend],
        2,
    )  # fmt: skip
    return document(
        "Routes",
        [h("p", why, class_="bad") for why in trouble],
        h("div", routes, class_="card"),
        h("h2", "Caps"),
        h("div", limits if caps else h("p", "No caps are set.", class_="note"), class_="card"),
        h("h2", "Spent"),
        h("div", spent, class_="card"),
        h("h2", "Forget an end user"),
        h("div", _forget(token), class_="card"),
    )


def _forget(token: str) -> Child:
    return h(
        "form",
        h("input", type="hidden", name="token", value=token),
        h("label", "End user, as clients name it ", h("input", name="end_user")),
        h("label", " of the key ", h("input", name="key", placeholder="all")),
        h("button", "Remove what is kept of it", type="submit"),
        method="post",
        action="/admin/forget",
    )


def forgotten(removed: Removed) -> bytes:
    """Return what was removed of an end user, and what had come from it."""
    rows = [
        [cell("Library", version, "mono"), cell("Entry", entry), cell("Text", text, "text")]
        for version, entry, text in removed.entries
    ]
    came = table(("Library", "Entry", "Text"), rows) if rows else h(
        "p", "No library entry came from it.", class_="note")  # fmt: skip
    return document(
        "Removed",
        h("p", f"The content of {removed.requests} requests and {removed.groups} groups is gone."),
        *(
            h("p", f"{path} is kept from a mended journal and may hold it still: delete that file.")
            for path in removed.left
        ),
        h("h2", "Entries that came from it"),
        h("div", came, class_="card"),
    )


def _money(value: float | None) -> str:
    return "unknown" if value is None else f"${value:.6f}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Forms:
    """Makes the forms of a page, each with its token and the version it is meant for."""

    def __init__(self, route: str, version: int, token: str) -> None:
        self._route, self._version, self._token = route, version, token

    def button(self, event: str, label: str, *more: Child) -> Html:
        """Return a form that gives one command."""
        return h(
            "form",
            [
                h("input", type="hidden", name=name, value=value)
                for name, value in (
                    ("route", self._route),
                    ("event", event),
                    ("expected", str(self._version)),
                    ("token", self._token),
                )
            ],
            *more,
            h("button", label, type="submit", name="do", value=event),
            method="post",
            action="/admin/act",
        )

    def settle(self, response_id: str, value: str, label: str) -> Html:
        """Return a form that settles a contradiction."""
        fields = (("response_id", response_id), ("value", value), ("token", self._token),
                  ("route", self._route))  # fmt: skip
        return h(
            "form",
            [h("input", type="hidden", name=name, value=v) for name, v in fields],
            h("button", label, type="submit"),
            method="post",
            action="/admin/settle",
        )


def route_page(
    learning: RouteLearning,
    forms: Forms,
    conflicts: Sequence[tuple[str, float, float]],
    worth: EffectInterval | None,
    groups: tuple[int, int],
) -> bytes:
    """Return one route: its state, the proposal with its evidence, the test, the history."""
    state = learning.state
    summary = h(
        "div",
        h("p", tag(state.name, _COLOURS.get(state.name, "")), " ", state.reason),
        h("p", f"Library in force: {learning.current.library.version_id}, "
          f"{len(learning.current.library)} entries. Groups: {groups[0]}, informative: "
          f"{groups[1]}, used: {state.used_groups}.", class_="note"),
        _identity(learning),
        _worth(worth),
        _commands(learning, forms),
        class_="card hero",
    )  # fmt: skip
    return document(
        f"Route {learning.route.name}",
        summary,
        _proposal(learning, forms),
        _test(learning.verdict) if state.name == "canary" else None,
        _conflicts(conflicts, forms),
        h("h2", "Library in force"),
        _entries(learning.current),
        h("h2", "History"),
        _history(learning.transitions),
    )


def _identity(learning: RouteLearning) -> Child:
    if learning.route.settings.groups.task_identity == "id":
        return None
    return h("p", "Equal messages are taken for one task here (groups.task_identity).",
             class_="note")  # fmt: skip


def _worth(worth: EffectInterval | None) -> Child:
    if worth is None:
        return h("p", "No holdout: what the library is worth is not measured.", class_="note")
    return h(
        "p",
        f"Worth of the library against the holdout, at every look: {worth.low:+.3f} to "
        f"{worth.high:+.3f} over {worth.n} units, on {_time(datetime.now(UTC).timestamp())}.",
    )


def _commands(learning: RouteLearning, forms: Forms) -> Child:
    state = learning.state
    rows: list[Child] = []
    if state.name == "canary":
        rows.append(forms.button("pause", "Pause the test"))
        rows.append(forms.button("reject", "Reject"))
        if learning.settings.approve == "before_promotion" and state.approvals < 2:
            rows.append(forms.button("approve", "Agree to the promotion"))
    if state.name == "paused":
        rows.append(forms.button("resume", "Go on with the test"))
        rows.append(forms.button("reject", "Reject"))
    if state.candidate == "" and state.previous:
        rows.append(forms.button("roll_back", "Roll back to the library before"))
        now = h("label", h("input", type="checkbox", name="now", value="1"),
                " running sessions too ")  # fmt: skip
        rows.append(forms.button("roll_back", "Roll back now", now))
    if state.name == "canary":
        rows.append(forms.button("roll_back", "Stop the test and keep what is in force"))
    event = "thaw" if state.name == "frozen" else "freeze"
    rows.append(forms.button(event, "Go on learning" if event == "thaw" else "Freeze"))
    return h("div", rows)


def _proposal(learning: RouteLearning, forms: Forms) -> Child:
    candidate = learning.candidate
    if candidate is None:
        return None
    diff = learning.current.library.diff(candidate.library)
    marked = {
        key: why for key, why in flagged(candidate) if key in {e.experience_id for e in diff.added}
    }
    rows = [
        [cell("", tag("new", "good")), cell("Entry", e.experience_id), cell("Text", e.body, "text"),
         cell("Trust", e.trust), cell("Look", marked.get(e.experience_id, ""), "bad")]
        for e in diff.added
    ]  # fmt: skip
    rows += [[cell("", tag("gone", "bad")), cell("Entry", e.experience_id),
              cell("Text", e.body, "text"), cell("Trust", e.trust), cell("Look", "")]
             for e in diff.removed]  # fmt: skip
    rows += [[cell("", tag("changed", "accent")), cell("Entry", b.experience_id),
              cell("Text", f"{a.body}\n→ {b.body}", "text"), cell("Trust", b.trust),
              cell("Look", "")] for a, b in diff.changed]  # fmt: skip
    ticks = [
        h("p", h("label", h("input", type="checkbox", name=f"tick-{key}", value="1"),
                 f" I have read {key}: {why}"))
        for key, why in marked.items()
    ]  # fmt: skip
    evidence = next((t for t in reversed(learning.transitions) if t.event == "proposed"), None)
    answer: list[Child] = []
    if learning.state.name == "waiting":
        answer = [forms.button("approve", "Approve for the live test", *ticks),
                  forms.button("reject", "Reject")]  # fmt: skip
    return [
        h("h2", "Proposal"),
        h("div", table(("", "Entry", "Text", "Trust", "Look"), rows), answer, class_="card"),
        h("details", h("summary", "Evidence"),
          h("pre", json.dumps(dict(evidence.body), indent=1)) if evidence else None),
    ]  # fmt: skip


def _test(verdict: canary.CanaryVerdict | None) -> Child:
    if verdict is None:
        return None
    return [
        h("h2", "Live test"),
        h(
            "div",
            h("p", f"{verdict.units} units closed. Evidence for a gain {verdict.gain:.3g} of "
              f"{verdict.needed:.3g} needed; for harm {verdict.harm:.3g} of 20."),
            h("p", f"Effect, at every look: {verdict.interval.low:+.3f} to "
              f"{verdict.interval.high:+.3f}."),
            h("p", verdict.reason, class_="note"),
            class_="card",
        ),
    ]  # fmt: skip


def _conflicts(conflicts: Sequence[tuple[str, float, float]], forms: Forms) -> Child:
    if not conflicts:
        return None
    rows = [
        [cell("Response", key, "mono"), cell("Lowest", f"{low:g}", "n"),
         cell("Highest", f"{high:g}", "n"),
         cell("Settle", [forms.settle(key, str(low), f"It is {low:g}"),
                         forms.settle(key, str(high), f"It is {high:g}")])]
        for key, low, high in conflicts
    ]  # fmt: skip
    heads = ("Response", "Lowest", "Highest", "Settle")
    return [h("h2", "Contradicting feedback"), h("div", table(heads, rows, 9), class_="card")]


def _entries(artefact: Artefact) -> Child:
    rows = [[cell("Entry", e.experience_id), cell("Text", e.body, "text"), cell("Trust", e.trust)]
            for e in artefact.library.shown]  # fmt: skip
    if not rows:
        return h("p", "It is empty.", class_="note")
    return h("div", table(("Entry", "Text", "Trust"), rows), class_="card")


def _history(transitions: Sequence[Transition]) -> Child:
    rows = [
        [cell("When", _time(t.at)), cell("Event", t.event), cell("Who", t.who),
         cell("Reason", t.reason, "text")]
        for t in reversed(transitions[-200:])
    ]  # fmt: skip
    return h("div", table(("When", "Event", "Who", "Reason"), rows), class_="card")
