"""Exact, regex, numeric and JSON verifiers as tables."""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.policies.chat import FunctionPolicy
from tfgrpo.sampling import GroupSpec, SampleSettings, sample_group
from tfgrpo.verifiers import Exact, JsonSchema, Numeric, Regex
from tfgrpo.verifiers.numeric import numbers_in


@pytest.mark.parametrize(
    ("options", "reference", "answer", "reward"),
    [
        ({}, "Paris", " Paris\n", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({}, "a b", "a \n b", 1.0),
        ({"ignore_whitespace": False}, "a b", "a  b", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({"ignore_punctuation": True}, "A-12", "A12.", 1.0),
        ({}, "\u00e9", "e\u0301", 1.0),
        ({}, 42, "42", 1.0),
        ({}, ["one", "1"], "1", 1.0),
        ({"extract": r"Answer: (\w+)"}, "5", "Answer: 4. Answer: 5", 1.0),
        ({"extract": r"Answer: (\w+)"}, "5", "5", 0.0),
        ({"contains_reward": 0.5}, "Paris", "It is Paris!", 0.5),
        ({"contains_reward": 0.5}, "Par", "It is Paris!", 0.0),
        ({}, "Paris", "", 0.0),
    ],
)
async def test_exact(options: dict[str, Any], reference: Any, answer: str, reward: float) -> None:
    verifier = Exact(**options)
    verifier.check_task(task(reference))
    assert (await verifier.score(said(answer), task(reference))).reward == reward


@pytest.mark.parametrize("reference", [None, "", "  ", [], [""], True, {"a": 1}])
def test_a_reference_that_cannot_be_compared_is_found_before_spending(reference: Any) -> None:
    with pytest.raises(ConfigError, match="t1"):
        Exact().check_task(task(reference))


async def test_regex_takes_its_pattern_from_the_settings_or_the_task() -> None:
    assert (await Regex(r"\d{3}").score(said("no 123"), task(None))).reward == 1.0
    assert (await Regex(r"\d{3}", full=True).score(said("no 123"), task(None))).reward == 0.0
    assert (await Regex(r"sorry", invert=True).score(said("done"), task(None))).reward == 1.0
    assert (await Regex(ignore_case=True).score(said("ABC"), task("abc"))).reward == 1.0
    for broken in (None, "", "("):
        with pytest.raises(ConfigError, match="t1"):
            Regex().check_task(task(broken))
    with pytest.raises(ConfigError, match="regular expression"):
        Regex("(")


@pytest.mark.parametrize(
    ("options", "reference", "answer", "reward"),
    [
        ({}, 42, "The answer is 42.", 1.0),
        ({}, 42, "first 41, then 42", 1.0),
        ({}, 42, "42, not 41", 0.0),
        ({}, 1234.5, "$1,234.50", 1.0),
        ({}, "-7", "it is \u22127 degrees", 1.0),
        ({}, 3, "5-3", 1.0),
        ({}, 0.3, "0.30", 1.0),
        ({}, 0.3, "0.30000000000000004", 0.0),
        ({"tolerance": 0.01}, 3.14, "3.149", 1.0),
        ({"tolerance": 0.01}, 3.14, "3.151", 0.0),
        ({"relative": 0.1}, 1000, "1,100", 1.0),
        ({}, 0.75, "3/4", 1.0),
        ({}, 5, r"so \boxed{5}, as 2+3", 1.0),
        ({"source": "boxed"}, 5, "5", 0.0),
        ({"source": "whole"}, 5, "5", 1.0),
        ({"source": "whole"}, 5, "4 or 5", 0.0),
        ({"units": {"m": 1, "km": 1000}}, "3 km", "3000 m", 1.0),
        ({"units": {"m": 1, "km": 1000}, "unit_required": True}, "3 km", "3000", 0.0),
        ({"decimal_comma": True}, 1234.5, "1.234,5", 1.0),
        ({}, 5, "none", 0.0),
        ({}, 5, "5/0", 0.0),
        ({}, 10**30, str(10**30), 1.0),
        ({}, 10**30, str(10**30 + 1), 0.0),
    ],
)
async def test_numeric(options: dict[str, Any], reference: Any, answer: str, reward: float) -> None:
    verifier = Numeric(**options)
    verifier.check_task(task(reference))
    assert (await verifier.score(said(answer), task(reference))).reward == reward


@pytest.mark.parametrize("reference", [None, True, "none", "1 or 2", float("nan"), [1]])
def test_a_reference_without_one_number_is_found_before_spending(reference: Any) -> None:
    with pytest.raises(ConfigError, match="exactly one number"):
        Numeric().check_task(task(reference))


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12
    )
)
def test_a_number_is_read_as_it_was_written_with_and_without_separators(value: Decimal) -> None:
    for text in (f"x = {value:f} km", f"x = {value:,f} km"):
        assert numbers_in(text) == [(value, "km")]


@given(st.text(max_size=80))
def test_numbers_of_any_text_are_finite(text: str) -> None:
    assert all(n.is_finite() for n, _ in numbers_in(text))


SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["order", "count"],
    "additionalProperties": False,
}
RIGHT = {"order": "A1", "count": 2}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"order": "A1", "count": 2}', 1.0),
        ('Here:\n```json\n{"order": "A1", "count": 2}\n```\nDone.', 1.0),
        ('I think {"order": "A1", "count": 2} fits', 1.0),
        ('{"order": "A1", "count": 3}', 0.5),
        ('{"order": "A1", "count": "2"}', 0.5),
        ('{"order": "A1"}', 0.5),
        ('{"order": "A1", "count": 2, "note": "x"}', 2 / 3),
        ('{"order": "A1", "count": 2.0}', 0.5),
        ("[]", 0.0),
        ("none", 0.0),
        ('{"order": "A1", "order": "B", "count": 2}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
async def test_json_fields_earn_their_share(answer: str, reward: float) -> None:
    verifier = JsonSchema(SCHEMA)
    verifier.check_task(task(RIGHT))
    score = await verifier.score(said(answer), task(RIGHT))
    assert score.reward == pytest.approx(reward)
    whole = await JsonSchema(SCHEMA, partial=False).score(said(answer), task(RIGHT))
    assert whole.reward == float(reward == 1.0)


@pytest.mark.parametrize("closed", [{"additionalProperties": False},
                                    {"unevaluatedProperties": False}])  # fmt: skip
@pytest.mark.parametrize("name", ["it's", 'say "it\'s"', "a.b", "a['b']", "\\'", "count.x"])
async def test_a_field_that_the_schema_does_not_allow_is_blamed_whatever_its_name(
    name: str, closed: dict[str, bool]
) -> None:
    schema = {k: v for k, v in SCHEMA.items() if k != "additionalProperties"} | closed
    score = await JsonSchema(schema).score(said(json.dumps({**RIGHT, name: 1})), task(None))
    assert score.reward == pytest.approx(2 / 3)
    assert score.feedback == f"{name}: not allowed by the schema"


async def test_json_without_a_reference_is_judged_by_the_schema_alone() -> None:
    verifier = JsonSchema(SCHEMA)
    verifier.check_task(task(None))
    good = await verifier.score(said('{"order": "any", "count": 1}'), task(None))
    half = await verifier.score(said('{"order": "any", "count": "1"}'), task(None))
    assert (good.reward, half.reward) == (1.0, 0.5)


def test_json_references_must_fit_their_schema() -> None:
    with pytest.raises(ConfigError, match="breaks the schema"):
        JsonSchema(SCHEMA).check_task(task({"order": 1, "count": 1}))
    with pytest.raises(ConfigError, match="no schema"):
        JsonSchema().check_task(task(None))
    with pytest.raises(ConfigError, match="not a JSON Schema"):
        JsonSchema({"type": "objekt"})


ENDLESS = [r"^(a+)+$", r"^(a|a)*$", r"^(a|aa)+$", r"^([a-z]+)*$", r"^(a*)*$", r"(?:a+){9}b"]


@pytest.mark.real
@pytest.mark.parametrize("pattern", ENDLESS)
async def test_a_pattern_without_end_is_a_failure_and_leaves_the_loop_free(pattern: str) -> None:
    answer = said("a" * 60 + "!")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.05)

    ticking = asyncio.create_task(tick())
    for verifier in (Regex(pattern), Exact(extract=pattern), Numeric(extract=pattern)):
        with pytest.raises((TimeoutError, VerifierError)):
            async with asyncio.timeout(0.5):
                await verifier.score(answer, task("1"))
    ticking.cancel()
    assert ticks >= 9
    assert (await Regex("(a+)+!").score(said("aaa!" * 500), task(None))).reward == 1.0


@pytest.mark.real
async def test_a_verifier_that_is_given_up_ends_as_a_failure_of_its_own() -> None:
    group = await sample_group(
        task(None),
        FunctionPolicy(lambda prompt, context: "a" * 40 + "b", policy_id="p"),
        Regex(r"^(a+)+$"),
        draws=GroupSpec(group_size=2),
        settings=SampleSettings(verifier_timeout_s=0.5),
    )
    assert {r.outcome for r in group.rollouts} == {"verifier_failed"}


@given(
    st.sampled_from([r"a", r"a+b", r"^\\d{3}$", r"(x|y)z?", r"(a+)+b"]),
    st.text("abxyz1", max_size=30),
)
def test_a_pattern_says_the_same_in_a_worker_as_here(pattern: str, text: str) -> None:
    found = asyncio.run(Regex(pattern).score(said(text), task(None))).reward == 1.0
    assert found == (re.search(pattern, text.strip()) is not None)
