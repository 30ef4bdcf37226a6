"""Every algorithm against the contract, and each one's own promise."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from tests.benchmarks.search import search_properties as properties
from tfgrpo.errors import ConfigError
from tfgrpo.search import (
    ABMCTS,
    ALGORITHMS,
    MCTS,
    Beam,
    BestOfN,
    DepthFirst,
    EntropyRollouts,
    LookaheadRollouts,
    Node,
    NodeScore,
    Proposal,
    SearchState,
    StepResult,
    VisitRequest,
    call,
    make_algorithm,
)
from tfgrpo.search.algorithms.best_of_n import majority_probability
from tfgrpo.search.algorithms.tree_rollouts import first_entropy
from tfgrpo.search.node import make_node
from tfgrpo.search.state import VisitResult
from tfgrpo.search.views import tree_rows

NAMES = sorted(ALGORITHMS)


def answer(fold: SearchState, work: VisitRequest, asked: dict[int, int]) -> VisitResult:
    """Return a visit that depends on the node's path and the draw alone."""
    tree, node = fold.tree, fold.tree[work.node]
    path = "".join(n.action_key for n in tree.path(node)[1:])
    draw = asked.get(node.id, 0)
    asked[node.id] = draw + 1
    rng = random.Random(f"{path}/{draw}")
    if node.depth and not node.is_executed:
        outcome = StepResult(
            path, "", path, node.depth >= 4, node.depth >= 4 and rng.random() < 0.02
        )
        if node.depth >= 4 or rng.random() < 0.1:
            bad = "" if node.depth >= 4 else "failed"
            return VisitResult(outcome=StepResult(error=bad) if bad else outcome)
    else:
        outcome = None
    k = work.k or 4
    proposals = [Proposal(rng.choice("abcdef"), entropy=rng.random()) for _ in range(k)]
    count = len(fold.provisional(node, proposals))
    scores = [NodeScore(rng.random(), rng.random(), rng.random()) for _ in range(count)]
    return VisitResult(outcome=outcome, proposals=proposals, scores=scores)


def grow(fold: SearchState, steps: int, asked: dict[int, int]) -> None:
    for _ in range(steps):
        if fold.algorithm.finished(fold.tree) or (work := fold.select()) is None:
            return
        fold.commit(work, answer(fold, work, asked))


@pytest.mark.parametrize("name", NAMES)
def test_dump_and_load_in_the_middle_change_nothing(name: str) -> None:
    whole, asked = SearchState(make_algorithm(name)), {}
    grow(whole, 60, asked)
    halved, asked = SearchState(make_algorithm(name)), {}
    grow(halved, 25, asked)
    state = json.loads(json.dumps(halved.algorithm.dump()))
    fresh = make_algorithm(name)
    fresh.load(halved.tree, state)
    again = SearchState(fresh, halved.tree)
    again.commits = halved.commits
    grow(again, 35, asked)
    assert tree_rows(again.tree) == tree_rows(whole.tree)
    assert fresh.best(again.tree) == whole.algorithm.best(whole.tree)


@pytest.mark.parametrize("name", NAMES)
def test_visits_in_flight_are_distinct_unless_samples_are_asked(name: str) -> None:
    fold, asked = SearchState(make_algorithm(name)), {}
    grow(fold, 12, asked)
    works = [w for _ in range(8) if (w := fold.select()) is not None]
    plain = [w.node for w in works if w.k != 1]
    assert len(plain) == len(set(plain))
    for work in reversed(works):  # committed in another order than selected: all land
        before = fold.commits
        fold.commit(work, answer(fold, work, asked))
        assert fold.commits == before + 1


@pytest.mark.parametrize("name", NAMES)
async def test_the_tree_is_the_same_at_concurrency_1_and_16(name: str) -> None:
    runs = [
        await properties.one_full_run(seed, algorithm=name, concurrency=c, expansions=30)
        for seed in (0, 4)
        for c in (1, 16)
    ]
    rows = [json.dumps([tree_rows(r.fold.tree), r.stop_reason]) for r in runs]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["deterministic", "fast"])
async def test_no_paid_sample_is_dropped(name: str, mode: str) -> None:
    for concurrency in (1, 7, 64):
        world = properties.RandomWorld(1, failing=0.05)
        result = await properties.one_full_run(
            1, algorithm=name, mode=mode, concurrency=concurrency, world=world, expansions=40
        )
        assert properties.samples_in(result) == world.paid_samples
        assert result.counters["cut_proposals"] == 0


def test_unknown_names_and_options_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="uniform_cost"):
        make_algorithm("a-star")
    with pytest.raises(ConfigError, match="widht"):
        make_algorithm("beam", widht=3)


def commit(fold: SearchState, values: list[float], *, executed: bool = True) -> Node:
    """Visit the next node and give it children of these values."""
    work = fold.select()
    assert work is not None
    proposals = [Proposal(f"{i}") for i in range(len(values))]
    scores = [NodeScore(1 - v, 0.0, v) for v in values]
    outcomes: Any = [StepResult("s") for _ in values] if executed else None
    fold.commit(work, VisitResult(proposals=proposals, scores=scores, outcomes=outcomes))
    return fold.tree[work.node]


def test_a_beam_keeps_the_best_of_the_whole_level_and_prunes_the_rest() -> None:
    fold = SearchState(Beam(2))
    commit(fold, [0.1, 0.9, 0.5])
    commit(fold, [0.8, 0.7])
    commit(fold, [0.3, 0.75])
    assert fold.select() is not None
    kept = sorted(n.value or 0 for n in fold.tree if n.depth == 2 and n.status != "pruned")
    assert kept == [0.75, 0.8]
    assert [n.value for n in fold.tree if n.depth == 1 and n.status == "pruned"] == [0.1]


def test_diverse_beams_stay_below_different_first_steps() -> None:
    fold = SearchState(Beam.diverse(4, 2))
    commit(fold, [0.9, 0.8, 0.7])
    commit(fold, [0.9, 0.9, 0.9])
    commit(fold, [0.1, 0.1, 0.1])
    fold.select()
    kept = [fold.tree.path(n)[1].id for n in fold.tree if n.depth == 2 and n.status != "pruned"]
    assert sorted(kept) == [1, 1, 2, 2]


def test_depth_first_follows_the_best_child_and_returns_to_the_next() -> None:
    fold = SearchState(DepthFirst(2))
    commit(fold, [0.2, 0.9, 0.5])
    visited = []
    while (work := fold.select()) is not None:
        visited.append(fold.tree[work.node].value)
        fold.commit(work, VisitResult(outcome=StepResult(error="dead end")))
    assert visited == [0.9, 0.5]  # the third is wider than two


def test_dfsdt_draws_one_child_and_goes_back_two_levels_from_a_leaf() -> None:
    fold, order = SearchState(DepthFirst.dfsdt(width=2, back=2)), []
    for _ in range(40):
        work = fold.select()
        if work is None:
            break
        node = fold.tree[work.node]
        order.append("".join(n.action_key for n in fold.tree.path(node)[1:]))
        if node.depth == 3:
            fold.commit(work, VisitResult(outcome=StepResult("s", is_terminal=True, is_goal=False)))
            continue
        outcome = None if node.is_executed else StepResult("s")
        name = str(len(node.children))
        fold.commit(
            work, VisitResult(outcome=outcome, proposals=[Proposal(name)], scores=[NodeScore()])
        )
    # from leaf 000 back past 00 to 0, from 010 (a leaf's path again) past 01 to the root
    assert order[:4] == ["", "0", "00", "000"]
    assert order[4] == "0"
    assert "001" not in order
    assert order.index("01") > order.index("000")


def test_uct_backs_up_the_mean_of_what_lies_below() -> None:
    fold = SearchState(MCTS(stop_at_goal=False))
    rng = random.Random(0)
    for _ in range(40):
        commit(fold, [rng.random() for _ in range(3)])
    tree = fold.tree
    for node in tree:
        below = [n.value or 0.0 for n in tree.descendants(node)]
        own = [node.value or 0.0] if node.id else []
        assert node.value_sum == pytest.approx(math.fsum(below + own))
        assert node.visits == len(below + own)


def test_uct_finds_the_better_arm_and_puct_follows_the_prior() -> None:
    for rule in ("uct", "puct"):
        fold = SearchState(MCTS(rule=rule, stop_at_goal=False))  # type: ignore[arg-type]  # both rules
        commit(fold, [0.2, 0.8])
        for _ in range(200):
            work = fold.select()
            assert work is not None
            first = fold.tree.path(fold.tree[work.node])[1].action
            value = 0.8 if first == "1" else 0.2
            visit = VisitResult(
                proposals=[Proposal("x")], scores=[NodeScore(1 - value, 0.0, value)]
            )
            fold.commit(work, visit)
        low, high = fold.tree[1], fold.tree[2]
        assert high.visits > 4 * low.visits


def test_many_uct_visits_in_flight_spread_out_and_leave_no_trace_when_they_land() -> None:
    fold = SearchState(MCTS(stop_at_goal=False))
    commit(fold, [0.5] * 4)
    works = [fold.select() for _ in range(4)]
    assert len({w.node for w in works if w}) == 4
    assert fold.select() is None
    for work in works:
        assert work is not None
        fold.commit(work, VisitResult(proposals=[Proposal("x")], scores=[NodeScore(0.5, 0, 0.5)]))
    assert fold.tree.root.visits == 8
    assert fold.tree.root.value_sum == pytest.approx(4.0)


def test_ab_mcts_goes_wider_where_children_are_poor_and_deeper_where_they_are_good() -> None:
    def widths(value: float) -> int:
        fold = SearchState(ABMCTS(stop_at_goal=False, seed=3))
        rng = random.Random(1)
        for _ in range(60):
            work = fold.select()
            assert work is not None
            node = fold.tree[work.node]
            # children of the root are worth 0.5 on average, what lies below them `value`
            worth = rng.random() if node.id == 0 else value
            outcome = None if node.is_executed else StepResult("s")
            name = Proposal(str(len(node.children)))
            fold.commit(
                work,
                VisitResult(
                    outcome=outcome, proposals=[name], scores=[NodeScore(1 - worth, 0, worth)]
                ),
            )
        return len(fold.tree.root.children)

    assert widths(0.05) > 2 * widths(0.95)


def test_ab_mcts_learns_which_proposer_is_better() -> None:
    fold = SearchState(ABMCTS(arms=2, stop_at_goal=False, seed=0))
    asked = [0, 0]
    for _ in range(80):
        work = fold.select()
        assert work is not None
        asked[work.arm] += 1
        worth = 0.9 if work.arm else 0.1
        node = fold.tree[work.node]
        outcome = None if node.is_executed else StepResult("s")
        proposal = Proposal(str(len(node.children)), arm=work.arm)
        fold.commit(
            work,
            VisitResult(outcome=outcome, proposals=[proposal], scores=[NodeScore(0, 0, worth)]),
        )
    assert asked[1] > 2 * asked[0]


def finish(fold: SearchState, answers: list[tuple[str, float]]) -> None:
    """Run chains of one step that end with these answers and rewards."""
    queue = list(answers)
    while not fold.algorithm.finished(fold.tree) and (work := fold.select()) is not None:
        node = fold.tree[work.node]
        if node.depth == 0:
            text, reward = queue.pop(0)
            fold.commit(
                work, VisitResult(proposals=[Proposal(text)], scores=[NodeScore(0, 0, reward)])
            )
        else:
            reward = node.value or 0.0
            fold.commit(work, VisitResult(outcome=StepResult("s", is_terminal=True, reward=reward)))


def test_best_of_n_takes_the_best_reward_and_equal_chains_stay_apart() -> None:
    fold = SearchState(BestOfN.best_of(4))
    finish(fold, [("a", 0.2), ("b", 0.9), ("a", 0.2), ("c", 0.5)])
    assert fold.tree[fold.algorithm.best(fold.tree)].action == "b"
    assert len(fold.tree.with_status("terminal")) == 4


def test_self_consistency_takes_the_majority_and_stops_once_it_is_sure() -> None:
    fold = SearchState(BestOfN.self_consistency(8))
    finish(fold, [(t, 0.0) for t in "babacbbd"])
    assert fold.tree[fold.algorithm.best(fold.tree)].action == "b"
    early = SearchState(BestOfN.self_consistency(50, confidence=0.95))
    finish(early, [("x", 0.0)] * 50)
    assert early.algorithm.finished(early.tree) == "converged"
    votes = len(early.tree.with_status("terminal"))
    assert votes == 4  # 1 - 2^-5 = 0.969 is the first that passes 0.95
    assert majority_probability(4, 0) == pytest.approx(1 - 2**-5)


def test_the_majority_probability_is_the_beta_integral() -> None:
    steps = 2_000
    for first in range(6):
        for second in range(6):
            # Simpson's rule for the density of Beta(first + 1, second + 1) over [1/2, 1]
            weights = [1, *([4, 2] * (steps // 2))[: steps - 1], 1]
            points = [0.5 + 0.5 * i / steps for i in range(steps + 1)]
            area = sum(w * p**first * (1 - p) ** second for w, p in zip(weights, points))
            norm = math.factorial(first + second + 1)
            norm /= math.factorial(first) * math.factorial(second)
            expected = norm * area * 0.5 / steps / 3
            assert majority_probability(first, second) == pytest.approx(expected)


def test_entropy_is_that_of_the_alternatives() -> None:
    row = {"a": math.log(0.7), "b": math.log(0.2), "c": math.log(0.1)}
    expected = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1)) / math.log(3)
    assert first_entropy([row]) == pytest.approx(expected)
    assert first_entropy([{"a": 0.0}]) is None


def chains_with(entropy: Any, **options: Any) -> SearchState:
    """Run entropy rollouts of three steps whose entropies come from a function of the path."""
    fold, asked = SearchState(EntropyRollouts(16, initial=4, **options)), {}
    while (work := fold.select()) is not None:
        node = fold.tree[work.node]
        outcome = None if node.is_executed else StepResult("s", is_terminal=node.depth == 3)
        if node.depth == 3:
            fold.commit(work, VisitResult(outcome=outcome))
            continue
        draw = asked[node.id] = asked.get(node.id, 0) + 1
        proposal = Proposal(f"{node.id}-{draw}", entropy=entropy(node))
        fold.commit(work, VisitResult(outcome=outcome, proposals=[proposal], scores=[NodeScore()]))
    return fold


def test_entropy_rollouts_finish_exactly_n_chains_and_branch_where_entropy_rose() -> None:
    rising = chains_with(lambda n: 0.1 if n.depth == 0 else 0.9, base=0.4, gain=0.7)
    falling = chains_with(lambda n: 0.9 if n.depth == 0 else 0.1, base=0.4, gain=0.7)
    for fold in (rising, falling):
        assert len(fold.tree.with_status("terminal")) == 16
    roots = [len(f.tree.root.children) for f in (rising, falling)]
    assert roots[0] < roots[1] == 16  # branches replace fresh chains
    assert rising.tree.root.children


def text_proposal(text: str, rows: list[dict[str, float]]) -> Proposal:
    logs = tuple({t: math.log(p) for t, p in row.items()} for row in rows)
    return Proposal(text, tokens=tuple(text.split(" ")), top_logprobs=logs)


def test_lookahead_branches_at_uncertain_tokens_and_drops_what_says_the_same() -> None:
    sure, unsure = {"x": 0.99, "y": 0.01}, {"x": 0.5, "y": 0.4}
    fold = SearchState(LookaheadRollouts(4, min_edit=0.3))
    texts, prefixes = ["a x b c", "y other words here", "a x b c", "fresh one two three"], []
    while (work := fold.select()) is not None:
        node = fold.tree[work.node]
        if node.depth:
            fold.commit(work, VisitResult(outcome=StepResult("s", is_terminal=True)))
            continue
        prefixes.append(work.prefix)
        rows = [sure, unsure, sure, sure] if len(prefixes) == 1 else [sure] * 4
        text = texts[min(len(prefixes), len(texts)) - 1]
        fold.commit(work, VisitResult(proposals=[text_proposal(text, rows)], scores=[NodeScore()]))
    assert prefixes[0] == "" and prefixes[1] == "ay"
    assert len(fold.tree.with_status("terminal")) <= 4
    assert fold.tree[1].status != "pruned"


@pytest.mark.parametrize("rule", ["uct", "puct"])
def test_mcts_follows_its_formula_at_every_choice(rule: Any) -> None:
    """Each walk against the rule written out, at few and at many visits (table and function)."""
    fold = SearchState(MCTS(rule=rule, exploration=0.7, stop_at_goal=False))
    rng = random.Random(3)

    def chosen() -> int:
        node = fold.tree.root
        while node.children:
            children = [c for i in node.children if (c := fold.tree[i]).status != "dead"]
            n = node.visits
            if rule == "puct":
                bounds = [
                    c.mean_value + 0.7 * c.prior * math.sqrt(n) / (1 + c.visits) for c in children
                ]
            else:
                bounds = [c.mean_value + 0.7 * math.sqrt(math.log(n) / c.visits) for c in children]
            node = children[bounds.index(max(bounds))]
        return node.id

    for turn in range(5_000):
        expected = chosen() if turn % 50 < 5 or turn > 4_900 else None
        work = fold.select()
        assert work is not None
        assert expected is None or work.node == expected
        values = [rng.random() for _ in range(1 if turn > 20 else 3)]
        proposals = [Proposal(str(i), prior=rng.random()) for i in range(len(values))]
        scores = [NodeScore(1 - v, 0.0, v) for v in values]
        fold.commit(work, VisitResult(proposals=proposals, scores=scores))
    assert fold.tree.root.visits > 4_096


def test_the_prior_of_ab_mcts_is_set_by_options_of_one_flat_list() -> None:
    made = make_algorithm("ab_mcts", arms=2, prior_mean=0.9, prior_scale=0.4)
    assert isinstance(made, ABMCTS)
    assert (made.arms, made._prior) == (2, (0.9, 1.0, 1.0, 0.4))
    with pytest.raises(ConfigError, match="prior_men"):
        make_algorithm("ab_mcts", prior_men=0.9)


@pytest.mark.parametrize("name", ["astar", "best_of_n"])
def test_children_are_counted_as_they_would_be_made(name: str) -> None:
    fold = SearchState(make_algorithm(name))
    proposals = [Proposal(a) for a in ("a", " a", "b", call("f", x=1), call("f", x=1.0))]
    made = fold.provisional(fold.tree.root, proposals)
    assert fold.count_children(proposals) == len(made) == (3 if name == "astar" else 5)


def test_a_node_that_is_born_is_the_node_that_is_constructed() -> None:
    proposal = Proposal("a", count=2)
    score = NodeScore(0.5, 2.0, 0.25, {"g1": 1.0}, ["scorer_state"])
    made = make_node(7, Node(3, 0, 3), proposal, 0.4, 1.5, score, 9)
    known = Node(7, 3, 4, "a", "a", 2, 0.4, "open", 0.5, 1.5, 2.0, 0.25, seq=9)
    known.proposal, known.parts, known.scorer_state = proposal, score.parts, score.scorer_state
    names = Node.__dataclass_fields__
    assert {n: getattr(made, n) for n in names} == {n: getattr(known, n) for n in names}
