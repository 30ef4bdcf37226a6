"""Fields of served requests: honoured or refused by name; log-probabilities of texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.lm.server.replies import reply_json
from tfgrpo.lm.server.requests import _SERVED, BadBody, read_request
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import Completion

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def read(**fields):
    return read_request({**ASK, **fields}, model_name="m", timeout_s=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("tool_choice", "required"),
        ("tool_choice", TOOL),
        ("tool_choice", "any"),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 100}),
        ("top_k", 5),
        ("guided_json", {"type": "object"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("a_field_of_tomorrow", 1),
    ],
)
def test_a_field_without_effect_is_refused_by_name(name, value):
    with pytest.raises(BadBody, match=name) as caught:
        read(**{name: value}, tools=[TOOL])
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("logit_bias", {}),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("parallel_tool_calls", True),
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(name, value):
    assert read(**{name: value}).n == 1


def test_rendering_options_reach_the_model():
    extra = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert dict(read(**extra).request.sampling.extra) == extra


texts = st.text(st.characters(codec=None), max_size=6) | st.text("\ud800\udc00a", max_size=4)


@given(st.recursive(texts, lambda i: st.lists(i) | st.dictionaries(texts, i), max_leaves=5))
def test_lone_surrogates_anywhere_are_served_or_refused_in_words(value):
    body = {**ASK, "messages": [{"role": "user", "content": value}], "user": value}
    try:
        text = json.dumps(
            read_request(body, model_name="m", timeout_s=1.0).request.messages[0].content
        )
        json.loads(text).encode("utf-8")
    except BadBody as exc:
        str(exc).encode("utf-8")


REPLY = Completion(
    "\nå",
    token_ids=(198, 7, 8),
    logprobs=(-0.1, -0.2, -0.3),
    top_logprobs=({"\n": -0.1}, {"\u00e5": -0.2}, {"\ufffd": -0.3}),
)
WORDS = {198: "\n", 7: "å", 8: "\ufffd"}


def tokens(**fields):
    asked = read(logprobs=True, top_logprobs=1, **fields)
    row = reply_json([REPLY], asked, "m", WORDS.__getitem__)["choices"][0]
    return row, row["logprobs"]["content"]


def test_tokens_of_log_probabilities_are_text_with_bytes():
    _, content = tokens()
    assert [(t["token"], t["bytes"]) for t in content] == [
        ("\n", [10]),
        ("å", [195, 165]),
        ("\ufffd", None),  # half a character: its text says nothing about its bytes
    ]
    assert content[0]["top_logprobs"] == [{"token": "\n", "logprob": -0.1, "bytes": [10]}]


def test_token_ids_stand_there_only_where_they_are_asked_for():
    row, content = tokens(return_tokens_as_token_ids=True)
    assert [t["token"] for t in content] == ["token_id:198", "token_id:7", "token_id:8"]
    row, content = tokens(return_token_ids=True)
    assert row["token_ids"] == [198, 7, 8] and content[0]["token"] == "\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream", "false"), ("logprobs", 1), ("tools", {"a": 1}), ("tools", True),
     ("parallel_tool_calls", "no"), ("return_token_ids", 0)],
)  # fmt: skip
def test_a_field_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(BadBody, match=name):
        read(**{name: value})


def test_tool_calls_of_a_turn_must_be_a_list_and_objects_become_json():
    turn = {"role": "assistant", "content": None}
    with pytest.raises(BadBody, match="tool_calls"):
        read(messages=[{**turn, "tool_calls": 5}])
    calls = [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]
    (message,) = read(messages=[{**turn, "tool_calls": calls}]).request.messages
    assert json.loads(message.tool_calls[0].arguments) == {"a": 1}


TWO = Completion(
    "",
    "tool_calls",
    "hm",
    (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")),
)


@pytest.mark.parametrize(("field", "calls"), [(None, 2), (True, 2), (False, 1)])
def test_one_call_at_a_time_is_honoured(field, calls):
    row = reply_json([TWO], read(parallel_tool_calls=field), "m")
    assert len(row["choices"][0]["message"]["tool_calls"]) == calls


def test_reasoning_is_hidden_where_that_is_asked_for():
    shown, hidden = (reply_json([TWO], read(include_reasoning=v), "m") for v in (True, False))
    assert shown["choices"][0]["message"]["reasoning_content"] == "hm"
    assert "reasoning_content" not in hidden["choices"][0]["message"]


values = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({})


@given(st.dictionaries(st.sampled_from(sorted(_SERVED - {"model"})), st.lists(values) | values))
def test_any_body_is_served_or_refused_in_words(fields):
    try:
        read(**fields)
    except BadBody as exc:
        assert str(exc)
