"""Every entry of the registries against plain GRPO at equal rollouts, on the toy.

Each entry stands where what it does can matter: losses train a batch twice, in two parts, so that
ratios leave 1; a loss of win rates is judged in pairs, and one of references is shown right ones,
which its base is not; credit by step plays a turn a token, with rewards and states a step; credit
by tree grows trees; entries that need parts, answers or classes get those of the toy. The base is
the same setting with `clip` and `grpo`. Long replies are cut and fail, so that rewards of length
have a use.

    python -m tests.benchmarks.rl.rl_entries --out rows.jsonl   (--device cuda: larger)
    python -m tests.benchmarks.rl.rl_entries --collect rows.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.benchmarks.rl.rl_registry import COLUMNS
from tests.benchmarks.rl.toy.runs import LETTERS, Arm, main
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry
from tfgrpo.rl.formulas.rewards import REWARDS

Sections = dict[str, dict[str, Any]]
REUSED = {"epochs_per_batch": 2, "updates_per_epoch": 2}
PAIRS = {"kind": "win_rate", "verdicts": True}
OPTIONS: Mapping[str, dict[str, float]] = {
    "d3s": {"keep": 4.0},
    "overlong_soft": {"buffer": 8.0},
    "length_outlier": {"k": 1.0},
}
TREE = {"strategy": "tree", "strategy_options": {"factors": [2, 2, 2], "segment": 2}}
GROWN: Mapping[str, dict[str, Any]] = {
    "spo_tree": TREE,
    "branch_grpo": TREE,
    "spo_chain": {
        "strategy": "spo_chain",
        "strategy_options": {"every": 2, "draws": 4, "most_cuts": 4},
    },
    "portool": {"strategy": "turn_tree", "strategy_options": {"first": 2, "factor": 2}},
}
"""Strategies of rollouts that an entry of credit is made for."""
STEPS = {"steps", "step_rewards", "extra:tool_calls_R", "extra:invalid_R"}


def arm(kind: str, entry: Entry) -> Arm:
    """The setting of an entry, as its user would write it."""
    sections: Sections = {}
    options = OPTIONS.get(entry.name, {})
    columns = {c: s for c, s in COLUMNS.items() if f"extra:{c}" in entry.needs}
    if columns:
        sections["features"] = columns
    if "answers" in entry.needs:
        sections["loss"] = {"answer_pattern": "^(..?)"}
    task = "letters"
    if "parts" in entry.needs:
        task = "letters, several rewards"
    elif columns:
        task = "letters, " + ", ".join(columns.values())
    if kind == "loss":
        sections["loss"] = {"name": entry.name, "options": options}
        if "verdicts" in entry.needs:
            sections["verifier"] = dict(PAIRS)
        if "half_step" in entry.needs:
            return Arm(sections, task=f"{task}, judged in pairs")
        sections["optimiser"] = dict(REUSED)
        shown = ", with references" if "given" in entry.needs else ""
        return Arm(sections, base="grpo_reused", task=TWICE + shown)
    if kind == "advantage":
        named = {"advantage": entry.name, "advantage_options": options}
        sections["loss"] = sections.get("loss", {}) | named
        if entry.name == "nudge":
            sections["hints"] = {"name": "nudge"}
        return Arm(sections, task=task)
    if kind == "aggregation":
        sections["loss"] = {"aggregation": entry.name}
        return Arm(sections, task=task)
    if kind == "reward":
        named = {"names": [entry.name], "options": {entry.name: options} if options else {}}
        sections["rewards"] = named
    else:
        sections["credit"] = {"name": entry.name, "phrases": list("aeiou")}
    grown = GROWN.get(entry.name)
    if grown is not None:
        sections["rollout"], task = dict(grown), f"letters, strategy {grown['strategy']}"
    if entry.name == "portool" or (grown is None and STEPS & set(entry.needs)):
        return Arm(sections, turns=True, base="grpo_turns", task=f"{TURNS}{task[7:]}")
    return Arm(sections, task=task)


TWICE = "letters, a batch used twice in two parts"
TURNS = "letters, a turn a token"
ARMS: dict[str, Arm] = {
    "grpo": Arm(),
    "grpo_reused": Arm({"optimiser": dict(REUSED)}, base="grpo_reused", task=TWICE),
    "grpo_turns": Arm(turns=True, base="grpo_turns", task=TURNS),
} | {
    f"{kind}:{name}": arm(kind, entry)
    for kind, registry in (
        ("loss", LOSSES),
        ("advantage", ADVANTAGES),
        ("credit", CREDIT),
        ("reward", REWARDS),
        ("aggregation", AGGREGATIONS),
    )
    for name, entry in registry.items()
}

if __name__ == "__main__":
    main(__doc__ or "", "rl_entries", ARMS, LETTERS)
