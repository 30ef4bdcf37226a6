"""The openai backend against a server that misbehaves on demand, over real sockets."""

import asyncio
import base64
import json
import logging
import time
import traceback
from urllib.parse import quote

import pytest

from tfgrpo.errors import ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Limits, Request, Sampling
from tfgrpo.runtime.redaction import forget_secrets
from tfgrpo.testing import (
    FaultServer,
    check_lm,
    choices,
    events,
    hang,
    raw,
    reset,
    say,
    status,
)
from tfgrpo.testing.contracts import check_lm_failure
from tfgrpo.testing.fault_server import by_attempt

pytestmark = pytest.mark.real

ASK = Request((Message("user", "What is 17 times 23?"),))


async def ask(script, *, n=1, request=ASK, seeds=None, **options):
    with FaultServer(script) as server:
        lm = open_lm(server.spec(), **options)
        try:
            return await lm.complete(request, n, seeds or list(range(n))), server
        finally:
            await lm.aclose()


async def fail(script, *, request=ASK, **options) -> ProviderError:
    with FaultServer(script) as server:
        lm = open_lm(server.spec(), **options)
        try:
            return await check_lm_failure(lm, request)
        finally:
            await lm.aclose()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_contract_holds(stream):
    with FaultServer() as server:
        await check_lm(open_lm(server.spec(), stream=stream), is_deterministic=True)


async def test_single_draws_stream_with_usage_and_several_are_plain():
    _, server = await ask(say("x"))
    assert server.calls[0].body["stream"] is True
    assert server.calls[0].body["stream_options"] == {"include_usage": True}
    _, server = await ask(say("x"), n=2)
    assert "stream" not in server.calls[0].body and server.calls[0].body["n"] == 2
    _, server = await ask(say("x"), stream=False)
    assert "stream" not in server.calls[0].body


@pytest.mark.parametrize(("options", "sent"), [({}, 7), ({"send_seed": False}, None)])
async def test_seeds_are_sent_unless_they_are_kept_back(options, sent):
    _, server = await ask(say("x"), seeds=[7], **options)
    assert server.calls[0].body.get("seed") == sent


async def test_no_key_is_sent_where_none_is_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "CANARY-0000111122223333")
    _, server = await ask(say("x"))
    assert "authorization" not in server.calls[0].headers
    assert "CANARY" not in str(server.calls[0].headers)


HEAD = {"id": "c", "model": "scripted"}
TEXT = [
    {**HEAD, "choices": [{"index": 0, "delta": {"content": "39"}}]},
    {**HEAD, "choices": [{"index": 0, "delta": {"content": "1"}}]},
]
STOP = {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


@pytest.mark.parametrize(
    "chunks",
    [
        [{**HEAD, "choices": []}, *TEXT, STOP, {**HEAD, "choices": [], "usage": USAGE}],
        [{**HEAD, "choices": None}, *TEXT, STOP, {**HEAD, "choices": None, "usage": USAGE}],
        [HEAD, *TEXT, STOP, {**HEAD, "usage": USAGE}],
        [*TEXT, {**HEAD, "choices": [], "usage": USAGE}, STOP],
        [*TEXT, {**STOP, "usage": USAGE}],
        [{**HEAD, "choices": [None]}, *TEXT, {**STOP, "usage": None}, {"usage": USAGE}],
    ],
    ids=["empty", "null", "missing", "usage-first", "usage-inside", "null-choice"],
)
@pytest.mark.parametrize("done", [True, False])
async def test_chunk_variants_give_text_finish_and_billed_usage(chunks, done):
    (reply,), _ = await ask(events(chunks, done=done))
    assert (reply.text, reply.finish) == ("391", "stop")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.is_estimated) == (12, 3, False)


async def test_a_stream_split_at_every_byte_is_the_same_reply():
    text = "ü 🙂 39"
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]}, STOP, {"usage": USAGE}]
    body = b"".join(b"data: " + json.dumps(c, ensure_ascii=False).encode() + b"\r\n\r\n"
                    for c in chunks)  # fmt: skip
    answers = [raw(body, content_type="text/event-stream").split(i) for i in range(1, len(body), 3)]
    answers.append(raw(body, content_type="text/event-stream").split(every=1))
    with FaultServer(answers) as server:
        lm = open_lm(server.spec())
        for _ in answers:
            (reply,) = await lm.complete(ASK, 1, [0])
            assert reply.text == text and reply.usage.prompt_tokens == 12
        await lm.aclose()


NO_ANSWERS = [
    raw(b""),
    raw(b"<html><body>Gateway</body></html>", content_type="text/html"),
    raw(b'{"choices": []}'),
    raw(b'{"choices": [{"mess'),
    raw(b"[1, 2]"),
    raw(b"null"),
    raw(b"[" * 100_000),
]


@pytest.mark.parametrize("script", NO_ANSWERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_no_answer_is_a_bad_reply(script, stream):
    error = await fail(script, stream=stream)
    assert error.kind == "bad_reply" and error.is_retryable


@pytest.mark.parametrize(
    "script",
    [
        say("half an answer", finish=None),
        say("half an answer", finish=None, done=False),
        events([HEAD]),
        events([]),
        events(["{not json"]),
    ],
)
async def test_a_stream_without_a_terminal_marker_is_no_answer(script):
    assert (await fail(script)).kind == "bad_reply"


async def test_a_page_is_quoted_in_the_error():
    error = await fail(raw(b"<html>Gateway down</html>", content_type="text/html"))
    assert "Gateway down" in str(error)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "The model is overloaded"}}, "overloaded"),
        ({"error": {"code": "insufficient_quota", "message": "quota"}}, "quota"),
        ({"error": "invalid api key"}, "auth"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_in_a_200_is_typed_by_content(body, kind, stream):
    error = await fail(raw(json.dumps(body).encode()), stream=stream)
    assert error.kind == kind


async def test_an_error_in_the_middle_of_a_stream_is_typed():
    error = await fail(events([*TEXT, {"error": {"message": "rate limit reached", "code": 429}}]))
    assert error.kind == "rate_limit"


@pytest.mark.parametrize(
    ("script", "kind", "wait"),
    [
        (status(429, retry_after="2.5"), "rate_limit", 2.5),
        (status(429, retry_after="garbage"), "rate_limit", None),
        (status(429, retry_after_ms="700"), "rate_limit", 0.7),
        (status(429, {"error": {"code": "insufficient_quota"}}), "quota", None),
        (status(402), "quota", None),
        (status(401), "auth", None),
        (status(403), "auth", None),
        (status(404), "not_found", None),
        (status(503, "busy", retry_after="1"), "overloaded", 1.0),
        (status(500, b"\xff\xfe"), "overloaded", None),
        (status(400, {"error": {"message": "maximum context length is 8"}}), "context_too_long",
         None),
        (status(307, location="http://127.0.0.1:1/v1"), "not_found", None),
    ],
)  # fmt: skip
async def test_each_status_is_one_typed_call(script, kind, wait):
    with FaultServer(script) as server:
        lm = open_lm(server.spec())
        error = await check_lm_failure(lm, ASK)
        await lm.aclose()
    assert (error.kind, error.retry_after_s) == (kind, wait)
    assert server.call_count == 1, "the client library retried by itself"


async def test_a_date_hint_is_a_wait():
    moment = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    error = await fail(status(429, retry_after=moment))
    assert 50 < error.retry_after_s <= 60


@pytest.mark.parametrize("script", [reset(), reset(after=30)])
async def test_a_broken_connection_is_typed_and_the_next_call_works(script):
    with FaultServer(by_attempt(script, then=say("fine"))) as server:
        lm = open_lm(server.spec())
        assert (await check_lm_failure(lm, ASK)).kind == "connection"
        (reply,) = await lm.complete(ASK, 1, [0])
        await lm.aclose()
    assert reply.text == "fine"


async def test_a_refused_connection_and_an_unknown_host_are_connection_failures():
    for url in ("http://127.0.0.1:1/v1#m", "http://no-such-host.invalid/v1#m"):
        lm = open_lm(url)
        error = await check_lm_failure(lm, ASK)
        assert error.kind == "connection" and "m" in str(error)
        await lm.aclose()


async def test_a_slow_drip_meets_the_total_deadline():
    request = Request(ASK.messages, limits=Limits(timeout_s=0.5))
    start = time.monotonic()
    error = await fail(say("a long reply " * 20).drip(0.05), request=request)
    assert error.kind == "timeout" and "limits.timeout_s" in str(error)
    assert time.monotonic() - start < 10


async def test_the_first_token_has_a_limit_of_its_own():
    request = Request(ASK.messages, limits=Limits(timeout_s=30, first_token_s=0.2))
    error = await fail(hang(), request=request)
    assert error.kind == "timeout" and "limits.first_token_s" in str(error)
    # The first token comes at once, the rest later than the limit.
    request = Request(ASK.messages, limits=Limits(timeout_s=30, first_token_s=1.0))
    (reply,), _ = await ask(events([*TEXT, STOP]).drip(0.8, size=110), request=request)
    assert reply.text == "391"


async def test_a_cancelled_call_closes_its_connection():
    with FaultServer(hang()) as server:
        lm = open_lm(server.spec())
        task = asyncio.ensure_future(lm.complete(ASK, 1, [0]))
        while not server.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if server.dropped:
                break
            await asyncio.sleep(0.01)
        await lm.aclose()
        assert server.dropped == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_over_the_limit_is_refused(stream):
    request = Request(ASK.messages, limits=Limits(max_reply_bytes=100_000))
    error = await fail(say("x" * 400_000), request=request, stream=stream)
    assert error.kind == "bad_reply" and "max_reply_bytes" in str(error)


async def test_many_tiny_chunks_are_bounded_too():
    one = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    request = Request(ASK.messages, limits=Limits(max_reply_bytes=100_000))
    error = await fail(events([one] * 3000), request=request)
    assert error.kind == "bad_reply" and "max_reply_bytes" in str(error)


async def test_fewer_draws_than_asked_are_a_short_answer():
    replies, server = await ask(choices("a", "b", "c", "d", "e"), n=8)
    assert [r.text for r in replies] == list("abcde") and server.call_count == 1


async def test_a_server_that_ignores_n_is_asked_in_parallel_from_then_on():
    with FaultServer(lambda call: choices(f"seed {call.seed}")) as server:
        lm = open_lm(server.spec())
        first = await lm.complete(ASK, 3, [5, 6, 7])
        assert not lm.prefers_n
        second = await lm.complete(ASK, 3, [5, 6, 7])
        await lm.aclose()
    assert [r.text for r in first] == [r.text for r in second] == ["seed 5", "seed 6", "seed 7"]
    assert server.call_count == 3 + 3
    assert sum(r.usage.calls for r in first) == 3


async def test_a_server_that_refuses_n_is_asked_in_parallel():
    def script(call):
        return status(400, {"error": {"message": "n must be 1"}}) if call.n > 1 else None

    replies, server = await ask(script, n=2)
    assert len(replies) == 2 and server.call_count == 3


async def test_parallel_draws_that_succeed_are_kept_when_a_later_one_fails():
    def script(call):
        return status(503) if call.seed == 2 else None

    replies, _ = await ask(script, n=3, supports_n=False)
    assert len(replies) == 2


async def test_a_refusal_and_a_cut_reply_are_told_apart():
    (refused,), _ = await ask(say("", finish="content_filter"))
    (cut,), _ = await ask(say("39", finish="length"))
    assert (refused.finish, cut.finish) == ("content_filter", "length")


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_tools_and_usage_arrive_either_way(stream):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 2}}
    script = say("", reasoning="hm", tool_calls=[call], usage=usage, finish="tool_calls")
    (reply,), _ = await ask(script, stream=stream)
    assert reply.tool_calls == (ToolCall("c1", "f", '{"a": 1}'),)
    assert (reply.reasoning, reply.finish) == ("hm", "tool_calls")
    assert (reply.usage.reasoning_tokens, reply.usage.text_tokens) == (2, 1)


async def test_absent_usage_is_estimated_and_flagged():
    (reply,), _ = await ask(say("eight words of text, or nearly so", usage=None))
    assert reply.usage.is_estimated and reply.usage.completion_tokens > 3


async def test_another_models_name_is_recorded_and_warned_of_once(caplog):
    with FaultServer(say("x", model="cheaper")) as server:
        lm = open_lm(server.spec("dear"))
        replies = [(await lm.complete(ASK, 1, [0]))[0] for _ in range(2)]
        await lm.aclose()
    assert [r.model for r in replies] == ["cheaper", "cheaper"]
    assert len([r for r in caplog.records if "cheaper" in r.getMessage()]) == 1
    error = await fail(say("x", model="cheaper"), strict_model=True)
    assert error.kind == "bad_reply" and "cheaper" in str(error)


async def test_replies_under_concurrency_belong_to_their_requests():
    def script(call):
        return say(call.text.upper(), reply_id="same").after(0.05 if "1" in call.text else 0)

    with FaultServer(script) as server:
        lm = open_lm(server.spec())
        texts = [f"ask {i}" for i in range(30)]
        replies = await asyncio.gather(
            *(lm.complete(Request((Message("user", t),)), 1, [0]) for t in texts)
        )
        await lm.aclose()
    assert [r[0].text for r in replies] == [t.upper() for t in texts]


@pytest.mark.parametrize("text", ["a\x00b\x1b[31m", "\u202eevil", "\ud800 lone", "{} % $x \\n 🙂"])
async def test_odd_text_is_sent_and_read_back(text):
    request = Request((Message("user", text),))
    (reply,), _ = await ask(lambda call: say(call.text), request=request)
    assert reply.text == text.replace("\ud800", "\ufffd")


async def test_two_halves_of_one_character_are_sent_as_it() -> None:
    request = Request((Message("user", "\ud83d\ude00 and \ude00"),))
    (reply,), _ = await ask(lambda call: say(call.text), request=request)
    assert reply.text == "\U0001f600 and \ufffd"


CANARY = "CANARY-7f3a9c51d2e84b60"


@pytest.mark.parametrize("query", [None, "key"])
async def test_the_key_is_found_nowhere_after_a_failure(monkeypatch, caplog, query):
    forget_secrets()
    monkeypatch.setenv("LM_TEST_SECRET", CANARY)
    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "aiohttp":
            monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)  # it then tells of every connection
    echo = status(404, {"error": {"message": f"no model; key was {CANARY[:12]}… {CANARY}"}})
    seen = []
    for script in (echo, status(401), reset(), raw(b"<html>" + CANARY.encode())):
        with FaultServer(script) as server:
            lm = open_lm(server.spec(), api_key_env="LM_TEST_SECRET", api_key_query=query)
            error = await check_lm_failure(lm, ASK)
            await lm.aclose()
            assert CANARY in (server.calls[0].path if query else str(server.calls[0].headers))
        seen += traceback.format_exception(error)
        seen += [repr(error), repr(lm), str(lm.identity), lm.model_id, repr(error.__reduce__())]
        assert error.__cause__ is None and error.__context__ is None
        if error.kind == "auth":
            assert "environment variable LM_TEST_SECRET" in str(error)
    output = "\n".join(seen) + caplog.text
    assert sum("connected to" in r.getMessage() for r in caplog.records) == 4
    forms = (CANARY, quote(CANARY, safe=""), base64.b64encode(CANARY.encode()).decode()[:-2])
    leaks = {f[i : i + 6] for f in forms for i in range(len(f) - 5) if f[i : i + 6] in output}
    assert not leaks


async def test_sampling_fields_reach_the_server():
    request = Request(
        ASK.messages, sampling=Sampling(temperature=0.5, top_p=0.9, max_tokens=7, stop=("x",))
    )
    _, server = await ask(say("y"), request=request, seeds=[11])
    body = server.calls[0].body
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 7)
    assert (body["stop"], body["seed"]) == (["x"], 11)


def test_one_lm_serves_several_event_loops():
    with FaultServer(say("x")) as server:
        lm = open_lm(server.spec())
        for _ in range(2):
            assert asyncio.run(lm.complete(ASK, 1, [0]))[0].text == "x"
