"""The summary on a made-up run, checked against figures counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.report.made import library, made_run
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import Decision, RunView, scores_of
from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import paired_difference
from tfgrpo.statistics.verdict import VerdictRule


@pytest.fixture(scope="module")
def view() -> RunView:
    return made_run()


def test_the_summary_is_json_and_equal_for_equal_views(view: RunView) -> None:
    text = json.dumps(summarise(view), allow_nan=False)
    assert text == json.dumps(summarise(made_run()), allow_nan=False)


def test_the_gain_is_the_paired_difference_of_the_test_arms(view: RunView) -> None:
    arms = [scores_of(view.of_stage("test", arm)) for arm in ("empty", "final")]
    summary = summarise(view)
    expected = paired_difference(arms[0], arms[1])
    assert summary["gain"]["estimate"] == expected.estimate
    assert summary["gain"]["low"] == expected.low > 0
    assert summary["verdict"]["status"] == "met"
    assert summary["noise"]["n_tasks"] == 24


def test_counts_of_groups_outcomes_and_spend_add_up(view: RunView) -> None:
    summary = summarise(view)
    practice = list(view.of_stage("practice"))
    for row in summary["informative"]:
        at_step = [g for g in practice if g.metadata["step"] == row["step"]]
        assert row["mixed"] == sum(g.is_informative() for g in at_step)
        kinds = ("mixed", "all_fail", "all_pass", "equal", "unusable")
        assert sum(row[k] for k in kinds) == len(at_step)
    counted = sum(n for row in summary["outcomes"].values() for k, n in row.items() if k != "cut")
    assert counted == summary["run"]["rollouts"] == sum(len(g.rollouts) for g in view.groups)
    assert summary["spend"]["total"]["prompt_tokens"] == 163_000
    assert summary["spend"]["total"]["cost_usd"] == pytest.approx(0.163)


def test_the_curve_has_practice_and_every_look_of_the_gate(view: RunView) -> None:
    curve = summarise(view)["curve"]
    assert [(p["step"], p["kind"]) for p in curve] == [
        (step, kind) for step in range(4) for kind in ("practice", "gate")
    ]
    looks = [p for p in curve if p["kind"] == "gate"]
    assert [p["accepted"] for p in looks] == [True, True, False, True]
    assert looks[0]["what"] == "1 lesson"
    # A version is scored once: the second look compares with what the first one proposed.
    versions = [
        scores_of(g for g in view.of_stage("gate") if g.metadata["library_version"] == version)
        for version in ("v1", "v2")
    ]
    assert looks[1]["difference"]["low"] == paired_difference(versions[0], versions[1]).low


def test_every_rejection_is_listed_with_its_reason(view: RunView) -> None:
    rejected = summarise(view)["rejected"]
    assert [(r["what"], r["reason"]) for r in rejected] == [
        ("add", "repeats a task"),
        ("whole step", "lower bound"),
    ]


def test_versions_say_what_each_changed_over_the_one_before() -> None:
    changed = library(2, 2)
    changed["entries"][1]["text"] = "other words"
    dropped = library(2, 3) | {"entries": library(2, 3)["entries"][1:]}
    view = RunView("r", libraries=(("a", library(1, 1)), ("b", changed), ("c", dropped)))
    rows = summarise(view)["versions"]
    assert [len(r["added"]) for r in rows] == [1, 1, 0]
    assert rows[2]["removed"][0][0] == "E1"
    assert rows[2]["changed"] == [["E2", "other words", dropped["entries"][0]["text"]]]


def test_versions_of_one_step_are_compared_with_what_they_were_proposed_against() -> None:
    looks = [
        Decision("gate", "1", {"step": 1, "current": "empty", "proposed": name, "accepted": passed})
        for name, passed in (("b", True), ("a", False))
    ]
    libraries = (("b", library(2, 1)), ("a", library(1, 1)), ("b", library(2, 1)))
    rows = summarise(RunView("r", libraries=libraries, decisions=tuple(looks)))["versions"]
    assert [(r["version_id"], len(r["added"]), len(r["removed"])) for r in rows] == [
        ("b", 2, 0),
        ("a", 1, 0),
    ]
    assert [r["accepted"] for r in rows] == [True, False]


def test_contaminated_test_tasks_stand_in_no_figure(view: RunView) -> None:
    practised = next(g for g in view.groups if g.metadata["stage"] == "practice")
    leaked = [
        replace(g, task=replace(g.task, prompt=practised.task.prompt))
        if g.task.task_id == "msg-200"
        else g
        for g in view.groups
    ]
    summary = summarise(replace(view, groups=tuple(leaked)))
    assert summary["leaks"]["contaminated"] == ["msg-200"]
    assert summary["gain"]["n_tasks"] == 23
    assert summary["verdict"]["n_attempted"] == 23
    (row,) = [r for r in summary["tasks"] if r["task_id"] == "msg-200"]
    assert row["contaminated"] and row["difference"] is None


def test_a_run_whose_test_tasks_were_all_practised_gets_no_verdict(view: RunView) -> None:
    test_ids = {t.task_id for t in view.tasks("test")}
    practised = tuple(
        replace(g, group_id=f"p{g.group_id}", metadata={"stage": "practice", "step": 0})
        for g in view.groups
        if g.task.task_id in test_ids
    )
    summary = summarise(replace(view, groups=view.groups + practised))
    assert summary["verdict"]["status"] == "inconclusive"
    assert summary["verdict"]["exit_code"] == 5
    assert summary["gain"] is None
    assert len(summary["leaks"]["contaminated"]) == 24


def test_a_rule_about_one_arm_judges_the_arm_that_was_kept(view: RunView) -> None:
    final = summarise(view, rule=VerdictRule("mean", 0.5))["verdict"]
    assert final["status"] == "met"
    kept = replace(
        view, decisions=(*view.decisions, Decision("final", "", {"version_id": "empty"}))
    )
    assert summarise(kept, rule=VerdictRule("mean", 0.5))["verdict"]["status"] == "not_met"


def test_measured_values_of_randomised_groups_stand_before_stored_ones(view: RunView) -> None:
    randomised = []
    for i, g in enumerate(g for g in view.groups if g.metadata["stage"] == "practice"):
        shown = g.context if i % 2 else replace(g.context, parts=())
        metadata = dict(g.metadata) | {"offered": ["E1"], "keep": 0.5}
        randomised.append(RolloutGroup(f"r{i}", g.task, g.rollouts, shown, g.policy_id, metadata))
    summary = summarise(replace(view, groups=view.groups + tuple(randomised)))
    by_id = {e["experience_id"]: e["value"] for e in summary["library"]["entries"]}
    assert by_id["E1"]["n_with"] > 0 and by_id["E1"]["n_without"] > 0
    assert "n_with" not in by_id["E2"]  # the stored value, measured elsewhere


def test_a_run_whose_empty_library_won_reports_no_gain_and_one_arm(view: RunView) -> None:
    emptied = Decision("final", "", {"version_id": "empty", "reason": "interval includes zero"})
    summary = summarise(replace(view, decisions=(*view.decisions, emptied)))
    assert [a["arm"] for a in summary["arms"]] == ["empty"]
    assert summary["verdict"]["status"] == "not_met"
    assert summary["verdict"]["exit_code"] == 1
    assert summary["library"]["entries"] == []


def test_a_rejection_told_twice_is_listed_once(view: RunView) -> None:
    twice = Decision(
        "rejected_edit",
        "2.gate.3",
        {"step": 2, "edits": [{"op": "add", "text": "a"}], "reason": "lower bound"},
    )
    rows = summarise(replace(view, decisions=(*view.decisions, twice)))["rejected"]
    assert [(r["what"], r["text"]) for r in rows if r["reason"] == "lower bound"] == [("add", "a")]


def test_how_often_an_entry_was_shown_is_counted_from_the_groups(view: RunView) -> None:
    rows = {e["experience_id"]: e["shown"] for e in summarise(view)["library"]["entries"]}
    counted = sum(
        len(g.rollouts) for g in view.groups if "E3" in {p.source for p in g.context.parts}
    )
    assert rows["E3"] == counted > 38


def test_an_empty_run_has_a_summary_without_figures() -> None:
    summary = summarise(RunView("empty"))
    assert summary["verdict"]["status"] == "inconclusive"
    assert summary["arms"] == [] and summary["curve"] == [] and summary["gain"] is None
    json.dumps(summary, allow_nan=False)
