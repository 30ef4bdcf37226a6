"""Branching and partial decoding against groups whose rollouts are drawn alone, on the toy.

Arms with a value at cuts draw continuations that are not trained; they count (`value_rollouts`),
and the budget is of all rollouts. `plain_long` and `april` let replies run to 80 tokens, of which
the long tail of lengths makes use: compare `decode_steps` a rollout. `plain_turns` is the base of
the branches of turns. `completion_tokens` were sampled, `row_tokens` are in rows.

    python -m tests.benchmarks.rl.branching --out rows.jsonl   (--device cuda: larger)
    python -m tests.benchmarks.rl.branching --collect rows.jsonl
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.rl.toy.runs import LETTERS, Arm, main


def strategy(name: str, credit: str = "", **options: Any) -> Arm:
    """An arm of one strategy of rollouts."""
    rollout = {"strategy": name, "strategy_options": options}
    return Arm(
        {"rollout": rollout, **({"credit": {"name": credit}} if credit else {})}, base="plain"
    )


LONG = {"max_tokens": 80}
ARMS: dict[str, Arm] = {
    "plain": Arm(base="plain"),
    "latr": strategy("latr", ahead=4, tau_abs=0.1, tau_rel=0.3),
    "tree": strategy("tree", factors=[2, 2, 2], segment=2),
    "spo_tree": strategy("tree", "spo_tree", factors=[2, 2, 2], segment=2),
    "branch_grpo": strategy("tree", "branch_grpo", factors=[2, 2, 2], segment=2),
    "spo_chain": strategy("spo_chain", "spo_chain", every=2, draws=4, most_cuts=4),
    "echo": strategy("echo", window=3),
    "plain_long": Arm({"rollout": LONG}, base="plain_long"),
    "april": Arm(
        {"rollout": {**LONG, "strategy": "april", "strategy_options": {"over": 1.5}}},
        base="plain_long",
    ),
    "plain_turns": Arm(turns=True, base="plain_turns"),
    "arpo": Arm({"rollout": {"strategy": "arpo"}}, turns=True, base="plain_turns"),
    "turn_tree": Arm(
        {
            "rollout": {"strategy": "turn_tree", "strategy_options": {"first": 2, "factor": 2}},
            "credit": {"name": "portool"},
        },
        turns=True,
        base="plain_turns",
    ),
}

if __name__ == "__main__":
    main(__doc__ or "", "branching", ARMS, LETTERS)
