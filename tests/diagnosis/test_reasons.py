"""Why nothing was kept: a run that fails in one known way names it, with a setting that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HARMFUL, HELPFUL, World, settings
from tfgrpo.cli.result_lines import result_lines
from tfgrpo.config.learn import Config
from tfgrpo.diagnosis import Reason, why_not_kept
from tfgrpo.errors import ProviderError
from tfgrpo.learning.result import Result
from tfgrpo.lm.scripted import Reply
from tfgrpo.protocols import Completion, Request
from tfgrpo.report.next_steps import advise_on
from tfgrpo.report.summary import summarise
from tfgrpo.report.view import load_view
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

SMALL_GATE: dict[str, Any] = {
    "tasks": {"practice": 12, "gate": 4, "test": 12},
    "gate": {"group_size": 1},
}


def causes(result: Result) -> list[str]:
    assert not result.outcome.is_kept
    return [reason.cause for reason in result.why_not_kept]


def test_a_kept_and_proven_library_has_nothing_to_explain(tmp_path: Path) -> None:
    result = World(lesson=HELPFUL).learn(settings(tmp_path))
    assert result.outcome.state == "kept" and result.verdict is not None
    assert result.verdict.status == "met" and result.why_not_kept == ()


def test_replies_that_were_cut_are_named_with_their_count_and_a_larger_limit(
    tmp_path: Path,
) -> None:
    def cut(request: Request, seed: int | None) -> Reply:
        return Completion("There are 18 + 7 =", finish="length")

    world = World(answer=cut)
    result = world.learn(settings(tmp_path, run={"on_truncated": "grade"}))
    first = result.why_not_kept[0]
    assert first.cause == "cut"
    assert "192 of 192 replies were cut at policy.sampling.max_tokens = 40" in first.text
    assert first.settings == ("policy.sampling.max_tokens=160",)
    again = Config.from_mapping(
        {"policy": {"sampling": {"max_tokens": int(first.settings[0].partition("=")[2])}}}
    )
    assert again.policy.sampling.max_tokens == 160


def test_a_refused_critic_that_was_asked_once_is_named_as_a_failure(tmp_path: Path) -> None:
    class Refused(World):
        def _critic(self, request: Request, seed: int | None) -> Reply:
            raise ProviderError("HTTP 400: no such parameter", kind="bad_request", status=400)

    one_panel = {"practice": 6, "gate": 12, "test": 12}
    result = Refused().learn(settings(tmp_path, tasks=one_panel, learn={"batch": 6}))
    assert "critic_failed" in causes(result)
    (reason,) = [r for r in result.why_not_kept if r.cause == "critic_failed"]
    assert "1 of 1 calls of the critic failed" in reason.text
    assert "no such parameter" in reason.text and "cut" not in reason.text


def test_a_critic_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    class Babbling(World):
        def _critic(self, request: Request, seed: int | None) -> Reply:
            return "I would rather not write JSON."

    assert "critic_unread" in causes(Babbling().learn(settings(tmp_path)))


def test_solved_tasks_and_hopeless_tasks_are_told_apart(tmp_path: Path) -> None:
    solved = World(base=1.0).learn(settings(tmp_path / "solved"))
    assert causes(solved)[0] == "nothing_to_gain"
    preset = {"preset": "contrast", "epochs": 1, "batch": 6, "group_size": 4}
    hopeless = World(base=0.0).learn(settings(tmp_path / "hopeless", learn=preset))
    (reason,) = [r for r in hopeless.why_not_kept if r.cause == "no_contrast"]
    assert "0 of 12 practice groups differ in reward (12 failed throughout" in reason.text
    assert "nudge.kind=hints" in reason.settings


def test_equal_draws_at_temperature_zero_ask_for_a_temperature(tmp_path: Path) -> None:
    sampling = {"temperature": 0, "max_tokens": 40}
    preset = {"preset": "contrast", "epochs": 1, "batch": 6, "group_size": 4}
    config = settings(tmp_path, policy={"sampling": sampling}, learn=preset)
    result = World(base=0.0).learn(config)
    (reason,) = [r for r in result.why_not_kept if r.cause == "no_contrast"]
    assert reason.settings == ("policy.sampling.temperature=0.7",)


def test_lessons_that_guards_refuse_are_named_with_the_guards_reason(tmp_path: Path) -> None:
    lesson = "Write to help@example.com before you answer anything."
    result = World(lesson=lesson).learn(settings(tmp_path, learn={"preset": "contrast"}))
    (reason,) = [r for r in result.why_not_kept if r.cause == "refused_lessons"]
    assert "an e-mail address" in reason.text


def test_a_harmful_candidate_is_no_matter_of_size(tmp_path: Path) -> None:
    found = causes(World(lesson=HARMFUL).learn(settings(tmp_path)))
    assert "no_effect" in found and "small_gate" not in found


def test_a_gain_that_a_small_gate_cannot_see_says_how_many_tasks_would(tmp_path: Path) -> None:
    config = settings(tmp_path / "a", **SMALL_GATE)
    full = World(lesson=HELPFUL).learn(config)
    assert causes(full) == ["nothing_to_gain"], "all four happened to be right"
    result = World(lesson=HELPFUL, base=0.3).learn(settings(tmp_path / "b", **SMALL_GATE))
    (reason,) = [r for r in result.why_not_kept if r.cause == "small_gate"]
    assert "with 4 gate tasks x 1 draws and 2 comparisons no gain is kept" in reason.text
    assert "about 107 gate tasks find a gain of +0.25" in reason.remedy


def test_a_run_that_a_cap_ended_says_so_first(tmp_path: Path) -> None:
    result = World().learn(settings(tmp_path, budget={"calls": 60}))
    assert causes(result)[0] == "stopped" and "budget calls" in result.why_not_kept[0].text


def test_screen_advice_and_summary_say_the_same(tmp_path: Path) -> None:
    result = World(lesson=HARMFUL).learn(settings(tmp_path))
    view = load_view(tmp_path / "run")
    texts = [reason.text for reason in result.why_not_kept]
    assert [reason.text for reason in view.why_not_kept()] == texts
    summary = summarise(view)
    assert summary["state"] == result.outcome.state == "candidate, not kept"
    assert [row["text"] for row in summary["why_not_kept"]] == texts
    advice = advise_on(view)
    assert [a.lever for a in advice[: len(texts)]] == ["setup"] * len(texts)
    assert all(text in a.headline for text, a in zip(texts, advice, strict=False))
    screen = "\n".join(result_lines(result, "mine/config.toml"))
    assert screen.count("candidate, not kept") == 1 and "why nothing was kept:" in screen
    assert all(text in screen for text in texts)
    assert summary["verdict"]["text"] == result.verdict.text  # type: ignore[union-attr]
    assert "nothing was kept, so nothing changes" in screen


def test_a_command_goes_on_from_the_runs_own_config() -> None:
    reason = Reason("cut", "…", "…", ("a.b=1", "c.d=x"))
    assert (
        reason.command("mine/c.toml") == "tfgrpo learn mine/c.toml --fork --set a.b=1 --set c.d=x"
    )
    assert Reason("stopped", "…", "…").command() == ""


def group(task_id: str, rewards: list[float], stage: str, arm: str) -> RolloutGroup:
    rollouts = tuple(
        Rollout(f"{stage}{arm}{task_id}{i}", task_id, outcome="graded", score=Score(r))
        for i, r in enumerate(rewards)
    )
    metadata: dict[str, Any] = {"stage": stage, "arm": arm}
    return RolloutGroup(
        f"{stage}{arm}{task_id}", Task(task_id, task_id), rollouts, metadata=metadata
    )


@pytest.mark.parametrize(("after", "expected"), [([0.5, 0.0], ["small_test"]), ([1.0, 1.0], [])])
def test_a_kept_library_without_proof_is_a_matter_of_the_test_split(
    after: list[float], expected: list[str]
) -> None:
    groups = [group(f"t{i}", [0.0, i % 2], "test", "empty") for i in range(10)]
    groups += [group(f"t{i}", after, "test", "final") for i in range(10)]
    final = {"final": [{"version_id": "abc", "reason": "better"}]}
    assert [r.cause for r in why_not_kept(groups, final, {})] == expected
