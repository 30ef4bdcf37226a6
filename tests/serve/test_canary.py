"""The live test over closed units: decisions, guards, and order of assignment."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.conftest import Start
from tfgrpo.serve.learning.canary import LiveUnit, drift, live_verdict, worth
from tfgrpo.serve.settings import CanarySettings

SETTINGS = CanarySettings(shares=(0.5,), min_units=20, max_units=2000, max_harm=0.05)


def units(n: int, effect: float, *, share: float = 0.5, base: float = 0.5, seed: int = 0,
          told: tuple[float, float] = (1.0, 1.0)) -> list[LiveUnit]:  # fmt: skip
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        arm = "candidate" if rng.random() < share else "current"
        p = base + (effect if arm == "candidate" else 0.0)
        has = rng.random() < told[arm == "candidate"]
        y = float(rng.random() < p) if has else None
        rows.append(LiveUnit(arm, share, float(i), y, has))
    return rows


def test_a_better_candidate_is_promoted_and_a_harmful_one_rolled_back() -> None:
    good = live_verdict(units(800, 0.25), SETTINGS, number=1, share_index=0)
    bad = live_verdict(units(1500, -0.3), SETTINGS, number=1, share_index=0)
    assert (good.action, bad.action) == ("promote", "roll_back")
    assert good.interval.low <= 0.25 <= good.interval.high
    assert good.needed == pytest.approx(40.0)  # 0.05 / (1 * 2)


def test_without_a_difference_the_candidate_expires() -> None:
    verdict = live_verdict(units(2000, 0.0, seed=3), SETTINGS, number=1, share_index=0)
    assert verdict.action == "expire"


def test_the_next_share_needs_evidence_and_units() -> None:
    settings = CanarySettings(shares=(0.5, 0.7), min_units=50)
    rows = units(400, 0.3)
    first = next(n for n in range(1, 400) if live_verdict(rows[:n], settings, number=1,
                                                   share_index=0).action == "grow")  # fmt: skip
    assert first >= 50
    assert live_verdict(rows[:first], settings, number=1, share_index=0).gain >= 3.0


def test_the_bar_rises_with_every_candidate() -> None:
    needed = [live_verdict([], SETTINGS, number=k, share_index=0).needed for k in (1, 2, 3)]
    assert needed == pytest.approx([40.0, 120.0, 240.0])


def test_a_difference_in_how_often_feedback_comes_holds_the_promotion_back() -> None:
    rows = units(1500, 0.25, told=(0.9, 0.3), seed=2)
    verdict = live_verdict(rows, SETTINGS, number=1, share_index=0)
    assert verdict.feedback_differs and verdict.action == "wait"


@pytest.mark.parametrize("guard", ["failures", "cost_usd", "duration_s"])
def test_errors_cost_and_latency_need_no_statistics(guard: str) -> None:
    rows = [
        LiveUnit(arm, 0.5, float(i), None, False,
                 **{guard: (1 if guard == "failures" else 5.0) if arm == "candidate"
                    else (0 if guard == "failures" else 1.0)})
        for i, arm in enumerate(["candidate", "current"] * 60)
    ]  # fmt: skip
    assert live_verdict(rows, SETTINGS, number=1, share_index=0).action == "roll_back"
    assert live_verdict(rows[:80], SETTINGS, number=1, share_index=0).action == "wait"


def test_pinned_and_held_out_units_are_no_part_of_the_test() -> None:
    rows = units(300, 0.25)
    more = [LiveUnit("holdout", 0.5, 0.0, 0.0), LiveUnit("pinned", 0.5, 0.0, 0.0)] * 50
    one = live_verdict(rows, SETTINGS, number=1, share_index=0)
    assert live_verdict([*more, *rows], SETTINGS, number=1, share_index=0) == one


def test_the_holdout_tells_what_the_library_is_worth() -> None:
    rng = random.Random(4)
    rows = []
    for i in range(3000):
        arm = "holdout" if rng.random() < 0.2 else "current"
        rows.append(LiveUnit(arm, 0.0, float(i),
                             float(rng.random() < (0.4 if arm == "holdout" else 0.7))))  # fmt: skip
    found = worth(rows, 0.2)
    assert 0.0 < found.low <= 0.3 <= found.high


def test_drift_is_told_apart_by_the_holdout() -> None:
    rng = random.Random(5)

    def rows(current: float, holdout: float) -> list[LiveUnit]:
        return [
            LiveUnit(arm, 0.0, float(i), float(rng.random() < p))
            for i in range(1500)
            for arm, p in (("current", current), ("holdout", holdout))
        ]

    assert drift(rows(0.7, 0.7), 0.65) == (False, False)
    assert drift(rows(0.4, 0.7), 0.65) == (True, False)
    assert drift(rows(0.4, 0.4), 0.65) == (True, True)


@given(st.integers(0, 10_000))
def test_a_verdict_follows_from_the_units_alone(seed: int) -> None:
    rows = units(60, 0.1, seed=seed)
    assert live_verdict(rows, SETTINGS, number=1, share_index=0) == live_verdict(
        list(rows), SETTINGS, number=1, share_index=0
    )


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "broken"),
    [("f", '{"a": 1}', False), ("f", '{"a": "one"}', True), ("f", "{}", True), ("f", "{", True),
     ("g", '{"a": 1}', True), ("f", None, True), ("f", "[" * 5000, True)],
)  # fmt: skip
def test_a_call_that_no_tool_takes_is_a_failure(name: str, arguments: Any, broken: bool) -> None:
    from tfgrpo.serve.learning.tool_failures import breaks_tools

    call = {"function": {"name": name, "arguments": arguments}}
    assert breaks_tools({"tool_calls": [call]}, TOOLS) is broken
    assert not breaks_tools({"content": "no call"}, None)


async def test_broken_tool_calls_count_in_the_live_test(start: Start) -> None:
    from tests.serve.test_loop import LEARN, Loop
    from tfgrpo.serve.learning.evidence import read_units
    from tfgrpo.testing import answers
    from tfgrpo.testing.fault_server import FaultServer

    def script(asked: Any) -> Any:
        if not asked.body.get("tools"):
            return None
        function = {"name": "f", "arguments": '{"a": 1}' if asked.index % 2 else "{}"}
        return answers.say("", tool_calls=({"id": "c", "type": "function", "function": function},))

    with FaultServer(script) as upstream:
        client = await start(upstream, routes={"r": {**LEARN, "holdout": 0.0}})
        loop = Loop(client)
        await loop.to_waiting()
        await loop.learning.act("approve", "person")
        for i in range(6):
            await client.chat("call it", tools=TOOLS, tfgrpo={"session_id": f"s{i}"})
        client.rows("SELECT 1")
        units = read_units(client.gateway.journal, "r", loop.learning.settings.feedback, now=4e9,
                           experiment="x1")  # fmt: skip
    assert [u.failures for u in units] == [1, 0, 1, 0, 1, 0]
