"""Advantages by segment: steps that rollouts share, nodes of a tree, values at cuts.

Each returns one value a token, rows end to end: D. `state_keys_R` names the state (or tree node)
before each step; equal keys are equal states within one group. Does not know environments.
Sources are named at each entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.credit.steps import Place, clusters_of, spread
from tfgrpo.rl.formulas.group_stats import deviation_of, mean_of
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.registry import Entry, register, required

SEGMENT_CREDIT: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/credit/test_segments.py::"

Edge = tuple[Hashable, Hashable]
"""(state, next state)."""


def _edges(batch: RewardBatch, entry: str, ends: Sequence[Hashable]) -> list[list[Edge]]:
    """The edge of each step; `ends` stands for the state after a row's last step."""
    keys = required(batch.state_keys_R, entry, "state_keys_R")
    return [
        list(zip(row_keys, [*row_keys[1:], ("end", end)], strict=True)) if row_keys else []
        for row_keys, end in zip(keys, ends, strict=True)
    ]


@register(
    SEGMENT_CREDIT,
    "salt",
    source="SALT, abstract and summary; no code released",
    formula="mean of the rollouts' advantages over those that share the step's edge",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_salt_neutralises_steps_that_good_and_bad_rollouts_share",
    needs=("steps", "states"),
)
def salt(batch: RewardBatch, *, history: float = 0, eps: float = 1e-4) -> Floats:
    """Return outcome advantages averaged over the group's shared steps: D.

    Approximation: the paper's match rule is unknown. Here steps merge that agree in state, next
    state and `history` earlier states, last steps by their reward; put the action into the
    state's key to tell more apart.
    """
    advantage_R = grpo(batch, eps=eps)
    edges = _edges(batch, "salt", batch.reward_R.tolist())
    depth = int(history)
    paths = [[tuple(row[max(0, t - depth) : t + 1]) for t in range(len(row))] for row in edges]
    value = {
        place: mean_of(np.array([advantage_R[row] for row in sorted({r for r, _ in places})]))
        for places in clusters_of(batch, paths).values()
        for place in places
    }
    return spread(batch, "salt", value)


def _node_values(batch: RewardBatch, entry: str) -> tuple[dict[Place, float], dict[Place, float]]:
    """Per step: mean reward of the rollouts through its edge, and the mean of that over its fork.

    States are nodes of a tree: a step's siblings are the distinct edges out of its state, and no
    two rollouts share their last edge.
    """
    edges = _edges(batch, entry, range(len(batch.reward_R)))
    worth: dict[tuple[int, Edge], float] = {}
    forks: dict[tuple[int, Hashable], list[float]] = defaultdict(list)
    through: dict[tuple[int, Edge], list[Place]] = defaultdict(list)
    for row, row_edges in enumerate(edges):
        for step, edge in enumerate(row_edges):
            through[int(batch.group_R[row]), edge].append((row, step))
    for (group, edge), places in through.items():
        rows = np.array(sorted({row for row, _ in places}))
        worth[group, edge] = mean_of(batch.reward_R[rows])
        forks[group, edge[0]].append(worth[group, edge])
    if not batch.is_tree and not _has_shared_node(batch, edges):
        raise ConfigError(
            f"{entry!r} compares the branches of a tree, and no two rollouts of a group share more "
            "than their prompt: every step after the first would get 0. Use environments whose "
            "state_keys name tree nodes, or a credit for separate rollouts, such as gigpo"
        )
    own: dict[Place, float] = {}
    fork: dict[Place, float] = {}
    for (group, edge), places in through.items():
        around = mean_of(np.array(forks[group, edge[0]]))
        for place in places:
            own[place], fork[place] = worth[group, edge], around
    return own, fork


def _has_shared_node(batch: RewardBatch, edges: Sequence[Sequence[Edge]]) -> bool:
    """True where two rollouts of a group pass one node below the root, or no node is there."""
    seen: set[tuple[int, Hashable]] = set()
    for row, row_edges in enumerate(edges):
        nodes = {(int(batch.group_R[row]), edge[0]) for edge in row_edges[1:]}
        if nodes & seen:
            return True
        seen |= nodes
    return not seen


@register(
    SEGMENT_CREDIT,
    "spo_tree",
    source="SPO-tree, released code AIFrameResearch/SPO (configuration level)",
    formula="V(node) - mean of its siblings' V, V = mean reward of the leaves below",
    certainty="code",
    checked=(
        "read in AIFrameResearch/SPO configs only; its trees are drawn by the sampler, here"
        " a user's environment must share nodes"
    ),
    test=TESTS + "test_spo_tree_and_portool_match_a_small_tree",
    needs=("steps", "states"),
)
def spo_tree(batch: RewardBatch) -> Floats:
    """Return each segment's value against its siblings': D.

    Rollouts are root-to-leaf paths of one tree a group; state keys name nodes. The mean is over
    distinct siblings, the node itself among them; an only child gives 0.
    """
    own, fork = _node_values(batch, "spo_tree")
    return spread(batch, "spo_tree", {p: own[p] - fork[p] for p in own})


@register(
    SEGMENT_CREDIT,
    "branch_grpo",
    source="BranchGRPO, abstract: rewards of leaves averaged upward, normalised by depth",
    formula="(V(node) - mean of V at its depth) / (std of V at its depth + eps), distinct nodes",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_branch_grpo_normalises_nodes_of_one_depth",
    needs=("steps", "states"),
)
def branch_grpo(batch: RewardBatch, *, eps: float = 1e-4) -> Floats:
    """Return each segment's value among the nodes of its depth in its group: D.

    Rollouts are root-to-leaf paths of one tree a group; state keys name nodes. Approximation: the
    sample deviation and that a node counts once, however many leaves it has, are ours; pruning of
    branches is not here.
    """
    own, _ = _node_values(batch, "branch_grpo")
    edges = _edges(batch, "branch_grpo", range(len(batch.reward_R)))
    by_depth: dict[tuple[int, int], dict[Edge, float]] = defaultdict(dict)
    for (row, step), value in own.items():
        by_depth[int(batch.group_R[row]), step][edges[row][step]] = value
    found = {}
    for (row, step), value in own.items():
        values = np.array(list(by_depth[int(batch.group_R[row]), step].values()))
        gap = value - mean_of(values)
        found[row, step] = gap / (deviation_of(values) + eps) if gap else 0.0
    return spread(batch, "branch_grpo", found)


@register(
    SEGMENT_CREDIT,
    "portool",
    source="PORTool, abstract and summary",
    formula="a (V(step) + bonus - mean siblings) + (1-a) (R - mean of the group)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_spo_tree_and_portool_match_a_small_tree",
    needs=("steps", "states"),
)
def portool(batch: RewardBatch, *, a: float = 0.5) -> Floats:
    """Return a blend of fork-relative and trajectory-relative advantages: D.

    Approximation: reward constants are unknown; a step's worth is the mean reward below it, and
    the bonus for successful calls is left to the verifier.
    """
    own, fork = _node_values(batch, "portool")
    path_R = dr_grpo(batch)
    value = {p: a * (own[p] - fork[p]) + (1 - a) * float(path_R[p[0]]) for p in own}
    return spread(batch, "portool", value)


@register(
    SEGMENT_CREDIT,
    "spo_chain",
    source="SPO-chain, released code AIFrameResearch/SPO (configuration level)",
    formula="V(end of segment) - V(start), last end = R; only tokens with pi_old <= below",
    certainty="code",
    checked=(
        "read in AIFrameResearch/SPO math_episode_generator_with_mc_advantages.py: tokens "
        "above 0.9 get 0; values come from the environment here"
    ),
    test=TESTS + "test_spo_chain_telescopes_and_masks_sure_tokens",
    needs=("steps", "step_rewards", "logp_tokens"),
)
def spo_chain(batch: RewardBatch, *, below: float = 0.9) -> Floats:
    """Return segment advantages from values at the cuts: D.

    `step_R` numbers segments (turns), `step_reward_R` is the Monte Carlo value at each segment's
    start. Tokens of a probability above `below` get 0, as in the release; 1 keeps every token.
    """
    values = required(batch.step_reward_R, "spo_chain", "step_reward_R")
    ends = zip(values, batch.reward_R.tolist(), strict=True)
    value = {
        (row, k): gain
        for row, (value_K, reward) in enumerate(ends)
        for k, gain in enumerate(np.diff([*value_K, reward]).tolist())
    }
    advantage_D = spread(batch, "spo_chain", value)
    if below >= 1:
        return advantage_D
    logp_D = required(batch.logp_D, "spo_chain", "logp_D")
    return np.where(np.exp(logp_D) <= below, advantage_D, 0.0)
