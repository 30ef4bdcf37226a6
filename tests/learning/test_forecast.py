"""The forecast against runs that really happened."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HARMFUL, HELPFUL, World, settings
from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.experience import final_choice, preset
from tfgrpo.learning.forecast import Forecast, forecast, library_tokens, text_tokens
from tfgrpo.learning.forecast.power import keepable_gain
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


def test_a_gate_too_small_for_most_gains_is_told_with_sizes_that_would_do() -> None:
    tasks = World().tasks[:30]
    plan = forecast(Config(), tasks[:12], tasks[12:20], tasks[20:])
    assert plan.keepable is not None and 0.7 < plan.keepable < 0.8
    (warning,) = plan.warnings
    assert "with 8 gate tasks only a gain of about 0.75 is kept" in warning
    assert "practice = 6, gate = 17, test = 7 would keep 0.51" in warning
    assert any(line == f"warning: {warning}" for line in plan.lines())
    many = [Task(f"t{i}", "x") for i in range(120)]
    assert forecast(Config(), many[:40], many[40:80], many[80:]).warnings == ()
    closed = Config.from_mapping({"gate": {"enabled": False}})
    assert forecast(closed, tasks[:12], (), tasks[20:]).keepable is None


@pytest.mark.parametrize(("n", "draws", "least"), [(8, 2, 0.5), (20, 2, 0.65), (40, 4, 0.65)])
def test_the_gain_that_a_gate_keeps_is_kept_by_most_runs_of_the_worst_case(
    n: int, draws: int, least: float
) -> None:
    """The worst case: the whole gain sits in tasks that flip, all others are coins."""
    gain = keepable_gain(Config.from_mapping({"gate": {"group_size": draws}}), n)
    assert gain is not None
    rng = random.Random(n)

    def flips(chance: float) -> list[float]:
        return [float(rng.random() < chance) for _ in range(draws)]

    kept, runs = 0, 120
    for _ in range(runs):
        turned = [rng.random() < gain for _ in range(n)]
        base = {str(i): flips(0.0 if t else 0.5) for i, t in enumerate(turned)}
        other = {str(i): flips(1.0 if t else 0.5) for i, t in enumerate(turned)}
        kept += not final_choice({"empty": base, "v": other}, level=0.95).is_empty
    assert least <= kept / runs <= 0.97


@pytest.mark.parametrize(
    ("lm", "low", "high"),
    [("scripted:digits", 0.0, 0.0), ("openai:gpt-5-mini", 1.0, 3600.0)],
)
def test_minutes_are_told_where_the_backend_is_known(lm: str, low: float, high: float) -> None:
    tasks = World().tasks
    plan = forecast(
        Config.from_mapping({"policy": {"lm": lm}}), tasks[:12], tasks[12:24], tasks[24:]
    )
    assert plan.seconds is not None and low <= plan.seconds[0] <= plan.seconds[1] <= high
    own = Config.from_mapping({"policy": {"kind": "function", "function": "agent:agent"}})
    unknown = forecast(own, tasks[:12], tasks[12:24], tasks[24:], policy_price=(1.0, 1.0))
    assert unknown.seconds is None and "time unknown" in "\n".join(unknown.lines())
    assert unknown.stages[0].cost_high_usd is None
    assert any("own calls, tokens and money are not seen" in note for note in unknown.notes)


def test_exemplars_alone_add_no_lessons_to_the_forecast() -> None:
    alone = preset("default", lessons=False, exemplars=2)
    assert library_tokens(alone, 16, 30, 12) == 2 * (30 + 12 + 8) + 40


def test_a_rehearsal_opens_what_the_run_opens(tmp_path: Path) -> None:
    tasks, scripted = World().tasks, {"lm": "scripted:digits"}
    for section, words in (
        ({"policy": {"kind": "function", "function": "no_such_agent:f"}}, "cannot be loaded"),
        ({"verifier": {"kind": "exakt"}}, "exakt"),
        ({"critic": {"lm": "opnai:x"}}, "did you mean 'openai'"),
    ):
        with pytest.raises(ConfigError, match=words):
            sections = {"policy": scripted, "critic": scripted} | section
            dry_run(settings(tmp_path, **sections), tasks=tasks)


def test_an_absent_key_is_a_remark_of_the_rehearsal_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    hosted = {"lm": "openai:gpt-5-mini"}
    config = settings(tmp_path, policy=hosted, critic=hosted)
    plan, _ = dry_run(config, tasks=World().tasks)
    (remark,) = [w for w in plan.warnings if "OPENAI_API_KEY" in w]
    assert remark.startswith("the run will stop at once")


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("abcd", 1), ("abcde", 2), ("练习", 2)])
def test_tokens_are_a_quarter_of_the_bytes(text: str, tokens: int) -> None:
    assert text_tokens(text) == tokens
