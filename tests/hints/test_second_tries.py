"""Second tries as state machines on scripted rewards and replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.hints.groups import SOLUTION, group, task
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, Ask, HintPlan, PlannedGroup, Write, WriteResult
from tfgrpo.hints import make_scheduler
from tfgrpo.hints.scaf import Scaf
from tfgrpo.hints.second_tries.contexts import Example, Icpo, NudgeContexts, Seeding, nearest
from tfgrpo.hints.second_tries.drafts import IGrpo
from tfgrpo.hints.second_tries.perturbed import Lope
from tfgrpo.hints.second_tries.recycled import Scope
from tfgrpo.hints.second_tries.reflected import R3L
from tfgrpo.hints.settings import method_of
from tfgrpo.messages import Message
from tfgrpo.protocols import HintScheduler
from tfgrpo.rollout import RolloutGroup, Step, Task
from tfgrpo.testing import check_scheduler

Rewards = Callable[[HintPlan], Sequence[float | None]]


def with_texts(of: RolloutGroup, texts: Sequence[str]) -> RolloutGroup:
    """The group with one turn a rollout."""
    rollouts = [
        replace(
            r,
            steps=(Step(Message("assistant", text), (), (3, 4), (-1.0, -1.0), (5, 6)),),
            rollout_id=f"{of.group_id}-{r.rollout_id}",
        )
        for r, text in zip(of.rollouts, texts, strict=False)
    ]
    return replace(of, rollouts=tuple(rollouts))


def visit(
    scheduler: HintScheduler,
    of: Task,
    rewards_of: Rewards,
    reply: Callable[[Write, int], str] = lambda ask, attempt: "",
    group_size: int = 4,
) -> tuple[list[list[Ask]], list[PlannedGroup], RolloutGroup]:
    """Drive a visit as the makers do; return what was asked, what was made, what is accepted."""
    made: list[PlannedGroup] = []
    asked: list[list[Ask]] = [list(scheduler.start(of, group_size))]
    while asked[-1]:
        written = []
        for ask in asked[-1]:
            if isinstance(ask, Write):
                tries, value = 0, None
                while value is None and tries <= ask.retries:
                    value = ask.read(reply(ask, tries))
                    tries += 1
                written.append(WriteResult(ask.key, value, tries))
                continue
            rewards = list(rewards_of(ask))[: ask.n or group_size]
            one = group(of, rewards, ask, len(made))
            texts = [f"try {len(made)} {i}" for i in range(len(rewards))]
            made.append(PlannedGroup(ask, with_texts(one, texts)))
        if written:
            made[-1] = replace(made[-1], written=(*made[-1].written, *written))
        asked.append(list(scheduler.after(of, made)))
    return asked[:-1], made, scheduler.accept(of, made)


def plans(asked: list[list[Ask]]) -> list[HintPlan]:
    return [a for asks in asked for a in asks if isinstance(a, HintPlan)]


def writes(asked: list[list[Ask]]) -> list[Write]:
    return [a for asks in asked for a in asks if isinstance(a, Write)]


HINTS = json.dumps({"level_1": "add", "level_2": "tens first", "level_3": "carry the rest"})


def test_sage_has_the_hints_written_once_a_failed_visit() -> None:
    sage = make_scheduler({"name": "sage", "rewrite": "visit", "retries": 3})
    one = task(solution=SOLUTION)
    asked, made, _ = visit(sage, one, lambda p: [0.0] * 4, lambda ask, i: HINTS if i == 2 else "?")
    assert [p.level for p in plans(asked)] == [0, 1, 2, 3]
    assert [p.text for p in plans(asked)[1:]] == ["add", "tens first", "carry the rest"]
    assert {p.source for p in plans(asked)[1:]} == {"self"}
    assert len(writes(asked)) == 1 and made[0].written[0].tries == 3
    asked, *_ = visit(sage, one, lambda p: [1.0, 0.0, 0.0, 0.0])
    assert asked == [[BARE]]  # a visit that did not fail asks for nothing
    figures = sage.figures()
    assert figures["rewrites"] == 1 and figures["rewrite_parse_rate"] == pytest.approx(1 / 3)


def test_sage_falls_back_to_the_last_good_hints_and_before_there_are_any_to_the_cut() -> None:
    sage = make_scheduler({"name": "sage", "rewrite": "visit", "retries": 1, "max_level": 1})
    one = task(solution=SOLUTION)
    asked, *_ = visit(sage, one, lambda p: [0.0] * 4)
    cut = plans(asked)[1]
    assert cut.source == "reference" and SOLUTION.startswith(cut.text)
    visit(sage, one, lambda p: [0.0] * 4, lambda ask, i: HINTS)
    again = make_scheduler({"name": "sage", "rewrite": "visit", "retries": 1, "max_level": 1})
    again.load_state_dict(json.loads(json.dumps(sage.state_dict())))
    asked, *_ = visit(again, one, lambda p: [0.0] * 4)
    assert (plans(asked)[1].text, plans(asked)[1].source) == ("add", "self")
    assert again.figures()["rewrite_fallbacks"] == 1


def test_sage_drops_written_hints_that_hold_the_answer_and_says_how_many() -> None:
    sage = make_scheduler({"name": "sage", "rewrite": "visit"})
    leaky = json.dumps({"level_1": "add", "level_2": "it is 42", "level_3": "carry"})
    asked, *_ = visit(sage, task(solution=SOLUTION), lambda p: [0.0] * 4, lambda ask, i: leaky)
    assert [p.text for p in plans(asked)[1:]] == ["add", "carry"]
    assert sage.figures()["rewrite_leak_rate"] == pytest.approx(1 / 3)


def test_wrong_options_of_rewriting_are_named() -> None:
    for options, told in (
        ({"ahead": True}, "hints.ahead rolls levels before any has failed"),
        ({"writer": "openai:gpt-x"}, "hints.writer is 'openai:gpt-x'"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_scheduler({"name": "sage", "rewrite": "visit", **options})


def test_igrpo_trains_refinements_of_the_best_draft_and_no_draft() -> None:
    igrpo = IGrpo(drafts=3)
    rewards = {0: [0.2, 0.7, 0.1], 1: [0.0, 1.0, 0.0, 1.0]}
    asked, made, accepted = visit(igrpo, task(), lambda p: rewards[p.level])
    first, second = plans(asked)
    assert (first.n, first.train_on, first.is_bare) == (3, "none", True)
    assert (second.kind, second.text, second.n) == ("draft", "try 0 1", None)
    assert accepted is made[1].group
    assert sum(len(x.group.rollouts) for x in made) == 3 + 4
    figures = igrpo.figures()
    assert figures["first_mean"] == pytest.approx(1 / 3) and figures["second_mean"] == 0.5
    assert figures["gain"] == pytest.approx(1 / 6) and "gain_low" not in figures
    visit(igrpo, task(), lambda p: rewards[p.level])
    assert igrpo.figures()["gain_low"] == pytest.approx(1 / 6)  # equal visits: no spread


def test_igrpo_takes_a_wrong_draft_too_and_decides_ties_by_chance() -> None:
    drafts = set()
    for seed in range(12):
        asked, *_ = visit(IGrpo(drafts=3, seed=seed), task(), lambda p: [0.0] * 4)
        drafts.add(plans(asked)[1].text)
    assert drafts == {"try 0 0", "try 0 1", "try 0 2"}


def test_igrpo_without_drafts_is_the_bare_group_and_only_failed_refines_failures() -> None:
    asked, _, accepted = visit(IGrpo(drafts=0), task(), lambda p: [0.0, 1.0, 0.0, 0.0])
    assert plans(asked) == [BARE] and accepted.rewards_G == (0.0, 1.0, 0.0, 0.0)
    only = IGrpo(only_failed=True)
    asked, *_ = visit(only, task(), lambda p: [0.0, 1.0, 0.0, 0.0])
    assert plans(asked) == [BARE]
    asked, made, accepted = visit(only, task(), lambda p: [float(p.level)] * 4)
    assert plans(asked)[1].kind == "draft" and accepted is made[1].group


def test_lope_resamples_failed_groups_alone_behind_distinct_texts() -> None:
    lope = Lope(resamples=6, words=(3, 5))
    asked, *_ = visit(lope, task(), lambda p: [0.0, 1.0, 0.0, 0.0])
    assert plans(asked) == [BARE]
    outcomes = iter([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    asked, _, accepted = visit(lope, task(), lambda p: [0.0] * 4 if p.is_bare else [next(outcomes)])
    again = plans(asked)[1:]
    assert len({p.text for p in again}) == 6
    assert {(p.kind, p.n, p.condition) for p in again} == {("perturbation", 1, "corrected")}
    assert accepted.rewards_G == (1.0, 1.0, 0.0, 0.0)


def test_lope_keeps_one_failure_and_may_take_advantages_over_all_rollouts() -> None:
    lope = Lope(resamples=6, words=(3, 5), whole_baseline=True)
    _, _, accepted = visit(lope, task(), lambda p: [0.0] * 4 if p.is_bare else [1.0])
    assert accepted.rewards_G == (1.0, 1.0, 1.0, 0.0)
    # ten rollouts, six right: (1 - .6) / s and -.6 / s, s the sample deviation of 6 ones, 4 zeros
    found = [r.metadata["hint"]["advantage"] for r in accepted.rollouts]
    assert found == pytest.approx([0.7746, 0.7746, 0.7746, -1.1619], abs=1e-4)


def test_the_control_of_lope_resamples_plainly() -> None:
    lope = make_scheduler({"name": "lope", "resamples": 5, "text": "none"})
    asked, made, accepted = visit(lope, task(), lambda p: [0.0] * 4 if p.n is None else [1.0] * 5)
    assert plans(asked) == [BARE, HintPlan(n=5)]
    assert len(made[1].group.rollouts) == 5 and accepted.rewards_G == (1.0, 1.0, 1.0, 0.0)
    assert not method_of({"name": "lope", "text": "none"}).needs_ratio


def reflection(step: int = 0, suggestion: str = "do b") -> str:
    return json.dumps(
        {"outcome": "failure", "cause": "a", "suggestion": suggestion, "retry_from_step": step}
    )


def test_r3l_retries_what_it_could_reflect_on() -> None:
    r3l = R3L()
    replies = {"0": reflection(), "1": "no json"}
    asked, made, accepted = visit(
        r3l,
        task(),
        lambda p: [0.0, 0.5, 1.0, 1.0] if p.is_bare else [1.0],
        lambda ask, i: replies[ask.key],
        group_size=8,
    )
    first, retry = plans(asked)
    assert first == HintPlan(n=4)
    assert [w.key for w in writes(asked)] == ["0", "1"]  # full rewards are left alone
    assert "do b" in retry.text and (retry.n, retry.condition) == (1, "original")
    assert accepted.rewards_G == (0.0, 0.5, 1.0, 1.0, 1.0)
    assert accepted.metadata["hint"] == "mixed"
    assert [r.sample_index for r in accepted.rollouts] == [0, 1, 2, 3, 4]
    assert r3l.beside(task(), made) == []  # replies of this driver have no tokens


@pytest.mark.parametrize(
    "text",
    [
        reflection(step=1),  # one turn alone
        reflection(step=-1),
        reflection(suggestion=" "),
        "{}",
        '{"outcome": 1}',
        reflection().replace(": 0", ": true"),
    ],
)
def test_r3l_leaves_an_attempt_whose_reflection_is_no_reflection(text: str) -> None:
    asked, _, accepted = visit(
        R3L(), task(), lambda p: [0.0, 0.0], lambda ask, i: text, group_size=4
    )
    assert plans(asked) == [HintPlan(n=2)] and len(accepted.rollouts) == 2


def test_r3l_replays_the_turns_before_the_named_step_and_masks_both() -> None:
    steps = tuple(Step(Message("assistant", f"a{i}"), (), (3,), (-1.0,), (1,)) for i in range(3))
    r3l, one = R3L(), task()
    attempts = group(one, [0.0, 1.0])
    attempts = replace(attempts, rollouts=tuple(replace(r, steps=steps) for r in attempts.rollouts))
    ask = r3l.after(one, [PlannedGroup(HintPlan(n=2), attempts)])[0]
    assert isinstance(ask, Write)
    drawn = replace(attempts.rollouts[0], outcome="ungraded", score=None)
    said = WriteResult(ask.key, ask.read(reflection(step=2)), 1, drawn)
    made = [PlannedGroup(HintPlan(n=2), attempts, (said,))]
    (plan,) = r3l.after(one, made)
    assert isinstance(plan, HintPlan) and plan.replay == steps[:2]
    retry = group(one, [1.0], plan, 1)
    retry = replace(retry, rollouts=(replace(retry.rollouts[0], steps=steps),))
    made.append(PlannedGroup(plan, retry))
    accepted = r3l.accept(one, made)
    noted = [r.metadata.get("hint", {}).get("first_step") for r in accepted.rollouts]
    assert noted == [2, None, 2]
    told, guided = r3l.beside(one, made)
    assert told.rewards_G == guided.rewards_G == (1.0,)
    assert [g.rollouts[0].metadata["hint"]["advantage"] for g in (told, guided)] == [1.0, 1.0]
    assert guided.rollouts[0].metadata["hint"]["first_step"] == 2


def test_nudge_shares_rollouts_out_over_strategies_some_of_which_are_dropped() -> None:
    nudge = NudgeContexts(strategies=("s1", "s2", "s3"), dropout=0.5)
    one, seen = task(), []
    for _ in range(40):
        asked, _, accepted = visit(nudge, one, lambda p: [0.0] * 8)
        (first,) = asked
        assert sum(p.n or 0 for p in plans(asked)) == len(accepted.rollouts) == 8
        assert {p.distil for p in plans(asked)} == {0.01}
        seen.append({p.text for p in plans(asked) if not p.is_bare})
        del first
    dropped = sum(len(s) < 2 for s in seen)
    assert set().union(*seen) == {"s1", "s2", "s3"} and dropped < 20
    bare = nudge.record.bare_rollouts / (40 * 8)
    assert abs(bare - 0.5) < 3 * (0.25 / 320) ** 0.5  # within three standard errors


def test_nudge_without_dropout_and_with_an_answer_in_a_strategy() -> None:
    nudge = NudgeContexts(strategies=("s1", "it is 42"), dropout=0.0)
    asked, *_ = visit(nudge, task(), lambda p: [0.0] * 8)
    assert [(p.text, p.n) for p in plans(asked)] == [("s1", 4)]
    with pytest.raises(ConfigError, match=r"has no metadata\.strategies"):
        NudgeContexts().start(task(), 4)
    assert NudgeContexts(missing_is_error=False).start(task(), 4) == [BARE]


POOL = [
    Task("near", "What is 17 + 26?", "43", {"solution": "add them"}),
    Task("far", "Name a colour.", "red", {"solution": "think of one"}),
    Task("leaky", "What is 17 + 25 now?", "42", {"solution": "it is 42"}),
]


def test_examples_are_the_nearest_that_do_not_give_the_answer() -> None:
    pool = [Example(t.task_id, t.text, t.metadata["solution"]) for t in POOL]
    assert [x.task_id for x in nearest(task(), pool, 2)] == ["near", "far"]
    assert [x.task_id for x in nearest(POOL[0], pool, 3)] == ["leaky", "far"]


def test_icpo_rejects_expert_rollouts_below_the_bound_and_pays_the_rest_a_bonus() -> None:
    icpo = Icpo(expert=2, bonus=0.2, bonus_groups=3, groups_per_step=1)
    icpo.take_pool(POOL)
    rewards = {True: [0.0, 1.0], False: [1.0, 0.5]}
    asked, _, accepted = visit(icpo, task(), lambda p: rewards[p.is_bare])
    bare, helped = plans(asked)
    assert (bare.n, helped.n, helped.kind) == (2, 2, "exemplar")
    assert (helped.condition, helped.shaping) == ("corrected", 0.1)
    assert [m.content for m in helped.turns] == ["What is 17 + 26?", "add them"]
    assert accepted.rewards_G == (0.0, 1.0, 1.0)
    # rewards with bonus 0, 1, 1.2: mean .7333, sample deviation .6429
    found = [r.metadata["hint"]["advantage"] for r in accepted.rollouts]
    assert found == pytest.approx([-1.1405, 0.4147, 0.7257], abs=1e-3)
    assert icpo.bonus_now() == pytest.approx(0.1)
    visit(icpo, task(), lambda p: rewards[p.is_bare])
    assert icpo.bonus_now() == 0.0


def test_icpo_without_experts_or_examples_is_grpo() -> None:
    for made in (Icpo(expert=0), Icpo(expert=2)):
        asked, _, accepted = visit(made, task(), lambda p: [0.0, 1.0, 0.0, 0.0])
        assert plans(asked) == [BARE] and not accepted.rollouts[0].metadata


def test_seeding_shows_solved_tasks_to_failed_ones_never_their_own() -> None:
    seeding = Seeding()
    other = Task("other", "What is 17 + 26?", reference="43")
    asked, *_ = visit(seeding, task(), lambda p: [0.0] * 4)
    assert plans(asked) == [BARE]  # nothing is solved yet
    visit(seeding, other, lambda p: [0.0, 1.0, 0.0, 0.0])
    asked, made, accepted = visit(
        seeding, task(), lambda p: [0.0] * 4 if p.is_bare else [0.0, 0.0, 1.0, 0.0]
    )
    assert [m.content for m in plans(asked)[1].turns] == ["What is 17 + 26?", "try 0 1"]
    assert accepted is made[1].group
    asked, *_ = visit(seeding, other, lambda p: [0.0] * 4)
    assert plans(asked) == [BARE]  # only its own solution is known: help solved the other one
    again = Seeding()
    again.load_state_dict(json.loads(json.dumps(seeding.state_dict())))
    assert again.state_dict() == seeding.state_dict()


def test_scope_keeps_the_steps_before_the_first_wrong_one() -> None:
    scope = Scope(weight=0.5)
    one = Task("t", "?", "42", {"solution": "A.\nB.\nso 42."})
    text = "first.\nsecond.\nthird."
    base = group(one, [0.0, 1.0, 0.0])
    base = with_texts(base, [text] * 3)
    ask = scope.after(one, [PlannedGroup(BARE, base)])
    assert [w.key for w in ask if isinstance(w, Write)] == ["0"]
    (write,) = ask
    assert isinstance(write, Write)
    assert write.read('{"first_wrong_step": 3}') is None
    said = WriteResult("0", write.read('{"first_wrong_step": 1}'), 1)
    made = [PlannedGroup(BARE, base, (said,))]
    (plan,) = scope.after(one, made)
    assert isinstance(plan, HintPlan) and plan.is_given and plan.weight == 0.5
    assert plan.response_prefix == "B.\nso 42." and plan.prefix_ids == (3, 4)
    assert plan.prefix_chars == len("first.\n")
    made.append(PlannedGroup(plan, with_texts(group(one, [1.0], plan, 1), ["done"])))
    assert scope.accept(one, made).rewards_G == (1.0, 1.0, 0.0)
    fine = [PlannedGroup(BARE, base, (WriteResult("0", 3, 1),))]
    assert scope.after(one, fine) == [] and scope.accept(one, fine) is base
    assert Scope(weight=0.0).after(one, [PlannedGroup(BARE, base)]) == ()


def test_scaf_may_graft_the_same_answer_under_the_bare_prompt() -> None:
    scaf = Scaf(graft=True)
    _, made, accepted = visit(
        scaf, task(hints=["a", "b"]), lambda p: [0.0] * 4 if p.is_bare else [float(p.level == 2)]
    )
    assert accepted.rewards_G == (1.0, 1.0, 0.0, 0.0)
    hinted, graft = accepted.rollouts[:2]
    assert graft.steps == hinted.steps == made[2].group.rollouts[0].steps
    assert graft.metadata["hint"]["bare_prompt"] == [5, 6] and "hint" not in hinted.metadata
    with pytest.raises(ConfigError, match=r"hints\.graft puts one answer into the group twice"):
        Scaf(graft=True, replacements=2)


SECTIONS = [
    {"name": "sage", "rewrite": "visit"},
    {"name": "igrpo", "drafts": 2},
    {"name": "igrpo", "only_failed": True},
    {"name": "lope", "resamples": 3, "words": [3, 5]},
    {"name": "r3l"},
    {"name": "nudge", "strategies": ["s1", "s2"]},
    {"name": "icpo", "expert": 2},
    {"name": "xrpo"},
    {"name": "scope"},
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: str(s["name"]))
def test_second_tries_keep_the_contract_of_schedulers(section: dict[str, object]) -> None:
    one = task(solution=SOLUTION, hints=["a", "b"])
    scheduler = make_scheduler(section, tasks=POOL)
    check_scheduler(scheduler, one, replies=lambda ask: HINTS)
    never = make_scheduler(section, tasks=POOL)
    check_scheduler(never, one, rewards_of=lambda plan: [0.0] * 8)
