"""Which groups get rollouts, and which rollouts are trained when, at equal rollouts on the toy.

Tasks ask for one to three tokens, so some groups mostly succeed and some hardly ever do. `uniform`
is plain GRPO; `dynamic` draws further tasks until a step is full of mixed groups (DAPO); the others
spend the same rollouts elsewhere. `rorecomp` is about the length of replies (`length_last`).
Rollouts of dropped groups count. Besides the reward: the share of rollouts in mixed groups
(`useful_share`), rollouts a mixed group and the variance of a group's mean.

    python -m tests.benchmarks.rl.top_up --out rows.jsonl   (--device cuda: larger)
    python -m tests.benchmarks.rl.top_up --collect rows.jsonl
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.rl.toy.runs import LETTERS, Arm, main


def curriculum(**options: Any) -> Arm:
    """An arm of one `[curriculum]`."""
    return Arm({"curriculum": options}, base="uniform")


ARMS: dict[str, Arm] = {
    "uniform": Arm(base="uniform"),
    "dynamic": curriculum(max_resample_rounds=4),
    "posterior_gain": curriculum(allocate="posterior_gain"),
    "gdro": curriculum(allocate="gdro"),
    "prompt_gdro": curriculum(allocate="prompt_gdro"),
    "practice": curriculum(allocate="practice"),
    "practice_all": curriculum(allocate="practice", candidates="all"),
    "dars": curriculum(allocate="dars"),
    "top_up": curriculum(allocate="top_up"),
    "top_up_dars": curriculum(allocate="top_up_dars"),
    "top_up_xrpo": curriculum(allocate="top_up_xrpo"),
    "refill": curriculum(refill=2),
    "replay": curriculum(replay=2),
    "d3s": Arm({"loss": {"advantage": "d3s", "advantage_options": {"keep": 4.0}}}, base="uniform"),
    "d3s_dual": Arm({"credit": {"name": "d3s_dual"}}, base="uniform"),
    "adora": Arm({"loss": {"advantage": "adora"}}, base="uniform"),
    "shrunk": Arm({"loss": {"advantage": "shrunk"}}, base="uniform"),
    "rorecomp": curriculum(select="rorecomp"),
}

if __name__ == "__main__":
    main(__doc__ or "", "top_up", ARMS, LETTERS)
