"""Replays: which tasks are rolled again and what that says of each rule."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.experience.cases import group
from tfgrpo.experience import ExperienceSettings
from tfgrpo.experience.claim import Claim
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.reflect.replay_check import check_replays, joined, replay_tasks
from tfgrpo.experience.settings import ReflectSettings
from tfgrpo.rollout import RolloutGroup, Score

FULL = ExperienceSettings(exemplar_reward=1.0)


def rule(number: int, *support: str, topic: str = "") -> Experience:
    return Experience(f"E{number}", text=f"rule {number}", claim=Claim(topic, support))


def parted(group: RolloutGroup, **parts: float) -> RolloutGroup:
    made = tuple(
        replace(r, score=Score(r.score.reward if r.score else 0.0, "", parts))
        for r in group.rollouts
    )
    return replace(group, rollouts=made)


@given(
    supports=st.lists(st.sets(st.integers(0, 9), max_size=6), max_size=8),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=10, max_size=10),
    most=st.integers(0, 8),
)
def test_tasks_have_headroom_support_a_rule_and_are_no_more_than_allowed(
    supports: list[set[int]], rewards: list[float], most: int
) -> None:
    rules = [rule(i, *sorted(f"t{s}" for s in found)) for i, found in enumerate(supports, 1)]
    groups = [group(i, [r, r]) for i, r in enumerate(rewards)]
    settings = replace(FULL, reflect=ReflectSettings(replays=most))
    chosen = [t.task_id for t in replay_tasks(rules, groups, settings)]
    assert len(chosen) == len(set(chosen)) <= most
    cited = {t for r in rules for t in r.claim.support}
    assert all(t in cited and rewards[int(t[1:])] < 1.0 for t in chosen)
    if most == 8 and len(rules) <= 4:
        for one in rules:
            open_tasks = [t for t in one.claim.support if rewards[int(t[1:])] < 1.0]
            done = sum(t in chosen for t in one.claim.support)
            assert done >= min(2, len(open_tasks)), "each rule is tried on two tasks"


def test_a_rule_that_turns_no_supporting_task_is_idle() -> None:
    before = [group(1, [0.0, 0.0]), group(2, [0.5, 0.5]), group(3, [1.0, 1.0])]
    after = [group(1, [1.0]), group(2, [0.5]), group(3, [1.0])]
    good, bad, right = check_replays(
        [rule(1, "t1", "t2"), rule(2, "t2"), rule(3, "t3")], before, after, FULL
    )
    assert good.turned == ("t1",) and not good.is_idle
    assert good.value is not None and good.value.estimate == 0.5  # (1 - 0 + 0.5 - 0.5) / 2
    assert bad.is_idle and bad.value is None
    assert right.already_right == ("t3",) and not right.is_idle, "nothing was left to turn"


def test_a_topic_that_is_a_reward_part_is_judged_by_that_part() -> None:
    before = [parted(group(1, [0.5]), hours=0.0, queue=1.0)]
    after = [parted(group(1, [0.5]), hours=1.0, queue=0.0)]
    hours, queue = check_replays(
        [rule(1, "t1", topic="Hours"), rule(2, "t1", topic="queue")], before, after, FULL
    )
    assert hours.turned == ("t1",) and not hours.is_idle
    assert queue.turned == () and queue.already_right == ("t1",)


def test_a_second_draw_forgives_one_slip() -> None:
    before, slip, then = [group(1, [0.0])], [group(1, [0.0])], [group(1, [1.0])]
    (check,) = check_replays([rule(1, "t1")], before, joined(slip, then), FULL)
    assert not check.is_idle
    assert [len(g.rollouts) for g in joined(slip, then)] == [2]
