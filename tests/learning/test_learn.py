"""Runs that end early and go on: resume, kill, budget, changed settings; survival scenarios."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HELPFUL, Killed, World, comparable, journal, settings
from tfgrpo.config.learn import Config
from tfgrpo.errors import BudgetError, ConfigError, StoreError
from tfgrpo.learning.learn import LearnKeywords, Overrides, RunKeywords, learn, open_run
from tfgrpo.learning.result import Result
from tfgrpo.store import Journal


@pytest.mark.parametrize("entries", ["lessons", "exemplars", "both"])
def test_a_second_run_calls_nothing_and_gives_an_equal_result(tmp_path: Path, entries: str) -> None:
    world = World(turns_help=True)
    config = settings(tmp_path, learn={"entries": entries, "epochs": 2})
    first = world.learn(config)
    asked = world.calls
    with journal(tmp_path) as store:
        decisions = {k: store.decisions(k) for k in ("step", "gate", "final", "aa", "splits")}
        groups = [g.to_dict() for g in store.groups()]
    again = world.learn(config)
    assert world.calls == asked
    assert comparable(again) == comparable(first)
    assert again.learned.proof == first.learned.proof
    with journal(tmp_path) as store:
        assert {k: store.decisions(k) for k in decisions} == decisions
        assert [g.to_dict() for g in store.groups()] == groups


def small(folder: Path, **sections: Any) -> Any:
    """A run of 47 calls: small enough to be killed at each of them."""
    sizes = {"practice": 4, "gate": 4, "test": 4}
    parts: dict[str, Any] = {
        "run": {"concurrency": 3},
        "tasks": sizes,
        "learn": {"batch": 4, "group_size": 3},
        "gate": {"group_size": 2, "test_group_size": 2},
    }
    for name, changes in sections.items():
        parts[name] = {**parts.get(name, {}), **changes}
    return settings(folder, **parts)


def killed_at(call: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Run until that call and leave the journal as a killed process does."""
    world = World(fail_at=call)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", Journal.abandon)
        with pytest.raises((Killed, BaseExceptionGroup)):
            world.learn(small(folder))
    return world


def test_a_kill_at_any_call_costs_at_most_the_calls_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = World()
    whole = fresh.learn(small(tmp_path / "whole"))
    assert fresh.calls > 40
    for call in range(1, fresh.calls + 1, 3):
        folder = tmp_path / f"kill{call}"
        world = killed_at(call, folder, monkeypatch)
        before = sum(world.draws.values())
        world.fail_at = 0
        result = world.learn(small(folder))
        assert result.learned.proof == whole.learned.proof, call
        assert result.learned.choice == whole.learned.choice, call
        assert result.library.version_id == whole.library.version_id, call
        assert result.outcomes == whole.outcomes, call
        assert set(world.draws) == set(fresh.draws), call
        again = [draw for draw, n in world.draws.items() if n > 1]
        assert len(again) <= 3, (call, before, again)


def test_changed_settings_are_refused_with_the_difference_and_forked_on_request(
    tmp_path: Path,
) -> None:
    world = World()
    first = world.learn(settings(tmp_path))
    asked = world.calls
    changed = settings(tmp_path, gate={"test_group_size": 5})
    with pytest.raises(ConfigError, match=r"gate\.test_group_size.*4.*5") as caught:
        world.learn(changed)
    assert "--fork" in str(caught.value) and world.calls == asked
    forked = world.learn(changed, fork=True)
    assert forked.folder != first.folder and forked.folder.parent == first.folder.parent
    assert world.calls == asked + 24, "two arms, twelve tasks, one more draw each"
    assert forked.library.version_id == first.library.version_id


def test_changed_tasks_are_refused_and_the_same_tasks_under_another_path_are_not(
    tmp_path: Path,
) -> None:
    import json

    world = World()
    rows = [{"task_id": t.task_id, "prompt": t.prompt, "reference": t.reference}
            for t in world.tasks]  # fmt: skip
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = learn(settings(tmp_path, tasks={"path": str(tmp_path / "a" / "t.jsonl")}),
                  opener=world.opener)  # fmt: skip
    asked = world.calls
    moved = settings(tmp_path, tasks={"path": str(tmp_path / "b" / "t.jsonl")})
    assert comparable(learn(moved, opener=world.opener)) == comparable(first)
    assert world.calls == asked
    rows[3]["reference"] = "another"
    (tmp_path / "b" / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"tasks\.content"):
        learn(moved, opener=world.opener)


def without(values: Any, *paths: str) -> Any:
    """Settings without some keys, as an older release kept them."""
    import copy

    values = copy.deepcopy(values)
    for path in paths:
        *sections, key = path.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        del inner[key]
    return values


OLDER = ("learn.epochs", "gate.level", "policy.max_steps", "judge")


def test_a_run_kept_before_a_key_existed_goes_on_where_the_key_has_its_default(
    tmp_path: Path,
) -> None:
    config = settings(tmp_path, learn={"epochs": Config().learn.epochs})
    world = World()
    world.learn(config)
    asked = world.calls
    with Journal.open(config.run.folder) as store:
        older = without(store.config, *OLDER)
        older["policy"]["context_tokens"] = None  # gone since, and said nothing
        store._keep_config(older)
        assert store.config == older
    world.learn(config)
    assert world.calls == asked
    with Journal.open(config.run.folder) as store:
        store._keep_config(without(store.config, "gate.level"))
    with pytest.raises(ConfigError, match=r"gate\.level: absent -> 0\.8"):
        world.learn(settings(tmp_path, learn={"epochs": Config().learn.epochs},
                             gate={"level": 0.8}))  # fmt: skip


@pytest.mark.parametrize("role", ["policy", "judge"])
def test_a_window_is_the_critics_alone(tmp_path: Path, role: str) -> None:
    with pytest.raises((ConfigError, ValueError), match="context_tokens"):
        settings(tmp_path, **{role: {"context_tokens": 4096}})
    assert settings(tmp_path, critic={"context_tokens": 4096}).critic.context_tokens == 4096


def test_settings_that_only_drive_a_run_may_change(tmp_path: Path) -> None:
    world = World()
    world.learn(settings(tmp_path))
    asked = world.calls
    world.learn(settings(tmp_path, run={"concurrency": 2, "timeout_s": 5.0}))
    assert world.calls == asked


@pytest.mark.parametrize("cap", [30, 100, 220])
def test_scenario_10_a_cap_in_mid_batch_keeps_finished_work_and_a_larger_one_goes_on(
    tmp_path: Path, cap: int
) -> None:
    world = World()
    result = world.learn(settings(tmp_path, budget={"calls": cap}))
    assert result.exit_code == 4 and result.learned.stopped_by.startswith("budget")
    assert cap - 3 <= world.calls <= cap
    with journal(tmp_path) as store:
        kept = sum(row.usage.calls for row in store.spend())
    assert kept == world.calls
    more = world.learn(settings(tmp_path, budget={"calls": 1000}))
    fresh = World()
    whole = fresh.learn(settings(tmp_path / "whole"))
    assert more.exit_code == 0
    assert more.learned.proof == whole.learned.proof and world.calls == fresh.calls
    assert max(world.draws.values()) == 1


def test_scenario_10_a_cap_that_allows_nothing_more_makes_no_call_on_resume(tmp_path: Path) -> None:
    world = World()
    config = settings(tmp_path, budget={"calls": 60})
    world.learn(config)
    asked = world.calls
    assert world.learn(config).exit_code == 4
    assert world.calls == asked


def test_scenario_10_six_tasks_and_a_budget_for_one_step_say_so_beforehand(tmp_path: Path) -> None:
    from tfgrpo.learning.learn import dry_run

    world = World()
    world.tasks = world.tasks[:6]
    config = settings(
        tmp_path,
        tasks={"practice": 2, "gate": 2, "test": 2},
        learn={"batch": 1, "epochs": 3},
        budget={"calls": 20},
    )
    plan, _ = dry_run(config, tasks=world.tasks, opener=world.opener)
    assert any("the cap of 20 calls covers about" in note for note in plan.notes)
    result = world.learn(config)
    assert result.exit_code == 4 and world.calls <= 20
    assert sum(sum(row.values()) for row in result.outcomes.values()) > 0


def test_money_caps_need_a_price_and_hold_to_the_calls_in_flight(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.prices"):
        unpriced = {"lm": "openai:nobody-sells-this"}
        World().learn(settings(tmp_path / "a", policy=unpriced, budget={"cost_usd": 1.0}))
    prices = {
        "scripted:policy": {"input": 1000.0, "output": 1.0},
        "scripted:critic": {"input": 1000.0, "output": 1.0},
    }
    world = World()
    result = world.learn(settings(tmp_path / "b", budget={"cost_usd": 0.5}, run={"prices": prices}))
    assert result.exit_code == 4 and world.calls > 10
    cost = sum(row.usage.cost_usd or 0.0 for row in result.spend)
    assert 0.2 < cost <= 0.5


def test_two_runs_on_one_folder_are_kept_apart(tmp_path: Path) -> None:
    config = settings(tmp_path)
    store = open_run(config)
    try:
        with pytest.raises(StoreError, match="use"):
            World().learn(config)
    finally:
        store.close()


def test_duplicate_ids_and_no_tasks_stop_before_the_first_call(tmp_path: Path) -> None:
    world = World()
    for tasks in ([], [world.tasks[0], world.tasks[0]]):
        with pytest.raises(ConfigError):
            learn(settings(tmp_path), tasks=tasks, opener=world.opener)
    assert world.calls == 0 and not (tmp_path / "run").exists()


def test_held_out_tasks_that_are_all_practice_tasks_in_disguise_are_refused(tmp_path: Path) -> None:
    from tfgrpo.rollout import Task

    world = World()
    practice = [Task(f"p{i}", t.prompt, t.reference, {"split": "practice"})
                for i, t in enumerate(world.tasks)]  # fmt: skip
    test = [Task(f"q{i}", t.prompt, t.reference, {"split": "test"})
            for i, t in enumerate(world.tasks)]  # fmt: skip
    config = settings(tmp_path, tasks={"practice": None, "gate": 0, "test": None})
    with pytest.raises(ConfigError, match="contaminated"):
        learn(config, tasks=practice + test, opener=world.opener)
    assert world.calls == 0


def test_learn_works_inside_a_running_loop() -> None:
    import asyncio
    import tempfile

    async def notebook() -> Result:
        with tempfile.TemporaryDirectory() as name:
            return World().learn(small(Path(name)))

    assert HELPFUL in [e.text for e in asyncio.run(notebook()).learned.accepted[0].library.shown]


def test_a_budget_error_names_its_limit() -> None:
    assert BudgetError("x", resource="calls").resource == "calls"


def test_settings_may_be_put_right_while_nothing_came_of_a_run(tmp_path: Path) -> None:
    from tfgrpo.errors import ProviderError

    world = World(answer=lambda request, seed: ProviderError("no such model", kind="not_found"))
    with pytest.raises(ProviderError):
        world.learn(settings(tmp_path, policy={"lm": "openai:gtp-9"}))
    right = World()
    config = settings(tmp_path, policy={"lm": "openai:gpt-9"})
    assert right.learn(config).exit_code == 0
    with journal(tmp_path) as store:
        assert store.config is not None and store.config["policy"]["lm"] == "openai:gpt-9"
    with pytest.raises(ConfigError, match=r"policy\.lm"):
        right.learn(settings(tmp_path, policy={"lm": "openai:gpt-10"}))


def test_the_report_tells_the_choice_of_the_session_that_finished(tmp_path: Path) -> None:
    from tfgrpo.report.summary import summarise
    from tfgrpo.report.view import load_view

    world = World()
    world.learn(settings(tmp_path, budget={"calls": 60}))
    result = world.learn(settings(tmp_path, budget={"calls": 1000}))
    summary = summarise(load_view(tmp_path / "run"))
    assert summary["kept"] == "final" and summary["why_kept"] == result.learned.choice.reason


def test_the_typed_keywords_of_learning_are_the_overrides_that_it_takes() -> None:
    # Their types' names are imported for type checkers alone; the annotations are their texts.
    assert {**RunKeywords.__annotations__, **LearnKeywords.__annotations__}.keys() == {
        f.name for f in fields(Overrides)
    }
    assert set(LearnKeywords.__annotations__) - set(RunKeywords.__annotations__) == {
        "allocate",
        "scheduler",
    }
    with pytest.raises(TypeError, match="polcy"):
        learn(Config(), polcy=None)  # type: ignore[call-arg]


def test_a_test_rollout_that_succeeds_when_it_is_tried_again_counts_in_the_figures(
    tmp_path: Path,
) -> None:
    world = World(fail_test_call=5)
    assert world.learn(settings(tmp_path)).outcomes["test"].get("provider_failed") == 1
    assert world.learn(settings(tmp_path)).outcomes["test"].keys() == {"graded"}
    with journal(tmp_path) as store:
        outcomes = [dict(f.outcomes) for f in store.figures("test")]
        assert outcomes == [g.outcome_counts() for g in store.groups("test")]
