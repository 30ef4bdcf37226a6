"""The head-to-head as a page of the docs, written from its recorded figures alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "head_to_head.md"

_NAMES = {
    "none": "no library",
    "tips": "tips written by the model, no practice",
    "voting": "majority vote at equal tokens",
    "paper-main": "Training-Free GRPO as published (`paper-main`)",
    "dspy-simba": "DSPy SIMBA, rules",
    "dspy-simba-demos": "DSPy SIMBA, rules and demonstrations",
    "gepa": "GEPA",
    "ace-playbook": "ACE (ace-playbook)",
    "ours": "**tfgrpo** (default preset, worked examples)",
}

_TEXT = """# Head-to-head

Same model ({model}), same actor (temperature 0.7, 24 tokens), same {tests} held-out tasks x
{draws} draws with the same seeds, at most {budget_tokens:,} learning tokens a seed counted at the
server (and {deadline_s:.0f} s, meant for what hangs), {learning_tasks} tasks to learn from and
choose by. Score is the share of right answers; intervals are 95 %, over learning seeds and tasks.
Gain is the paired difference to no library.

{tables}

* Tokens are prompt and completion tokens of learning, mean over seeds. Voting learns nothing: its
  tokens are what it spends with every pass over the test tasks.
* Seconds are the wall time of learning, all seeds side by side on two cores with other work beside
  them: they tell an order of magnitude, no more.
* Every method's actor gets what was learnt in the same form: a system text, and worked examples as
  chat turns. DSPy's and ACE's own answer formats are not used for the actor, because this model
  does not write them; their reflection keeps its own prompts.
* `messages`: a value out of a customer's message; a right answer is the value and no other word,
  and learning gets 0.3 where it stands among others. The bare model never answers in one word.
* `sums`: the sum of two numbers, asked as a formula or told as a story; a right answer's last
  number is the sum. The bare model gets some right, so that a method can gain and lose.
* All methods of a family learn from one reward. All may see the right answers of learning tasks:
  GEPA and ACE in their feedback, SIMBA in its rule writer's prompt, tfgrpo's critic in its prompt
  and as a worked example where every attempt failed.
* Several draws asked for in one call count their prompt once, as providers bill it; the rivals ask
  for one draw a call.
* A method is asked to stop at its tokens and refused at 1.25 times as many; one that could not run
  says so.

Made by `{command}` in {wall_seconds:.0f} s on {processor}, {date}, commit {commit}; the rivals
are installed by `sh tests/benchmarks/head_to_head/install.sh`.
"""


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown, the best score first and what could not run last."""
    ordered = sorted(rows, key=lambda r: (r["score"] is None, -(r["score"] or 0.0)))
    lines = [
        "| method | seeds | score | gain | tokens | seconds | note |",
        "| --- | ---: | --- | --- | ---: | ---: | --- |",
    ]
    for r in ordered:
        score = _range(r["score"], r["ci_low"], r["ci_high"], sign=False)
        gain = _range(r["gain"], r["gain_low"], r["gain_high"], sign=True)
        note = str(r["note"]).replace("|", "/")
        lines.append(
            f"| {_NAMES.get(r['method'], r['method'])} | {r['seeds']} | {score} | {gain} | "
            f"{r['tokens']:,} | {r['seconds']:.0f} | {note} |"
        )
    return "\n".join(lines)


def write_page(figures: Mapping[str, Any]) -> None:
    """Write the page."""
    rows = figures["rows"]
    tables = "\n\n".join(
        f"## Family `{family}`\n\n{table([r for r in rows if r['family'] == family])}"
        for family in dict.fromkeys(r["family"] for r in rows)
    )
    PAGE.write_text(_TEXT.format(tables=tables, **figures), encoding="utf-8")


def _range(value: float | None, low: float | None, high: float | None, *, sign: bool) -> str:
    if value is None or low is None or high is None:
        return "–"
    return (
        f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
        if sign
        else (f"{value:.3f} ({low:.3f} to {high:.3f})")
    )
