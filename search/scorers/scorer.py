"""How good a node is: the scorer's interface and the simple scorers.

A scorer says costs (lower is better) or a value (higher is better) and keeps the components. It
is asked once a visit, with all children together. ToolChain*'s scorer is in `costs.py`.

Does not know how children were made or what is done with the numbers. Source: own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ProviderError
from tfgrpo.rollout import Task, Usage
from tfgrpo.search.algorithms.protocol import VisitRequest
from tfgrpo.search.node import Node, NodeScore
from tfgrpo.search.tree import Tree

__all__ = [
    "FrequencyScorer",
    "FunctionScorer",
    "LikelihoodScorer",
    "Scorer",
    "SearchContext",
    "UnitScorer",
]


_AT_ROOT = VisitRequest(0)


@dataclass(slots=True)
class SearchContext:
    """What expanders and scorers are told besides the node. The tree is for reading only."""

    task: Task
    tree: Tree
    context: Context = EMPTY_CONTEXT
    work: VisitRequest = _AT_ROOT
    seed: int = 0
    """Fixed by the search's seed and the visit; the only source of randomness."""
    first_sample: int = 0
    """How many samples of this node were asked for by earlier visits."""
    spent: dict[str, Usage] = field(default_factory=dict)
    """Filled by `spend`."""
    failed: list[ProviderError] = field(default_factory=list)
    """Calls that failed for good beside others that did not: each may have been billed."""

    def spend(self, role: str, usage: Usage) -> None:
        """Report what a model call of this role used."""
        self.spent[role] = self.spent.get(role, Usage()) + usage


class Scorer(Protocol):
    """Something that scores the children of one node.

    Contract:
        1. One score a child, in order; `nodes` are not in the tree yet (their id is -1).
        2. Step costs are at least 0.
        3. Equal context, parent and children give equal scores, unless it asks an LM.
        4. Model calls are reported through `ctx.spend`.
    """

    is_additive: bool
    """True when a step's cost depends on the step and its parent's state alone, so that nodes of
    equal state may be merged."""

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Return the scores of the children of `parent`."""
        ...


class UnitScorer:
    """Every step costs 1, nothing is estimated: shortest plans first."""

    is_additive = True

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Return cost 1 for each."""
        return [NodeScore() for _ in nodes]


class FrequencyScorer:
    """Cost of a step = 1 − the share of the samples that said it (self-consistency).

    With `uniform_cost` this is frequency-only A*; with `greedy`, which reads `to_go`, it is greedy
    best-first on the frequency, the cheap baseline.
    """

    is_additive = True

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Return 1 − prior as the cost, again as the estimate, and the prior as the value."""
        return [
            NodeScore(1.0 - n.prior, 1.0 - n.prior, n.prior, {"frequency": n.prior}) for n in nodes
        ]


class LikelihoodScorer:
    """Cost of a step = minus the natural log of its probability, so that A* maximises likelihood.

    Args:
        floor: probabilities below this count as this.
    """

    is_additive = True

    def __init__(self, floor: float = 1e-6) -> None:
        self._floor = floor

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Return −log(prior) for each."""
        costs = [-math.log(min(1.0, max(self._floor, n.prior))) for n in nodes]
        return [NodeScore(c, 0.0, -c, {"nll": c}) for c in costs]


Judgement = float | NodeScore


class FunctionScorer:
    """A user's function of (context, parent, child), synchronous or async.

    Args:
        fn: returns a `NodeScore`, or a number that `reads_as` says how to read.
        reads_as: `value` (higher is better), `to_go` (an estimate of the remaining cost).
        is_additive: see `Scorer`.
    """

    def __init__(
        self,
        fn: Callable[[SearchContext, Node, Node], Judgement | Awaitable[Judgement]],
        *,
        reads_as: str = "value",
        is_additive: bool = True,
    ) -> None:
        self._fn, self._reads_as, self.is_additive = fn, reads_as, is_additive

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Ask the function once a child."""
        return [await self._one(ctx, parent, n) for n in nodes]

    async def _one(self, ctx: SearchContext, parent: Node, node: Node) -> NodeScore:
        result: Any = self._fn(ctx, parent, node)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, NodeScore):
            return result
        if self._reads_as == "to_go":
            return NodeScore(to_go=float(result))
        return NodeScore(value=float(result))
