"""The section on the library: its entries with value and origin, its versions, how to use it.

Does not know statistics or the frame around it. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.report import charts
from tfgrpo.report.html import Child, Html, h
from tfgrpo.report.html_parts import cell, chart_card, copyable, table, tag
from tfgrpo.report.wording import count_words, range_words

__all__ = ["library", "use"]

_STATUS = {"active": "good", "pinned": "accent", "banned": "bad", "quarantined": "bad"}


def use(s: Mapping[str, Any]) -> Html | None:
    """How what was kept goes into a program; None where nothing was kept."""
    if s["kept"] == "empty" or not s["use"]["instructions"]:
        return None
    code = (
        "from tfgrpo import load_artefact\n\n"
        f"library = load_artefact({s['use']['folder']!r})\n"
        'messages = library.for_openai("your question")  # or .for_anthropic(…), .instructions'
    )
    return h(
        "div",
        h("div", h("h3", "In a program"), copyable(code),
          h("p", "LangChain, DSPy, pydantic-ai and the gateway: docs/use.md.", class_="note"),
          class_="card"),
        h("div", h("h3", "As one text, for any prompt"),
          copyable(s["use"]["instructions"], "copy the prompt"), class_="card tall-pre"),
        class_="grid",
    )  # fmt: skip


def library(s: Mapping[str, Any]) -> Html:
    """Entries with value and provenance, and the versions."""
    entries = s["library"]["entries"]
    versions = _versions(s["versions"])
    if not entries:
        return h("div", h("p", _empty_words(s), class_="note"), versions, class_="grid wide")
    rows = [
        [
            cell("id", e["experience_id"]),
            cell("text", [e["text"], *_claim(e)], "text"),
            cell("effect", _value(e)),
            cell("shown", count_words(e["shown"], "time"), "n"),
            cell("learnt from", _sources(e)),
            cell("status", [tag(e["status"], _STATUS.get(e["status"], "")), " ", _trust(e)]),
        ]
        for e in entries
    ]
    listed = table(["id", "text", "effect", "shown", "learnt from", "status"], rows)
    cards: list[Child] = [h("div", listed, class_="card")]
    effects = [(e["experience_id"], found, "") for e in entries if (found := _effect(e))]
    chart = charts.intervals(
        effects[:24], title="Effect", xlabel="change of the mean reward", band=None
    ) if effects else ""  # fmt: skip
    cards.append(h("div", chart_card("Effect of each entry", chart), versions, class_="grid"))
    return h("div", cards, class_="grid wide")


def _empty_words(s: Mapping[str, Any]) -> str:
    if s["versions"]:
        return "The empty library was kept. What was tried stands under the versions."
    return "The library is empty so far: nothing has been proposed."


def _claim(entry: Mapping[str, Any]) -> list[Child]:
    words = entry.get("claim", "")
    return [h("br"), h("span", words, class_="note")] if words else []


def _trust(entry: Mapping[str, Any]) -> str:
    words = {"model": "by a model", "human": "by a person", "third_party": "by a stranger"}
    return words.get(entry["trust"], str(entry["trust"]))


def _effect(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = entry["value"] or entry["arrived"]
    return found


def _value(entry: Mapping[str, Any]) -> Child:
    """An entry's own effect, else what the gate saw when it came in."""
    found = _effect(entry)
    if found is None:
        return h("span", "not measured alone", class_="note")
    kind = "good" if found["low"] > 0 else "bad" if found["high"] < 0 else ""
    words = range_words(found)
    if entry["value"] is None:
        others = found["others"]
        company = f"with {count_words(others, 'other')} that came along" if others else "alone"
        words += f", at the gate, {company}"
    return [h("b", f"{found['estimate']:+.3f}", class_=kind), h("br"),
            h("span", words, class_="note")]  # fmt: skip


def _sources(entry: Mapping[str, Any]) -> Child:
    step = entry["created_step"]
    links: list[Child] = [f"step {step}"] if step is not None else []
    tasks: dict[str, str] = {}
    for group_id, task_id in entry["sources"]:
        tasks.setdefault(task_id, group_id)
    for task_id, group_id in list(tasks.items())[:6]:
        links += [", " if links else "", h("a", task_id, href="#groups", data_group=group_id)]
    if len(tasks) > 6:
        links.append(f" and {len(tasks) - 6} more")
    return links or "–"


def _versions(versions: Sequence[Mapping[str, Any]]) -> Html:
    items = []
    for place, v in reversed(list(enumerate(versions, 1))):
        changes: list[Child] = [h("ins", f"+ {k}  {text}") for k, text in v["added"]]
        changes += [h("del", f"− {k}  {text}") for k, text in v["removed"]]
        for key, before, after in v["changed"]:
            changes += [h("del", f"~ {key}  {before}"), h("ins", f"~ {key}  {after}")]
        step = "" if v["step"] is None else f", step {v['step']}"
        number = len(v["added"]) + len(v["removed"]) + len(v["changed"])
        head = (
            f"Version {place}{step}: {count_words(v['entries'], 'entry')}, "
            f"{count_words(number, 'change')}"
        )
        mark = {True: tag("accepted", "good"), False: tag("rejected", "bad")}.get(v["accepted"])
        items.append(
            h(
                "details",
                h("summary", head, " ", mark, title=v["version_id"]),
                changes or h("p", "Nothing changed in the prompt.", class_="note"),
            )
        )
    return h("div", h("h3", "Versions"), items or "none yet", class_="card")
