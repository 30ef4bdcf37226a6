"""Scaf-GRPO, ADHint-style, StepHint and BREAD as state machines on scripted rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hints.groups import rounds, solved_from, task, visit
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE
from tfgrpo.hints.adhint import AdHint, PrefixShare
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.bread import Bread
from tfgrpo.hints.metadata import steps_of
from tfgrpo.hints.sage import Sage
from tfgrpo.hints.scaf import Scaf
from tfgrpo.hints.stephint import StepHint

CHAIN = "17 and 25. Tens first, then ones, then the carry, then all. So 42."
LADDER = [["carry", "tens"], ["plan a", "plan b"]]


def test_scaf_rolls_one_rollout_a_rung_and_only_where_all_failed() -> None:
    scaf = Scaf()
    one = task(scaffold=LADDER)
    asked, group = rounds(scaf, one, lambda plan: [float(plan.level >= 3)] * 4)
    assert asked[0] == [BARE]
    assert [(p.level, p.n) for p in asked[1]] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert len(asked) == 2
    assert group.rewards_G == (1.0, 0.0, 0.0, 0.0)
    assert group.metadata["replaced_from_level"] == {"0": 3}  # the lowest rung, the first failure
    assert scaf.record.rollouts == 4 + 4
    assert scaf.record.of("t").level == 3
    solved, same = rounds(scaf, one, lambda _: [1.0, 0.0, 0.0, 0.0])
    assert solved == [[BARE]]
    assert "replaced_from_level" not in same.metadata


def test_scaf_leaves_a_group_that_no_rung_solves() -> None:
    scaf = Scaf()
    asked, group = rounds(scaf, task(scaffold=LADDER), lambda _: [0.0] * 4)
    assert len(asked) == 2
    assert group.rewards_G == (0.0,) * 4
    assert scaf.record.accepted == {"0": 1}


def test_scaf_waits_for_its_warm_up() -> None:
    scaf = Scaf(warmup_groups=2)
    lengths = [len(rounds(scaf, task(scaffold=LADDER), lambda _: [0.0])[0]) for _ in range(3)]
    assert lengths == [1, 1, 2]


def test_scaf_takes_other_hints_as_rungs_and_may_train_under_the_bare_prompt() -> None:
    scaf = Scaf(original_prompt=True)
    asked, _ = rounds(scaf, task(hints=["a", "b"]), lambda _: [0.0])
    assert [(p.text, p.n, p.condition) for p in asked[1]] == [
        ("a", 1, "original"),
        ("b", 1, "original"),
    ]
    with pytest.raises(ConfigError, match="list of tiers"):
        scaf.start(task(scaffold=["a", "b"]), 4)
    with pytest.raises(ConfigError, match=r"metadata\.solution"):
        scaf.start(task(), 4)


def test_adhints_prefix_grows_with_what_the_bare_set_missed() -> None:
    lengths = []
    for successes in (4, 3, 2, 1, 0):
        rewards = [1.0] * successes + [0.0] * (4 - successes)
        asked, _ = rounds(
            AdHint(share=PrefixShare(w_max=0.8)), task(solution=CHAIN), lambda _, r=rewards: r
        )
        assert asked[0][0].is_bare
        prefix = asked[1][0].response_prefix if len(asked) > 1 else ""
        assert not leaks(prefix, task())
        assert CHAIN.startswith(prefix)
        lengths.append(len(prefix))
    assert lengths[0] == 0  # nothing missed: no second set
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[1] > 0


def test_adhint_trains_both_sets_with_advantages_of_their_own() -> None:
    adhint = AdHint(bare=2, hinted=3)
    asked, group = rounds(
        adhint,
        task(solution=CHAIN),
        lambda plan: [1.0, 0.0, 0.0] if plan.is_bare else [1.0, 1.0, 0.0],
    )
    assert [p.n for plans in asked for p in plans] == [2, 3]
    assert asked[1][0].weigh_prefix
    assert group.metadata["hint"] == "mixed"
    values = [r.metadata["hint"]["advantage"] for r in group.rollouts]
    bare, hinted = values[:2], values[2:]
    assert bare[0] > hinted[0] > 0 > bare[1] > hinted[2]
    assert math.fsum(v * v for v in values) / 5 == pytest.approx(1.0)
    assert adhint.record.rollouts == 5


def test_adhint_without_a_verdict_or_a_solution_is_the_bare_group() -> None:
    _, group = rounds(AdHint(), task(solution=CHAIN), lambda _: [None, None])
    assert "hint" not in group.metadata
    asked, _ = rounds(AdHint(missing_is_error=False), task(), lambda _: [0.0])
    assert len(asked) == 1
    with pytest.raises(ConfigError, match=r"metadata\.solution"):
        AdHint().start(task(), 4)
    with pytest.raises(ConfigError, match="w_min"):
        PrefixShare(w_min=0.5, w_max=0.1)


def test_stephint_is_one_round_of_several_prefixes_in_one_group() -> None:
    stephint = StepHint(most_steps=4, bare=2)
    one = task(solution=CHAIN)
    asked, group = rounds(stephint, one, solved_by_level(2), group_size=8)
    (plans,) = asked
    assert sum(p.n or 0 for p in plans) == 8
    assert plans[0].is_bare
    assert plans[0].n == 2
    assert [p.level for p in plans] == [0, 1, 2, 3]
    assert all(not leaks(p.response_prefix, one) for p in plans)
    assert len(group.rollouts) == 8
    assert [r.sample_index for r in group.rollouts] == list(range(8))
    assert group.metadata["hint"] == "mixed"
    with pytest.raises(ConfigError, match=r"neither metadata\.steps"):
        stephint.start(task(), 8)
    assert StepHint(missing_is_error=False).start(task(), 8) == [BARE]


def solved_by_level(level: int):
    return lambda plan: [float(plan.level >= level)] * 8


@pytest.mark.parametrize("first", [1, 2, 3, 4, 9])
def test_bread_finds_the_shortest_prefix_that_works(first: int) -> None:
    steps = ["a. ", "b. ", "c. ", "d. ", "so 42"]
    bread = Bread()
    one = task(steps=steps)
    asked, group = rounds(bread, one, lambda plan: [float(plan.level >= first)] * 4)
    tried = [p.level for plans in asked[1:] for p in plans]
    assert asked[0] == [BARE]
    assert len(tried) <= math.ceil(math.log2(5))
    assert all(p.response_prefix == "".join(steps[: p.level]) for ps in asked[1:] for p in ps)
    if first <= 4:
        assert bread.record.of("t").level == first
        assert group.rewards_G == (1.0,) * 4
    else:
        assert group.rewards_G == (0.0,) * 4
        assert group.group_id == "g0"  # the bare group
    assert bread.record.rollouts == 4 * (1 + len(tried))


def test_bread_leaves_a_task_that_succeeds_alone() -> None:
    asked, _ = rounds(Bread(), task(solution=CHAIN), lambda _: [1.0, 0.0])
    assert asked == [[BARE]]
    asked, _ = rounds(Bread(), task(steps=["so 42"]), lambda _: [0.0])
    assert asked == [[BARE]]  # a single step is the whole solution


@given(
    st.lists(st.sampled_from(["a. ", "bb, ", "42 ", "c\n", "42. "]), max_size=9), st.integers(2, 6)
)
@settings(max_examples=100)
def test_steps_are_the_solution_and_all_but_the_last_keep_the_answer_back(
    parts: list[str], most: int
) -> None:
    one = task(steps=parts)
    steps = steps_of(one, most=most)
    assert "".join(steps) == "".join(parts)
    assert len(steps) <= most
    assert all(steps)
    assert not leaks("".join(steps[:-1]), one)
    by_text = steps_of(task(solution="".join(parts)), most=most)
    assert "".join(by_text) == "".join(parts).strip()


def test_steps_must_be_texts() -> None:
    with pytest.raises(ConfigError, match="list of texts"):
        steps_of(task(steps="one"))


@given(
    first=st.integers(0, 4),
    visits=st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
@settings(max_examples=80)
def test_rolling_ahead_accepts_what_climbing_accepts(first: int, visits: list[int]) -> None:
    climbing, ahead = Sage(), Sage(ahead=True)
    one = task(hints=["a", "b", "c"])
    n_rounds = []
    for needed in (first, *visits):
        slow, wanted = rounds(climbing, one, lambda plan, n=needed: solved_from(n)(plan.level))
        fast, found = rounds(ahead, one, lambda plan, n=needed: solved_from(n)(plan.level))
        assert found.to_dict() == wanted.to_dict()
        assert len(fast) <= len(slow)
        n_rounds.append((len(fast), needed))
        assert [p for plans in fast for p in plans][: len(slow)] == [
            p for plans in slow for p in plans
        ]
    assert ahead.record.of("t").level == climbing.record.of("t").level
    assert ahead.record.rollouts >= climbing.record.rollouts


def test_rolling_ahead_starts_where_the_task_or_the_run_stands() -> None:
    ahead = Sage(ahead=True)
    one, other = task("a", hints=["x", "y", "z"]), task("b", hints=["x", "y", "z"])
    assert visit(ahead, one, solved_from(2)) == [0, 1, 2]
    assert [p.level for p in ahead.start(one, 4)] == [0, 1, 2]
    assert [p.level for p in ahead.start(other, 4)] == [0, 1, 2]  # new: the run's mean
    assert visit(ahead, one, solved_from(0)) == [0, 1, 2]  # two levels too many, paid for
    assert ahead.record.of("a").level == 0
    assert [p.level for p in ahead.start(one, 4)] == [0]
    for i in range(20):
        visit(ahead, task(f"c{i}", hints=["x"]), solved_from(0))
    assert [p.level for p in ahead.start(other, 4)] == [0]


@pytest.mark.parametrize("ahead", [False, True])
def test_without_restart_a_level_that_succeeds_is_kept(ahead) -> None:
    scheduler = Sage(restart=False, ahead=ahead)
    several = [task(f"c{i}", hints=["x", "y", "z"]) for i in range(12)]
    for needed in (0, 1, 0, 0):
        for one in several:
            visit(scheduler, one, solved_from(needed))
    assert {scheduler.record.of(one.task_id).level for one in several} == {1}


def test_rolling_ahead_moves_a_task_as_the_run_s_last_groups_have_moved() -> None:
    ahead = Sage(ahead=True)
    several = [task(f"c{i}", hints=["x", "y", "z"]) for i in range(10)]
    last = task("b", hints=["x", "y", "z"])
    for one in (*several, last):
        visit(ahead, one, solved_from(3))
    assert [p.level for p in ahead.start(last, 4)] == [0, 1, 2, 3]
    for one in several[:5]:
        visit(ahead, one, solved_from(1))
    assert ahead.record.drift_ema == pytest.approx(-2 * (1 - 0.9**5))  # -0.82
    assert [p.level for p in ahead.start(last, 4)] == [0, 1, 2]
    for one in several[5:]:
        visit(ahead, one, solved_from(0))
    assert ahead.record.drift_ema == pytest.approx(-2 * 0.9**5 * (1 - 0.9**5) - 3 * (1 - 0.9**5))
    assert [p.level for p in ahead.start(last, 4)] == [0, 1]  # 3 - 1.71
