"""Finish words, errors inside answers, parallel tool calls, and what a failed call costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.finish_words import FAILED_FINISHES, FINISHES, finish_of
from tfgrpo.lm.openai import OpenAILM
from tfgrpo.lm.openai_reply import ReplyReader
from tfgrpo.lm.wire import ChoiceParts
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import Task, Usage
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import GroupSpec, sample_group
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM, estimate_prompt_tokens
from tfgrpo.testing import FaultServer, events, raw, say, status
from tfgrpo.verifiers.numeric import Numeric

ASK = Request((Message("user", "how much?"),), sampling=Sampling(max_tokens=10))


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def piece(index: int | str | None, name: str = "", arguments: str = "", call_id: str = "") -> Any:
    row: dict[str, Any] = {"function": {"arguments": arguments}}
    if index is not None:
        row["index"] = index
    if name:
        row["function"]["name"] = name
    if call_id:
        row["id"] = call_id
    return chunk({"tool_calls": [row]})


def complete(script: Any, **options: Any) -> list[Completion]:
    async def run(spec: str) -> list[Completion]:
        lm = open_lm(spec, **options)
        try:
            return await lm.complete(ASK, 1, [0])
        finally:
            await lm.aclose()

    with FaultServer(script) as server:
        return asyncio.run(run(server.spec()))


# --- parallel tool calls --------------------------------------------------------------------------

BOTH = [("get_weather", '{"city":"Oslo"}'), ("get_time", '{"tz":"CET"}')]


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, *BOTH[0], "a"), piece(0, *BOTH[1], "b")],
        [piece(0, "get_weather", '{"city":', "a"), piece(0, "", '"Oslo"}'),
         piece(0, "get_time", '{"tz":', "b"), piece(0, "", '"CET"}')],
        [piece(0, *BOTH[0]), piece(0, *BOTH[1])],
        [piece(None, *BOTH[0]), piece(None, *BOTH[1])],
        [piece(0, *BOTH[0], "a"), piece(1, *BOTH[1], "b")],
        [piece(0, "get_weather", '{"city":', "x1"), piece(0, "", '"Oslo"}', "x2"),
         piece(1, "get_time", '{"tz":', "x3"), piece(1, "", '"CET"}', "x4")],
        [piece(0, "get_weather", "", "a"), piece(1, "get_time", "", "b"),
         piece(0, "", BOTH[0][1]), piece(1, "", BOTH[1][1])],
        [piece("0", "get_weather", "", "a"), piece("1", "get_time", "", "b"),
         piece("0", "", BOTH[0][1]), piece("1", "", BOTH[1][1])],
        [piece(0, *BOTH[0], "a"), piece(0, *BOTH[1], "b"), piece(0, "", "", "b")],
    ],
    ids=["c01 one index", "one index in pieces", "one index, no ids", "no index, no ids", "right",
         "an id a piece", "interleaved", "an index as text", "an id again"],
)  # fmt: skip
def test_parallel_calls_are_told_apart_whatever_index_the_server_writes(pieces: list[Any]) -> None:
    (reply,) = complete(events([*pieces, chunk({}, "tool_calls")]))
    assert [(c.name, c.arguments) for c in reply.tool_calls] == BOTH
    assert len({c.call_id for c in reply.tool_calls}) == 2 and reply.finish == "tool_calls"


@given(
    calls=st.lists(
        st.tuples(st.text("abc_", min_size=1, max_size=5), st.integers(0, 99)),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(1, 6),
    index=st.sampled_from(["own", "zero", "none"]),
)
def test_calls_that_come_one_after_another_are_read_as_they_were_sent(
    calls: list[tuple[str, int]], cut: int, index: str
) -> None:
    parts = ChoiceParts()
    wanted = []
    for place, (name, value) in enumerate(calls):
        arguments = json.dumps({"value": value})
        wanted.append((name, arguments))
        at = {"own": place, "zero": 0, "none": None}[index]
        pieces = [arguments[i : i + cut] for i in range(0, len(arguments), cut)]
        for i, text in enumerate(pieces):
            row = piece(at, name if i == 0 else "", text, f"call-{place}" if i == 0 else "")
            parts.add(row["choices"][0], row["choices"][0]["delta"])
    assert [(c.name, c.arguments) for c in parts.tool_calls()] == wanted


# --- finish words ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["abort", "error", "cancelled", "something new", "timeout"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_finish_word_that_is_no_end_is_a_failure_that_names_itself(
    word: str, stream: bool
) -> None:
    with pytest.raises(ProviderError, match=f"finish_reason '{word.replace(' ', '_')}'") as caught:
        complete(say("The answer is 4", finish=word), stream=stream)
    assert caught.value.is_retryable and caught.value.had_output


def test_c03_an_aborted_reply_is_no_answer_and_never_graded() -> None:
    async def run(spec: str) -> list[str]:
        policy = ChatPolicy(open_lm(spec), sampling=Sampling(temperature=1.0, max_tokens=8))
        task = Task("t", "6*7?", 42)
        group = await sample_group(task, policy, Numeric(), draws=GroupSpec(group_size=4))
        return [r.outcome for r in group.rollouts]

    with FaultServer(say("The answer is 4", finish="abort")) as server:
        assert asyncio.run(run(server.spec())) == ["provider_failed"] * 4


def test_one_aborted_draw_among_several_leaves_the_others_and_their_whole_bill() -> None:
    def script(call: Any) -> Any:
        rows = [
            {"index": i, "message": {"content": f"draw {i}"}, "finish_reason": word}
            for i, word in enumerate(["stop", "abort", "length"])
        ]
        usage = {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19}
        return raw(json.dumps({"choices": rows, "usage": usage}).encode())

    async def run(spec: str) -> list[Completion]:
        return await open_lm(spec).complete(ASK, 3, [0, 1, 2])

    with FaultServer(script) as server:
        replies = asyncio.run(run(server.spec()))
    assert [(r.text, r.finish) for r in replies] == [("draw 0", "stop"), ("draw 2", "length")]
    assert sum(r.usage.completion_tokens for r in replies) == 9


@given(st.text(max_size=30))
def test_every_finish_word_is_known_or_a_failure(word: str) -> None:
    try:
        assert finish_of(word) in ("stop", "length", "tool_calls", "content_filter")
    except ProviderError as exc:
        assert word.strip() and "finish_reason" in str(exc)


def test_the_two_tables_of_words_have_nothing_in_common() -> None:
    assert not set(FINISHES) & set(FAILED_FINISHES)
    assert all(w == w.lower() for w in (*FINISHES, *FAILED_FINISHES))


# --- errors inside answers ------------------------------------------------------------------------

BUSY = {"message": "the engine is overloaded", "code": 503}
WHOLE = [{"index": 0, "message": {"content": "4"}, "finish_reason": "stop"}]


@pytest.mark.parametrize(
    "body",
    [
        {"error": BUSY},
        {"error": BUSY, "choices": WHOLE},
        {"error": "overloaded", "choices": []},
        {"object": "error", **BUSY},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        {"choices": [WHOLE[0] | {"error": BUSY}]},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_is_an_error_wherever_it_stands(body: dict[str, Any], stream: bool) -> None:
    with pytest.raises(ProviderError) as caught:
        complete(raw(json.dumps(body).encode()), stream=stream)
    assert caught.value.kind == "overloaded"


@pytest.mark.parametrize("last", [{"error": BUSY}, {"error": BUSY, **chunk({}, "stop")}])
def test_an_error_after_text_in_a_stream_is_an_error(last: dict[str, Any]) -> None:
    with pytest.raises(ProviderError) as caught:
        complete(events([chunk({"content": "4"}), last]))
    assert caught.value.kind == "overloaded" and caught.value.had_output


def test_llama_cpps_error_field_in_a_stream_is_an_error() -> None:
    body = b'data: {"choices":[{"index":0,"delta":{"content":"4"}}]}\n\nerror: {"code":500,"message":"slot unavailable"}\n\n'  # noqa: E501
    with pytest.raises(ProviderError) as caught:
        complete(raw(body, content_type="text/event-stream"))
    assert caught.value.kind == "overloaded" and "slot unavailable" in str(caught.value)


# --- what a failed call costs ---------------------------------------------------------------------

PRICE = {"input": 1.0, "output": 2.0}
BILLED = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


def spend_of(tmp_path: Path, script: Any, spec: str = "") -> tuple[Usage, Usage, int]:
    """Return what one failed call booked: settled, at its worst case, and calls in the ledger."""

    async def run(spec: str) -> tuple[Usage, Usage, int]:
        with Journal.open(tmp_path / "run", create=True) as store:
            lm = JournaledLM(open_lm(spec), store, prices={spec: PRICE})
            with pytest.raises(ProviderError):
                await lm.complete(ASK, 1, [0])
            await lm.aclose()
            (row,) = store.spend()
            return row.usage, row.booked, int(store.ledger.spent["calls"])

    if spec:
        return asyncio.run(run(spec))
    with FaultServer(script) as server:
        return asyncio.run(run(server.spec()))


def test_a_connection_that_is_refused_costs_nothing(tmp_path: Path) -> None:
    used, worst, calls = spend_of(tmp_path, None, "http://127.0.0.1:9/v1#m")
    assert (used.total_tokens, worst.total_tokens, calls) == (0, 0, 0)


def test_an_error_after_text_costs_the_worst_case(tmp_path: Path) -> None:
    script = events([chunk({"content": "4"}), {"error": BUSY}])
    used, worst, calls = spend_of(tmp_path, script)
    assert (used.total_tokens, calls) == (0, 1)
    assert worst.completion_tokens == 10
    assert worst.prompt_tokens == estimate_prompt_tokens(ASK)


@pytest.mark.parametrize(
    "script",
    [
        events([chunk({"content": "4"}), {"error": BUSY, "usage": BILLED}]),
        events([chunk({"content": "4"}, usage=BILLED), {"error": BUSY}]),
        say("4", finish="abort", usage=BILLED),
    ],
)
def test_a_failure_that_says_what_was_used_costs_that(tmp_path: Path, script: Any) -> None:
    used, worst, calls = spend_of(tmp_path, script)
    assert (used.prompt_tokens, used.completion_tokens, calls) == (12, 3, 1)
    assert worst.total_tokens == 0 and used.cost_usd == pytest.approx(18e-6)


@pytest.mark.parametrize("script", [status(429), status(400), status(503), {"error": BUSY}])
def test_a_call_that_was_refused_before_a_word_costs_the_call(tmp_path: Path, script: Any) -> None:
    answer = raw(json.dumps(script).encode()) if isinstance(script, dict) else script
    used, worst, calls = spend_of(tmp_path, answer)
    assert (used.calls, used.total_tokens, worst.calls, calls) == (1, 0, 0, 1)


# --- any bytes ------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=4),
        st.floats(), st.sampled_from(["stop", "abort", "token_id:5", "NaN"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["logprob", "token", "content", "top_logprobs", "function", "name", "id",
                         "arguments", "text", "index", "error", "type", "code"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
DELTA = st.fixed_dictionaries(
    {},
    optional={n: JUNK | st.just("4") for n in ("content", "reasoning_content", "reasoning",
                                               "refusal", "tool_calls")},
)  # fmt: skip
ENTRY = st.fixed_dictionaries(
    {}, optional={"token": JUNK, "logprob": JUNK | st.floats(), "top_logprobs": JUNK}
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": JUNK,
        "delta": DELTA | JUNK,
        "message": DELTA | JUNK,
        "finish_reason": JUNK | st.just("stop"),
        "logprobs": JUNK | st.fixed_dictionaries({"content": st.lists(ENTRY, max_size=3)}),
        "token_ids": JUNK | st.lists(st.integers(), max_size=3),
        "error": JUNK,
    },
)
ANSWER = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(CHOICE, max_size=3) | JUNK,
        "usage": JUNK | st.dictionaries(st.sampled_from(list(BILLED)), JUNK, max_size=3),
        "model": JUNK,
        "error": st.none() | JUNK,
        "prompt_token_ids": JUNK,
    },
)


@settings(max_examples=400, deadline=None)
@given(answer=ANSWER, stream=st.booleans())
def test_any_answer_is_a_completion_or_a_typed_failure(
    answer: dict[str, Any], stream: bool
) -> None:
    data = json.dumps(answer).encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: " + data + b"\n\ndata: [DONE]\n\n" if stream else data

    async def run() -> list[Completion]:
        reader = ReplyReader(ASK, "model 'm'")
        if stream:
            await reader.read_stream(chunks(), asyncio.timeout(None))
        else:
            await reader.read_body(chunks())
        return OpenAILM("m", base_url="http://127.0.0.1:9/v1")._completions(reader, ASK)

    try:
        replies = asyncio.run(run())
    except ProviderError:
        return
    for reply in replies:
        json.dumps(reply.usage.to_dict(), allow_nan=False)
        for value in (reply.logprobs, [dict(t) for t in reply.top_logprobs or ()]):
            json.dumps(value, allow_nan=False)


# --- proxies and addresses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("all_proxy", "socks5h://user:CANARY-0123456789@127.0.0.1:9"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:9"),
        ("HTTP_PROXY", "nonsense://x"),
        ("ALL_PROXY", "http://[::1"),
    ],
)
def test_c05_a_proxy_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name in (
        "ALL_PROXY",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "all_proxy",
        "https_proxy",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)

    async def run() -> None:
        await open_lm("http://127.0.0.2:9/v1#m").complete(ASK, 1, [0])

    with pytest.raises((ConfigError, ProviderError)) as caught:
        asyncio.run(run())
    if isinstance(caught.value, ConfigError):
        assert variable in str(caught.value)
    assert "CANARY" not in str(caught.value)


def test_openai_base_url_of_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> Completion:
        (reply,) = await open_lm("openai:gpt-5-mini").complete(ASK, 1, [0])
        return reply

    with FaultServer(say("hello"), api_key="CANARY-0123456789") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url + "/")
        monkeypatch.setenv("OPENAI_API_KEY", "CANARY-0123456789")
        assert asyncio.run(run()).text == "hello"


def test_an_own_server_without_a_key_is_told_how_to_get_one() -> None:
    with FaultServer(say("x"), api_key="k" * 20) as server:
        spec = server.spec("m")
        with pytest.raises(ProviderError) as caught:
            asyncio.run(open_lm(spec).complete(ASK, 1, [0]))
        assert f"{server.base_url}?api_key_env=OPENAI_API_KEY#m" in str(caught.value)


def test_the_sync_way_tells_the_connections_own_cause_whatever_its_caller_was_handling() -> None:
    async def ask(spec: str) -> list[Completion]:
        return await open_lm(spec).complete(ASK, 1, [0])

    def told(spec: str) -> str:
        with pytest.raises(ProviderError) as caught:
            run_sync(lambda: ask(spec))
        return str(caught.value)

    try:
        {}["what the caller was doing"]  # type: ignore[index]
    except KeyError:
        words = [told("http://127.0.0.1:9/v1#m"), told("http://no-such-host.invalid/v1#m")]
    assert all("event loop" not in w and "caller" not in w for w in words)
    assert "refused" in words[0].lower() or "connect" in words[0].lower()

    async def inside() -> str:
        return told("http://127.0.0.1:9/v1#m")

    assert "event loop" not in asyncio.run(inside())


# --- further shapes of one kind -------------------------------------------------------------------


def message(**fields: Any) -> Any:
    finish = "tool_calls" if "tool_calls" in fields else "function_call"
    return status(200, {"choices": [{"message": fields, "finish_reason": finish}]})


@pytest.mark.parametrize(
    "script",
    [
        message(tool_calls=[{"id": "a", "function": dict(zip(("name", "arguments"), call))}
                            for call in BOTH]),
        message(tool_calls=[dict(zip(("name", "arguments"), call)) for call in BOTH]),
        events([piece(0, *BOTH[0], "a"), piece(1, *BOTH[1], "a"), chunk({}, "tool_calls")]),
        events([piece(0, *BOTH[0], "a"), piece(0, *BOTH[0], "a"), piece(1, *BOTH[1], "b"),
                chunk({}, "tool_calls")]),
    ],
    ids=["one id in a whole message", "flat", "one id under two indices", "repeated at its end"],
)  # fmt: skip
def test_calls_are_told_apart_by_place_where_ids_do_not(script: Any) -> None:
    reply = complete(script)[0]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == BOTH


def test_the_form_before_parallel_calls_is_a_call() -> None:
    old = {"name": "f", "arguments": '{"a":1}'}
    for script in (
        message(function_call=old),
        events([chunk({"function_call": {"name": "f", "arguments": '{"a":'}}),
                chunk({"function_call": {"arguments": "1}"}}), chunk({}, "function_call")]),
    ):  # fmt: skip
        reply = complete(script)[0]
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", '{"a":1}')]


@pytest.mark.parametrize("place", ["errors", "message"])
def test_an_error_in_any_place_is_no_reply(place: str) -> None:
    choice: dict[str, Any] = {"message": {"content": "4"}, "finish_reason": "stop"}
    body: dict[str, Any] = {"choices": [choice]}
    if place == "errors":
        body["errors"] = [{"message": "overloaded"}]
    else:
        choice["message"]["error"] = {"message": "overloaded"}
    with pytest.raises(ProviderError):
        complete(status(200, body))


@pytest.mark.parametrize(
    ("word", "finish"),
    [("FINISH_REASON_STOP", "stop"), ("FINISH_REASON_MAX_TOKENS", "length"), ("</s>", "stop"),
     ("<|im_end|>", "stop"), ("stop_reason_end_turn", "stop"), ("content_policy_violation",
     "content_filter"), ("BLOCKED", "content_filter")],
)  # fmt: skip
def test_spellings_of_a_known_word_are_that_word(word: str, finish: str) -> None:
    assert finish_of(word) == finish


# --- finish words, however they are written -------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "finish"),
    [("maxTokens", "length"), ("toolUse", "tool_calls"), ("endTurn", "stop"),
     ("contentFilter", "content_filter"), ("FinishReason.MAX_TOKENS", "length"),
     ("truncated", "length")],
)  # fmt: skip
def test_a_finish_word_in_another_writing_is_the_same_word(word: str, finish: str) -> None:
    assert finish_of(word) == finish


@given(
    st.sampled_from(sorted({**FINISHES, **FAILED_FINISHES})),
    st.sampled_from(["_", "-", " ", ""]),
    st.sampled_from([str.lower, str.upper, str.title]),
)
def test_joining_and_case_change_no_finish_word(word: str, joint: str, case: Any) -> None:
    written = case(word.replace("_", joint))
    if word in FINISHES:
        assert finish_of(written) == FINISHES[word]
    else:
        with pytest.raises(ProviderError) as caught:
            finish_of(written)
        assert caught.value.kind == FAILED_FINISHES[word]


# --- calls in the forms of other servers ----------------------------------------------------------


def named(index: Any, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    row = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [row]}


W, T = BOTH
FORMS: dict[str, list[dict[str, Any]]] = {
    "one id for both": [
        named(0, "c", W[0], ""), named(0, "c", "", W[1]),
        named(1, "c", T[0], ""), named(1, "c", "", T[1]),
    ],
    "a call outside a list": [
        {"tool_calls": named(0, "a", *W)["tool_calls"][0]},
        {"tool_calls": named(1, "b", *T)["tool_calls"][0]},
    ],
    "arguments so far": [
        named(0, "a", W[0], W[1][:8]), named(0, "a", W[0], W[1]), named(1, "b", *T),
    ],
    "an empty object first": [named(0, "a", W[0], "{}"), named(0, "", "", W[1]), named(1, "b", *T)],
    "input in place of arguments": [
        {"tool_calls": [
            {"index": 0, "id": "a", "function": {"name": W[0], "input": {"city": "Oslo"}}}]},
        {"tool_calls": [{"index": 1, "id": "b", "custom": {"name": T[0], "input": T[1]}}]},
    ],
    "parts of a content list": [
        {"content": [{"type": "tool_use", "id": "a", "name": W[0], "input": {"city": "Oslo"}}]},
        {"content": [{"type": "tool_use", "id": "b", "name": T[0], "input": {"tz": "CET"}}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_another_form_are_two_calls_with_ids_of_their_own(form: str) -> None:
    (reply,) = complete(events([*(chunk(d) for d in FORMS[form]), chunk({}, "tool_calls")]))
    found = [(c.name, json.loads(c.arguments)) for c in reply.tool_calls]
    assert found == [(n, json.loads(a)) for n, a in BOTH]
    assert len({c.call_id for c in reply.tool_calls}) == 2


def test_a_reply_that_announces_calls_and_has_none_is_no_answer() -> None:
    with pytest.raises(ProviderError, match="announces tool calls"):
        complete(say("", finish="tool_calls"), stream=False)


@given(
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 99), min_size=1), st.integers(1, 9)
)
def test_arguments_that_are_said_again_with_each_piece_are_read_once(
    value: dict[str, int], cut: int
) -> None:
    text = json.dumps(value)
    parts = ChoiceParts()
    for end in [*range(cut, len(text), cut), len(text)]:
        delta = named(0, "a", "f", text[:end])
        parts.add({"delta": delta}, delta)
    (call,) = parts.tool_calls()
    assert json.loads(call.arguments) == value
