"""Panels: every group is seen, none too many, kinds apart, counter-evidence beside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.experience.cases import group
from tfgrpo.experience.reflect.panels import compose, panel_size
from tfgrpo.rollout import RolloutGroup


def groups(keys: list[str], start: int = 0, reward: float = 0.0) -> list[RolloutGroup]:
    return [group(start + i, [reward, 0.5], reference=key) for i, key in enumerate(keys)]


@given(
    kinds=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    solved=st.integers(0, 6),
    past=st.integers(0, 6),
    size=st.integers(1, 10),
    counter=st.integers(0, 3),
    lines=st.integers(0, 60),
)
def test_every_teaching_group_is_in_full_in_exactly_one_panel_of_bounded_size(
    kinds: list[str], solved: int, past: int, size: int, counter: int, lines: int
) -> None:
    teaching, good = groups(kinds), groups(["a"] * solved, 100, 1.0)
    panels = compose(
        teaching, good, groups(["b"] * past, 200), size=size, counter=counter, lines=lines
    )
    full = [g.task.task_id for p in panels for g in p.groups if g in teaching]
    assert sorted(full) == sorted(g.task.task_id for g in teaching)
    for panel in panels:
        assert 1 <= len(panel.groups) <= max(1, size) and len(panel.others) <= lines
        shown = [g.task.task_id for g in (*panel.groups, *panel.others)]
        assert len(shown) == len(set(shown)), "no task stands twice in a panel"
    sizes = [sum(g in teaching for g in p.groups) for p in panels]
    assert max(sizes) - min(sizes) <= 1, "panels are as even as can be"


def test_kinds_are_dealt_out_evenly() -> None:
    panels = compose(groups(list("aaaabbbb")), [], size=4, counter=0, lines=0)
    assert [sorted(str(g.task.reference) for g in p.groups) for p in panels] == [
        ["a", "a", "b", "b"], ["a", "a", "b", "b"],
    ]  # fmt: skip


def test_solved_groups_stand_beside_and_earlier_tasks_in_single_lines() -> None:
    teaching, solved = groups(["a", "b"]), groups(["c"], 100, 1.0)
    (panel,) = compose(teaching, solved, groups(["d"], 200), size=10, counter=2, lines=9)
    assert [g.task.task_id for g in panel.groups] == ["t0", "t1", "t100"]
    assert [g.task.task_id for g in panel.others] == ["t200"]
    assert panel.task_ids == ("t0", "t1", "t100", "t200")


def test_without_teaching_groups_there_is_no_panel() -> None:
    assert compose([], groups(["a"], reward=1.0), size=10, counter=2, lines=9) == []


def test_a_small_window_holds_fewer_groups() -> None:
    assert [panel_size(n, 10) for n in (0, 299, 600, 2999, 3000, 10**6)] == [1, 1, 2, 9, 10, 10]
