import pytest

from tfgrpo.lm.wire import ChoiceParts, loads, message_json, request_json
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Request, Sampling, ToolSpec
from tfgrpo.rollout import Usage
from tfgrpo.runtime.thinking import split_thinking


def done(*deltas, finish="stop", **choice):
    parts = ChoiceParts()
    for delta in deltas:
        parts.add({}, delta)
    parts.add({"finish_reason": finish, **choice}, None)
    return parts.completion(usage=Usage(), model="m")


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("<think>a</think>b", "b", "a"),
        ("  <thinking>\na\n</thinking>\n\nb", "b", "a"),
        ("<think>never closed", "", "never closed"),
        ("prompt opened it</think>b", "b", "prompt opened it"),
        ("<think></think>b", "b", ""),
        ("b <think>a</think>", "b <think>a</think>", ""),
        ("plain", "plain", ""),
        ("", "", ""),
    ],
)
def test_thinking_never_stands_in_the_text(text, answer, thought):
    assert split_thinking(text) == (answer, thought)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_reasoning_field_is_kept_apart(field):
    reply = done({field: "hm "}, {field: "so"}, {"content": "4"})
    assert (reply.text, reply.reasoning) == ("4", "hm so")


def test_both_reasoning_fields_together_count_once():
    assert done({"reasoning_content": "x", "reasoning": "x"}, {"content": "y"}).reasoning == "x"


def test_null_and_unknown_fields_are_tolerated():
    reply = done(None, {"content": None, "role": None, "mystery": [1]}, {"content": "ok"})
    assert reply.text == "ok"


def test_tool_call_pieces_come_in_any_order():
    reply = done(
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}, None]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    )
    assert reply.tool_calls == (ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", "{}"))
    assert reply.finish == "tool_calls"


def test_calls_without_an_index_are_told_apart_by_id():
    reply = done(
        {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"function": {"arguments": "}"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "f", "arguments": {"k": 1}}}]},
    )
    assert [c.arguments for c in reply.tool_calls] == ["{}", '{"k": 1}']


@pytest.mark.parametrize(
    ("word", "finish"),
    [("length", "length"), ("max_tokens", "length"), ("content_filter", "content_filter"),
     ("end_turn", "stop"), ("eos", "stop")],
)  # fmt: skip
def test_finish_reasons_are_normalised(word, finish):
    assert done({"content": "x"}, finish=word).finish == finish


def test_a_refusal_field_is_a_content_filter():
    reply = done({"refusal": "I cannot"})
    assert (reply.finish, reply.text) == ("content_filter", "I cannot")


def test_token_ids_are_read_from_either_place_and_must_line_up():
    entries = [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:7", "logprob": -1}]
    reply = done({"content": "ab"}, logprobs={"content": entries})
    assert (reply.token_ids, reply.logprobs) == ((5, 7), (-0.5, -1.0))
    reply = done({"content": "ab"}, token_ids=[1, 2, 3], logprobs={"content": entries})
    assert reply.token_ids is None and reply.logprobs == (-0.5, -1.0)


def test_a_request_becomes_the_body_and_nothing_unset_is_sent():
    request = Request(
        (Message("assistant", "", (ToolCall("a", "f", "{}"),), reasoning="secret thoughts"),),
        tools=(ToolSpec("f", "d", {"type": "object"}),),
        tool_choice="f",
        sampling=Sampling(temperature=0.0, stop=("x",), extra={"min_p": 0.1}),
    )
    body = request_json(request, "m")
    assert body["temperature"] == 0.0 and body["stop"] == ["x"] and body["min_p"] == 0.1
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert "top_p" not in body and "max_tokens" not in body
    assert "secret thoughts" not in str(body)


def test_a_tool_turn_names_its_call():
    assert message_json(Message("tool", "4", tool_call_id="a")) == {
        "role": "tool", "content": "4", "tool_call_id": "a",
    }  # fmt: skip


def test_deep_nesting_is_refused_before_the_parser_sees_it():
    for raw in (b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300):
        with pytest.raises(ValueError, match="nested"):
            loads(raw)
    many = b"[" + b"[1]," * 5000 + b'"[[[ \\" {{{"]'
    assert len(loads(many)) == 5001
