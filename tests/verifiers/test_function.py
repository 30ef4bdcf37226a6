"""User functions, composites, settings, and the contract of every verifier."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tests.verifiers.rows import said, task
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import ToolSpec, Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers import (
    Code,
    Exact,
    FunctionVerifier,
    JsonSchema,
    Judge,
    Numeric,
    Regex,
    ToolCalls,
    Weighted,
    make_verifier,
)
from tfgrpo.verifiers.code import Marking
from tfgrpo.verifiers.judge import Scale


def verifier(fn: Any, **options: Any) -> FunctionVerifier:
    return FunctionVerifier(fn, verifier_id="mine", **options)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.5, -0.5),
        (np.float64(0.25), 0.25),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        ((0.5, "half"), 0.5),
        (Score(0.25), 0.25),
    ],
)
async def test_a_result_that_loses_nothing_is_a_reward(value: Any, reward: float) -> None:
    assert (await verifier(lambda r, t: value).score(said("x"), task(None))).reward == reward


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", "", float("nan"), float("inf"), np.float64("nan"), np.array([1.0]), [1.0]),
        *({"reward": 1}, 2**53 + 1, 10**400, (1.0, 2.0), b"1", 1j),
    ],
)
async def test_any_other_result_is_a_failure_and_never_zero(value: Any) -> None:
    with pytest.raises(VerifierError, match="mine"):
        await verifier(lambda r, t: value).score(said("x"), task(None))


@pytest.mark.parametrize("raised", [KeyError("x"), StopIteration(), SystemExit(0), TimeoutError()])
async def test_what_a_function_raises_is_a_failure(raised: BaseException) -> None:
    def broken(rollout: Any, task: Any) -> float:
        raise raised

    with pytest.raises(VerifierError, match=type(raised).__name__):
        await verifier(broken).score(said("x"), task(None))


async def test_a_late_function_is_a_failure() -> None:
    release = threading.Event()

    async def slow(rollout: Any, task: Any) -> float:
        await asyncio.sleep(30)
        return 1.0

    def blocks(rollout: Any, task: Any) -> float:
        release.wait(5)
        return 1.0

    for fn in (slow, blocks):
        with pytest.raises(VerifierError, match=r"0\.02 s"):
            await verifier(fn, timeout_s=0.02).score(said("x"), task(None))
    release.set()


async def test_a_reward_outside_the_declared_range_is_a_failure() -> None:
    with pytest.raises(VerifierError, match="outside"):
        await verifier(lambda r, t: 2, reward_range=(0, 1)).score(said("x"), task(None))


def test_a_users_check_finds_bad_references_before_spending() -> None:
    def check(task: Any) -> None:
        int(task.reference)

    with pytest.raises(ConfigError, match="ValueError"):
        verifier(lambda r, t: 1, check=check).check_task(task("x"))


async def test_a_composite_is_the_weighted_mean_and_fails_with_any_part() -> None:
    parts: dict[str, tuple[Verifier, float]] = {
        "right": (Exact(), 3.0),
        "short": (verifier(lambda r, t: len(r.answer) < 3), 1.0),
    }
    both = Weighted(parts)
    score = await both.score(said("12345"), task("12345"))
    assert score.reward == 0.75 and dict(score.parts) == {"right": 1.0, "short": 0.0}
    broken = Weighted({**parts, "broken": (verifier(lambda r, t: None), 1.0)})
    with pytest.raises(VerifierError):
        await broken.score(said("1"), task("1"))
    with pytest.raises(ConfigError):
        both.check_task(task(None))
    with pytest.raises(ConfigError, match="weight"):
        Weighted({"a": (Exact(), 0.0)})


async def test_tool_calls_are_judged_under_the_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    expected = [{"name": "f", "arguments": {"x": 1}}]
    judge = ToolCalls([ToolSpec("f", "", schema)], partial=True)
    judge.check_task(task(expected))
    assert (await judge.score(said('Action: f {"x": 1.0}'), task(expected))).reward == 1.0
    wrong = await judge.score(said('Action: f {"x": 1, "y": 2}'), task(expected))
    assert wrong.reward == 0.0 and "'y'" in wrong.feedback
    with pytest.raises(ConfigError):
        judge.check_task(task([{"name": "f", "arguments": {"x": "1"}}]))


# --- the contract ---------------------------------------------------------------------------

EVERY: list[tuple[Verifier, Any, str]] = [
    (Exact(), "4", "4"),
    (Regex(r"\d"), None, "4"),
    (Numeric(), 4, "it is 4"),
    (JsonSchema(), {"a": 4}, '{"a": 4}'),
    (Judge(ScriptedLM("Score: 80"), "Good?"), None, "4"),
    (verifier(lambda r, t: 0.5), None, "4"),
    (ToolCalls([]), [], "4"),
    (Weighted({"a": (Exact(), 1.0)}), "4", "4"),
]


@pytest.mark.parametrize(("judge", "reference", "answer"), EVERY)
async def test_every_verifier_is_finite_pure_and_safe_at_once(
    judge: Verifier, reference: Any, answer: str
) -> None:
    given_task, rollout = task(reference), said(answer)
    before = (given_task.to_dict(), rollout.to_dict())
    judge.check_task(given_task)
    scores = await asyncio.gather(*(judge.score(rollout, given_task) for _ in range(20)))
    low, high = judge.reward_range
    assert all(s == scores[0] for s in scores) and low <= scores[0].reward <= high
    assert (given_task.to_dict(), rollout.to_dict()) == before
    empty = await judge.score(said(""), given_task)
    assert low <= empty.reward <= high


# --- settings -------------------------------------------------------------------------------


def test_a_verifier_is_made_from_a_name_or_a_table() -> None:
    assert make_verifier("exact").verifier_id == Exact().verifier_id
    made = make_verifier({"kind": "numeric", "tolerance": 1, "units": {"m": 1}})
    assert made.verifier_id == Numeric(tolerance=1.0, units={"m": 1.0}).verifier_id
    made = make_verifier({"kind": "function", "function": "tests.verifiers.rows:said"})
    assert made.verifier_id == "function:tests.verifiers.rows:said"
    asked: list[Any] = []

    def opener(spec: str = "", **options: Any) -> ScriptedLM:
        asked.append((spec, options))
        return ScriptedLM("Score: 1")

    judge = {"kind": "judge", "rubric": "Good?", "sampling": {"max_tokens": 5}}
    make_verifier(judge, open_lm=opener)
    make_verifier({**judge, "lm": "scripted:x", "options": {"a": 1}}, open_lm=opener)
    assert asked == [("", {}), ("scripted:x", {"a": 1})]
    mixed = {"kind": "weighted", "parts": {"a": {"kind": "exact", "weight": 2}, "b": judge}}
    assert isinstance(make_verifier(mixed, open_lm=opener), Weighted)


def test_options_that_a_class_takes_as_one_record_are_keys_of_their_own() -> None:
    strict = make_verifier({"kind": "code", "partial": False, "tolerance": 1})
    assert strict.verifier_id == Code(marking=Marking(False, 1.0)).verifier_id
    assert strict.verifier_id != Code().verifier_id
    lm = ScriptedLM("Score: 3")
    graded = make_verifier(
        {"kind": "judge", "rubric": "Good?", "low": 1, "high": 5}, open_lm=lambda **_: lm
    )
    assert graded.verifier_id == Judge(lm, "Good?", scale=Scale(1, 5)).verifier_id


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("exakt", "allowed are exact, numeric"),
        ({}, "kind is None"),
        ({"kind": "exact", "ignore_cas": True}, "did you mean 'ignore_case'"),
        ({"kind": "exact", "ignore_case": "yes"}, "ignore_case is 'yes'"),
        ({"kind": "numeric", "tolerance": "0.1"}, "tolerance is '0.1'"),
        ({"kind": "judge"}, "name the judge's model"),
        ({"kind": "judge", "lm": "scripted:x"}, "'rubric' is missing"),
        ({"kind": "function"}, "module:name"),
        ({"kind": "function", "function": "tests.verifiers.rows:nothing"}, "cannot be loaded"),
        ({"kind": "weighted"}, "parts"),
        ({"kind": "code", "level": "process"}, "no security boundary"),
        ({"kind": "code", "level": "docker"}, "level"),
        ({"kind": "code", "partial": "no"}, "partial is 'no'"),
        ({"kind": "code", "tolerence": 1}, "did you mean 'tolerance'"),
    ],
)
def test_wrong_settings_name_key_value_and_what_is_allowed(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_verifier(config)


def test_code_is_off_unless_a_level_is_chosen() -> None:
    with pytest.raises(ConfigError, match="is off"):
        Code().check_task(task("assert f(1) == 1"))


class Counting:
    """A verifier that counts how often it is asked."""

    reward_range = (-1.0, 1.0)

    def __init__(self, reward: float) -> None:
        self.reward, self.calls = reward, 0
        self.verifier_id = f"counting-{reward}"

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        self.calls += 1
        return Score(self.reward)


async def test_parts_behind_a_gate_are_asked_only_where_it_is_full() -> None:
    for rule, expected, calls in ((0.5, (0.5 - 3.0) / 4, 0), (1.0, (1.0 + 3 * 0.25) / 4, 1)):
        judge = Counting(0.25)
        both = Weighted({"judge": (judge, 3.0), "form": (Counting(rule), 1.0)}, gate=["form"])
        found = await both.score(said("x"), task(None))
        assert judge.calls == calls and found.reward == pytest.approx(expected)
        assert list(found.parts) == ["judge", "form"]
        assert found.parts["judge"] == (0.25 if calls else -1.0)


def test_a_gate_names_some_of_the_parts() -> None:
    parts = {"form": {"kind": "regex", "pattern": "x"}, "judge": {"kind": "exact"}}
    made = make_verifier({"kind": "weighted", "parts": parts, "gate": ["form"]})
    assert made.verifier_id != make_verifier({"kind": "weighted", "parts": parts}).verifier_id
    for gate in (["from"], ["form", "judge"], "form"):
        with pytest.raises(ConfigError, match="gate"):
            make_verifier({"kind": "weighted", "parts": parts, "gate": gate})


def test_a_gate_needs_ends_of_its_parts_ranges() -> None:
    free = FunctionVerifier(lambda rollout, task: 1.0, verifier_id="free")
    for gate in ("free", "rule"):
        with pytest.raises(ConfigError, match=r"'free' needs a (largest|smallest) reward"):
            Weighted({"free": (free, 1.0), "rule": (Counting(1.0), 1.0)}, gate=[gate])
