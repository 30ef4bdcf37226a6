"""The pass path: what goes in, what comes out, and what stands in the books."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.serve.conftest import Client, Start
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer, by_attempt


def two(second: FaultServer, **upstream: Any) -> dict[str, Any]:
    rows = {"b": {"lm": second.spec("n"), "price": {"input": 1, "output": 2}, **upstream}}
    return {"upstreams": rows, "routes": {"r": {"upstreams": ["a", "b"]}}}


async def read(response: Any) -> list[Any]:
    text = (await response.read()).decode()
    return [e.removeprefix("data: ") for e in text.split("\n\n") if e]


async def test_fields_we_do_not_know_travel_untouched_in_both_directions(start: Start) -> None:
    with FaultServer(answers.say("yes", extra={"odd": [1, {"x": None}]})) as upstream:
        client = await start(upstream)
        status, reply, headers = await client.chat(
            "hi",
            seed=7,
            logit_bias={"50": -3},
            new_field={"a": [1.5, "é"]},
            tfgrpo={"task_id": "t"},
        )
    assert status == 200
    sent = upstream.calls[0].body
    assert sent["new_field"] == {"a": [1.5, "é"]} and sent["seed"] == 7
    assert sent["model"] == "m" and "tfgrpo" not in sent
    assert reply["choices"][0]["odd"] == [1, {"x": None}]
    assert reply["id"].startswith("chatcmpl-tf_") and reply["id"] == headers["x-request-id"]
    assert headers["x-tfgrpo-route"] == "r" and headers["x-tfgrpo-model"] == "a"
    assert headers["x-tfgrpo-library"] == "empty" and headers["x-tfgrpo-arm"] == "current"


async def test_a_call_is_booked_at_the_price_of_its_tokens(start: Start) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 500, "total_tokens": 1500}
    with FaultServer(answers.say("yes", usage=usage)) as upstream:
        client = await start(upstream)
        _, _, headers = await client.chat()
    # 1,000 tokens at $1 and 500 at $2 a million.
    assert float(headers["x-tfgrpo-cost-usd"]) == pytest.approx(0.002)
    assert client.rows("SELECT kind, calls, cost_usd FROM results") == [("ok", 1, 0.002)]
    assert client.rows("SELECT state, cost_usd, calls FROM replies") == [("ok", 0.002, 1)]


async def test_a_stream_and_a_whole_reply_hold_the_same_text_and_cost_the_same(
    start: Start,
) -> None:
    with FaultServer(answers.say("one two three")) as upstream:
        client = await start(upstream)
        _, whole, headers = await client.chat()
        body = {
            "model": "r",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.post("/v1/chat/completions", body) as response:
            events = await read(response)
    rows = [json.loads(e) for e in events[:-1]]
    assert events[-1] == "[DONE]"
    text = "".join(c["delta"].get("content") or "" for r in rows for c in r["choices"])
    assert text == whole["choices"][0]["message"]["content"] == "one two three"
    assert len({r["id"] for r in rows}) == 1
    assert rows[-1]["usage"]["completion_tokens"] == 3
    assert rows[-1]["tfgrpo"]["cost_usd"] == pytest.approx(float(headers["x-tfgrpo-cost-usd"]))


async def test_the_usage_event_is_asked_of_the_upstream_and_kept_from_who_did_not_ask(
    start: Start,
) -> None:
    with FaultServer(answers.say("one")) as upstream:
        client = await start(upstream)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            events = await read(response)
    assert upstream.calls[0].body["stream_options"] == {"include_usage": True}
    assert not any("usage" in json.loads(e) for e in events[:-1])
    assert client.rows("SELECT estimated FROM results") == [(0,)]


@pytest.mark.parametrize("every", range(1, 40))
async def test_a_stream_cut_anywhere_gives_the_same_events(start: Start, every: int) -> None:
    answer = answers.say("zwölf Bären ☃", reasoning="hm", tool_calls=(
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},),
    )  # fmt: skip
    with FaultServer(answer.split(every=every)) as upstream:
        client = await start(upstream)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            rows = [json.loads(e) for e in (await read(response))[:-1]]
    deltas = [c["delta"] for r in rows for c in r["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == "zwölf Bären ☃"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["f"]


FAILURES = [
    (answers.status(429, retry_after="3"), 429, "upstream_rate_limit", "true"),
    (answers.status(500), 502, "upstream_error", "true"),
    (answers.status(401), 502, "upstream_error", "false"),
    (answers.status(404), 502, "upstream_error", "false"),
    (answers.status(400), 400, "invalid_request", "false"),
    (
        answers.status(400, {"error": {"message": "maximum context length is 8 tokens"}}),
        400,
        "context_length_exceeded",
        "false",
    ),
    (
        answers.status(400, {"error": {"message": "content_filter", "code": "content_filter"}}),
        400,
        "content_filter",
        "false",
    ),
    (answers.raw(b"<html>"), 502, "bad_reply", "false"),
    (answers.raw(b'{"error": {"message": "overloaded"}}'), 502, "upstream_error", "true"),
    (answers.raw(b'{"choices": []}'), 502, "bad_reply", "false"),
    (answers.reset(), 502, "upstream_error", "false"),
    (answers.reset(after=20), 502, "upstream_error", "false"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("answer", "status", "code", "retry"), FAILURES)
async def test_a_failure_before_content_is_an_http_error_that_steers_retries(
    start: Start, answer: Any, status: int, code: str, retry: str, stream: bool
) -> None:
    with FaultServer(answer) as upstream:
        client = await start(upstream)
        found, reply, headers = await client.chat(stream=stream)
    assert (found, reply["error"]["code"]) == (status, code)
    assert headers["x-should-retry"] == retry
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert client.rows("SELECT status, state FROM replies") == [(status, "failed")]


async def test_a_hint_of_the_upstream_reaches_the_client(start: Start) -> None:
    with FaultServer(answers.status(429, retry_after="1.5")) as upstream:
        client = await start(upstream)
        _, _, headers = await client.chat()
    assert headers["retry-after"] == "2" and headers["retry-after-ms"] == "1500"


async def test_a_dead_upstream_costs_no_call_and_the_next_one_answers(start: Start) -> None:
    with FaultServer() as gone:
        spec = gone.spec("m")
    with FaultServer(answers.say("from b")) as second:
        changes = two(second)
        changes["upstreams"]["a"] = {"lm": spec}
        client = await start(second, **changes)
        status, reply, headers = await client.chat()
    assert status == 200 and reply["choices"][0]["message"]["content"] == "from b"
    assert headers["x-tfgrpo-model"] == "b"
    kinds = client.rows("SELECT kind, calls FROM results ORDER BY call")
    assert kinds == [("not_sent", 0), ("ok", 1)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [
    answers.status(429), answers.status(503), answers.reset(), answers.raw(b"<html>"),
    answers.status(401),
])  # fmt: skip
async def test_a_failing_host_is_left_for_the_next_one_and_rests(
    start: Start, fault: Any, stream: bool
) -> None:
    with FaultServer(fault) as first, FaultServer(answers.say("from b")) as second:
        client = await start(first, **two(second))
        for _ in range(2):
            body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            async with client.post("/v1/chat/completions", body) as response:
                assert response.status == 200
                assert response.headers["x-tfgrpo-model"] == "b"
                await response.read()
    assert first.call_count == 1 and second.call_count == 2


async def test_a_request_that_is_wrong_is_not_sent_to_the_next_one(start: Start) -> None:
    with FaultServer(answers.status(400)) as first, FaultServer() as second:
        client = await start(first, **two(second))
        status, _, _ = await client.chat()
    assert status == 400 and second.call_count == 0


CHUNK = {"id": "u", "model": "m", "choices": [{"index": 0, "delta": {"content": "half"}}]}


@pytest.mark.parametrize(
    "answer",
    [
        answers.events([CHUNK], done=True),
        answers.events([CHUNK, {"error": {"message": "overloaded"}}], done=False).drip(
            0.05, size=90
        ),
        answers.events([CHUNK, "not json"], done=False).drip(0.05, size=90),
        answers.events([CHUNK], done=False).cut(after=1000),
        answers.say("a long reply", finish=None, done=False),
    ],
)
async def test_what_breaks_off_after_content_is_an_error_event_and_never_an_answer(
    start: Start, answer: Any
) -> None:
    with FaultServer(answer) as first, FaultServer() as second:
        changes = two(second)
        changes["routes"]["r"]["capture"] = True
        client = await start(first, **changes)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            events = await read(response)
    last = json.loads(events[-1])
    assert last["error"]["code"] in ("upstream_error", "bad_reply") and "[DONE]" not in events
    assert second.call_count == 0
    assert client.rows("SELECT state FROM replies") == [("cut",)]
    assert client.rows("SELECT kind FROM results") == [("unsettled",)]
    ((finish, kept),) = client.rows("SELECT finish, body FROM choices")
    assert finish == "cut" and json.loads(kept)["content"].startswith(("half", "a long"))


async def test_headers_go_out_after_the_hold_and_comments_keep_the_stream_open(
    start: Start,
) -> None:
    with FaultServer(answers.say("late").after(0.3)) as upstream:
        client = await start(upstream, serve={"hold_s": 0.05, "comment_s": 0.05})
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            events = await read(response)
    assert events[0] == ": wait" and events[-1] == "[DONE]"


async def test_after_the_hold_failover_goes_on_and_a_last_failure_is_an_event(
    start: Start,
) -> None:
    slow = answers.status(503).after(0.2)
    with FaultServer(slow) as first, FaultServer(answers.say("from b")) as second:
        client = await start(first, serve={"hold_s": 0.05}, **two(second))
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            assert (await read(response))[-1] == "[DONE]"
    with FaultServer(slow) as only:
        client = await start(only, folder=client.gateway.folder.parent / "2",
                             serve={"hold_s": 0.05})  # fmt: skip
        async with client.post("/v1/chat/completions", body) as response:
            assert response.status == 200
            last = (await read(response))[-1]
    assert json.loads(last)["error"]["code"] == "upstream_error"


async def gone(client: Client, upstream: FaultServer, *, stream: bool, **headers: str) -> None:
    """Start a request and leave when the upstream has it."""
    body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": stream}

    async def ask() -> None:
        async with client.post("/v1/chat/completions", body, **headers) as response:
            await response.read()

    task = asyncio.ensure_future(ask())
    while not upstream.calls:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_upstream_and_is_booked_at_the_worst_case(
    start: Start, stream: bool
) -> None:
    with FaultServer(answers.hang()) as upstream:
        client = await start(upstream)
        await gone(client, upstream, stream=stream)
        async with asyncio.timeout(20):
            while not upstream.dropped or not client.rows("SELECT 1 FROM replies"):
                await asyncio.sleep(0.01)
    assert client.rows("SELECT kind FROM results") == [("unsettled",)]
    assert client.rows("SELECT status, state FROM replies") == [(499, "left")]
    (row,) = client.gateway.journal.spend()
    assert row.booked.calls == 1 and row.usage.calls == 0


async def test_a_client_with_a_key_that_leaves_finds_the_reply_on_its_retry(start: Start) -> None:
    with FaultServer(answers.say("kept").after(0.2)) as upstream:
        client = await start(upstream)
        await gone(client, upstream, stream=False, idempotency_key="k1")
        status, reply, headers = await client.chat(stream=False, headers={"idempotency_key": "k1"})
    assert status == 200 and reply["choices"][0]["message"]["content"] == "kept"
    assert upstream.call_count == 1 and headers["x-tfgrpo-cached"] == "idempotent"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_key_and_body_is_answered_once_and_replayed(
    start: Start, stream: bool
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        found = []
        for _ in range(3):
            async with client.post("/v1/chat/completions", body, idempotency_key="k") as response:
                found.append(await response.read())
        body["temperature"] = 0.5
        async with client.post("/v1/chat/completions", body, idempotency_key="k") as response:
            assert response.status == 422
    assert len(set(found)) == 1 and upstream.call_count == 1


async def test_requests_with_one_key_at_the_same_time_are_one_call(start: Start) -> None:
    with FaultServer(answers.say("x").after(0.1)) as upstream:
        client = await start(upstream)
        asked = [client.chat(headers={"idempotency_key": "k"}) for _ in range(8)]
        replies = await asyncio.gather(*asked)
        body = {"model": "r", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        running = asyncio.ensure_future(client.chat("b", headers={"idempotency_key": "s"}))
        while upstream.call_count < 2:
            await asyncio.sleep(0.005)
        body = {"model": "r", "messages": [{"role": "user", "content": "b"}]}
        async with client.post("/v1/chat/completions", body, idempotency_key="s") as response:
            assert response.status == 200
        await running
    assert {r[1]["id"] for r in replies} == {replies[0][1]["id"]}
    assert upstream.call_count == 2


async def test_the_deadline_of_the_client_ends_its_call(start: Start) -> None:
    with FaultServer(answers.hang()) as upstream:
        client = await start(upstream)
        status, reply, headers = await client.chat(headers={"x_request_timeout_ms": "100"})
    assert (status, reply["error"]["code"]) == (408, "deadline")
    assert headers["x-should-retry"] == "false"
    assert client.rows("SELECT status, state FROM replies") == [(408, "deadline")]


async def test_identities_come_from_path_header_and_body_and_the_most_explicit_wins(
    start: Start,
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        path = "/r/r/t/path-task/s/path-session/v1/chat/completions"
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        async with client.post(path, body) as response:
            assert response.status == 200
        async with client.post(path, body, x_tfgrpo_task_id="header-task") as response:
            assert response.status == 200
        body["tfgrpo"] = {"task_id": "body-task"}
        async with client.post(path, body, x_tfgrpo_task_id="header-task") as response:
            assert response.status == 200
    rows = client.rows("SELECT task_id, session_id FROM requests ORDER BY at")
    assert [r[0] for r in rows] == ["path-task", "header-task", "body-task"]
    assert {r[1] for r in rows} == {"path-session"}


async def test_embeddings_and_responses_are_passed_on_under_our_ids(start: Start) -> None:
    def script(call: Any) -> answers.Answer:
        if call.path.endswith("/embeddings"):
            row = {"object": "list", "data": [{"embedding": [0.5]}],
                   "usage": {"prompt_tokens": 4, "total_tokens": 4}}  # fmt: skip
            return answers.raw(json.dumps(row).encode())
        row = {"id": f"resp_up{call.index}", "object": "response", "status": "completed",
               "model": "m", "output": [], "usage": {"input_tokens": 5, "output_tokens": 2,
                                                     "total_tokens": 7}}  # fmt: skip
        return answers.raw(json.dumps(row).encode())

    with FaultServer(script) as upstream:
        client = await start(upstream)
        async with client.post("/v1/embeddings", {"model": "r", "input": "x"}) as response:
            assert (await response.json())["data"] == [{"embedding": [0.5]}]
        async with client.post("/v1/responses", {"model": "r", "input": "x"}) as response:
            first = await response.json()
        body = {"model": "r", "input": "y", "previous_response_id": first["id"]}
        async with client.post("/v1/responses", body) as response:
            assert response.status == 200
        body["previous_response_id"] = "resp_nobody"
        async with client.post("/v1/responses", body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (
                404, "unknown_response")  # fmt: skip
    assert first["id"].startswith("resp_tf_")
    assert upstream.calls[2].body["previous_response_id"] == "resp_up1"
    assert client.rows("SELECT uncached, text FROM results ORDER BY call") == [
        (4, 0), (5, 2), (5, 2)]  # fmt: skip


async def test_models_lists_routes_and_aliases(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"aliases": ["gpt-x"]}})
        async with client.get("/v1/models") as response:
            names = [row["id"] for row in (await response.json())["data"]]
        async with client.get("/v1/models/gpt-x") as response:
            assert (await response.json())["id"] == "gpt-x"
        status, reply, _ = await client.chat(model="gpt-y")
    assert names == ["r", "gpt-x"]
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


async def test_one_response_is_told_without_content(start: Start) -> None:
    with FaultServer(by_attempt(answers.status(503))) as first, FaultServer() as second:
        client = await start(first, **two(second))
        _, reply, _ = await client.chat("the secret question")
        async with client.get(f"/tfgrpo/v1/responses/{reply['id']}") as response:
            text = await response.text()
        never = reply["id"][:-1] + ("0" if reply["id"][-1] != "0" else "1")
        async with client.get(f"/tfgrpo/v1/responses/{never}") as response:
            assert response.status == 404
        async with client.get(f"/tfgrpo/v1/responses/chatcmpl-{client.gateway.ids.make()}") as (
            response
        ):
            assert response.status == 410
    row = json.loads(text)
    assert "secret question" not in text
    assert (row["state"], row["upstream"], row["calls"]) == ("ok", "b", 2)
    assert [a["kind"] for a in row["attempts"]] == ["rejected", "ok"]


async def test_a_model_of_this_process_answers_like_a_server(start: Start) -> None:
    client = await start(None)
    status, reply, _ = await client.chat("hello")
    assert status == 200 and reply["choices"][0]["message"]["content"]
    body = {"model": "r", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with client.post("/v1/chat/completions", body) as response:
        events = await read(response)
    assert events[-1] == "[DONE]"
    async with client.post("/v1/embeddings", {"model": "r", "input": "x"}) as response:
        assert (await response.json())["error"]["code"] == "no_upstream"


async def test_metadata_has_the_three_spellings_of_the_other_fields_but_the_path(
    start: Start,
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        head = {"x-tfgrpo-metadata": json.dumps({"team": "a"})}
        assert (await client.chat(headers=head))[0] == 200
        assert (await client.chat(headers=head, tfgrpo={"metadata": {"team": "b"}}))[0] == 200
        for wrong in ("{", "[1]", '{"a": 1}', "[" * 3000):
            status, reply, _ = await client.chat(headers={"x-tfgrpo-metadata": wrong})
            assert (status, reply["error"]["param"]) == (400, "tfgrpo.metadata")
    kept = [json.loads(m) for (m,) in client.rows("SELECT metadata FROM requests ORDER BY at")]
    assert kept == [{"team": "a"}, {"team": "b"}]
