"""The summary as Markdown, for pull requests and model cards.

Texts of models stand in table cells with every character that Markdown or HTML could act on
escaped; no link, image or raw HTML can come from them. Does not know statistics. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfgrpo.report.html import safe_text
from tfgrpo.report.wording import ARM_WORDS, best_of_lines

__all__ = ["render_markdown"]

_ACTIVE = re.compile(r"([\\`*_{}\[\]#|~!@]|(?<=:)/(?=/)|(?<=www)\.)")


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the summary of a run as Markdown."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(s: Mapping[str, Any]) -> Iterator[str]:
    run = s["run"]
    yield f"# {_cell(run['name'])}"
    yield ""
    yield f"**{_cell(s['verdict']['text'])}**"
    yield ""
    yield (
        f"Policy {_cell(run['policy'])}, preset {_cell(run['preset'] or 'none')}, seed "
        f"{_cell(run['seed'])}; {run['steps']} steps, {run['rollouts']} rollouts."
    )
    yield ""
    rows = [
        [ARM_WORDS[a["arm"]], _interval(a["mean"]), a["mean"]["n_tasks"], a["draws"],
         round(a["tokens_per_rollout"])]
        for a in s["arms"]
    ]  # fmt: skip
    yield from _table(["held out", "mean reward", "tasks", "draws", "tokens a rollout"], rows)
    for line in best_of_lines(s):
        yield f"{line}."
    if s["gain"]:
        yield f"Gain {_interval(s['gain'], sign=True)}, p = {s['p_value']:.4f}."
    if s["noise"]:
        yield f"A/A noise ±{s['noise']['width']:.3f}."
    if s["detectable"]:
        yield f"Smallest effect found with 80% power: {s['detectable']:.3f}."
    yield ""
    if s["leaks"]["contaminated"]:
        names = ", ".join(_cell(t) for t in s["leaks"]["contaminated"][:20])
        yield f"**Contaminated and left out:** {names}"
        yield ""
    yield from _curve(s)
    if "nudge" in s:
        yield "## Help for tasks that failed throughout"
        yield ""
        yield from (f"- {_cell(line)}." for line in s["nudge"]["lines"])
        yield ""
    if "reflection" in s:
        yield "## Reflection"
        yield ""
        yield from (f"- {_cell(line)}." for line in s["reflection"]["lines"])
        yield ""
    yield from _library(s)
    yield from _rejected(s)
    yield from _spend(s)
    yield "## What pays next"
    yield ""
    for advice in s["advice"]:
        gain = f" {_interval(advice['gain'], sign=True)}" if advice["gain"] else ""
        words = f"{_cell(advice['headline'])} ({advice['kind']}{gain})"
        yield f"1. {words}: {_cell(advice['evidence'])}"


def _curve(s: Mapping[str, Any]) -> Iterator[str]:
    if not s["curve"]:
        return
    informative = {row["step"]: row["share"] for row in s["informative"]}
    rows = [
        [
            p["step"],
            _interval(p["practice"]),
            _interval(p["current"]),
            _interval(p["proposed"]),
            _interval(p["difference"], sign=True),
            " ".join(
                filter(None, [{True: "accepted", False: "rejected"}.get(p["accepted"]), p["what"]])
            ),
            f"{informative[p['step']]:.0%}"
            if p["kind"] == "practice" and p["step"] in informative
            else "–",
        ]
        for p in s["curve"]
    ]
    yield "## Steps"
    yield ""
    heads = ["step", "practice", "gate: current", "gate: proposed", "difference", "decision",
             "informative"]  # fmt: skip
    yield from _table(heads, rows)


def _library(s: Mapping[str, Any]) -> Iterator[str]:
    yield "## Library"
    yield ""
    rows = [
        [e["experience_id"], e["text"], _interval(e["value"], sign=True), e["status"], e["trust"],
         e.get("claim", "") or "–"]
        for e in s["library"]["entries"]
    ]  # fmt: skip
    if rows:
        yield from _table(["id", "text", "value", "status", "trust", "rests on"], rows)
    else:
        yield "Empty."
        yield ""


def _rejected(s: Mapping[str, Any]) -> Iterator[str]:
    if not s["rejected"]:
        return
    yield "## Rejected"
    yield ""
    rows = [
        [r["step"], f"{r['what']} {r['target']}", r["text"], r["reason"]] for r in s["rejected"]
    ]
    yield from _table(["step", "what", "text", "why"], rows)


def _spend(s: Mapping[str, Any]) -> Iterator[str]:
    yield "## Spend"
    yield ""
    rows = [
        [r["stage"], r["model"], r["calls"], r["hits"], r["prompt_tokens"], r["completion_tokens"],
         "unknown" if r["cost_usd"] is None else f"{r['cost_usd']:.4f}"]
        for r in s["spend"]["rows"]
    ]  # fmt: skip
    heads = ["stage", "model", "calls", "from cache", "prompt", "completion", "US dollars"]
    yield from _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield "| " + " | ".join(_cell(x) for x in row) + " |"
    yield ""


def _interval(row: Mapping[str, Any] | None, *, sign: bool = False) -> str:
    if row is None:
        return "–"
    value = f"{row['estimate']:+.3f}" if sign else f"{row['estimate']:.3f}"
    return f"{value} ({row['low']:.3f} to {row['high']:.3f})"


def _cell(value: Any) -> str:
    text = "–" if value is None else " ".join(safe_text(value).split())
    if isinstance(value, (int, float)) or re.fullmatch(r"[-+–±0-9. to()%,]+", text):
        return text
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ACTIVE.sub(r"\\\1", text)
