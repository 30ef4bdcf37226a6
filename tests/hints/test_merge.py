"""Merges with advantages computed by hand, and the methods that stand here as functions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hints.groups import SOLUTION, group, task
from tfgrpo.advantage import advantages_G
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.adhint import consistency_weights_T, difficulty, hint_ratio, prefix_plan
from tfgrpo.hints.bread import PrefixSearch, branch_plan
from tfgrpo.hints.merge import mixed, replace_k, side_by_side, with_advantages
from tfgrpo.hints.scaf import ladder
from tfgrpo.hints.stephint import cut_points, step_plans
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Step

PLAN = HintPlan(text="x", level=1, source="teacher")


def hinted(level: int, reward: float) -> tuple[int, Rollout]:
    """A rollout at a level, with prompt tokens of its own."""
    made = group(task(), [reward], HintPlan(text="x", level=level, source="teacher"))
    step = Step(Message("assistant", "y"), token_ids=(1,), prompt_token_ids=(level, level))
    rollout = made.rollouts[0]
    scored = Rollout(rollout.rollout_id, "t", (step,), sample_index=0)
    assert rollout.score is not None
    return level, scored.graded(rollout.score)


def test_sets_become_one_group_numbered_anew_that_says_so() -> None:
    one = task()
    made = [
        PlannedGroup(BARE, group(one, [0.0, None])),
        PlannedGroup(PLAN, group(one, [1.0], PLAN, 1)),
    ]
    merged = mixed(made)
    assert [r.sample_index for r in merged.rollouts] == [0, 1, 2]
    assert len({r.rollout_id for r in merged.rollouts}) == 3
    assert merged.rewards_G == (0.0, 1.0)
    assert merged.metadata["hint"] == "mixed"
    assert mixed(made[:1]) is made[0].group
    with pytest.raises(ConfigError, match="one task"):
        mixed([made[0], PlannedGroup(BARE, group(task("other"), [1.0]))])


def test_advantages_are_written_into_graded_rollouts_in_order() -> None:
    noted = with_advantages(group(task(), [0.0, None, 1.0]), [-0.5, 0.5])
    assert [r.metadata.get("hint") for r in noted.rollouts] == [
        {"advantage": -0.5},
        None,
        {"advantage": 0.5},
    ]
    with pytest.raises(ValueError, match="1 advantages for 2"):
        with_advantages(group(task(), [0.0, 1.0]), [0.5])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_replaced_success_has_the_advantages_of_the_paper(size: int) -> None:
    merged = replace_k(group(task(), [0.0] * size), [hinted(3, 1.0)])
    assert sum(merged.rewards_G) == 1.0
    population = advantages_G(merged.rewards_G, "grpo_population")
    assert population[0] == pytest.approx(math.sqrt(size - 1))
    assert population[1:] == pytest.approx([-1 / math.sqrt(size - 1)] * (size - 1))


def test_the_sample_deviation_gives_verls_figures_for_eight() -> None:
    merged = replace_k(group(task(), [0.0] * 8), [hinted(1, 1.0)])
    sample = advantages_G(merged.rewards_G)
    assert round(sample[0], 2) == 2.47
    assert round(sample[1], 2) == -0.35


def test_the_least_hinted_success_replaces_the_first_failure_and_nothing_else() -> None:
    bare = group(task(), [None, 0.0, 0.0, 0.0])
    merged = replace_k(bare, [hinted(7, 1.0), hinted(2, 0.0), hinted(5, 1.0)])
    assert merged.rollouts[1].steps[0].prompt_token_ids == (5, 5)  # trained as rolled
    assert merged.rollouts[1].sample_index == 1
    assert [merged.rollouts[i] for i in (0, 2, 3)] == [bare.rollouts[i] for i in (0, 2, 3)]
    assert merged.metadata["replaced_from_level"] == {"1": 5}
    assert merged.context == bare.context
    two = replace_k(bare, [hinted(7, 1.0), hinted(5, 1.0)], k=2)
    assert two.rewards_G == (1.0, 1.0, 0.0)
    assert two.metadata["replaced_from_level"] == {"1": 5, "2": 7}


def test_a_group_with_a_success_or_without_a_solution_is_untouched() -> None:
    solved = group(task(), [0.0, 1.0])
    assert replace_k(solved, [hinted(1, 1.0)]) is solved
    failed = group(task(), [0.0, 0.0])
    assert replace_k(failed, [hinted(1, 0.0)]) is failed
    assert advantages_G(failed.rewards_G) == (0.0, 0.0)
    unknown = group(task(), [None, None])
    assert replace_k(unknown, [hinted(1, 1.0)]) is unknown
    with pytest.raises(ConfigError, match="at least one"):
        replace_k(failed, [], k=0)


def test_a_ladder_goes_from_idea_to_solution_in_growing_parts() -> None:
    plans = ladder(task(), [["carry", "tens"], ["add 7 and 5", "so 42"]])
    assert [(p.level, p.text) for p in plans] == [
        (1, "carry"),
        (2, "carry\ntens"),
        (3, "add 7 and 5"),
    ]  # rung 4 holds the answer
    assert {(p.n, p.source, p.condition) for p in plans} == {(1, "teacher", "as_rolled")}
    grafted = ladder(task(), [["carry"]], original_prompt=True)
    assert grafted[0].condition == "original"


def test_side_by_side_matches_a_hand_computed_case() -> None:
    # b = 1/4, h = 3/4: bare 1 -> 9/16, bare 0 -> -1/16; hinted 1 -> 1/16, hinted 0 -> -9/16.
    found = side_by_side(
        group(task(), [1.0, 0.0, 0.0, 0.0]), group(task(), [1.0, 1.0, 1.0, 0.0], PLAN)
    )
    size = math.sqrt((2 * 81 + 6 * 1) / 256 / 8)
    assert found.bare_G == pytest.approx([9 / 16 / size] + [-1 / 16 / size] * 3)
    assert found.hinted_G == pytest.approx([1 / 16 / size] * 3 + [-9 / 16 / size])


@given(
    bare=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
    with_hint=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
)
@settings(max_examples=120)
def test_a_bare_success_never_ranks_below_a_hinted_one(
    bare: list[float], with_hint: list[float]
) -> None:
    found = side_by_side(group(task(), bare), group(task(), with_hint, PLAN))
    best_bare = [a for a, r in zip(found.bare_G, bare, strict=True) if r == 1.0]
    best_hinted = [a for a, r in zip(found.hinted_G, with_hint, strict=True) if r == 1.0]
    assert not best_bare or not best_hinted or min(best_bare) >= max(best_hinted) - 1e-12
    values = (*found.bare_G, *found.hinted_G)
    if any(values):
        assert math.fsum(v * v for v in values) / len(values) == pytest.approx(1.0)
    assert all(a >= 0 for a in (*best_bare, *best_hinted))


def test_without_a_hint_side_by_side_is_grpo() -> None:
    bare, same = group(task(), [1.0, 0.0]), group(task(), [0.0, 0.0])
    found = side_by_side(bare, same, ratio=0.0)
    assert (*found.bare_G, *found.hinted_G) == advantages_G([1.0, 0.0, 0.0, 0.0])
    flat = side_by_side(same, same)
    assert (*flat.bare_G, *flat.hinted_G) == (0.0,) * 4
    with pytest.raises(ConfigError, match=r"in \[0, 1\]"):
        side_by_side(group(task(), [2.0]), same)
    with pytest.raises(ConfigError, match="0 hinted"):
        side_by_side(bare, group(task(), [None]))


def test_the_hint_ratio_rises_with_difficulty_from_zero() -> None:
    ratios = [hint_ratio(d / 20, w_max=0.8) for d in range(21)]
    assert ratios[0] == 0.0
    assert ratios[-1] == 0.8
    assert all(a < b for a, b in pairwise(ratios))
    assert hint_ratio(1.0, w_max=0.9, noise=0.5) == 1.0
    for wrong in ({"difficulty": 1.1}, {"difficulty": 0.5, "w_min": 0.6, "w_max": 0.5}):
        with pytest.raises(ConfigError, match="w_min"):
            hint_ratio(**wrong)


def test_difficulty_is_what_was_missed_without_help() -> None:
    assert difficulty(group(task(), [1.0, 0.0, 0.0, 0.0])) == 0.75
    assert difficulty(group(task(), [None])) is None
    with pytest.raises(ConfigError, match="outside"):
        difficulty(group(task(), [3.0]))


def test_a_prefix_is_cut_before_the_answer_and_ratio_zero_is_the_bare_task() -> None:
    one = task()
    assert prefix_plan(one, SOLUTION, 0.0, n=4).is_bare
    plan = prefix_plan(one, SOLUTION, 0.5, n=4)
    assert SOLUTION.startswith(plan.response_prefix)
    assert 0 < len(plan.response_prefix) <= round(len(SOLUTION) / 2)
    assert (plan.n, plan.text) == (4, "")
    assert plan.train_on == "generated_and_prefix_if_positive"
    assert prefix_plan(one, "So 42 " + SOLUTION, 0.9, n=1).response_prefix == "So"


def test_forced_tokens_unlike_the_policys_own_weigh_less() -> None:
    weights = consistency_weights_T([0.5, 0.75, 0.4, 0.0], 0.5)
    assert weights == pytest.approx([1.0, math.exp(-0.5), math.exp(-0.2), math.exp(-1.0)])
    with pytest.raises(ConfigError, match="above 0"):
        consistency_weights_T([0.1], 0.0)


def test_bisection_finds_the_shortest_prefix_in_logarithmic_tries() -> None:
    for n in range(1, 20):
        for first in range(1, n + 2):  # n + 1: no prefix works
            search = PrefixSearch(n)
            while (k := search.next()) is not None:
                assert search.found is None
                search = search.told(k, succeeded=k >= first)
            assert search.found == (first if first <= n else None)
            assert search.tries <= math.ceil(math.log2(n + 1))


def test_bisection_refuses_an_answer_it_did_not_ask_for() -> None:
    with pytest.raises(ConfigError, match="asked for 2"):
        PrefixSearch(4).told(3, succeeded=True)
    assert PrefixSearch(0).next() is None


def test_a_branch_never_gets_the_whole_solution() -> None:
    plan = branch_plan(["a ", "b ", "c"], 2, n=8)
    assert (plan.response_prefix, plan.level, plan.n) == ("a b ", 2, 8)
    assert plan.train_on == "generated"
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match="give 1 to 2"):
            branch_plan(["a ", "b ", "c"], wrong, n=8)


def test_a_chain_is_cut_at_its_highest_peaks_that_lie_apart() -> None:
    p_end_T = [0.1, 0.9, 0.2, 0.8, 0.1, 0.3, 0.2, 0.5]
    assert cut_points(p_end_T, most=9) == (2, 4, 6)  # the last token is no cut
    assert cut_points(p_end_T, most=2) == (2, 4)
    assert cut_points(p_end_T, most=9, min_distance=3) == (2, 6)
    assert cut_points([0.1, 0.2, 0.3], most=3) == ()
    with pytest.raises(ConfigError, match="min_distance"):
        cut_points(p_end_T, most=1, min_distance=0)


@pytest.mark.parametrize("rollouts", [1, 3, 8, 9])
@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_a_mixed_group_has_one_baseline_and_spends_its_rollouts(
    rollouts: int, n_steps: int
) -> None:
    steps = [f"s{i} " for i in range(n_steps)]
    plans = step_plans(steps, group_key="t", rollouts=rollouts)
    assert sum(p.n or 0 for p in plans) == rollouts
    assert {p.group_key for p in plans} == {"t"}
    assert plans[0].is_bare
    prefixes = [p.response_prefix for p in plans]
    assert all(b.startswith(a) and len(b) > len(a) for a, b in pairwise(prefixes))
    assert "".join(steps) not in prefixes  # the last step is never given
    assert all(p.train_on == "generated_and_prefix_if_positive" for p in plans[1:])


def test_a_mixed_group_needs_steps_and_a_bare_rollout() -> None:
    with pytest.raises(ConfigError, match="bare"):
        step_plans([], group_key="t", rollouts=4)
    with pytest.raises(ConfigError, match="bare"):
        step_plans(["a"], group_key="t", rollouts=4, bare=0)
