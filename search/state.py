"""The tree as a fold of visits: the synchronous core under the driver, the replay and the tests.

`select` asks the algorithm for a visit and marks the node; `commit` puts what came of it into the
tree and tells the algorithm. Equal visits in equal order make an equal tree, whoever did the work
and however long it took.

Does not know models, asyncio, budgets or files. Idea: event sourcing (common); the split into
select and commit so that paid results are never dropped (own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.texts.repetition import goes_round
from tfgrpo.search.algorithms.protocol import Algorithm, VisitRequest
from tfgrpo.search.environments.protocol import StepResult
from tfgrpo.search.node import NO_PARTS, Node, NodeScore, Proposal, action_key, make_node
from tfgrpo.search.tree import Children, LazyChildren, Tree

__all__ = ["NO_PROGRESS", "Merge", "SearchState", "VisitResult", "explore"]

NO_PROGRESS = (
    "no progress: this step repeats one of its path, on the same state, with the same result"
)
"""Error of a step that is closed since it adds nothing."""

Merge = Literal["off", "sound", "any"]
"""Whether nodes with equal state keys become one: never; only with step-additive costs; or also
where costs depend on the whole path, which is an approximation."""

_EPS = 1e-12


@dataclass(slots=True)
class VisitResult:
    """What came of one visit; filled in as results arrive."""

    outcome: StepResult | None = None
    """Of the node's own action, where it had not been run before."""
    proposals: list[Proposal] | None = None
    """What the expander offered; None where it was not asked or failed."""
    outcomes: list[StepResult | None] | None = None
    """Of the children's actions, where they are run at once; one a child, in order."""
    scores: list[NodeScore] | None = None
    """One a child, in order."""
    error: str = ""
    """Why there are no proposals."""
    usage: dict[str, Usage] = field(default_factory=dict)
    """Role to usage: propose, score, imagine, verify, tool."""
    tool_calls: int = 0
    gave_up: frozenset[str] = frozenset()
    """What was tried in vain and is not tried again: `score`, `verify`."""
    reward: float | None = None
    """The verifier's reward of a finished path, where it is asked during the search."""

    def spend(self, role: str, usage: Usage) -> None:
        """Add to what a role has used."""
        self.usage[role] = self.usage.get(role, Usage()) + usage


class SearchState:
    """A tree, the algorithm that grows it, and the two moves between them.

    Args:
        merge: what happens to equal states; needs state keys at birth, so that the children's
            actions have to be run when they are made.
        max_depth: nodes at this depth get no children.
        goal_reward: reward from which a verified finished path is a goal.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        tree: Tree | None = None,
        *,
        merge: Merge = "off",
        max_depth: int | None = None,
        goal_reward: float = 1.0,
    ) -> None:
        self.algorithm = algorithm
        self.tree = tree if tree is not None else Tree()
        self.merge = merge
        self.max_depth = max_depth
        self.goal_reward = goal_reward
        self._rows_of = getattr(algorithm, "rows", None)
        self.commits = 0
        self.expansions = 0
        self._knowledge: dict[int, frozenset[str]] = {}
        """By node: what reads on its path have said."""
        if merge != "off" and self.tree.root.state_key is not None:
            self.tree.by_state[self.tree.root.state_key] = 0

    def select(self) -> VisitRequest | None:
        """Return the next visit, or None when the algorithm has none now."""
        works = self.algorithm.select(self.tree, 1)
        if not works:
            return None
        work = works[0]
        found = self.tree.places[work.node]
        node = found if isinstance(found, Node) else self.tree[work.node]
        if node.status == "open":
            node.status = "in_flight"
        return work

    def wants_children(self, node: Node) -> bool:
        """Return whether a visit asks for next actions once the node's own action has worked."""
        return (
            not node.is_terminal
            and not node.is_broken
            and (self.max_depth is None or node.depth < self.max_depth)
        )

    def provisional(self, node: Node, proposals: Sequence[Proposal]) -> list[Node]:
        """Return the children that proposals would make, equal ones merged; the tree is unchanged.

        A child's prior is the proposal's own, or its share of this visit's samples.
        """
        total = 0
        for proposal in proposals:
            total += proposal.count
        children: list[Node] = []
        by_key: dict[str, Node] = {}
        merges, parent, depth = self.algorithm.merges_siblings, node.id, node.depth + 1
        for proposal in proposals:
            action, count, prior = proposal.action, proposal.count, proposal.prior
            key = action_key(action)
            if merges and key in by_key:
                child = by_key[key]
                child.count += count
                if prior is None:
                    child.prior = child.count / total
                continue
            child = Node(-1, parent, depth, action, key, count)
            child.prior = count / total if prior is None else prior
            child.proposal = proposal
            by_key[key] = child
            children.append(child)
        return children

    def count_children(self, proposals: Sequence[Proposal]) -> int:
        """Return how many children `provisional` would give."""
        if not self.algorithm.merges_siblings:
            return len(proposals)
        return len({action_key(p.action) for p in proposals})

    def commit(self, work: VisitRequest, visit: VisitResult) -> None:
        """Put what came of a visit into the tree and tell the algorithm."""
        tree, algorithm, found = self.tree, self.algorithm, self.tree.places[work.node]
        node = found if isinstance(found, Node) else tree[work.node]
        self.commits += 1
        if visit.usage:
            node.usage = sum(visit.usage.values(), node.usage or Usage())
        if visit.outcome is not None:
            self._take_outcome(node, visit.outcome)
        if node.is_terminal:
            self._take_leaf(node, visit)
            algorithm.on_leaf(tree, node)
        elif visit.proposals is None:
            self.expansions += bool(visit.error)  # asked in vain is asked
            if node.children:  # one of several draws here failed
                node.status = "expanded"
            else:
                node.status = "dead"
                node.error = node.error or visit.error or "depth limit"
            algorithm.on_fail(tree, node)
        else:
            self.expansions += 1
            node.status, node.error = "expanded", ""
            children = self._grow(node, visit)
            algorithm.on_children(tree, node, children)

    def _take_outcome(self, node: Node, outcome: StepResult) -> None:
        node.is_executed = True
        node.state, node.state_key = outcome.state, outcome.state_key
        node.observation, node.error = outcome.observation, outcome.error
        node.is_broken = bool(outcome.error)
        node.is_terminal = outcome.is_terminal and not outcome.error
        node.reward = outcome.reward
        if outcome.is_goal is not None:
            node.is_goal = outcome.is_goal
        else:
            node.is_goal = node.is_terminal and outcome.reward is None

    def _take_leaf(self, node: Node, visit: VisitResult) -> None:
        node.status = "terminal"
        if "verify" in visit.gave_up:
            node.is_goal = False
        if visit.reward is not None:
            node.reward = visit.reward
            node.is_goal = visit.reward >= self.goal_reward

    def _grow(self, node: Node, visit: VisitResult) -> Sequence[Node]:
        """Make the children; in one go where they are new, distinct and have only been scored."""
        proposals, scores = visit.proposals, visit.scores
        if not proposals or not scores or visit.outcomes is not None:
            return self._grow_nodes(node, visit)
        if node.children or self.merge != "off" or len(scores) != len(proposals):
            return self._grow_nodes(node, visit)
        grow = self._grow_fresh if self._rows_of is None else self._grow_brood
        children: Sequence[Node] | None = grow(node, proposals, scores)
        return self._grow_nodes(node, visit) if children is None else children

    def _grow_brood(
        self, node: Node, proposals: Sequence[Proposal], scores: Sequence[NodeScore]
    ) -> Children | None:
        """Keep new children as a brood; None where two of them are the same."""
        tree, is_plain = self.tree, True
        seen, total = set(), 0
        for proposal, (cost, _, _, parts, scorer_state) in zip(proposals, scores):
            seen.add(action_key(proposal.action))
            total += proposal.count
            if not cost >= 0:
                _refuse_cost(cost, proposal.action)
            if parts is not NO_PARTS or scorer_state is not None:
                is_plain = False
        if len(seen) < len(proposals) and self.algorithm.merges_siblings:
            return None
        tree.merged_siblings += total - len(proposals)
        first = len(tree.places)
        assert self._rows_of is not None
        rows = self._rows_of(node.g, first, scores)
        kept = None if is_plain else scores
        return tree.add_brood(
            node, LazyChildren(node, first, self.commits, proposals, tuple(rows), kept)
        )

    def _grow_fresh(
        self, node: Node, proposals: Sequence[Proposal], scores: Sequence[NodeScore]
    ) -> list[Node] | None:
        """Make new children in one go; None where two of them are the same."""
        tree, seq, above = self.tree, self.commits, node.g
        first = at = len(tree.places)
        made: list[Node] = []
        seen: set[str] = set()
        total = 0
        for proposal in proposals:
            total += proposal.count
        for proposal, score in zip(proposals, scores):
            prior = proposal.prior
            if not score[0] >= 0:
                _refuse_cost(score[0], proposal.action)
            if prior is None:
                prior = proposal.count / total
            child = make_node(at, node, proposal, prior, above + score[0], score, seq)
            made.append(child)
            seen.add(child.action_key)
            at += 1
        if len(seen) < len(made) and self.algorithm.merges_siblings:
            return None
        tree.merged_siblings += total - len(made)
        tree.places += made
        node.children = range(first, first + len(made))
        return made

    def _grow_nodes(self, node: Node, visit: VisitResult) -> list[Node]:
        """Make the children one by one: their actions have run, or some are known already."""
        tree, seq, merge = self.tree, self.commits, self.merge != "off"
        provisional = self.provisional(node, visit.proposals or ())
        outcomes, scores = visit.outcomes, visit.scores
        _check_length(len(provisional), outcomes, "outcomes")
        _check_length(len(provisional), scores, "scores")
        check_twins = bool(node.children) and self.algorithm.merges_siblings
        places, ids = tree.places, tree.children_of(node)
        fresh: list[Node] = []
        for i, child in enumerate(provisional):
            if outcomes is not None and (outcome := outcomes[i]) is not None:
                self._take_outcome(child, outcome)
            _take_score(node, child, scores[i] if scores is not None else None)
            child.seq = seq
            if check_twins:
                twin = tree.child_by_key(node, child.action_key)
                if twin is not None:
                    twin.count += child.count
                    tree.merged_siblings += child.count
                    continue
            tree.merged_siblings += child.count - 1
            if merge and child.state_key is not None and self._merged(node, child):
                continue
            child.id = len(places)  # as `Tree.add` does; a call a node would show here
            places.append(child)
            ids.append(child.id)
            if child.error:
                child.status = "dead"
            else:
                fresh.append(child)
        return fresh

    def goes_round(self, parent: Node, action: Any, outcome: StepResult) -> bool:
        """Return whether a step adds nothing to its path: the same call, on the same state, said
        the same before, or the path goes round in circles.

        Equal states that are merged need no such look: such a step is merged.
        """
        if outcome.error or outcome.is_terminal:
            return False
        known = outcome.state_key
        if known is not None and self.merge != "off":
            return False
        key = action_key(action)
        marks = [_mark(known, key, outcome.observation)]
        is_still = known is not None and parent.state_key == known
        for at in reversed(self.tree.path(parent)[1:]):
            mark = _mark(at.state_key, at.action_key, at.observation)
            if is_still and mark == marks[0]:
                return True
            is_still = is_still and self.tree[at.parent].state_key == known
            marks.append(mark)
        return goes_round(marks[::-1])

    def _merged(self, node: Node, child: Node) -> bool:
        """Return True when the child's state is known and needs no node of its own to work on.

        What reads on the path have said is part of the state: a plan may need it.
        """
        tree = self.tree
        assert child.state_key is not None
        knowledge = self._knowledge.get(node.id, _NOTHING)
        if child.state_key == node.state_key and child.observation and not child.is_terminal:
            knowledge |= {_mark(child.state_key, child.action_key, child.observation)}
        key = child.state_key
        if knowledge:
            key = digest([key, sorted(knowledge)], 32)
            self._knowledge[len(tree)] = knowledge
        known_id = tree.by_state.get(key)
        if known_id is None:
            tree.by_state[key] = len(tree)
            return False
        self._knowledge.pop(len(tree), None)
        tree.merged_states += 1
        known = tree[known_id]
        if child.g < known.g - _EPS:
            tree.reparent(known, node, child.action, child.action_key, child.step_cost)
            self.algorithm.on_moved(tree, known)
        return True


_NOTHING: frozenset[str] = frozenset()


def _mark(state_key: str | None, key: str, observation: str) -> str:
    return f"{state_key}\x00{key}\x00{observation}"


def _check_length(children: int, rows: Sequence[Any] | None, what: str) -> None:
    if rows is not None and len(rows) != children:
        raise ConfigError(f"{len(rows)} {what} for {children} children: give one a child")


def _refuse_cost(cost: float, action: Any) -> NoReturn:
    raise ConfigError(
        f"step cost {cost!r} of {action!r:.80}: costs must be at least 0, or cheaper paths could "
        "never be ruled out"
    )


def _take_score(node: Node, child: Node, score: NodeScore | None) -> None:
    if score is None:  # the scorer failed: as promising as the parent
        child.step_cost, child.h, child.value = 1.0, node.h, node.value
    else:
        child.step_cost, child.h, child.value, child.parts, child.scorer_state = score
        if not child.step_cost >= 0:
            _refuse_cost(child.step_cost, child.action)
    child.g = node.g + child.step_cost
    if child.is_terminal:
        child.h = (
            0.0  # nothing is left to do, whatever the scorer, who saw only the action, guessed
        )


Successors = Callable[[Any], Iterable[tuple[Any, Any, float]]]


def explore(
    start: Any,
    successors: Successors,
    algorithm: Algorithm,
    *,
    is_goal: Callable[[Any], bool],
    to_go: Callable[[Any], float] = lambda state: 0.0,
    key: Callable[[Any], str | None] = str,
    max_expansions: int | None = None,
) -> SearchState:
    """Search a known world without models or asyncio; for puzzles, proofs and tests.

    Args:
        successors: state to (action, next state, step cost of at least 0).
        to_go: the heuristic, for algorithms that use one.
        key: equal exactly for equal states, which become one node; None keeps a state apart.

    Returns:
        The fold; `fold.algorithm.best(fold.tree)` is the best node.

    >>> from tfgrpo.search.algorithms.astar import BestFirst
    >>> def steps(n): return [("+1", n + 1, 1.0), ("*2", n * 2, 1.0)]
    >>> fold = explore(1, steps, BestFirst.uniform_cost(), is_goal=lambda n: n == 10)
    >>> fold.tree.plan(fold.tree[fold.algorithm.best(fold.tree)])
    ['+1', '*2', '+1', '*2']
    """
    root = Node(0, -1, 0, h=to_go(start), state=start, state_key=key(start), is_executed=True)
    root.is_terminal = root.is_goal = is_goal(start)
    fold = SearchState(algorithm, Tree(root), merge="sound")
    while not algorithm.finished(fold.tree):
        if max_expansions is not None and fold.expansions >= max_expansions:
            break
        work = fold.select()
        if work is None:
            break
        fold.commit(work, _known_visit(fold.tree[work.node], successors, is_goal, to_go, key))
    return fold


def _known_visit(
    node: Node,
    successors: Successors,
    is_goal: Callable[[Any], bool],
    to_go: Callable[[Any], float],
    key: Callable[[Any], str | None],
) -> VisitResult:
    visit = VisitResult()
    if node.is_terminal:
        return visit
    visit.proposals, visit.outcomes, visit.scores = [], [], []
    seen: set[str] = set()
    for action, state, cost in successors(node.state):
        name = action_key(action)
        if name in seen:  # the same action twice, as with two equal numbers
            continue
        seen.add(name)
        solved = is_goal(state)
        visit.proposals.append(Proposal(action))
        visit.outcomes.append(
            StepResult(state=state, state_key=key(state), is_terminal=solved, is_goal=solved)
        )
        visit.scores.append(NodeScore(step_cost=cost, to_go=0.0 if solved else to_go(state)))
    return visit
