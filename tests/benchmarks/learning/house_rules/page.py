"""The recorded rows as a page of the docs. Does not know how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs" / "house_rules.md"
KEYS = ("family", "method", "arm", "noise", "keys")

_NAMES = {
    "default": "**tfgrpo**, default preset",
    "contrast": "tfgrpo, preset `contrast`",
    "paper-main": "Training-Free GRPO as published (`paper-main`)",
    "gepa": "GEPA 0.1.4, minibatch 6, 150 metric calls",
    "gepa-300": "GEPA 0.1.4, 300 metric calls",
    "gepa-600": "GEPA 0.1.4, 600 metric calls",
    "simba": "DSPy SIMBA, rules",
    "simba-demos": "DSPy SIMBA, rules and demonstrations",
    "ace": "ACE (ace-playbook 0.3.0)",
}

_TEXT = """# House rules

Whether a method learns conventions that no single task shows. Five houses of
tasks, each with five or more hidden rules; a policy and a critic that are programs, know nothing
but their prompt, and are described in `tests/benchmarks/learning/house_rules/policy_simulator.py`
and `critic_simulator.py`. What is measured is what a method's own prompts and its loop let such a
pair learn; no language model is measured here.

| house | what is asked |
| --- | --- |
| labels | a helpdesk's tickets get queue, priority and hours: tables, an override, a doubling |
| thresholds | refunds get decision, percentage and approver: limits of two numbers, a deduction |
| formats | entries of a ledger in the notation of the house, which differs by country and kind |
| tools | three tool calls in order with their arguments |
| letters | a reply of five lines under a rubric of parts |

{practice} practice, {gate} gate and {test} test tasks a seed. Reward is the share of right parts;
the feedback names right and wrong parts and what was wanted. Captured gain is (with - without) /
(attainable - without) on the test tasks, attainable being the policy with the true rules in its
prompt; intervals are 95 %, over seeds. Tokens are a quarter of the characters, prompt and
completion of policy and critic while learning, every draw's prompt counted, in this process and at
the server alike.

## Noise 0, true keys

{main}

## With less to see

Arms of the default preset: lessons alone; worked examples alone; lessons without references, where
feedback says what was wanted (`telling`); and without references where
feedback says only which parts are right (`feedback`).

{arms}

## Slips, wrong keys, shuffled keys

(Rows are added as they are measured; noise levels and rows that are not here were not run.)

With chance `noise` the policy guesses a part although a rule settles it. `wrong`: one practice task
in ten has another task's key. `shuffled`: all keys are dealt out anew, so that nothing is to be
learnt.

{stress}

Rows by `{command} --record` in several commands, so of neighbouring commits; the page of {date},
commit {commit}, {processor}; the rivals are installed by
`sh tests/benchmarks/head_to_head/install.sh`.
"""


def merged(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return all rows, a new one in the place of an old one of the same run."""
    rows = {tuple(r[k] for k in KEYS): r for r in old}
    rows |= {tuple(r[k] for k in KEYS): r for r in new}
    return list(rows.values())


def write_page(figures: Mapping[str, Any]) -> None:
    """Write the page."""
    rows = figures["rows"]
    main = [r for r in rows if r["noise"] == 0 and r["keys"] == "true" and r["arm"] == "both"]
    arms = [r for r in rows if r["arm"] != "both"]
    stress = [r for r in rows if r["noise"] or r["keys"] != "true"]
    texts = {"main": table(main), "arms": table(arms), "stress": table(stress)}
    PAGE.write_text(_TEXT.format(**texts, **figures), encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as Markdown, by house, the best first."""
    lines = [
        "| house | method | captured gain | seeds | tokens | rollouts | critic calls | prompt |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    houses = list(dict.fromkeys(r["family"] for r in rows))
    for r in sorted(rows, key=lambda r: (houses.index(r["family"]), -(r["captured"] or -9))):
        name = _NAMES.get(r["method"], r["method"])
        name += f", {r['arm']}" if r["arm"] != "both" else ""
        name += f", noise {r['noise']:g}" if r["noise"] else ""
        name += f", {r['keys']} keys" if r["keys"] != "true" else ""
        if r["captured"] is None:
            lines.append(f"| {r['family']} | {name} | – | 0 | – | – | – | – |")
            continue
        gain = f"{r['captured']:.2f} ({r['ci_low']:.2f} to {r['ci_high']:.2f})"
        lines.append(
            f"| {r['family']} | {name} | {gain} | {r['seeds']} | {r['tokens']:,} | "
            f"{r['rollouts']:,} | {r['critic_calls']:,} | {r['prompt_tokens_per_call']:,} |"
        )
    return "\n".join(lines)
