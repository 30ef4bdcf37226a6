"""AB-MCTS-A: at each node Thompson sampling decides between a new child and a deeper look.

Every node keeps, for "one more child from proposer j" and for each child, the scores seen so far.
A normal-inverse-gamma posterior over their mean is drawn from once each; the largest draw wins. The
walk ends where "one more child" wins. Several proposers (LMs) are just several such arms.

Draws come from a counter, so equal answers give equal trees. Does not know where scores come from;
they should lie in [0, 1], as the prior says. Source: Inoue et al. 2025 (AB-MCTS, aggregation form
A; structure from descriptions and from the behaviour of TreeQuest; the prior's constants are ours:
an approximation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

if TYPE_CHECKING:
    import random

__all__ = ["ABMCTS", "ScorePrior"]

_Sums = list[float]
"""[count, sum, sum of squares] of the scores seen."""


@dataclass(frozen=True, slots=True)
class ScorePrior:
    """Normal-inverse-gamma prior of a score; what is not known of a node or an arm yet."""

    prior_mean: float = 0.5
    prior_weight: float = 1.0
    """How many scores the mean counts as."""
    prior_shape: float = 1.0
    prior_scale: float = 0.1
    """Of the variance, inverse gamma."""


_PRIOR = ScorePrior()


class ABMCTS(GoalSearch):
    """Adaptive branching; each visit draws one sample at one node.

    Args:
        arms: proposers to choose from.
        prior: of the scores; settings files give its fields as options of their own.
        seed: start of the counter that draws come from.
        stop_at_goal: stop at the first goal.
        max_children: most children of one node; None leaves it to the draws.
    """

    merges_siblings = False
    lookahead = 1

    def __init__(
        self,
        *,
        arms: int = 1,
        prior: ScorePrior = _PRIOR,
        seed: int = 0,
        stop_at_goal: bool = True,
        max_children: int | None = None,
    ) -> None:
        self.arms, self.seed, self.stop_at_goal = arms, seed, stop_at_goal
        self.max_children = max_children
        self._prior = (
            prior.prior_mean, prior.prior_weight, prior.prior_shape, prior.prior_scale
        )  # fmt: skip
        self._own: dict[int, list[_Sums]] = {}
        self._below: dict[int, _Sums] = {}
        self._flying: dict[int, int] = {}
        self._arm_of: dict[int, list[int]] = {}
        self._closed: set[int] = set()
        self._draws = 0

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Walk down `room` times."""
        found: list[VisitRequest] = []
        while len(found) < room:
            work = self._walk(tree)
            if work is None:
                break
            found.append(work)
            self._draws += 1  # a walk that ended in "none now" must leave no trace
            self._flying[work.node] = self._flying.get(work.node, 0) + 1
            self._arm_of.setdefault(work.node, []).append(work.arm)
        return found

    def _walk(self, tree: Tree) -> VisitRequest | None:
        node = tree.root
        if node.id in self._closed:
            return None
        from random import Random

        rng = Random(derive_seed(self.seed, "ab-mcts", self._draws))
        while True:
            if node.status not in ("expanded", "dead"):
                # a node not run yet takes one visit at a time
                return (
                    None
                    if self._flying.get(node.id)
                    else VisitRequest(node.id, 1, self._arm(rng, node))
                )
            children = [c for i in node.children if self._is_alive(c := tree[i])]
            deeper = [(self._draw(rng, self._below.get(c.id)), c) for c in children]
            wider = [(self._draw(rng, sums), j) for j, sums in enumerate(self._sums(node))]
            if self.max_children is not None and len(node.children) >= self.max_children:
                wider = []
            best_deep = max(deeper, key=lambda d: d[0], default=(-math.inf, None))
            best_wide = max(wider, default=(-math.inf, 0))
            if best_deep[1] is None or best_wide[0] >= best_deep[0]:
                return VisitRequest(node.id, 1, best_wide[1]) if wider else None
            node = best_deep[1]

    def _is_alive(self, node: Node) -> bool:
        return node.id not in self._closed and not node.is_broken

    def _arm(self, rng: random.Random, node: Node) -> int:
        if self.arms == 1:
            return 0
        return max((self._draw(rng, s), j) for j, s in enumerate(self._sums(node)))[1]

    def _sums(self, node: Node) -> list[_Sums]:
        """Scores of the node's own children by arm."""
        return self._own.setdefault(node.id, [[0.0, 0.0, 0.0] for _ in range(self.arms)])

    def _draw(self, rng: random.Random, sums: _Sums | None) -> float:
        """Draw a mean from the posterior given the scores seen."""
        mean0, weight0, shape0, scale0 = self._prior
        n, total, squares = sums if sums is not None else (0.0, 0.0, 0.0)
        weight = weight0 + n
        mean = (weight0 * mean0 + total) / weight
        average = total / n if n else 0.0
        spread = max(0.0, squares - n * average * average)
        drift = weight0 * n * (average - mean0) ** 2 / weight if n else 0.0
        shape, scale = shape0 + n / 2, scale0 + (spread + drift) / 2
        variance = scale / max(rng.gammavariate(shape, 1.0), 1e-12)
        return rng.gauss(mean, math.sqrt(variance / weight))

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Enter each child's score at the parent's arm and along the path."""
        made_by = children[0].proposal.arm if children and children[0].proposal else None
        arm = self._land(node, made_by)
        for child in children:
            worth = child.value if child.value is not None else 1.0 - child.step_cost
            _enter(self._sums(node)[arm], worth)
            self._enter_up(tree, child, worth)
        if not children:
            _enter(self._sums(node)[arm], 0.0)

    def _land(self, node: Node, made_by: int | None = None) -> int:
        """Take one visit of the node out of flight; return its arm, as far as that is known."""
        self._flying[node.id] = max(0, self._flying.get(node.id, 0) - 1)
        waiting = self._arm_of.get(node.id)
        if not waiting:
            return made_by or 0
        return waiting.pop(
            waiting.index(made_by) if made_by is not None and made_by in waiting else 0
        )

    def _enter_up(self, tree: Tree, node: Node, worth: float) -> None:
        for above in tree.path(node)[1:]:
            _enter(self._below.setdefault(above.id, [0.0, 0.0, 0.0]), worth)
            above.visits += 1
            above.value_sum += worth
        tree.root.visits += 1
        tree.root.value_sum += worth

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Close a finished path and enter its reward along the path."""
        self._land(node)
        self._closed.add(node.id)
        self._has_goal = self._has_goal or node.is_goal
        reward = node.reward if node.reward is not None else (1.0 if node.is_goal else 0.0)
        self._enter_up(tree, node, reward)

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Close a node that nothing can follow; a failed draw counts as a score of 0."""
        arm = self._land(node)
        if node.is_broken or node.error == "depth limit":
            self._closed.add(node.id)
            self._enter_up(tree, node, 0.0)
        else:
            _enter(self._sums(node)[arm], 0.0)

    def dump(self) -> dict[str, Any]:
        """Return the sums, what is running, and the counter."""
        return {
            "own": {str(k): v for k, v in self._own.items()},
            "below": {str(k): v for k, v in self._below.items()},
            "flying": {str(k): v for k, v in self._flying.items()},
            "arm_of": {str(k): v for k, v in self._arm_of.items()},
            "closed": sorted(self._closed),
            "draws": self._draws,
            "has_goal": self._has_goal,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._own = {int(k): [list(s) for s in v] for k, v in state["own"].items()}
        self._below = {int(k): list(v) for k, v in state["below"].items()}
        self._flying = {int(k): v for k, v in state["flying"].items()}
        self._arm_of = {int(k): list(v) for k, v in state["arm_of"].items()}
        self._closed, self._draws = set(state["closed"]), state["draws"]
        self._has_goal = state["has_goal"]


def _enter(sums: _Sums, worth: float) -> None:
    sums[0] += 1
    sums[1] += worth
    sums[2] += worth * worth
