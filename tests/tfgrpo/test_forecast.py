"""The forecast against runs that really happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tfgrpo.worlds import HARMFUL, HELPFUL, World, settings
from tfgrpo.config import Config
from tfgrpo.forecast import Forecast, estimate_tokens, forecast
from tfgrpo.run import dry_run

CASES: list[tuple[str, World, dict[str, Any]]] = [
    ("helpful lessons", World(lesson=HELPFUL), {}),
    ("harmful lessons", World(lesson=HARMFUL), {"learn": {"batch": 3}}),
    ("both kinds", World(turns_help=True), {"learn": {"entries": "both", "epochs": 2}}),
    ("exemplars", World(turns_help=True), {"learn": {"entries": "exemplars", "top_k": 1}}),
    ("nothing to learn", World(base=1.0), {}),
    ("no gate", World(), {"gate": {"enabled": False}}),
    ("the paper's algorithm", World(), {"learn": {"preset": "paper-main"}}),
]


def calls(plan: Forecast) -> dict[str, tuple[int, int]]:
    return {s.stage: (s.calls_low, s.calls_high) for s in plan.stages}


@pytest.mark.parametrize(("name", "world", "sections"), CASES, ids=[c[0] for c in CASES])
def test_a_run_asks_for_no_less_and_no_more_than_was_forecast(
    tmp_path: Path, name: str, world: World, sections: dict[str, Any]
) -> None:
    config = settings(tmp_path, **sections)
    plan, _ = dry_run(config, tasks=world.tasks)
    world.learn(config)
    made = dict(world.stages)
    for stage in ("practice", "gate", "test"):
        if stage in calls(plan):
            low, high = calls(plan)[stage]
            assert low <= made.pop(stage) <= high, (stage, low, high)
    assert sum(made.values()) <= calls(plan).get("critic", (0, 0))[1], made
    assert world.calls <= plan.calls_high


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
    by_hand = sum(s.prompt_tokens * 1.0 + s.completion_high * 2.0 for s in priced.stages) / 1e6
    assert priced.cost_high_usd == pytest.approx(by_hand, rel=1e-12)
    assert all((s.cost_low_usd or 0.0) <= (s.cost_high_usd or 0.0) for s in priced.stages)


def test_a_tool_policy_may_take_its_steps_in_calls_and_tokens() -> None:
    config = Config.from_mapping({"policy": {"kind": "tools", "max_steps": 7}})
    tasks = World().tasks
    (practice, *_) = forecast(config, tasks[:12], (), ()).stages
    (chat, *_) = forecast(Config(), tasks[:12], (), ()).stages
    assert practice.calls_high == 7 * chat.calls_high
    assert practice.completion_high == 7 * chat.completion_high
    assert practice.calls_low == chat.calls_low


def test_without_a_test_split_nothing_will_be_proven() -> None:
    plan = forecast(Config(), World().tasks, (), ())
    assert plan.min_detectable is None and "nothing will be proven" in plan.notes[-1]


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("abcd", 1), ("abcde", 2), ("练习", 2)])
def test_tokens_are_a_quarter_of_the_bytes(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens
