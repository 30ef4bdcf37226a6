"""A finished search as a `RolloutGroup`, and its advantages relative to the forks.

Each finished path is a rollout; paths that share their first actions share those steps, word for
word. The metadata of a rollout holds its node ids (`node_path`), so that the tree's forks can be
found again from the group alone, after any journey through a file.

Usage: a node's cost is booked on the first rollout that passes through it, so that the group's
total counts shared prefixes once; what was spent on branches that no rollout passes through stands
in the group's metadata as `off_path_usage`.

Does not know policies or token losses. Source: PORTool (fork-relative blended with path-relative),
TreeRL (value of a step from the leaves below it); both from descriptions: approximations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task, Usage, group_id_of
from tfgrpo.sampling import judge
from tfgrpo.search.node import Node
from tfgrpo.search.paths import rollout_of
from tfgrpo.search.settings import SearchResult

__all__ = ["fork_advantages", "group_of", "step_values", "tree_advantages"]


async def group_of(
    result: SearchResult,
    *,
    verifier: Verifier | None = None,
    context: Context = EMPTY_CONTEXT,
    policy_id: str = "search",
    seed: int = 0,
    include_failed: bool = False,
    verifier_timeout_s: float = 120.0,
) -> RolloutGroup:
    """Return the finished paths as a group; where there is none, the best unfinished one.

    Rewards come from the verifier; without one from the environment's own goal test (1 or 0), and
    a path of which neither knows anything stays ungraded.

    Args:
        include_failed: also take the paths that ended in a failed action, as `policy_failed`.
        verifier_timeout_s: wall time of one verification, seconds.
    """
    tree, task = result.fold.tree, result.task
    group_id = group_id_of(task, context, policy_id, seed=seed, scope="search")
    ends = tree.with_status("terminal")
    if include_failed:
        ends = sorted([*ends, *tree.with_status("dead")], key=lambda n: n.id)
    if not ends and result.best.id > 0:
        ends = [result.best]
    booked: set[int] = set()
    rollouts: list[Rollout] = []
    for index, end in enumerate(ends):
        rollout = _rollout(result, end, index, group_id, booked, rollouts)
        rollouts.append(await _graded(rollout, end, task, verifier, verifier_timeout_s))
    metadata = {
        "stage": "search",
        "stop_reason": result.stop_reason,
        "best_rollout": next(
            (r.rollout_id for r, e in zip(rollouts, ends) if e is result.best), ""
        ),
        "counters": dict(result.counters),
        "usage_by_role": {role: u.to_dict() for role, u in sorted(result.usage_by_role.items())},
        "off_path_usage": _rest(result, booked).to_dict(),
    }
    if verifier is not None:
        metadata["verifier_id"] = verifier.verifier_id
    return RolloutGroup(group_id, task, tuple(rollouts), context, policy_id, metadata)


def _rollout(
    result: SearchResult,
    end: Node,
    index: int,
    group_id: str,
    booked: set[int],
    earlier: Sequence[Rollout],
) -> Rollout:
    path = result.fold.tree.path(end)
    usage = Usage()
    for node in path:
        if node.id not in booked:
            booked.add(node.id)
            usage = usage + (node.usage or Usage())
    ids = [n.id for n in path]
    shared = max((_common(ids, r.metadata["node_path"]) for r in earlier), default=1) - 1
    return replace(
        rollout_of(result.task, result.fold.tree, end),
        rollout_id=f"{group_id}-n{end.id}",
        usage=usage,
        sample_index=index,
        metadata={"node_path": ids, "shared_steps": max(0, shared), "path_cost": end.g},
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first, second):
        if a != b:
            break
        count += 1
    return count


async def _graded(
    rollout: Rollout, end: Node, task: Task, verifier: Verifier | None, timeout_s: float
) -> Rollout:
    if end.status == "dead":
        return rollout.failed("policy_failed", end.error)
    if end.status != "terminal":
        return rollout.failed("truncated", "the search stopped before this path was finished")
    if verifier is None:
        if end.reward is None and not end.is_goal and end.state_key is None:
            return rollout
        reward = end.reward if end.reward is not None else float(end.is_goal)
        return rollout.graded(Score(reward, "environment"))
    return await judge(rollout, task, verifier, timeout_s=timeout_s)


def _rest(result: SearchResult, booked: set[int]) -> Usage:
    rest = Usage()
    for node in result.fold.tree:
        if node.id not in booked and node.usage is not None:
            rest = rest + node.usage
    return rest


# --- advantages ---------------------------------------------------------------------------------

_Key = tuple[int, ...]


def _paths(group: RolloutGroup) -> list[tuple[Rollout, tuple[int, ...]]]:
    found = []
    for rollout in group.graded:
        path = rollout.metadata.get("node_path")
        if not isinstance(path, Sequence) or len(path) != len(rollout.steps) + 1:
            raise ConfigError(
                f"rollout {rollout.rollout_id!r} of group {group.group_id!r} has no node path: "
                "fork-relative advantages need a group that a search made"
            )
        found.append((rollout, tuple(int(i) for i in path)))
    return found


def step_values(group: RolloutGroup, *, discount: float = 1.0) -> dict[int, float]:
    """Return, for each node on a graded path, the mean reward of the leaves below it.

    A leaf's reward counts `discount` to the power of its distance.
    """
    rewards: dict[int, list[float]] = {}
    for rollout, path in _paths(group):
        assert rollout.reward is not None
        for distance, node_id in enumerate(reversed(path)):
            rewards.setdefault(node_id, []).append(rollout.reward * discount**distance)
    return {node_id: math.fsum(rs) / len(rs) for node_id, rs in rewards.items()}


def fork_advantages(
    group: RolloutGroup,
    *,
    blend: float = 0.5,
    discount: float = 1.0,
    call_bonus: float = 0.0,
) -> dict[str, list[float]]:
    """Return one advantage a step for each graded rollout, by rollout id.

    A step's value is the mean (discounted) reward below it, plus `call_bonus` where its tool call
    did not fail. Its advantage is `blend` times the value relative to the mean over its siblings,
    plus `1 − blend` times the rollout's reward relative to the mean over the rollouts. A step
    without siblings has a fork part of 0. A step that several rollouts share has the same value in
    all of them. (Approximation of PORTool; its constants are unknown.)
    """
    if not 0.0 <= blend <= 1.0:
        raise ConfigError(f"blend={blend!r}: give a number from 0 to 1")
    paths = _paths(group)
    values = step_values(group, discount=discount)
    ok = {path[i + 1]: _worked(r, i) for r, path in paths for i in range(len(r.steps))}
    worth = {n: v + (call_bonus if ok.get(n, False) else 0.0) for n, v in values.items()}
    children: dict[int, set[int]] = {}
    for _, path in paths:
        for parent, child in itertools.pairwise(path):
            children.setdefault(parent, set()).add(child)
    mean = group.mean_reward or 0.0
    result: dict[str, list[float]] = {}
    for rollout, path in paths:
        assert rollout.reward is not None
        whole = rollout.reward - mean
        steps = []
        for parent, child in itertools.pairwise(path):
            siblings = sorted(children[parent])
            fork = worth[child] - math.fsum(worth[s] for s in siblings) / len(siblings)
            steps.append(blend * fork + (1 - blend) * whole)
        result[rollout.rollout_id] = steps
    return result


def _worked(rollout: Rollout, index: int) -> bool:
    step = rollout.steps[index]
    return not any(m.content.startswith("Error") for m in step.observations)


def tree_advantages(group: RolloutGroup) -> dict[str, list[float]]:
    """Return TreeRL's step rewards: (value − root's value + value − parent's value) / sqrt(leaves).

    `leaves` is how many rollouts pass through the step, so that a shared step does not count
    several times in full. (Recalled formula: an approximation.)
    """
    paths = _paths(group)
    values = step_values(group)
    through: dict[int, int] = {}
    for _, path in paths:
        for node_id in path:
            through[node_id] = through.get(node_id, 0) + 1
    return {
        rollout.rollout_id: [
            (2 * values[child] - values[path[0]] - values[parent]) / math.sqrt(through[child])
            for parent, child in itertools.pairwise(path)
        ]
        for rollout, path in paths
    }


def advantage_rows(group: RolloutGroup, **options: Any) -> list[dict[str, Any]]:
    """Return training rows as JSON: a rollout's id, reward, shared steps and step advantages."""
    advantages = fork_advantages(group, **options)
    return [
        {
            "rollout_id": r.rollout_id,
            "reward": r.reward,
            "shared_steps": r.metadata["shared_steps"],
            "node_path": list(r.metadata["node_path"]),
            "step_advantages": advantages[r.rollout_id],
        }
        for r in group.graded
    ]
