"""Tree-shaped sampling for training: branch where the model is unsure.

`EntropyRollouts` (ARPO): start a few chains; after each tool result compare the entropy of the next
step's first tokens with that of the chain's first step; where it has risen, draw another
continuation from the same place. What is left of the total is filled with fresh chains.

`LookaheadRollouts` (LATR): where a second token is probable enough both absolutely and beside the
first, continue with it too; after `lookahead` tokens drop branches that say the same as their
sibling; fill up with plain samples.

Both work with any engine that returns top log-probabilities and can continue a given text; neither
touches the engine. They do not know rewards. Source: Dong et al. 2025 (ARPO), LATR (Lookahead
Tree-Based Rollouts); behaviour from descriptions: approximations. Entropy is averaged over the
first tokens here and compared within one search only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.texts.edit_distance import edit_ratio
from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["EntropyRollouts", "LookaheadRollouts", "first_entropy"]


def first_entropy(top_logprobs: Sequence[Mapping[str, float]], first: int = 20) -> float | None:
    """Return the mean entropy of the first tokens over their alternatives, in [0, 1].

    Each token's alternatives are renormalised; the entropy is divided by the log of their number.
    None where no token has two alternatives.

    >>> first_entropy([{"a": math.log(0.5), "b": math.log(0.5)}])
    1.0
    """
    found = []
    for row in top_logprobs[:first]:
        if len(row) < 2:
            continue
        weights = [math.exp(v) for v in row.values()]
        total = math.fsum(weights)
        shares = [w / total for w in weights if w > 0]
        found.append(-math.fsum(p * math.log(p) for p in shares) / math.log(len(row)))
    return math.fsum(found) / len(found) if found else None


class _Chains(GoalSearch):
    """Chains of which all count: the search ends when they do."""

    stop_at_goal = False
    _running = 0

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """A chain is finished."""
        self._running -= 1

    def on_fail(self, tree: Tree, node: Node) -> None:
        """A chain has ended without an answer."""
        self._running -= 1


class EntropyRollouts(_Chains):
    """ARPO's branching.

    Args:
        n: finished chains in all.
        initial: chains from the root at the start.
        base: probability of branching at equal entropy.
        gain: how much probability a rise of the normalised entropy by 1 adds.
        width: most branches drawn at one place.
        seed: of the branch draws, which are fixed by the node and not by the order of arrival.
    """

    merges_siblings = False

    def __init__(
        self,
        n: int = 16,
        *,
        initial: int = 8,
        base: float = 0.5,
        gain: float = 0.2,
        width: int = 2,
        seed: int = 0,
    ) -> None:
        if not 1 <= initial <= n:
            raise ConfigError(f"n={n!r}, initial={initial!r}: give 1 <= initial <= n")
        self.n, self.initial = n, initial
        self.base, self.gain, self.width, self.seed = base, gain, width, seed
        self.lookahead = initial
        self._queue: list[int] = [0] * initial
        self._chains = initial
        self._branches: dict[int, int] = {}
        self._first: dict[int, float] = {}

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Continue chains and branches; fill up with fresh chains once nothing else is left."""
        found: list[VisitRequest] = []
        while len(found) < room:
            if not self._queue and not self._running and not found and self._chains < self.n:
                self._queue = [0] * (self.n - self._chains)
                self._chains = self.n
            if not self._queue:
                break
            found.append(VisitRequest(self._queue.pop(0), 1))
        self._running += len(found)
        return found

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Go on from the new node, and perhaps once more from where it began."""
        self._running -= 1
        for child in children[:1]:
            self._queue.append(child.id)
            entropy = child.proposal.entropy if child.proposal is not None else None
            if node.id == 0 or entropy is None:
                self._first[child.id] = entropy if entropy is not None else 0.0
                continue
            first = self._first[child.id] = self._first.get(node.id, entropy)
            used = self._branches.get(node.id, 0)
            if (
                self._chains < self.n
                and used < self.width - 1
                and self._wins(child, entropy - first)
            ):
                self._branches[node.id] = used + 1
                self._chains += 1
                self._queue.append(node.id)

    def _wins(self, child: Node, rise: float) -> bool:
        from random import Random

        draw = Random(derive_seed(self.seed, "arpo", child.id)).random()
        return draw < self.base + self.gain * rise

    def dump(self) -> dict[str, Any]:
        """Return the queue and the counts."""
        return {
            "queue": self._queue,
            "chains": self._chains,
            "running": self._running,
            "branches": {str(k): v for k, v in self._branches.items()},
            "first": {str(k): v for k, v in self._first.items()},
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._queue, self._chains = list(state["queue"]), state["chains"]
        self._running = state["running"]
        self._branches = {int(k): v for k, v in state["branches"].items()}
        self._first = {int(k): v for k, v in state["first"].items()}


class LookaheadRollouts(_Chains):
    """LATR's branching inside one step of text, at the root; the steps after it are plain chains.

    Args:
        n: branches in all.
        min_prob: smallest probability of a token that opens a branch.
        max_gap: largest difference to the first token's probability.
        lookahead_tokens: tokens that are compared.
        min_edit: branches nearer than this to their sibling are dropped.
        tree_share: share of the n that may come from branching, the rest is sampled plainly; the
            caller lowers it over training.
    """

    merges_siblings = False

    def __init__(
        self,
        n: int = 8,
        *,
        min_prob: float = 0.15,
        max_gap: float = 0.25,
        lookahead_tokens: int = 30,
        min_edit: float = 0.4,
        tree_share: float = 1.0,
    ) -> None:
        if n < 1 or not 0.0 <= tree_share <= 1.0:
            raise ConfigError(
                f"n={n!r}, tree_share={tree_share!r}: give n >= 1 and a share in 0..1"
            )
        self.n, self.min_prob, self.max_gap = n, min_prob, max_gap
        self.lookahead_tokens, self.min_edit = lookahead_tokens, min_edit
        self.tree_limit = max(1, round(n * tree_share))
        self.lookahead = n
        self._queue: list[tuple[int, str]] = [(0, "")]
        self._branches = 1
        self._seen: list[tuple[str, ...]] = []
        self.dropped = 0
        """Branches that said the same as a sibling."""

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Continue branches; fill up with plain samples once no branch is left to open."""
        found: list[VisitRequest] = []
        while len(found) < room:
            if not self._queue and not self._running and not found and self._branches < self.n:
                self._queue = [(0, "")] * (self.n - self._branches)
                self._branches = self.n
                self._seen = []
            if not self._queue:
                break
            node_id, prefix = self._queue.pop(0)
            found.append(VisitRequest(node_id, 1, 0, prefix))
        self._running += len(found)
        return found

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Open branches of a new text, unless it repeats one."""
        self._running -= 1
        for child in children[:1]:
            if node.id == 0 and not self._keeps(child):
                child.status = "pruned"
                self.dropped += 1
                self._branches -= 1
                continue
            self._queue.append((child.id, ""))
            if node.id == 0:
                self._open_branches(child)

    def _keeps(self, child: Node) -> bool:
        tokens = child.proposal.tokens if child.proposal is not None else ()
        window = tokens[: self.lookahead_tokens]
        is_new = all(edit_ratio(window, other) >= self.min_edit for other in self._seen)
        if self._branches >= self.n and not self._queue and not self._running:
            is_new = True  # plain samples fill the rest: alike or not
        if is_new or not tokens:
            self._seen.append(window)
            return True
        return not self._seen

    def _open_branches(self, child: Node) -> None:
        proposal = child.proposal
        if proposal is None:
            return
        text = ""
        for token, row in zip(proposal.tokens, proposal.top_logprobs):
            if self._branches >= self.tree_limit:
                return
            ranked = sorted(((math.exp(v), t) for t, v in row.items()), reverse=True)
            for probability, other in ranked[1:2]:
                near = ranked[0][0] - probability < self.max_gap
                if other != token and probability > self.min_prob and near:
                    self._queue.append((0, text + other))
                    self._branches += 1
            text += token

    def dump(self) -> dict[str, Any]:
        """Return the queue and what was seen."""
        return {
            "queue": [list(q) for q in self._queue],
            "branches": self._branches,
            "seen": [list(s) for s in self._seen],
            "running": self._running,
            "dropped": self.dropped,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._queue = [(q[0], q[1]) for q in state["queue"]]
        self._branches, self._running = state["branches"], state["running"]
        self._seen = [tuple(s) for s in state["seen"]]
        self.dropped = state["dropped"]
