"""Tools: schemas from functions, strict arguments, reading and matching calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message, ToolCall
from tfgrpo.policies.tool_calls import (
    calls_of,
    match_calls,
    parse_action,
    parse_arguments,
    resolve_name,
)
from tfgrpo.policies.tools import tool
from tfgrpo.protocols import ToolSpec
from tfgrpo.rollout import Rollout, Step
from tfgrpo.runtime.json_schema import check_arguments, check_schema


def find(
    query: str,
    top: int = 3,
    mode: Literal["fast", "slow"] = "fast",
    weights: list[float] | None = None,
    filters: Annotated[dict[str, str], "field to value"] = {},  # noqa: B006
) -> list[str]:
    """Search the shop.

    Finds goods by words.

    Args:
        query: words to look for,
            as typed
        top (int): how many
    """
    return [query, str(top), mode, str(weights), str(filters)]


def test_a_schema_is_read_from_signature_and_docstring() -> None:
    spec = tool(find).spec
    assert spec.name == "find"
    assert spec.description == "Search the shop.\n\nFinds goods by words."
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words to look for, as typed"},
            "top": {"type": "integer", "description": "how many", "default": 3},
            "mode": {"enum": ["fast", "slow"], "default": "fast"},
            "weights": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                "default": None,
            },
            "filters": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "field to value",
                "default": {},
            },
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    check_schema(spec.parameters)


def test_functions_without_a_json_form_are_refused_by_parameter() -> None:
    def untyped(x): ...  # type: ignore[no-untyped-def]
    def rest(*x: int) -> None: ...
    def keywords(**x: int) -> None: ...
    def odd(x: bytes) -> None: ...
    def default(x: float = float("nan")) -> None: ...

    for wrong in (untyped, rest, keywords, odd, default):
        with pytest.raises(ConfigError, match="parameter 'x'"):
            tool(wrong)


SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "s": {"type": "string"},
        "b": {"type": "boolean"},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        ({"n": 1}, True),
        ({"n": 1, "x": 2}, True),
        ({"n": 1, "x": 2.5}, True),
        ({"n": 1, "x": True}, False),
        ({"n": 1, "x": "2"}, False),
        ({"n": 1.0}, False),
        ({"n": True}, False),
        ({"n": "1"}, False),
        ({"n": 1, "s": 1}, False),
        ({"n": 1, "b": 1}, False),
        ({"n": 1, "b": "true"}, False),
        ({}, False),
        ({"n": 1, "unit": "cm"}, False),
    ],
)
def test_arguments_are_never_coerced(args: dict[str, Any], fits: bool) -> None:
    assert (check_arguments(SCHEMA, args) == ()) is fits


def test_open_schemas_allow_what_they_say() -> None:
    assert check_arguments({**SCHEMA, "additionalProperties": True}, {"n": 1, "u": "x"}) == ()
    numbers = {**SCHEMA, "additionalProperties": {"type": "number"}}
    assert check_arguments(numbers, {"n": 1, "u": 2}) == ()
    assert "argument 'u'" in check_arguments(numbers, {"n": 1, "u": "x"})[0]
    patterns = {**SCHEMA, "patternProperties": {"^u": {}}, "additionalProperties": False}
    assert check_arguments(patterns, {"n": 1, "u1": 2}) == ()
    assert "unknown argument 'v'" in check_arguments(patterns, {"n": 1, "v": 2})[0]


def test_a_schema_that_points_to_the_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="refers to 'http://"):
        check_schema({"properties": {"x": {"$ref": "http://127.0.0.1:1/s.json"}}})
    with pytest.raises(ConfigError, match="not a JSON Schema"):
        check_schema({"type": "integr"})
    check_schema({"$defs": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a"}}})


@pytest.mark.parametrize("text", ["[1]", "1", "{'a': 1}", '{"a": 1', '{"a": NaN}', '{"a":1,"a":2}'])
def test_broken_arguments_are_errors(text: str) -> None:
    with pytest.raises(ValueError):
        parse_arguments(text)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('Action: f {"a": 1}', "f", '{"a": 1}'),
        ('think\n**Action:** f {"a": {"b": "}"}} trailing', "f", '{"a": {"b": "}"}}'),
        ('Action: f\nAction Input: {"a": 1}', "f", '{"a": 1}'),
        ('Action: `shop.find` ({"a": 1})', "shop.find", '{"a": 1}'),
        ("Action: f", "f", ""),
        ("Action: f()", "f", ""),
        ('Action: f {"a": 1\nObservation: x', "f", '{"a": 1'),
        ("Action: f a=1", "f", "a=1"),
        ('Action: f {}\nAction: g {"x": 1}', "f", "{}"),
    ],
)
def test_a_text_action_is_read_to_the_end_of_its_json(text: str, name: str, arguments: str) -> None:
    assert parse_action(text) == ToolCall("", name, arguments)


def test_prose_is_no_action() -> None:
    for text in ("", "The action: none", "Reaction: f {}", "Action : ", "No Action: f {}"):
        assert parse_action(text) is None


# --- matching: the field case of the surplus arguments ---------------------------------------

AREA = ToolSpec(
    "geo.area",
    "",
    {
        "type": "object",
        "properties": {"base": {"type": "number"}, "height": {"type": "number"}},
        "required": ["base", "height"],
    },
)
WITH_UNIT = ToolSpec(
    "geo.area",
    "",
    {
        **AREA.parameters,
        "properties": {
            **AREA.parameters["properties"],
            "unit": {"type": "string", "default": "cm"},
            "label": {"type": "string"},
        },
    },
)
RIGHT = {"name": "geo.area", "arguments": {"base": 10, "height": 5}}


def made(name: str = "geo.area", **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_unknown_arguments_are_no_match_and_both_are_named() -> None:
    result = match_calls([RIGHT], [made(base=10, height=5, unit="cm", mode="fast")], [AREA])
    assert not result.is_match and result.n_matched == 0
    assert any("'unit'" in r for r in result.reasons)
    assert any("'mode'" in r for r in result.reasons)
    assert len(result.reasons) == 2


@pytest.mark.parametrize(
    ("call", "spec", "is_match"),
    [
        (made(base=10, height=5), AREA, True),
        (made(base=10.0, height=5), AREA, True),
        (made(base="10", height=5), AREA, False),
        (made(base=True, height=5), AREA, False),
        (made(base=11, height=5), AREA, False),
        (made(base=10), AREA, False),
        (made("geo_area", base=10, height=5), AREA, True),
        (made("area", base=10, height=5), AREA, False),
        (made("Geo.area", base=10, height=5), AREA, False),
        (made(base=10, height=5, unit="cm"), WITH_UNIT, True),
        (made(base=10, height=5, unit="mm"), WITH_UNIT, False),
        (made(base=10, height=5, unit=1), WITH_UNIT, False),
        (made(base=10, height=5, label="x"), WITH_UNIT, False),
        (ToolCall("c", "geo.area", '{"height": 5, "base": 1e1}'), AREA, True),
        (ToolCall("c", "geo.area", '{"height": 5, "base": 10'), AREA, False),
    ],
)
def test_matching_follows_the_schema(call: Any, spec: ToolSpec, is_match: bool) -> None:
    result = match_calls([RIGHT], [call], [spec])
    assert result.is_match is is_match
    assert bool(result.reasons) is not is_match


def test_a_default_spelt_out_in_the_expectation_matches_its_absence() -> None:
    expected = made(base=10, height=5, unit="cm")
    assert match_calls([expected], [RIGHT], [WITH_UNIT]).is_match


def test_several_calls_match_as_a_set_unless_order_is_asked_for() -> None:
    a, b = made(base=1, height=1), made(base=2, height=2)
    assert match_calls([a, b], [b, a], [AREA]).is_match
    assert not match_calls([a, b], [b, a], [AREA], ordered=True).is_match
    assert match_calls([a, b], [a, b], [AREA], ordered=True).is_match
    assert not match_calls([a, b], [a, a], [AREA]).is_match
    assert not match_calls([a], [a, a], [AREA]).is_match
    assert not match_calls([a, a], [a], [AREA]).is_match
    assert match_calls([], [], [AREA]).is_match


def test_an_expectation_that_breaks_its_own_schema_is_a_fault_of_the_data() -> None:
    with pytest.raises(ConfigError, match="expected call"):
        match_calls([made(base="x", height=1)], [], [AREA])


def test_a_mangled_name_that_could_mean_two_tools_means_none() -> None:
    assert resolve_name("a_b", ["a.b", "a-b"]) == "a.b"
    assert resolve_name("a_b", ["a.b", "a b"]) is None
    assert resolve_name("a_b", ["a.b", "a_b"]) == "a_b"


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda k: k not in ("base", "height")),
        st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.none()),
        min_size=1,
        max_size=3,
    )
)
def test_adding_an_unknown_argument_to_a_right_call_makes_it_wrong(extra: dict[str, Any]) -> None:
    call = {"name": "geo.area", "arguments": {"base": 10, "height": 5, **extra}}
    assert not match_calls([RIGHT], [call], [AREA]).is_match


def test_calls_of_a_rollout_are_found_in_both_forms() -> None:
    native = Step(Message("assistant", "", (ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}"))))
    text = Step(Message("assistant", "Action: h {}"))
    rollout = Rollout("r", "t", (native, text, Step(Message("assistant", "done"))))
    assert [c.name for c in calls_of(rollout)] == ["f", "g", "h"]
