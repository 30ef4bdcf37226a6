"""The forecast against runs that really happened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HARMFUL, HELPFUL, World, settings
from tfgrpo.config.learn import Config
from tfgrpo.experience import preset
from tfgrpo.learning.forecast import Forecast, forecast, library_tokens, text_tokens
from tfgrpo.learning.learn import dry_run
from tfgrpo.lm.scripted import Reply
from tfgrpo.protocols import Request
from tfgrpo.rollout import Task
from tfgrpo.runtime.call_scope import current_scope


class Measured(World):
    """A world that counts the tokens of prompts as a forecast does."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.prompt_tokens: Counter[str] = Counter()

    def _policy(self, request: Request, seed: int | None) -> Reply:
        tokens = sum(text_tokens(m.content) + 4 for m in request.messages)
        self.prompt_tokens[current_scope().stage] += tokens
        return super()._policy(request, seed)


CASES: list[tuple[str, Measured, dict[str, Any]]] = [
    ("helpful lessons", Measured(lesson=HELPFUL), {}),
    ("harmful lessons", Measured(lesson=HARMFUL), {"learn": {"batch": 3}}),
    ("both kinds", Measured(turns_help=True), {"learn": {"entries": "both", "epochs": 2}}),
    ("exemplars", Measured(turns_help=True), {"learn": {"entries": "exemplars", "top_k": 1}}),
    ("nothing to learn", Measured(base=1.0), {}),
    ("no gate", Measured(), {"gate": {"enabled": False}}),
    ("the paper's algorithm", Measured(), {"learn": {"preset": "paper-main"}}),
]


def calls(plan: Forecast) -> dict[str, tuple[int, int]]:
    return {s.stage: (s.calls_low, s.calls_high) for s in plan.stages}


@pytest.mark.parametrize(("name", "world", "sections"), CASES, ids=[c[0] for c in CASES])
def test_a_run_asks_for_no_less_and_no_more_than_was_forecast(
    tmp_path: Path, name: str, world: Measured, sections: dict[str, Any]
) -> None:
    config = settings(tmp_path, **sections)
    plan, _ = dry_run(config, tasks=world.tasks, opener=world.opener)
    world.learn(config)
    made = dict(world.stages)
    for stage in ("practice", "gate", "test"):
        if stage in calls(plan):
            low, high = calls(plan)[stage]
            assert low <= made.pop(stage) <= high, (stage, low, high)
    assert made.pop("replay", 0) <= calls(plan).get("replay", (0, 0))[1]
    assert sum(made.values()) <= calls(plan).get("critic", (0, 0))[1], made
    assert world.calls <= plan.calls_high
    for row in plan.stages:
        if row.stage in ("practice", "gate", "test"):
            found = world.prompt_tokens[row.stage]
            assert row.prompt_low <= found <= row.prompt_high, (row.stage, found)


def test_a_library_at_its_cap_is_the_most_that_is_forecast_for_it() -> None:
    tight = preset("default", caps={"tokens": 100})
    assert library_tokens(tight, 50, 30, 200) == 140
    few = preset("contrast", lessons_per_group=1, max_words=10, exemplars=1)
    assert library_tokens(few, 2, 30, 200) == 2 * 24 + (30 + 200 + 8) + 40
    assert library_tokens(few, 0, 30, 200) == 40
    rules = preset("default", exemplars=0, reflect={"rules": 3, "entry_tokens": 50})
    assert library_tokens(rules, 2, 30, 200) == 2 * 3 * (50 + 4) + 40


def test_each_step_of_a_tool_attempt_sends_again_what_came_before() -> None:
    tasks = [Task("t", "x" * 40)]
    section = {"kind": "tools", "max_steps": 3, "sampling": {"max_tokens": 100}}
    config = Config.from_mapping(
        {"policy": section, "learn": {"group_size": 2, "preset": "contrast"}}
    )
    (practice, *_) = forecast(config, tasks, (), ()).stages
    bare = 10 + 4
    by_hand = 2 * (3 * bare + (1 + 2) * (100 + 512 + 8))
    assert (practice.prompt_low, practice.prompt_high) == (2 * bare, by_hand)


def test_money_is_unknown_without_a_price_and_adds_up_with_one() -> None:
    tasks = World().tasks
    config = Config()
    plan = forecast(config, tasks[:12], tasks[12:24], tasks[24:])
    assert plan.cost_high_usd is None
    assert any("no price is known" in note for note in plan.notes)
    assert "unknown" in plan.lines()[1]
    priced = forecast(
        config,
        tasks[:12],
        tasks[12:24],
        tasks[24:],
        policy_price=(1.0, 2.0),
        critic_price=(1.0, 2.0),
    )
    by_hand = sum(s.prompt_high * 1.0 + s.completion_high * 2.0 for s in priced.stages) / 1e6
    assert priced.cost_high_usd == pytest.approx(by_hand, rel=1e-12)
    assert all((s.cost_low_usd or 0.0) <= (s.cost_high_usd or 0.0) for s in priced.stages)


def test_a_tool_policy_may_take_its_steps_in_calls_and_tokens() -> None:
    config = Config.from_mapping({"policy": {"kind": "tools", "max_steps": 7}})
    tasks = World().tasks
    (practice, *_) = forecast(config, tasks[:12], (), ()).stages
    (chat, *_) = forecast(Config(), tasks[:12], (), ()).stages
    assert practice.calls_high == 7 * chat.calls_high
    assert practice.completion_high == 7 * chat.completion_high
    # A chat model may answer a group in one call, a tool attempt never is part of one.
    assert practice.calls_low == 12 * config.learn.group_size and chat.calls_low == 12


def test_without_a_test_split_nothing_will_be_proven() -> None:
    plan = forecast(Config(), World().tasks, (), ())
    assert plan.min_detectable is None and "nothing will be proven" in plan.notes[-1]


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("abcd", 1), ("abcde", 2), ("练习", 2)])
def test_tokens_are_a_quarter_of_the_bytes(text: str, tokens: int) -> None:
    assert text_tokens(text) == tokens
