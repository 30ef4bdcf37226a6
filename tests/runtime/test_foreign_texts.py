"""Readers of foreign texts end on any text, and raise nothing of others.

How their time grows is measured by `tests.benchmarks.faults.linear_readers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.config.sections import apply_override, load_toml
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.experience.artefact import FORMAT, from_row, load_artefact
from tfgrpo.experience.critic.paper_flow import _lessons_in
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.edits import read_lessons, read_operations, resolve
from tfgrpo.experience.guards import Finding, Foreign, Guards
from tfgrpo.experience.reflect.reply import read_reply
from tfgrpo.experience.settings import Repairs
from tfgrpo.hints.answer_leaks import answers_of
from tfgrpo.hints.writer import read_texts
from tfgrpo.lm.wire import ChoiceParts
from tfgrpo.routing.outcome_files import read_outcomes
from tfgrpo.runtime.json_schema import check_arguments
from tfgrpo.runtime.lenient_json import ReplyError
from tfgrpo.serve.selection import read_best
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.events import ChatEvents
from tfgrpo.serve.wire.http import check_depth
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers.numbers import number_of, numbers_in, plain_text

PUBLISHED = Repairs(lenient_operations=False, grounded_merge=False)
LONG_TEXT = 300_000
"""Characters: a reader that compares each with all others would not end."""
OPENED = "\\boxed{" * (LONG_TEXT // 7)
POWER = "\\^" + " " * LONG_TEXT + "x"
HOSTILE: dict[str, tuple[Callable[[str], Any], str, Any]] = {
    "blank lines in hints": (
        lambda t: read_texts(t, 3), "1. a" + "\n" * LONG_TEXT + "b", ("a b",)
    ),
    "zeros as an id": (lambda t: resolve(t, {"G0": "E1"}), "0" * LONG_TEXT + "x", None),
    "blank lines in a page": (
        lambda t: Foreign.of([t]), "\n" * LONG_TEXT + "x", Foreign(frozenset({("x",)}), ())
    ),
    "an open tag in a lesson": (
        lambda t: Guards().check(t), "<" + " " * LONG_TEXT + "x", Finding("pass", "")
    ),
    "opened boxes": (answers_of, OPENED, (OPENED,)),
    "opened lessons": (_lessons_in, "<Experiences>" * (LONG_TEXT // 13), ""),
    "an open power": (plain_text, POWER, POWER),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_long_hostile_text_is_read_for_what_it_is(name: str) -> None:
    read, text, result = HOSTILE[name]
    assert read(text) == result


def test_a_long_body_of_escaped_quotes_behind_open_arrays_is_refused() -> None:
    with pytest.raises(ApiError, match="nested over 64 deep"):
        check_depth(b"[" * 64 + b'["' + b'\\"' * (LONG_TEXT // 2))


def test_an_open_fence_with_blanks_behind_is_no_reply() -> None:
    with pytest.raises(ReplyError):
        operations_from("```json" + " " * 100_000, {}, PUBLISHED)


def _stream(pieces: list[dict[str, Any]]) -> ChoiceParts:
    parts = ChoiceParts()
    for piece in pieces:
        parts.add({}, {"tool_calls": [piece]})
    return parts


def test_thousands_of_calls_in_one_stream_stay_apart() -> None:
    pieces = [
        {"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": part}}
        for i in range(20_000)
        for part in ("{", "}")
    ]
    calls = _stream(pieces).tool_calls()
    assert len(calls) == 20_000
    assert {c.arguments for c in calls} == {"{}"}


def test_a_piece_with_a_known_id_goes_to_its_call_whatever_its_index() -> None:
    calls = _stream(
        [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "id": "b", "function": {"arguments": "}"}},
            {"id": "a", "function": {"arguments": "}"}},
        ]
    ).tool_calls()
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [("a", "f", "{}"), ("b", "g", "{}")]


def test_arguments_nested_ten_thousand_deep_are_passed_on() -> None:
    deep = '{"a":' * 10_000
    calls = _stream(
        [
            {"index": 0, "function": {"name": "f", "arguments": deep}},
            {"index": 0, "function": {"name": "f", "arguments": "1"}},
        ]
    ).tool_calls()
    assert [c.arguments for c in calls] == [deep + "1"]


@pytest.mark.parametrize("text", ["131 180/699", "x = 1 200/999", "-12 345/678"])
def test_a_mixed_number_that_may_be_a_grouped_numerator_is_refused(text: str) -> None:
    assert number_of(text) is None
    assert numbers_in(text) == []


@pytest.mark.parametrize(
    ("text", "value"), [("131 18/699", 131 + 18 / 699), ("1 234/5", 246.8), ("2 602", 2602)]
)
def test_its_neighbours_are_read(text: str, value: float) -> None:
    found = number_of(text)
    assert found is not None
    assert float(found[0]) == pytest.approx(value, rel=1e-12)


DEEP = "[" * 100_000
LONG = "9" * 5_000


@pytest.mark.parametrize("value", [DEEP, LONG])
def test_files_of_deep_json_and_long_numbers_are_refused_by_name(
    tmp_path: Path, value: str
) -> None:
    for name, text, read in (
        ("t.jsonl", f'{{"prompt": {value}}}', read_tasks),
        ("l.json", f"[{value}", read_tasks),
        ("o.jsonl", f'{{"prompt": {value}}}', read_outcomes),
        ("library.json", f'{{"format": {value}}}', load_artefact),
        ("c.toml", f"v = {value}", load_toml),
        ("g.toml", f"v = {value}", GatewaySettings.from_toml),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError, match=name):
            read(path)


def test_a_csv_cell_past_the_reader_s_limit_is_a_config_error(tmp_path: Path) -> None:
    import csv

    path = tmp_path / "t.csv"
    path.write_text("prompt\n" + "a" * 200_000 + "\n")
    before = csv.field_size_limit(131_072)
    try:
        with pytest.raises(ConfigError, match="is not CSV"):
            read_tasks(path)
    finally:
        csv.field_size_limit(before)


def test_a_reward_past_any_float_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps({"prompt": "a", "model": "m", "reward": 10**400}))
    with pytest.raises(ConfigError, match="reward"):
        read_outcomes(path)


def test_an_override_with_a_long_number_is_a_text() -> None:
    values: dict[str, Any] = {}
    apply_override(values, f"a.b={LONG}")
    assert values == {"a": {"b": LONG}}


@pytest.mark.parametrize("version", [[], "1", None, {}])
def test_an_artefact_whose_version_is_no_number_is_damaged(version: object) -> None:
    with pytest.raises(ConfigError, match="format_version"):
        from_row({"format": FORMAT, "format_version": version}, "here")


def test_numbers_of_thousands_of_digits_in_replies_are_no_crash() -> None:
    assert read_best(f"Best: {LONG}", 3).index == 0
    assert read_lessons(json.dumps({"lessons": [{"lesson": "a b", "attempts": [LONG]}]}))
    texts = json.dumps({f"level_{LONG}1": "a", "level_2": "b"})
    assert sorted(read_texts(texts, 3)) == ["a", "b"]
    rule = {"text": "a is written b", "confidence": 10**400}
    assert read_reply(json.dumps({"rules": [rule]}), []).rules[0].confidence is None


def test_a_published_row_whose_name_is_an_object_is_passed_over() -> None:
    text = '```json\n[{"op": {}, "text": "a"}]\n```'
    found = operations_from(text, {}, PUBLISHED)
    assert not found.operations
    assert len(found.rejected) == 1


@pytest.mark.parametrize("choices", [5, 0.5, {"a": 1}, "ab", True])
def test_a_stream_whose_choices_are_no_list_is_a_bad_reply(choices: object) -> None:
    events = ChatEvents("chatcmpl-tf", wants_usage=True, where="here", keeps=True)
    with pytest.raises(ProviderError, match="no list"):
        events.feed(b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n")


@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"enum": [1, 2]}, {"maximum": 5}, {"multipleOf": 10}],
)
def test_an_argument_of_thousands_of_digits_that_does_not_fit_is_told_without_it(
    schema: dict[str, Any],
) -> None:
    long = 10**9_999 + 1
    wanted = {"properties": {"a": schema}}
    (reason,) = check_arguments(wanted, {"a": long})
    assert "too long to be shown" in reason
    assert check_arguments({"properties": {"a": {"type": "integer"}}}, {"a": long}) == ()


@pytest.mark.parametrize(
    "text", ["9" * 5000, '{"operations": [{"op": "delete", "id": %s}]}' % ("9" * 5000)]
)
def test_a_critic_s_integer_of_thousands_of_digits_is_no_operation(text: str) -> None:
    with pytest.raises(ReplyError):
        read_operations(text, {"G0": "E1"}, proposals={"C1": "C1"})


def test_a_task_id_of_thousands_of_digits_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(f'[{{"task_id": {LONG}, "prompt": "a"}}]')
    with pytest.raises(ConfigError, match="task_id cannot be used"):
        read_tasks(file)


@pytest.mark.parametrize("index", [-5, -1, True, "0", 1.5])
def test_an_index_that_is_no_place_is_as_none(index: Any) -> None:
    parts = ChoiceParts()
    for call_id, arguments in (("a", "{}"), ("", ""), ("b", "{}")):
        piece = {"function": {"name": "f" if call_id else "", "arguments": arguments}}
        parts.add({}, {"tool_calls": [piece | {"index": index, "id": call_id}]})
    parts.add({}, {"tool_calls": [{"function": {"arguments": ""}}]})
    assert [c.call_id for c in parts.tool_calls()] == ["a", "b"]
