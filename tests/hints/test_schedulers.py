"""The state machines on scripted rewards, their state, and the `[hints]` section."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hints.groups import SOLUTION, group, hinted_task, rounds, solved_from, task, visit
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.hint_plan import BARE
from tfgrpo.hints import make_scheduler
from tfgrpo.hints.pope import Pope, hard_tasks, is_guided
from tfgrpo.hints.questa import Questa, is_kept
from tfgrpo.hints.sage import Sage, SageLight
from tfgrpo.hints.state import Record, TaskState, reliance
from tfgrpo.runtime.canonical import canonical_json
from tfgrpo.testing import check_scheduler


@pytest.mark.parametrize(
    ("level", "tried"),
    [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_sage_climbs_until_something_succeeds(level: int, tried: list[int]) -> None:
    assert visit(Sage(), hinted_task(), solved_from(level)) == tried


@given(
    successes=st.lists(st.booleans(), min_size=4, max_size=4),
    n_hints=st.integers(1, 5),
    max_level=st.integers(1, 5),
)
@settings(max_examples=100)
def test_sages_climb_rises_by_one_and_stops_at_the_first_success_or_the_top(
    successes: list[bool], n_hints: int, max_level: int
) -> None:
    sage = Sage(max_level=max_level)
    wins = [*successes, False, False]
    tried = visit(sage, hinted_task(n=n_hints), lambda at: [float(wins[at]), 0.0])
    top = min(n_hints, max_level)
    first = next((i for i in range(top + 1) if wins[i]), top)
    assert tried == list(range(first + 1))
    assert sage.record.rollouts == 2 * len(tried)


def test_sage_restarts_from_the_bare_task_or_climbs_on_from_the_last_level() -> None:
    restarting, going_on = Sage(), Sage(restart=False)
    for scheduler in (restarting, going_on):
        visit(scheduler, hinted_task(), solved_from(2))
    assert visit(restarting, hinted_task(), solved_from(3)) == [0, 1, 2, 3]
    assert visit(going_on, hinted_task(), solved_from(3)) == [2, 3]


def test_no_verdict_is_no_failure() -> None:
    sage = Sage()
    assert visit(sage, hinted_task(), lambda _: [None, None]) == [0]
    assert sage.record.of("t").accuracy is None
    light = SageLight()
    visit(light, hinted_task(), lambda _: [None])
    light.epoch_end()
    assert light.record.of("t").level == 0


def test_a_hint_that_leaks_is_never_tried() -> None:
    one = task(hints=["add", "the answer is 42", "carry"])
    sage = Sage()
    asked, _ = rounds(sage, one, lambda _: [0.0])
    assert [plan.text for plans in asked for plan in plans] == ["", "add", "carry"]


def test_a_real_valued_reward_succeeds_above_the_threshold() -> None:
    assert visit(Sage(success_above=0.5), hinted_task(), lambda _: [0.5, 0.1]) == [0, 1, 2, 3]
    assert visit(Sage(success_above=0.5), hinted_task(), lambda _: [0.6, 0.1]) == [0]


def test_sage_light_moves_one_level_an_epoch_and_rolls_once_a_visit() -> None:
    light = SageLight()
    seen = []
    for accuracy in (0.0, 0.0, 0.25, 0.5, 0.0, 0.0, 0.0):
        rewards = [1.0 if i < accuracy * 4 else 0.0 for i in range(4)]
        tried = visit(light, hinted_task(), lambda _, rewards=rewards: rewards)
        assert len(tried) == 1
        seen += tried
        light.epoch_end()
    # up, up, keep (0 < 0.25 <= 0.35), down, up, up (to 3), kept at the top
    assert seen == [0, 1, 2, 2, 1, 2, 3]
    assert light.record.of("t").level == 3


def test_sage_lights_paper_rule_only_raises() -> None:
    light = SageLight(raise_at=0.3499, lower_above=None)
    seen = []
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0] * 4, [1.0] * 4):
        seen += visit(light, hinted_task(), lambda _, rewards=rewards: rewards)
        light.epoch_end()
    assert seen == [0, 1, 1]


def test_sage_light_moves_only_tasks_of_this_epoch() -> None:
    light = SageLight()
    visit(light, hinted_task("a"), solved_from(9))
    light.epoch_end()
    light.epoch_end()
    assert light.record.of("a").level == 1


def test_sage_light_never_passes_the_hints_there_are() -> None:
    light = SageLight()
    for _ in range(5):
        visit(light, hinted_task(n=2), solved_from(9))
        light.epoch_end()
    assert light.record.of("t").level == 2


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_popes_guided_visits_are_spread_evenly(share: float) -> None:
    for name in ("a", "b", "c", "d"):
        guided = [is_guided(name, v, share) for v in range(64)]
        assert sum(guided) == 64 * share
        window = round(1 / share)
        assert all(sum(guided[i : i + window]) == 1 for i in range(64 - window))
    first = [is_guided(f"t{i}", 0, share) for i in range(400)]
    assert abs(sum(first) / 400 - share) <= 0.08  # out of phase: each epoch holds both versions


def test_pope_finds_the_shortest_prefix_and_remembers_it() -> None:
    pope = Pope(guided_share=1.0)
    one = task(solution=SOLUTION)
    assert visit(pope, one, solved_from(3)) == [1, 2, 3]
    assert visit(pope, one, solved_from(3)) == [3]
    assert visit(pope, one, solved_from(9)) == [3, 4]


def test_pope_leaves_the_bare_version_alone() -> None:
    pope = Pope(guided_share=0.5)
    one = task(solution=SOLUTION)
    visits = [visit(pope, one, solved_from(9)) for _ in range(4)]
    bare = [v for v in visits if v[0] == 0]
    assert bare == [[0], [0]]
    assert sum(len(v) for v in visits if v[0]) == 4 + 1  # 1..4 once, then 4 again


def test_removing_popes_instruction_changes_only_the_prompt() -> None:
    one = task(solution=SOLUTION)
    told, plain = Pope(guided_share=1.0), Pope(guided_share=1.0, instruct=False)
    (with_instruction,), (without,) = told.start(one, 4), plain.start(one, 4)
    assert with_instruction.text != without.text
    assert with_instruction.text.endswith(without.text)
    assert SOLUTION.startswith(without.text)
    assert with_instruction.label == without.label == "hint:reference:1"
    assert visit(told, one, solved_from(2)) == visit(plain, one, solved_from(2)) == [1, 2]


def test_hard_tasks_are_those_that_hardly_ever_succeed() -> None:
    assert hard_tasks({"a": 0, "b": 1, "c": 5}) == ("a",)
    assert hard_tasks({"a": 0, "b": 1, "c": 5}, most=4) == ("a", "b")


def test_questa_gives_a_share_of_the_characters_that_falls_with_the_epoch() -> None:
    questa = Questa(shares=(0.5, 0.25, 0.0), epochs=(1, 3))
    one = task(solution=SOLUTION)
    seen = []
    for _ in range(4):
        (plan,) = questa.start(one, 4)
        seen.append((questa.share, plan.level, len(plan.text)))
        visit(questa, one, solved_from(9))
        questa.epoch_end()
    assert [s for s, _, _ in seen] == [0.5, 0.25, 0.25, 0.0]
    assert [level for _, level, _ in seen] == [3, 2, 2, 0]
    lengths = [n for _, _, n in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert 0 < lengths[1] <= round(len(SOLUTION) * 0.25)
    assert lengths[3] == 0


def test_questa_ends_before_the_answer_and_names_a_task_without_solution() -> None:
    questa = Questa(shares=(0.9,), epochs=())
    (plan,) = questa.start(task(solution="It is 42 since " + SOLUTION), 4)
    assert plan.text == "It is"
    with pytest.raises(ConfigError, match=r"task 't' has no metadata\.solution"):
        Questa().start(task(), 4)
    assert Questa(missing_is_error=False).start(task(), 4) == [BARE]


def test_questa_keeps_groups_strictly_between_its_bounds() -> None:
    one = task()
    kept = [is_kept(group(one, [1.0] * k + [0.0] * (20 - k))) for k in range(21)]
    assert kept == [False, False, *[True] * 17, False, False]
    assert not is_kept(group(one, [None]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"shares": (0.25, 0.5), "epochs": (1,)},
        {"shares": (), "epochs": ()},
        {"shares": (1.5,), "epochs": ()},
        {"shares": (0.5, 0.25), "epochs": ()},
        {"shares": (0.5, 0.25, 0.1), "epochs": (3, 1)},
    ],
)
def test_questas_stages_must_make_sense(wrong: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"hints\.(shares|epochs)"):
        Questa(**wrong)  # type: ignore[arg-type]


ALL = [
    {"name": "sage", "restart": False},
    {"name": "sage_light"},
    {"name": "pope", "hints_key": "hints"},
    {"name": "questa", "epochs": [1]},
    {"name": "sage", "ahead": True},
    {"name": "scaf", "warmup_groups": 3},
    {"name": "adhint", "noise": 0.2},
    {"name": "stephint"},
    {"name": "bread"},
]


@pytest.mark.parametrize("section", ALL, ids=lambda s: s["name"])
def test_a_restored_scheduler_goes_on_as_the_first_would(section: dict[str, object]) -> None:
    tasks = [task(f"t{i}", solution=SOLUTION, hints=[f"a{i}", f"b{i}", f"c{i}"]) for i in range(5)]

    def steps(scheduler, first: int, last: int) -> list[list[int]]:
        made = []
        for n in range(first, last):
            made.append(visit(scheduler, tasks[n % 5], solved_from((n * 7) % 4)))
            if n % 5 == 4:
                scheduler.epoch_end()
        return made

    whole = make_scheduler(section)
    expected = steps(whole, 0, 40)
    for cut in (3, 13):
        first = make_scheduler(section)
        assert steps(first, 0, cut) == expected[:cut]
        state = json.loads(canonical_json(first.state_dict()))
        second = make_scheduler(section)
        second.load_state_dict(state)
        assert second.state_dict() == first.state_dict()
        assert steps(second, cut, 40) == expected[cut:]
        assert second.state_dict() == whole.state_dict()


def test_a_state_of_another_scheduler_or_build_is_refused() -> None:
    with pytest.raises(StoreError, match="'sage' and the run's scheduler is 'pope'"):
        Pope().load_state_dict(Sage().state_dict())
    with pytest.raises(StoreError, match="None"):
        Sage().load_state_dict({})
    with pytest.raises(StoreError, match="another build"):
        Record.from_dict({"epoch": 1})


def test_figures_count_levels_signal_and_rollouts() -> None:
    sage = Sage()
    visit(sage, hinted_task("a"), solved_from(0))  # 4 rollouts, accepted bare
    visit(sage, hinted_task("b"), solved_from(2))  # 12, accepted at 2
    visit(sage, hinted_task("c"), solved_from(9))  # 16, no signal at 3
    assert sage.record.figures() == {
        "level_0": 1.0,
        "level_2": 1.0,
        "level_3": 1.0,
        "informative_share_bare": 1.0,
        "informative_share_hinted": 0.5,
        "bare_accuracy": 1 / 12,  # bare rollouts alone: 1 of 3 tasks x 4
        "extra_rollouts_per_group": (8 + 12) / 3,
    }


def test_accuracy_is_smoothed_over_visits() -> None:
    sage = Sage()
    for rewards in ([1.0, 1.0], [1.0, 0.0]):
        visit(sage, hinted_task(), lambda _, rewards=rewards: rewards)
    state = sage.record.of("t")
    assert (state.visits, state.attempts, state.accuracy) == (2, 2, 0.5)
    assert state.accuracy_ema == pytest.approx(0.7 * 1.0 + 0.3 * 0.5)


def test_reliance_is_the_mean_gain_of_a_token() -> None:
    assert reliance([-1.0, -3.0], [-1.0, -3.0]) == 0.0
    assert reliance([-0.5], [-2.5]) == 2.0
    for wrong in (([], []), ([-1.0], [-1.0, -2.0])):
        with pytest.raises(ValueError, match="one log-prob a token"):
            reliance(*wrong)


@pytest.mark.parametrize("section", ALL, ids=lambda s: s["name"])
def test_every_runnable_method_is_made_from_its_section(section: dict[str, object]) -> None:
    assert make_scheduler(section).state_dict()["name"] == section["name"]


def test_the_sections_options_reach_the_scheduler() -> None:
    sage = make_scheduler({"name": "sage", "max_level": 1, "success_above": 0.5})
    assert visit(sage, hinted_task(), lambda _: [0.5]) == [0, 1]
    plain = make_scheduler({"name": "sage", "missing": "plain"})
    assert visit(plain, task(), lambda _: [0.0]) == [0]
    light = make_scheduler({"name": "sage_light", "lower_above": "never"})
    light.load_state_dict(SageLight().state_dict())
    light.record.tasks["t"] = TaskState(level=1)
    visit(light, hinted_task(), lambda _: [1.0])
    light.epoch_end()
    assert light.record.of("t").level == 1
    keyed = make_scheduler({"name": "questa", "solution_key": "worked"})
    assert keyed.start(task(worked=SOLUTION), 4)[0].text
    pope = make_scheduler({"name": "pope", "guided_share": 1.0, "instruct": False})
    (plan,) = pope.start(task(solution=SOLUTION), 4)
    assert plan.text
    assert SOLUTION.startswith(plan.text)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({}, "allowed are sage, sage_light, pope, questa, scaf, adhint, stephint, bread"),
        ({"name": "sagelight"}, "did you mean 'sage_light'"),
        ({"name": "sage", "max_levels": 2}, "did you mean 'max_level'"),
        ({"name": "sage", "max_level": 0}, "greater than or equal to 1"),
        ({"name": "pope", "guided_share": 0}, "greater than 0"),
        ({"name": "sage_light", "raise_at": 0.5, "lower_above": 0.2}, "lower_above 0.2 is below"),
        ({"name": "questa", "shares": [0.5]}, "hints.epochs"),
    ],
)
def test_a_wrong_section_is_explained(section: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_scheduler(section)


@pytest.mark.parametrize("section", ALL, ids=lambda s: s["name"])
def test_every_scheduler_meets_the_contract(section: dict[str, object]) -> None:
    one = task(solution=SOLUTION, hints=["a", "b", "c"])
    check_scheduler(make_scheduler(section), one)
    check_scheduler(make_scheduler(section), one, rewards_of=lambda plan: [0.0] * 4)


class Careless(Sage):
    """Breaks the contract in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def start(self, task, group_size):
        if self.way == "no plan":
            return []
        if self.way == "moving":
            self.record.epoch += 1
        return super().start(task, group_size)

    def after(self, task, made):
        return [BARE] if self.way == "endless" else super().after(task, made)

    def accept(self, task, made):
        accepted = super().accept(task, made)
        if self.way == "empty":
            return replace(accepted, rollouts=())
        return group(task, [1.0], number=99) if self.way == "foreign" else accepted

    def figures(self):
        return {"x": float("nan")} if self.way == "figures" else {}

    def load_state_dict(self, state):
        super().load_state_dict(Sage().state_dict() if self.way == "forgetful" else state)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("no plan", "the bare task is a plan too"),
        ("moving", "changed the state"),
        ("endless", "come to an end"),
        ("empty", "is empty"),
        ("foreign", "not made in this visit"),
        ("figures", "not finite"),
        ("forgetful", "does not restore"),
    ],
)
def test_the_contract_check_finds_what_is_broken(way: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_scheduler(Careless(way), hinted_task())
    check_scheduler(Careless("not at all"), hinted_task())
