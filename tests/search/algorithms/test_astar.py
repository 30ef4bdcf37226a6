"""Best-first search against known optima, networkx, and itself under other settings."""

from __future__ import annotations

import random
from typing import Any

import networkx
import pytest

from tests.benchmarks.environments import blocksworld, shared
from tfgrpo.errors import ConfigError
from tfgrpo.search import BestFirst, Node, SearchState, StepResult, explore
from tfgrpo.search.graph import check_heuristic, to_networkx
from tfgrpo.search.node import NO_PARTS, NodeScore, Proposal
from tfgrpo.search.state import VisitResult
from tfgrpo.search.views import tree_rows

Edges = dict[str, list[tuple[str, str, float]]]

# a known tree: the cheap first step leads to a dear end
TREE: Edges = {
    "root": [("a", "A", 1.0), ("b", "B", 3.0)],
    "A": [("c", "C", 6.0), ("d", "D", 5.0)],
    "B": [("e", "goal", 1.0)],
    "D": [("f", "goal2", 4.0)],
}
TO_GO = {"root": 4.0, "A": 5.0, "B": 1.0, "C": 0.0, "D": 4.0}


def successors(edges: Edges) -> Any:
    return lambda state: edges.get(state, [])


def is_goal(state: str) -> bool:
    return state.startswith("goal")


def run(
    edges: Edges, algorithm: BestFirst, to_go: Any = lambda s: 0.0, **options: Any
) -> SearchState:
    return explore("root", successors(edges), algorithm, is_goal=is_goal, to_go=to_go, **options)


def cost(fold: SearchState) -> float:
    node = fold.tree[fold.algorithm.best(fold.tree)]
    assert node.is_goal
    return node.g


def test_a_consistent_estimate_finds_the_cheapest_leaf_and_expands_nothing_dearer() -> None:
    fold = run(TREE, BestFirst.astar(), lambda s: TO_GO.get(s, 0.0))
    best = fold.tree[fold.algorithm.best(fold.tree)]
    assert (fold.tree.plan(best), best.g) == (["b", "e"], 4.0)
    expanded = fold.tree.with_status("expanded")
    assert all(n.g + n.h <= best.g for n in expanded)
    assert [n.state for n in expanded] == ["root", "B"]


def test_without_an_estimate_astar_is_uniform_cost_search() -> None:
    first, second = run(TREE, BestFirst.astar()), run(TREE, BestFirst.uniform_cost())
    plans = [[(n.action, n.status, n.g) for n in fold.tree] for fold in (first, second)]
    assert plans[0] == plans[1]
    assert cost(first) == 4.0


def random_graph(rng: random.Random, nodes: int) -> Edges:
    names = ["root", *[f"n{i}" for i in range(nodes)], "goal"]
    edges: Edges = {name: [] for name in names}
    for name in names[:-1]:
        for other in rng.sample(names, min(len(names), 4)):
            if other != name:
                edges[name].append((f"{name}>{other}", other, float(rng.randrange(1, 20))))
    edges["root"].append(("straight", "goal", 200.0))
    return edges


def exact(edges: Edges) -> tuple[float, dict[str, float]]:
    graph = networkx.DiGraph()
    for name, rows in edges.items():
        for _, other, weight in rows:
            known = graph.get_edge_data(name, other)
            if known is None or weight < known["weight"]:
                graph.add_edge(name, other, weight=weight)
    lengths = networkx.single_source_dijkstra_path_length(graph.reverse(), "goal")
    return float(lengths["root"]), dict(lengths)


def test_random_graphs_give_the_optimum_of_networkx_also_where_nodes_must_be_reopened() -> None:
    moved = 0
    for seed in range(60):
        rng = random.Random(seed)
        edges = random_graph(rng, 14)
        optimum, to_go = exact(edges)
        # admissible but not consistent: some estimates are thrown away
        noisy = {name: length if rng.random() < 0.5 else 0.0 for name, length in to_go.items()}
        fold = run(edges, BestFirst.astar(), lambda s, h=noisy: h.get(s, 0.0))
        assert cost(fold) == optimum
        for node in fold.tree:  # moved subtrees carry their new costs
            if node.parent >= 0:
                assert node.g == pytest.approx(fold.tree[node.parent].g + node.step_cost)
        moved += fold.tree.merged_states
    assert moved > 0


def test_weight_w_costs_at_most_w_times_the_optimum() -> None:
    for seed in range(30):
        edges = random_graph(random.Random(seed), 14)
        optimum, to_go = exact(edges)
        for weight in (1.5, 3.0):
            fold = run(edges, BestFirst.astar(weight), lambda s, h=to_go: h.get(s, 500.0))
            assert cost(fold) <= weight * optimum + 1e-9


def test_anytime_search_ends_with_the_optimum_after_a_first_goal() -> None:
    for seed in range(20):
        edges = random_graph(random.Random(seed), 14)
        optimum, to_go = exact(edges)
        algorithm = BestFirst.astar(5.0, anytime=True)
        fold = run(edges, algorithm, lambda s, h=to_go: h.get(s, 500.0))
        assert cost(fold) == optimum


def test_a_bounded_open_list_drops_the_worst_and_says_how_many() -> None:
    algorithm = BestFirst.astar(max_open=20)
    fold = SearchState(algorithm)
    work = fold.select()
    assert work is not None
    proposals = [Proposal(f"x{i}") for i in range(30)]
    costs = random.Random(0).sample(range(30), 30)
    fold.commit(work, VisitResult(proposals=proposals, scores=[NodeScore(float(c)) for c in costs]))
    assert sorted(n.g for n in fold.tree.with_status("open")) == [float(i) for i in range(20)]
    assert algorithm.pruned_open == len(fold.tree.with_status("pruned")) == 10


def test_a_negative_step_cost_is_refused_with_the_reason() -> None:
    edges: Edges = {"root": [("a", "A", -1.0)]}
    with pytest.raises(ValueError, match="at least 0"):
        run(edges, BestFirst.astar())


def test_check_heuristic_tells_admissible_from_consistent_from_neither() -> None:
    steps = successors(TREE)

    def check(to_go: dict[str, float]) -> Any:
        return check_heuristic("root", steps, lambda s: to_go.get(s, 0.0), is_goal=is_goal)

    good = check({"root": 4.0, "B": 1.0, "D": 4.0, "A": 8.0, "C": 5.0})
    assert (good.optimum, good.is_admissible, good.is_consistent) == (4.0, True, True)
    jumping = check({"root": 4.0})  # true, but falls by 4 over a step of 1
    assert (jumping.is_admissible, jumping.is_consistent) == (True, False)
    assert jumping.not_consistent[0][0] == "root"
    high = check({"B": 2.0})
    assert high.not_admissible == [("B", 2.0, 1.0)]


def test_the_graph_export_has_the_costs_of_the_tree() -> None:
    fold = run(TREE, BestFirst.astar(), lambda s: TO_GO.get(s, 0.0))
    graph = to_networkx(fold.tree)
    lengths = networkx.single_source_dijkstra_path_length(graph, 0)
    assert lengths == {n.id: n.g for n in fold.tree}


@pytest.mark.skipif(
    not shared("data", "search", "blocksworld").exists(), reason="shared data are absent"
)
def test_blocksworld_plans_are_as_short_as_networkx_says() -> None:
    for instance in blocksworld.read_instances()[::10]:
        fold = explore(
            instance.start,
            blocksworld.moves,
            BestFirst.astar(),
            is_goal=instance.is_goal,
            to_go=instance.to_go,
            key=lambda s: s.key,
        )
        assert cost(fold) == instance.optimum == blocksworld.exact_optimum(instance)


def test_a_state_reached_more_cheaply_moves_with_all_below_it() -> None:
    edges: Edges = {
        "root": [("long", "A", 1.0), ("short", "B", 2.0)],
        "A": [("x", "S", 2.5)],
        "B": [("y", "S", 1.0)],
        "S": [("z", "goal", 1.0)],
    }
    estimates = {"B": 2.0}
    fold = run(edges, BestFirst.astar(), lambda s: estimates.get(s, 0.0))
    best = fold.tree[fold.algorithm.best(fold.tree)]
    assert isinstance(best, Node)
    assert fold.tree.plan(best) == ["short", "y", "z"]
    assert best.g == 4.0


class EagerBestFirst(BestFirst):
    """The same search, given nodes at once."""

    rows = None  # type: ignore[assignment]  # as for an algorithm that has none


@pytest.mark.parametrize("options", [{}, {"weight": 3.0, "anytime": True}, {"max_open": 25}])
def test_children_kept_as_numbers_make_the_same_tree_as_nodes(options: dict[str, Any]) -> None:
    folds = [SearchState(BestFirst.astar(**options)), SearchState(EagerBestFirst.astar(**options))]
    for fold in folds:
        rng = random.Random(7)
        for turn in range(120):
            work = fold.select()
            assert work is not None
            actions = [rng.choice("abcdef") + str(rng.randrange(9)) for _ in range(4)]
            proposals = [Proposal(a, count=rng.randrange(1, 4), prior=None) for a in actions]
            names = dict.fromkeys(actions)  # equal siblings become one
            parts = {"g1": 0.5} if turn % 2 else NO_PARTS
            scores = [
                NodeScore(rng.random(), rng.random(), rng.random(), parts, [turn]) for _ in names
            ]
            fold.commit(work, VisitResult(proposals=proposals, scores=scores))
    lazy, eager = folds
    unmade = len(lazy.tree) - sum(1 for _ in lazy.tree.touched())
    assert unmade > 20 and sum(1 for _ in eager.tree.touched()) == len(eager.tree)
    assert lazy.algorithm.best(lazy.tree) == eager.algorithm.best(eager.tree)
    assert tree_rows(lazy.tree) == tree_rows(eager.tree)
    assert [n.scorer_state for n in lazy.tree] == [n.scorer_state for n in eager.tree]
    assert lazy.tree[-1] is lazy.tree[len(lazy.tree) - 1]


def test_a_cost_that_is_no_number_is_refused() -> None:
    for cost in (-1.0, float("nan")):
        fold = SearchState(BestFirst.astar())
        work = fold.select()
        assert work is not None
        with pytest.raises(ConfigError, match="at least 0"):
            fold.commit(work, VisitResult(proposals=[Proposal("a")], scores=[NodeScore(cost)]))


@pytest.mark.parametrize("is_goal", [True, False])
def test_a_finished_path_has_nothing_to_go_whatever_the_scorer_guessed(is_goal: bool) -> None:
    fold = SearchState(BestFirst.greedy())
    work = fold.select()
    assert work is not None
    outcomes: list[StepResult | None] = [
        StepResult("end", is_terminal=True, is_goal=is_goal),
        StepResult("half"),
    ]
    scores = [NodeScore(1.0, 5.0), NodeScore(1.0, 2.0)]
    proposals = [Proposal("finish"), Proposal("go")]
    fold.commit(work, VisitResult(proposals=proposals, outcomes=outcomes, scores=scores))
    assert [n.h for n in fold.tree][1:] == [0.0, 2.0]
    work = fold.select()
    assert work is not None and fold.tree[work.node].action == "finish"
    fold.commit(work, VisitResult())
    assert fold.algorithm.finished(fold.tree) == ("goal" if is_goal else "")
