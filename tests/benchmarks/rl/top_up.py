"""Which groups get rollouts, and which rollouts are trained when, at equal rollouts on the toy.

Tasks are of all letters, so some groups always succeed and some never do. `uniform` is plain GRPO;
`dynamic` draws further tasks until a step is full of mixed groups (DAPO); the others spend the same
rollouts elsewhere. `rorecomp` is about the length of replies, whose dots
mean nothing (`length_last`). Rollouts of dropped groups count.

    python -m tests.benchmarks.rl.top_up --device cuda --seed 0 --out rows.jsonl
    python -m tests.benchmarks.rl.top_up --collect rows.jsonl
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.benchmarks.rl.toy.runs import Arm, Size, main
from tests.benchmarks.rl.toy.warm_start import ON_GPU


def curriculum(**options: Any) -> Arm:
    """An arm of one `[curriculum]`."""
    return Arm({"curriculum": options}, base="uniform")


ARMS: dict[str, Arm] = {
    "uniform": Arm(base="uniform"),
    "dynamic": curriculum(max_resample_rounds=4),
    "posterior_gain": curriculum(allocate="posterior_gain"),
    "gdro": curriculum(allocate="gdro"),
    "prompt_gdro": curriculum(allocate="prompt_gdro"),
    "gain": curriculum(top_up="gain"),
    "practice": curriculum(top_up="practice"),
    "dars": curriculum(top_up="dars"),
    "xrpo": curriculum(top_up="xrpo"),
    "refill": curriculum(refill=2),
    "replay": curriculum(replay=2),
    "d3s": Arm({"loss": {"advantage": "d3s", "advantage_options": {"keep": 4.0}}}, base="uniform"),
    "d3s_dual": Arm({"credit": {"name": "d3s_dual"}}, base="uniform"),
    "adora": Arm({"loss": {"advantage": "adora"}}, base="uniform"),
    "shrunk": Arm({"loss": {"advantage": "shrunk"}}, base="uniform"),
    "rorecomp": curriculum(select="rorecomp"),
}
CPU = Size()
GPU = replace(
    CPU, model=ON_GPU, prompts=16, rollouts=7680, rows=512, lr=3e-4, tasks=256, held_out=200
)

if __name__ == "__main__":
    main(__doc__ or "", "top_up", ARMS, CPU, GPU)
