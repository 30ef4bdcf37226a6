"""The schedulers behind the real rollout maker: one context a group, and what is rolled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")


from tests.hints.groups import hinted_task, task
from tests.rl.tiny import CharTokenizer, tiny_decoder
from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup, level_of
from tfgrpo.hints import make_scheduler
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.merge import mixed
from tfgrpo.hints.metadata import MetadataHints
from tfgrpo.hints.sage import Sage
from tfgrpo.protocols import Generated, HintScheduler, Sampling
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.requests import GroupRequest, OnDone
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.update.accumulate import score_rows
from tfgrpo.rl.update.rollout_rows import row_of
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
) -> tuple[list[RolloutGroup], Scripted, SingleTurnMaker]:
    prompter = Prompter(CharTokenizer(), context_tokens=4096)
    generator = Scripted()
    maker = SingleTurnMaker(
        generator,
        Grader(prompter, ByLevel(prompter, tasks)),
        Sampling(max_tokens=4),
        policy_id="p",
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
        assert prompts == {maker.prompter.ids(group.task, group.context)}
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
    bare = [maker.prompter.ids(t) for t in TASKS]
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
    maker = SingleTurnMaker(
        Scripted(),
        Grader(prompter, ByLevel(prompter, [one])),
        Sampling(max_tokens=4),
        policy_id="p",
    )
    (group,) = maker.make([one], 1, seed=0)
    assert group.rollouts[0].steps[0].prompt_token_ids == prompter.ids(one)
    assert group.context.is_empty


class Plans:
    """A scheduler of given rounds: everything is mixed, and what was asked is kept."""

    def __init__(self, *rounds: list[HintPlan]) -> None:
        self._rounds = rounds
        self.seen: list[list[PlannedGroup]] = []

    def start(self, task: Task, group_size: int) -> list[HintPlan]:
        return self._rounds[0]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> list[HintPlan]:
        self.seen.append(list(made))
        return self._rounds[len(self.seen)] if len(self.seen) < len(self._rounds) else []

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        return mixed(made)

    def epoch_end(self) -> None: ...

    def figures(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Always:
    """Any answer is right."""

    verifier_id = "always"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None: ...

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(1.0)


def roll_plans(
    *rounds: list[HintPlan], context_tokens: int = 4096
) -> tuple[RolloutGroup, Plans, SingleTurnMaker, Scripted]:
    prompter = Prompter(CharTokenizer(), context_tokens=context_tokens)
    generator, plans = Scripted(), Plans(*rounds)
    maker = SingleTurnMaker(
        generator, Grader(prompter, Always()), Sampling(max_tokens=4), policy_id="p"
    )
    (group,) = maker.make([task()], G, seed=3, hints=plans)
    return group, plans, maker, generator


def test_several_plans_are_rolled_at_once_each_with_its_number_of_rollouts() -> None:
    hint = HintPlan(text="carry", n=1, level=1, source="teacher")
    prefix = HintPlan(response_prefix="So", n=2, level=2, source="oracle")
    group, plans, maker, generator = roll_plans([BARE, hint], [prefix])
    assert [[one.plan for one in made] for made in plans.seen] == [
        [BARE, hint],
        [BARE, hint, prefix],
    ]
    assert [len(one.group.rollouts) for one in plans.seen[-1]] == [G, 1, 2]
    assert generator.rows == maker.figures.rollouts == G + 1 + 2
    assert maker.figures.hinted_rollouts == 3
    assert maker.figures.levels == {"mixed": 1}
    assert len({r.rollout_id for r in group.rollouts}) == G + 3
    assert len({r.seed for r in group.rollouts}) == G + 3
    for one in plans.seen[-1]:  # one context a set
        assert len({r.steps[0].prompt_token_ids for r in one.group.rollouts}) == 1


def test_a_forced_start_is_part_of_the_text_and_of_the_prompts_tokens() -> None:
    plan = HintPlan(response_prefix="So it ", n=1, level=1, source="oracle")
    group, _, maker, _ = roll_plans([plan])
    (rollout,) = group.rollouts
    step = rollout.steps[0]
    bare = maker.prompter.ids(task())
    forced = maker.prompter.prefix_ids("So it ")
    assert forced == maker.prompter.prefix_ids("So it")  # the blank belongs to the next word
    assert step.prompt_token_ids == bare + forced
    assert step.token_ids is not None
    assert rollout.answer == maker.prompter.text((*forced, *step.token_ids))
    assert rollout.metadata["hint"] == {
        "label": "prefix:oracle:1",
        "level": 1,
        "prefix_tokens": len(forced),
        "train_on": "generated",
    }


def test_the_bare_prompt_is_kept_where_training_shall_use_it() -> None:
    plan = HintPlan(text="carry", n=1, level=1, source="teacher", condition="original")
    group, _, maker, _ = roll_plans([plan])
    bare = maker.prompter.ids(task())
    assert group.rollouts[0].metadata["hint"]["bare_prompt"] == list(bare)
    assert group.rollouts[0].steps[0].prompt_token_ids != bare


def test_a_hint_longer_than_the_context_leaves_the_bare_group() -> None:
    bare_length = len(Prompter(CharTokenizer(), context_tokens=4096).ids(task()))
    long = HintPlan(text="x" * 50, level=1, source="given")
    for plan in (long, replace(long, text="", response_prefix="x" * 50)):
        group, plans, maker, generator = roll_plans([BARE], [plan], context_tokens=bare_length + 20)
        assert maker.figures.hints_too_long == 1
        assert generator.rows == G
        assert group is plans.seen[0][0].group
        assert maker.figures.levels == {"none": 1}
        started, _, again, _ = roll_plans([plan], context_tokens=bare_length + 20)
        assert again.figures.hints_too_long == 1
        assert again.figures.levels == {"none": 1}
        assert started.to_dict() == group.to_dict()


def test_a_climb_whose_next_hint_is_too_long_accepts_and_counts_the_visit() -> None:
    one = task("d", hints=["short", "x" * 200])
    prompter = Prompter(CharTokenizer(), context_tokens=4096)
    verifier = ByLevel(prompter, [one])
    short = Prompter(CharTokenizer(), context_tokens=len(prompter.ids(one)) + 40)
    sage = Sage()
    maker = SingleTurnMaker(
        Scripted(), Grader(short, verifier), Sampling(max_tokens=4), policy_id="p"
    )
    (group,) = maker.make([one], G, seed=0, hints=sage)
    assert maker.figures.hints_too_long == 1
    assert level_of(group.context.of_kind("hint")[0]) == 1
    assert sage.record.of("d").visits == 1


def real_maker(tasks: list[Task]) -> SingleTurnMaker:
    prompter = Prompter(CharTokenizer(), context_tokens=128)
    generator = GroupGenerator(tiny_decoder(), eos_ids=(2,), max_rows=8, fixed_rows=True)
    return SingleTurnMaker(
        generator,
        Grader(prompter, ByLevel(prompter, tasks)),
        Sampling(max_tokens=6),
        policy_id="p",
    )


def test_on_real_weights_a_success_at_level_0_is_bit_equal_to_plain_grpo() -> None:
    tasks = [task(n, hints=["x", "y", "z"]) for n in LEVEL_NEEDED]
    plain = real_maker(tasks).make(tasks, G, seed=5)
    hinted = real_maker(tasks).make(tasks, G, seed=5, hints=Sage())
    assert hinted[0].to_dict() == plain[0].to_dict()  # tokens and log-probs included
    assert [len(g.context.parts) for g in hinted] == [0, 1, 1, 1]


def test_on_real_weights_rolling_ahead_accepts_bit_equal_groups() -> None:
    tasks = [task(n, hints=["x", "y", "z"]) for n in LEVEL_NEEDED]
    climbing, ahead = Sage(), Sage(ahead=True)
    slow, fast = real_maker(tasks), real_maker(tasks)
    for seed in (5, 6):
        want = slow.make(tasks, G, seed=seed, hints=climbing)
        got = fast.make(tasks, G, seed=seed, hints=ahead)
        assert [g.to_dict() for g in got] == [g.to_dict() for g in want]
    assert fast.figures.rollouts >= slow.figures.rollouts


def test_log_probs_stand_under_the_prompt_as_rolled_and_not_under_the_bare_one() -> None:
    maker = real_maker([])
    maker.grader = Grader(maker.prompter, Always())
    plans = Plans([HintPlan(text="x", response_prefix="y", n=3, level=1, source="oracle")])
    (group,) = maker.make([task()], G, seed=5, hints=plans)
    rows = [row_of(r, index=i) for i, r in enumerate(group.rollouts)]
    bare = maker.prompter.ids(task())
    decoder = maker.generator.decoder  # type: ignore[attr-defined]
    as_rolled = score_rows(decoder, rows, temperature=1.0, max_tokens=512)
    without = score_rows(
        decoder, [replace(r, prompt_ids=bare) for r in rows], temperature=1.0, max_tokens=512
    )
    for i, rollout in enumerate(group.rollouts):
        told = rollout.steps[0].logprobs
        assert told == pytest.approx(as_rolled[i], abs=1e-4)
        assert told != pytest.approx(without[i], abs=1e-2)
