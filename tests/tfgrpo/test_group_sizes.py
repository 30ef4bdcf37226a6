"""The seam of rollout budgets: what allocators say is checked, groups grow, learning uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.learning.worlds import World, journal, settings
from tests.routing.worlds import group, tasks
from tfgrpo.errors import ConfigError
from tfgrpo.group_sizes import GroupSizes
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.factory import ALLOCATORS, open_allocator
from tfgrpo.routing.budgets.practice import Practice


class Doubles:
    """Grows the first task until the budget is spent."""

    def __init__(self, *steps: list[int]) -> None:
        self.steps = list(steps)

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        return self.steps.pop(0)

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        return self.steps.pop(0)


def test_sizes_grow_until_nothing_more_is_wanted() -> None:
    sizes = GroupSizes(Doubles([1, 0], [2, 0], [2, 1], [2, 1]), tasks(2), [], 4)
    seen = [list(sizes.now)]
    while sizes.grow([]):
        seen.append(list(sizes.now))
    assert seen == [[1, 0], [2, 0], [2, 1]]
    plain = GroupSizes(lambda tasks, history, budget: [2, 2], tasks(2), [], 4)
    assert not plain.grow([])


@pytest.mark.parametrize(
    "steps", [([1],), ([3, 3],), ([-1, 0],), ([2, 1], [1, 2]), ([1, 1], [4, 1]), ([1, 1], [1])]
)
def test_an_allocator_that_breaks_its_contract_is_refused(steps: tuple[list[int], ...]) -> None:
    with pytest.raises(ConfigError, match="the allocator gave"):
        GroupSizes(Doubles(*steps), tasks(2), [], 4).grow([])


def test_every_name_opens_an_allocator_with_the_group_size_of_the_run() -> None:
    for name in ALLOCATORS:
        made = open_allocator(name, {}, group_size=4)
        assert made is not None and sum(made(tasks(3), [], 12)) <= 12
    assert open_allocator("", {}, group_size=4) is None
    plan = open_allocator("practice", {"probe": 2, "success_at": 0.5}, group_size=6)
    assert isinstance(plan, Practice)
    assert (plan.size, plan.probe, plan.rule.success_at, plan.rule.max_seen) == (6, 2, 0.5, 8.0)
    small = open_allocator("practice", {}, group_size=2)
    assert isinstance(small, Practice) and small.probe == 2
    with pytest.raises(ConfigError, match=r"learn\.allocate 'practice'"):
        open_allocator("practice", {"speed": 1}, group_size=4, where="learn.allocate")


def test_practice_grows_what_can_turn_mixed_and_begins_only_what_it_can_finish() -> None:
    plan, asked = Practice(size=8, probe=3, floor=0.0), tasks(6)
    history = [group(f"t{i}", k, 8) for i, k in ((6, 0), (7, 8), (8, 4), (9, 0))]
    # tasks() knows t0 to t5; the history is of others, of which most are flat.
    first = plan(asked, history, 32)
    assert sorted(first) == [0, 0, 3, 3, 3, 3]
    chosen = [i for i, n in enumerate(first) if n]
    k = dict(zip(chosen, (0, 1, 2, 3), strict=True))
    groups = [group(f"t{i}", n, 3) for i, n in k.items()]
    grown = plan.grow(asked, history, groups, first, 32)
    mixed = [i for i in chosen if k[i] in (1, 2)]
    assert [grown[i] for i in mixed] == [8, 8]
    stopped = [i for i in chosen if grown[i] == 3]
    begun = [i for i in range(6) if not first[i] and grown[i]]
    assert all(k[i] in (0, 3) for i in stopped)
    left = 32 - sum(grown[i] for i in chosen)
    assert len(begun) == min(left // 8, 2) and all(grown[i] == 3 for i in begun)
    again = plan.grow(asked, history, groups + [group(f"t{i}", 0, 3) for i in begun], grown, 32)
    assert [again[i] for i in stopped] == [3] * len(stopped)
    assert sum(again) <= 32


def test_a_learning_run_probes_then_finishes_and_pays_for_no_rollout_twice(tmp_path: Path) -> None:
    world = World(lesson="")
    plan = Practice(size=4, probe=2, hope=2.0)
    config = settings(tmp_path)
    config = config.model_copy(
        update={"learn": config.learn.model_copy(update={"allocate": "practice"})}
    )
    with pytest.raises(ConfigError, match=r"learn\.allocate is set"):
        world.learn(config)
    world.learn(config, allocate=plan)
    with journal(tmp_path) as store:
        groups = list(store.groups("practice"))
    assert {len(g.rollouts) for g in groups} <= {2, 4}
    for g in groups:
        assert len(g.rollouts) == 4 or not g.is_informative()
    paid = world.calls
    again = World(lesson="")
    again.learn(config, allocate=plan)
    assert again.calls == 0 < paid
