"""Figures of many groups share what is equal, and stay what they are."""

from __future__ import annotations

from tfgrpo.group_figures import GroupFigures, OneOfEach


def figures(name: str, *rewards_G: float) -> GroupFigures:
    outcomes = {"graded": len(rewards_G)}
    return GroupFigures(name, name, "p", {"stage": "practice"}, tuple(rewards_G), outcomes)


def test_equal_parts_are_one_object_and_the_figures_stay_equal() -> None:
    shared = OneOfEach()
    plain = [figures("a", 1.0, 0.0), figures("b", 1.0, 0.0), figures("c", 0.0, 1.0)]
    first, second, third = found = [f.sharing(shared) for f in plain]
    assert found == plain
    assert first.rewards_G is second.rewards_G and first.rewards_G is not third.rewards_G
    assert first.outcomes is second.outcomes is third.outcomes
    assert first.metadata is second.metadata is third.metadata


def test_values_that_are_equal_and_read_otherwise_are_kept_apart() -> None:
    shared = OneOfEach()
    assert str(shared.of((1.0,))) == "(1.0,)" and str(shared.of((1,))) == "(1,)"
    assert str(shared.of((0.0,))) == "(0.0,)" and str(shared.of((-0.0,))) == "(-0.0,)"


def test_past_the_limit_no_further_value_is_remembered() -> None:
    shared = OneOfEach(most=2)
    one, two, three = ([n] for n in (1, 2, 3))
    assert shared.of(one) is one and shared.of(two) is two and shared.of(three) is three
    again = [3]
    assert shared.of([1]) is one and shared.of(again) is again
