"""The schedulers behind the real rollout maker: one context a group, and what is rolled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest

pytest.importorskip("torch")


from tests.rl.hints.groups import hinted_task, task
from tests.rl.tiny import CharTokenizer
from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.hint_plan import BARE, level_of
from tfgrpo.hint_texts import leaks
from tfgrpo.protocols import Generated, HintScheduler, Sampling
from tfgrpo.rl.hints import make_scheduler
from tfgrpo.rl.hints.sage import Sage
from tfgrpo.rl.hints.texts import MetadataHints
from tfgrpo.rl.rollouts import Prompter, RolloutMaker
from tfgrpo.rl.serving import GroupRequest, OnDone
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

G = 4
LEVEL_NEEDED = {"a": 0, "b": 1, "c": 3, "d": 9}
"""From which level each task succeeds; d never."""


class Scripted:
    """Serves the queue first come, first served; tokens depend on a row's prompt and seed alone."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.rows = 0

    def run(self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone) -> object:
        queue = deque(requests)
        while queue:
            request = queue.popleft()
            self.prompts.append(request.prompt_ids)
            self.rows += len(request.seeds)
            rows = [
                Generated((3 + (seed + sum(request.prompt_ids)) % 61,), (-1.0,), "stop")
                for seed in request.seeds
            ]
            queue.extend(on_done(request, rows))
        return None


class ByLevel:
    """One success a group, from the level that a task needs; reads the level off the prompt."""

    verifier_id = "by-level"
    reward_range = (0.0, 1.0)

    def __init__(self, prompter: Prompter, tasks: list[Task]) -> None:
        self._level: dict[tuple[str, tuple[int, ...]], int] = {}
        for one in tasks:
            for plan in (BARE, *MetadataHints()(one)):
                part = plan.part()
                given = EMPTY_CONTEXT if part is None else EMPTY_CONTEXT.with_parts(part)
                self._level[one.task_id, prompter.ids(one, given)] = plan.level

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        level = self._level[task.task_id, rollout.steps[0].prompt_token_ids or ()]
        needed = LEVEL_NEEDED[task.task_id]
        return Score(float(level >= needed and rollout.sample_index == 0))


def roll(
    hints: HintScheduler | None, tasks: list[Task]
) -> tuple[list[RolloutGroup], Scripted, RolloutMaker]:
    prompter = Prompter(CharTokenizer(), context_tokens=4096)
    generator = Scripted()
    maker = RolloutMaker(
        generator, prompter, ByLevel(prompter, tasks), Sampling(max_tokens=4), policy_id="p"
    )
    return maker.make(tasks, G, seed=3, hints=hints), generator, maker


TASKS = [hinted_task(name) for name in LEVEL_NEEDED]


def test_rollouts_made_are_the_group_size_times_the_levels_tried() -> None:
    groups, generator, maker = roll(Sage(), TASKS)
    tried = {"a": 1, "b": 2, "c": 4, "d": 4}
    assert generator.rows == G * sum(tried.values())
    assert maker.figures.hinted_rollouts == generator.rows - G * len(TASKS)
    assert maker.figures.levels == {
        "none": 1,
        "hint:given:1": 1,
        "hint:given:3": 2,
    }
    assert [g.is_informative() for g in groups] == [True, True, True, False]


def test_every_accepted_group_has_one_context_and_one_prompt() -> None:
    groups, _, maker = roll(Sage(), TASKS)
    for group, level in zip(groups, (0, 1, 3, 3), strict=True):
        prompts = {r.steps[0].prompt_token_ids for r in group.rollouts}
        assert prompts == {maker._prompter.ids(group.task, group.context)}
        parts = group.context.of_kind("hint")
        assert [level_of(p) for p in parts] == ([level] if level else [])
        assert not any(leaks(p.text, group.task) for p in parts)
        assert len(group.rollouts) == G


def test_a_success_on_the_bare_task_leaves_the_group_as_without_hints() -> None:
    hinted, _, _ = roll(Sage(), TASKS)
    plain, _, _ = roll(None, TASKS)
    assert hinted[0].to_dict() == plain[0].to_dict()
    assert hinted[0].context.is_empty
    assert all(h.to_dict() != p.to_dict() for h, p in zip(hinted[1:], plain[1:], strict=True))


def test_only_failed_tasks_are_rolled_again_and_before_the_others_end() -> None:
    _, generator, maker = roll(Sage(), TASKS)
    bare = [maker._prompter.ids(t) for t in TASKS]
    assert generator.prompts[:4] == bare
    assert not set(bare) & set(generator.prompts[4:])


def test_a_solved_task_costs_one_group() -> None:
    solved = [hinted_task("a")]
    groups, generator, _ = roll(make_scheduler({"name": "sage_light"}), solved)
    assert generator.rows == G
    assert groups[0].context.is_empty


def test_sage_light_never_rolls_twice_in_a_visit() -> None:
    light = make_scheduler({"name": "sage_light"})
    tried = []
    for _ in range(3):
        groups, generator, _ = roll(light, TASKS)
        assert generator.rows == G * len(TASKS)
        tried.append([sum(map(level_of, g.context.of_kind("hint"))) for g in groups])
        light.epoch_end()
    # a: 1 of 4 at level 0 is between the thresholds; b stays at 1; c and d climb on
    assert tried == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2]]


def test_evaluation_prompts_hold_no_hint() -> None:
    sage = Sage()
    roll(sage, TASKS)
    one = task("a", hints=["a secret"])
    prompter = Prompter(CharTokenizer(), context_tokens=4096)
    maker = RolloutMaker(
        Scripted(), prompter, ByLevel(prompter, [one]), Sampling(max_tokens=4), policy_id="p"
    )
    (group,) = maker.make([one], 1, seed=0)
    assert group.rollouts[0].steps[0].prompt_token_ids == prompter.ids(one)
    assert group.context.is_empty
