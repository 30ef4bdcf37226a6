"""Tools of any name, with arguments of any name, results of any kind; loops without progress."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.test_tool_loop import calls, run
from tfgrpo.policies.tool_loop import ToolLoop, _Run
from tfgrpo.policies.tools import Tool, check_arguments, tool
from tfgrpo.protocols import Completion, Request, ToolSpec
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.canonical import canonical_json, shown_as_json
from tfgrpo.runtime.json_schema import argument_defaults
from tfgrpo.runtime.texts.tool_names import wire_names
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.node import call


async def test_names_that_servers_refuse_are_sent_in_their_form_and_mapped_back() -> None:
    def start() -> str:
        return "started"

    tools = [tool(start, name=n) for n in ("coding.start", "coding_start", "a/b", "x" * 70)]

    def reply(request: Request, seed: int | None) -> Completion | str:
        offered = [t.name for t in request.tools]
        asked = [c.name for m in request.messages for c in m.tool_calls]
        assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", n) for n in (*offered, *asked))
        return calls((offered[len(asked)], "{}")) if len(asked) < 4 else "done"

    done, _ = await run(reply, tools)
    assert [c.name for s in done.steps for c in s.action.tool_calls] == [t.spec.name for t in tools]
    assert done.metadata["mode"] == "native"
    assert [m.content for s in done.steps for m in s.observations] == ["started"] * 4


@given(st.lists(st.text(min_size=1, max_size=80), max_size=12))
def test_every_list_of_names_has_forms_that_mean_one_tool_each(names: list[str]) -> None:
    forms = wire_names(names)
    assert len(set(forms.values())) == len(set(names)) == len(forms)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", form) for form in forms.values())
    fits = [n for n in names if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", n)]
    assert all(forms[n] == n for n in fits)


NAMES = ["fn", "error", "where", "timeout_s", "args", "kwargs", "named", "self", "name", "call"]


@pytest.mark.parametrize("name", [*NAMES, "tool", "tools", "arguments", "state", "loop", "context"])
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_argument_may_have_any_name(name: str, kind: str) -> None:
    space: dict[str, Any] = {}
    exec(f"{kind} query(table: str, {name}: str) -> str:\n return table + {name}", space)
    asked = ("query", json.dumps({"table": "t", name: "!"}))
    done, _ = await run([calls(asked), "ok"], [tool(space["query"])])
    assert done.steps[0].observations[0].content == "t!"
    world = ToolEnvironment([space["query"]])
    made = await world.apply(await world.start(), call("query", **json.loads(asked[1])))
    assert made.observation == "t!"


@dataclass
class Point:
    x: int
    when: datetime.date


class Colour(enum.Enum):
    RED = "red"


RESULTS: list[tuple[Any, str]] = [
    ({"at": datetime.datetime(2026, 1, 2, 3, 4)}, '{"at":"2026-01-02T03:04:00"}'),
    (decimal.Decimal("1.50"), '"1.50"'),
    (Point(1, datetime.date(2026, 1, 2)), '{"when":"2026-01-02","x":1}'),
    ({"b", "a"}, '["a","b"]'),
    (b"caf\xc3\xa9", '"caf\\u00e9"'),
    (b"\xff", '"base64:/w=="'),
    (numpy.int64(3), "3"),
    (numpy.array([[1, 2]]), "[[1,2]]"),
    (float("nan"), '"nan"'),
    ({1: Colour.RED, None: Path("a/b")}, '{"1":"red","null":"a/b"}'),
    (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
    (datetime.timedelta(seconds=90), '"0:01:30"'),
    ([fractions.Fraction(1, 2), 1j], '["1/2","1j"]'),
    ({"a": 1, "b": 2}.values(), "[1,2]"),
    (map(str, [1, 2]), '["1","2"]'),
]


@pytest.mark.parametrize(("result", "text"), RESULTS, ids=[type(r).__name__ for r, _ in RESULTS])
async def test_a_result_of_any_kind_is_shown(result: Any, text: str) -> None:
    made = list(result) if isinstance(result, Iterator) else None

    def get() -> Any:
        return result if made is None else iter(made)

    done, _ = await run([calls(("get", "{}")), "ok"], [tool(get)])
    assert done.steps[0].observations[0].content == text
    world = ToolEnvironment([get])
    seen = (await world.apply(await world.start(), call("get"))).observation
    assert json.loads(seen) == json.loads(text)


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.binary() | st.datetimes()
    | st.decimals() | st.uuids() | st.complex_numbers() | st.timedeltas() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text() | st.none(), inner)
    | st.tuples(inner, inner) | st.frozensets(st.integers() | st.text() | st.dates()),
    max_leaves=8,
)  # fmt: skip


@given(anything)
def test_every_value_has_a_form_that_json_carries(value: Any) -> None:
    shown = shown_as_json(value)
    assert canonical_json(json.loads(canonical_json(shown))) == canonical_json(shown)


def test_a_value_that_holds_itself_is_shown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(canonical_json(shown_as_json(endless))) < 1000


def look() -> str:
    """Look."""
    return "a wall"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


Asked = Callable[[int], list[tuple[str, str]]]


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        (lambda n: [("look", "{}")], 5),
        (lambda n: [("look", " { } " if n % 2 else "{}")], 5),
        (lambda n: [("add", json.dumps({"a": 1, "b": n % 2}))], 6),
        (lambda n: [("add", json.dumps({"b": 1, "a": n % 3}))], 9),
        (lambda n: [("look", "{}"), ("look", "{}")], 3),
        (lambda n: [("nothing", "{}")], 5),
    ],
)
async def test_a_loop_without_progress_ends(asked: Asked, steps: int) -> None:
    made = 0

    def reply(request: Request, seed: int | None) -> Completion:
        nonlocal made
        made += 1
        return calls(*asked(made))

    done, _ = await run(reply, [tool(look, is_read=True), tool(add)], loop=ToolLoop(max_steps=30))
    assert (done.outcome, done.metadata["stopped"]) == ("ungraded", "no_progress")
    assert len(done.steps) == steps


async def test_a_loop_without_progress_ends_in_text_mode() -> None:
    done, _ = await run("Action: look {}", [tool(look)], loop=ToolLoop("text", 30))
    assert (len(done.steps), done.metadata["stopped"]) == (5, "no_progress")


async def test_a_read_on_the_same_state_is_answered_from_memory() -> None:
    log: list[str] = []

    def seen() -> str:
        log.append("look")
        return str(len(log))

    def push() -> str:
        log.append("push")
        return "ok"

    tools = [tool(seen, name="look", is_read=True), tool(push)]
    asked = ["look", "look", "push", "look", "look"]
    done, _ = await run([*(calls((n, "{}")) for n in asked), "ok"], tools)
    assert log == ["look", "push", "look"]
    said = [m.content for s in done.steps for m in s.observations]
    assert said == ["1", "1", "ok", "3", "3"] and done.metadata["tool_calls"] == 3


async def test_calls_that_bring_something_new_go_on() -> None:
    count = iter(range(100))

    def next_page() -> int:
        return next(count)

    done, _ = await run(
        lambda r, s: calls(("next_page", "{}")), [tool(next_page)], loop=ToolLoop(max_steps=20)
    )
    assert done.metadata["stopped"] == "max_steps" and len(done.steps) == 20


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(2, 4), st.integers(2, 5))
def test_a_cycle_of_any_length_is_found(cycle: list[int], cycles: int, repeats: int) -> None:
    marks = [str(mark) for mark in cycle * max(cycles, repeats)]
    bounds = ToolLoop(max_cycles=cycles, max_repeats=repeats)
    assert _Run(Rollout("r", "t"), True, exchanges=marks).goes_round(bounds)
    fresh = [str(i) for i in range(40)]
    assert not _Run(Rollout("r", "t"), True, exchanges=fresh).goes_round(bounds)


BY_ID = {"properties": {"id": {"type": "string"}}, "required": ["id"]}
BY_NAME = {"properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "oneOf": [BY_ID, BY_NAME]}, {"id": "x"}, {"other": "x"}),
        ({"anyOf": [BY_ID, BY_NAME]}, {"name": "x", "id": "y"}, {"id": 1}),
        ({"allOf": [BY_ID, BY_NAME]}, {"id": "x", "name": "y"}, {"id": "x"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": BY_ID}}, {"id": "x"}, {"name": "x"}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": BY_ID}}, {"id": "x"}, {"name": "x"}),
        ({"if": BY_ID, "then": BY_NAME, "else": {"properties": {"q": {}}}}, {"q": 1}, {"z": 1}),
        (
            {"properties": {"a": {}}, "dependentSchemas": {"a": BY_ID}},
            {"a": 1, "id": "x"},
            {"b": 1},
        ),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"oneOf": [BY_ID]}}}, {"id": "x"}, {}),
        ({"properties": {"n": {}}, "oneOf": [BY_ID, BY_NAME]}, {"n": 1, "id": "x"}, {"m": 1}),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, None),
        ({"oneOf": [BY_ID, {**BY_NAME, "additionalProperties": {}}]}, {"name": "x", "z": 1}, None),
        ({"patternProperties": {"^x_": {"type": "integer"}}}, {"x_a": 1}, {"x_a": "1"}),
        ({"type": "object"}, {"anything": [1]}, None),
        ({}, {"anything": 1}, None),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}}, None, {}),
    ],
)  # fmt: skip
def test_schemas_put_together_from_others_are_checked_as_json_schema_has_it(
    schema: dict[str, Any], good: Any, bad: Any
) -> None:
    if good is not None:
        assert check_arguments(schema, good) == ()
    if bad is not None:
        assert check_arguments(schema, bad) != ()


DRAFT = "http://json-schema.org/draft-0{}/schema#"
PAIR = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
ABOVE = {"type": "integer", "minimum": 0, "exclusiveMinimum": True}
NEEDS = {"properties": {"a": {}}, "dependencies": {"a": BY_ID}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"p": PAIR}}, {"p": [1, "a"]}, {"p": ["a", 1]}),
        ({"$schema": DRAFT.format(7), **NEEDS}, {"a": 1, "id": "x"}, {"a": 1}),
        ({"$schema": DRAFT.format(4), "properties": {"n": ABOVE}}, {"n": 5}, {"n": 0}),
        ({"properties": {"n": ABOVE}}, {"n": 5}, {"n": 5.0}),
        ({"properties": {"s": {"type": "string", "nullable": True}}}, {"s": None}, {"s": 1}),
        ({"properties": {"s": {"type": "string", "nullable": False}}}, {"s": ""}, {"s": None}),
    ],
)
async def test_schemas_of_older_drafts_and_of_openapi_are_checked_as_they_mean_it(
    schema: dict[str, Any], good: Any, bad: Any
) -> None:
    assert check_arguments(schema, good) == () and check_arguments(schema, bad) != ()
    given_tool = Tool(ToolSpec("f", "", schema), lambda **named: "ran")
    done, _ = await run([calls(("f", json.dumps(good))), "ok"], [given_tool])
    assert done.steps[0].observations[0].content == "ran"


names = st.sampled_from(["a", "b", "c"])
flat = st.dictionaries(names, st.just({"type": "integer"}), min_size=1).map(
    lambda p: {"properties": p}
)
wrapped = st.recursive(
    flat,
    lambda inner: st.builds(
        lambda key, parts: {key: parts},
        st.sampled_from(["oneOf", "anyOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


@given(wrapped, st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(), max_size=3))
def test_an_argument_is_unknown_exactly_where_no_part_names_it(
    schema: dict[str, Any], given_args: dict[str, int]
) -> None:
    def named(part: dict[str, Any]) -> set[str]:
        inner = [p for key in ("oneOf", "anyOf", "allOf") for p in part.get(key, ())]
        return set(part.get("properties", ())) | {n for p in inner for n in named(p)}

    said = [r for r in check_arguments(schema, given_args) if r.startswith("unknown argument")]
    assert len(said) == len(set(given_args) - named(schema))


def test_defaults_come_from_referred_schemas_and_not_from_alternatives() -> None:
    part = {"properties": {"n": {"default": 1}}}
    assert argument_defaults({"$ref": "#/$defs/A", "$defs": {"A": part}}) == {"n": 1}
    assert argument_defaults({"oneOf": [part, {}]}) == {}
