"""JSON in prose: the best match in shape is found, whatever brackets stand around it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.runtime.json_text import best_json, fenced_blocks, json_in, shape_match
from tfgrpo.runtime.lenient_json import ReplyError, json_values
from tfgrpo.verifiers import JsonSchema
from tfgrpo.verifiers.answer import boxed


def reward(answer, reference, schema=None):
    return asyncio.run(JsonSchema(schema).score(said(answer), task(reference))).reward


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ('Here are the tags: ["a","b"]', ["a", "b"]),
        ('The matches are:\n[{"t":"a"},{"t":"b"}]', [{"t": "a"}, {"t": "b"}]),
        ("[] (no matches were found)", []),
        ('See [1] for details: {"answer": 42}', {"answer": 42}),
        ('{about travel} {"answer": 42}', {"answer": 42}),
        ('["a","b"], see [1] and [a page](http://x)', ["a", "b"]),
        ("The values are [1, 2] [3].", [1, 2]),
        ('First {"a": 1}, no: {"a": 2}', {"a": 2}),
        ('```json\n["a"]\n```\nas ["x", "y"] said', ["a"]),
        ('Sets {1, 2} and [Smith 2020]: {"a": "] }"}', {"a": "] }"}),
    ],
)
def test_the_answer_is_found_among_brackets_of_prose(answer, reference):
    assert reward(answer, reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [('{"q": ["a"]}', ["a"]), ('{"a": [1], "a": 2}', [1]), ("see [1]", {"a": 1})],
)
def test_a_part_of_another_value_is_not_paid(answer, reference):
    assert reward(answer, reference) == 0.0


def test_shape_and_not_rightness_chooses():
    assert reward('{"a": 1} or rather {"a": 2}', {"a": 1}) == 0.0


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab]}[{\"' \\", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=6,
)  # fmt: skip
noise = st.sampled_from(
    [
        "See [1]. ",
        "{about travel} ",
        "[Smith 2020] ",
        "[a page](http://x) ",
        "a < b } ] ",
        "[x ",
        "",
    ]
)


@given(
    st.lists(noise, max_size=4), values.filter(lambda v: isinstance(v, (list, dict)) and v), noise
)
def test_a_value_is_read_back_from_any_prose(before, value, after):
    text = "".join(before) + "\n" + json.dumps(value) + "\n" + after
    found = best_json(text, lambda v: shape_match(v, value))
    assert found is not None
    assert found.value == value or shape_match(found.value, value) >= shape_match(value, value)


@given(st.text("[]{}\"'`1,: a\n\\", max_size=60))
def test_any_text_of_brackets_is_read_without_an_error(text):
    for found in json_in(text):
        assert 0 <= found.start < found.end <= len(text)
    fenced_blocks(text)
    boxed(text)


@pytest.mark.parametrize("unit", ["[", "{", '{"a":', "[1] ", "```\n", "\n", "\\boxed{", "[]"])
def test_reading_brackets_takes_steps_in_proportion_to_the_text(unit, steps_of):
    def read(text):
        json_in(text), fenced_blocks(text), boxed(text)

    few, many = (steps_of(read, unit * n) for n in (500, 1000))
    assert many <= 2.5 * few


@pytest.mark.parametrize("unit", ['{"a', "['x' "])
def test_texts_left_open_are_read_within_a_bound(unit, steps_of):
    """Each opening bracket begins a text that runs to the end of the reply."""

    def read():
        with contextlib.suppress(ReplyError):
            json_values(unit * 20_000)

    assert steps_of(read) < 8_000_000


def test_a_value_after_many_texts_left_open_is_found():
    text = "it's [don't] " * 40 + '{"a": 1}'
    assert {"a": 1} in json_values(text)


def test_the_last_whole_box_counts():
    assert boxed(r"\boxed{1} \boxed {2} \boxed{3") == "2"
    assert boxed(r"\boxed{\boxed{5}}") == "5"
    assert boxed(r"\boxed{\left\{1\right.}") == r"\left\{1\right."


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('[Note] Two: ["Read twice."] [end]', [["Read twice."]]),
        ("As [Smith, Jones] wrote: ['a', 'b']", [["a", "b"]]),
        ('[sic] {"rules": []} [ibid]', [{"rules": []}]),
    ],
)
def test_words_in_brackets_are_a_name_where_a_quoted_value_stands_beside(text, values):
    assert json_values(text) == values
