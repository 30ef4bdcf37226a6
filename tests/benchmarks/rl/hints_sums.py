"""Hints on a family of tasks that they were not made for: long sums, at equal rollouts.

The model does four-digit sums and hardly ever five-digit ones. Arms are those of `second_tries`
that take a task's worked solution and nothing else; hinted rollouts count.

    python -m tests.benchmarks.rl.hints_sums --out rows.jsonl   (--device cuda: larger)
    python -m tests.benchmarks.rl.hints_sums --collect rows.jsonl
"""

from __future__ import annotations

from tests.benchmarks.rl.second_tries import ARMS as EVERY
from tests.benchmarks.rl.toy.runs import LONG_SUMS, Arm, main

NAMES = (
    *("grpo", "sage", "sage_light", "scaf", "scaf_graft", "pope", "questa", "icpo"),
    *("adhint", "stephint", "bread"),
)
ARMS: dict[str, Arm] = {name: EVERY[name] for name in NAMES}

if __name__ == "__main__":
    main(__doc__ or "", "hints_sums", ARMS, LONG_SUMS)
