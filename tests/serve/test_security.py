"""Threats through the running server: foreign pages, bodies, keys, slow clients, secrets."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.conftest import Client, Start
from tfgrpo.runtime.redaction import Secret, forget_secrets
from tfgrpo.serve.access.keys import KeyRing, hash_key, new_key
from tfgrpo.serve.settings import KeySettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.http import check_depth, parse_object
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

ASKED = {"model": "r", "messages": [{"role": "user", "content": "hi"}]}


async def refused(client: Client, body: Any = None, **headers: str) -> tuple[int, str]:
    async with client.post("/v1/chat/completions", ASKED if body is None else body,
                           **headers) as response:  # fmt: skip
        return response.status, (await response.json())["error"]["code"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "127.0.0.1:1"])
async def test_a_foreign_host_is_refused(start: Start, host: str) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        assert await refused(client, host=host) == (421, "host_not_allowed")
    assert upstream.call_count == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/v1/models"])
async def test_a_page_of_another_site_is_refused(start: Start, path: str) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        async with client.get(path, origin="http://evil.example") as response:
            assert response.status == 403
        async with client.session.options(
            client.url + path, headers={"origin": "null"}
        ) as response:
            assert response.status == 403 and "access-control-allow-origin" not in response.headers


BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_request"),
    (b"{", 400, "invalid_request"),
    (b"[]", 400, "invalid_request"),
    (b'"text"', 400, "invalid_request"),
    (b"\xff\xfe", 400, "invalid_request"),
    (b'{"model": "r", "messages": NaN}', 400, "invalid_request"),
    (b'{"model": "r", "messages": "x"}', 400, "invalid_request"),
    (b'{"model": "r", "messages": []}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [3]}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "boss"}]}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": ["user"]}]}', 400, "invalid_request"),
    (b'{"model": ["r"], "messages": [{"role": "user"}]}', 404, "model_not_found"),
    (b'{"model": "r", "messages": [{"role": "user"}], "n": 0}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user"}], "n": 1e9}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user"}], "stream": 1}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user"}], "tfgrpo": 1}', 400, "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user"}], "tfgrpo": {"base_url": "x"}}', 400,
     "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user"}], "tfgrpo": {"task_id": "a/b"}}', 400,
     "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "system", "content": [{"type": "x"}]}]}', 400,
     "invalid_request"),
    (b'{"model": "r", "messages": [{"role": "user", "content": [{"type": "image_url",'
     b' "image_url": {"url": "http://169.254.169.254/"}}]}]}', 400, "invalid_request"),
    (b"[" * 100_000, 400, "invalid_request"),
    (b'{"a":' * 70 + b"1" + b"}" * 70, 400, "invalid_request"),
    (b'{"model": "' + b"x" * 5_000_000 + b'"}', 413, "body_too_large"),
]  # fmt: skip


async def test_a_malformed_or_oversized_body_is_a_clear_refusal_and_sends_nothing(
    start: Start,
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        for body, status, code in BODIES:
            async with client.session.post(
                client.url + "/v1/chat/completions", data=io.BytesIO(body) if body else b""
            ) as response:
                found = (response.status, (await response.json())["error"]["code"])
            assert found == (status, code), body[:80]
    assert upstream.call_count == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except ApiError as error:
        assert error.status == 400


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5),
              st.sampled_from(["user", "system", "text", "image_url", "http://x", "vote"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "tool_calls",
                             "task_id", "samples", "select", "metadata", "include_usage"]),
            inner, max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = ("messages", "input", "instructions", "n", "stream", "stream_options", "tfgrpo",
          "max_tokens", "tools", "background")  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_json_body_is_forwarded_or_refused_and_never_a_bug(body: dict[str, Any]) -> None:
    from tfgrpo.context import Context, ContextPart
    from tfgrpo.serve.endpoints import dialects
    from tfgrpo.serve.identity import Place, read_extensions
    from tfgrpo.serve.inject import Injection

    library = Injection(Context((ContextPart("lesson", text="x"),), "user"), "h", "v")
    for dialect in (dialects.CHAT, dialects.RESPONSES, dialects.EMBEDDINGS):
        try:
            read_extensions(body.get("tfgrpo"), {}, Place("/v1"))
            dialect.check(body)
            dialects.check_system_turns(body)
            dialects.refuse_urls(body)
            assert dialect.prompt(body)
            assert dialect.make(body, "m", library)["model"] == "m"
        except ApiError as error:
            assert error.status == 400


@given(st.integers(1, 200), st.text(max_size=20))
def test_depth_is_counted_outside_texts(depth: int, text: str) -> None:
    inner = json.dumps(text + "[{" * 50)
    raw = ("[" * depth + inner + "]" * depth).encode()
    if depth <= 64:
        check_depth(raw)
    else:
        with pytest.raises(ApiError):
            check_depth(raw)


async def test_too_many_or_too_large_headers_are_refused(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        many = {f"x_h{i}": "v" for i in range(80)}
        assert await refused(client, **many) == (431, "headers_too_large")
        assert await refused(client, x_big="v" * 17_000) == (431, "headers_too_large")


async def raw_exchange(client: Client, data: bytes) -> bytes:
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def test_a_head_that_never_ends_and_a_giant_head_lose_their_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfgrpo.serve.wire import protocol

    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    with FaultServer() as upstream:
        client = await start(upstream)
        assert await raw_exchange(client, b"GET /health HTTP/1.1\r\nhost: 127") == b""
        assert await raw_exchange(client, b"") == b""
        big = b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"v" * 200_000 + b"\r\n\r\n"
        assert b"200 OK" not in await raw_exchange(client, big)


async def test_a_body_that_never_comes_is_refused_in_time(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, serve={"body_s": 0.2})
        host = client.url.removeprefix("http://")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 50\r\n"
        found = await raw_exchange(client, head.encode() + b"connection: close\r\n\r\n{")
    assert b"408" in found and b"body_timeout" in found


async def test_a_client_that_reads_nothing_is_dropped_and_others_are_served(start: Start) -> None:
    flood = answers.events([{"id": "u", "choices": [{"index": 0, "delta": {"content": "x" * 9000},
                                                     "finish_reason": None}]}] * 900)  # fmt: skip

    def script(call: Any) -> Any:
        return flood if call.is_stream else None

    with FaultServer(script) as upstream:
        client = await start(upstream, serve={"drop_after_s": 0.3})
        host, port = client.url.removeprefix("http://").split(":")
        body = json.dumps({**ASKED, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            while not client.rows("SELECT 1 FROM replies WHERE state = 'left'"):
                assert (await client.chat())[0] == 200
        writer.close()
    assert client.rows("SELECT kind FROM results WHERE kind <> 'ok'") == [("unsettled",)]


async def test_unknown_withdrawn_and_expired_keys_are_refused_at_once(start: Start) -> None:
    key, old = new_key(), new_key()
    keys = {
        "team": {"hash": hash_key(key)},
        "old": {"hash": hash_key(old), "expires": "2020-01-01"},
    }
    with FaultServer() as upstream:
        client = await start(upstream, keys=keys)
        good = {"authorization": f"Bearer {key}"}
        assert (await client.chat(headers=good))[0] == 200
        wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
        for value in ("", f"Bearer {wrong}", f"Basic {key}", "Bearer tf_short", f"Bearer {old}",
                      f"Bearer {new_key()}"):  # fmt: skip
            found = await client.chat(headers={"authorization": value} if value else {})
            assert (found[0], found[1]["error"]["code"]) == (401, "invalid_api_key"), value
        client.gateway.keys.revoke("team")
        assert (await client.chat(headers=good))[0] == 401
    assert upstream.call_count == 1


async def test_a_key_sees_its_own_routes_and_responses_only(start: Start) -> None:
    one, two = new_key(), new_key()
    with FaultServer() as upstream:
        client = await start(
            upstream,
            routes={"r": {"upstreams": ["a"]}, "other": {"upstreams": ["a"]}},
            keys={
                "one": {"hash": hash_key(one), "routes": ["r"]},
                "two": {"hash": hash_key(two), "scopes": ["read"]},
            },
        )
        first, second = {"authorization": f"Bearer {one}"}, {"authorization": f"Bearer {two}"}
        _, reply, _ = await client.chat(headers=first)
        assert (await client.chat(headers=first, model="other"))[0] == 404
        assert (await client.chat(headers=second))[0] == 403
        path = f"/tfgrpo/v1/responses/{reply['id']}"
        async with client.get(path, **first) as response:
            assert response.status == 200
        async with client.get(path, **second) as response:
            assert response.status == 404
        async with client.get("/v1/models", **first) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["r"]


async def test_the_same_idempotency_key_of_two_tenants_is_two_requests(start: Start) -> None:
    one, two = new_key(), new_key()
    keys = {"one": {"hash": hash_key(one)}, "two": {"hash": hash_key(two)}}
    with FaultServer() as upstream:
        client = await start(upstream, keys=keys)
        ids = [
            (await client.chat(headers={"authorization": f"Bearer {k}", "idempotency_key": "x"}))[
                1
            ]["id"]
            for k in (one, two)
        ]
    assert ids[0] != ids[1] and upstream.call_count == 2


async def test_the_clients_key_never_reaches_an_upstream_and_ours_reaches_no_client(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "CANARY-upstream-0123456789abcdef"
    monkeypatch.setenv("CANARY_KEY", secret)
    said = {"error": {"message": f"Incorrect API key provided: {secret}"}}

    def script(call: Any) -> Any:
        return answers.status(400, said) if call.text == "fail" else None

    try:
        with FaultServer(script) as upstream:
            client = await start(
                upstream,
                upstreams={"a": {"options": {"api_key_env": "CANARY_KEY"}}},
                routes={"r": {"capture": True}},
            )
            await client.chat(
                f"my key is {secret}", headers={"authorization": "Bearer tf_of-the-client-123456"}
            )
            _, bad, _ = await client.chat("fail")
            async with client.get("/metrics") as response:
                metrics = await response.text()
            await client.running.stop(0.0)
        sent = upstream.calls[0].headers
        assert sent["authorization"] == f"Bearer {secret}"
        assert "of-the-client" not in json.dumps(dict(sent))
        assert secret not in json.dumps(bad) + metrics and "redacted" in json.dumps(bad)
        for path in client.gateway.folder.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
    finally:
        forget_secrets()


def test_redirects_are_not_followed_and_link_local_names_are_refused() -> None:
    import ipaddress
    import socket

    from tfgrpo.serve.wire import upstream

    async def resolve(host: str) -> Any:
        return await upstream._resolver().resolve(host, 80, socket.AF_INET)

    class Fake:
        @staticmethod
        async def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))]

    async def run() -> None:
        resolver = upstream._resolver()
        resolver._loop = Fake()
        with pytest.raises(OSError, match="link-local"):
            await resolver.resolve("metadata.example", 80, socket.AF_INET)
        assert ipaddress.ip_address((await resolve("localhost"))[0]["host"]).is_loopback

    asyncio.run(run())


async def test_a_redirect_is_an_error(start: Start) -> None:
    with FaultServer(answers.status(302, location="http://169.254.169.254/")) as upstream:
        client = await start(upstream)
        status, reply, _ = await client.chat()
    assert status == 502 and "redirect" in reply["error"]["message"]
    assert upstream.call_count == 1


@pytest.mark.parametrize(
    "path",
    ["/admin/approve", "/v1/../admin", "/t/../v1/chat/completions", "/r/x/r/y/v1/models", "/%2e%2e",
     "/t//v1/models", "/v1/chat/completions/", "//v1/models", "/", "/proposals/1"],
)  # fmt: skip
async def test_paths_lead_to_endpoints_or_nowhere(start: Start, path: str) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        host = client.url.removeprefix("http://")
        data = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
        assert b" 404 " in (await raw_exchange(client, data)).split(b"\r\n")[0]


async def test_rates_and_requests_in_flight_are_held_by_key(start: Start) -> None:
    key = new_key()
    rate = {"per_minute": 3, "in_flight": 2}

    def script(call: Any) -> Any:
        return answers.hang() if call.text == "hang" else None

    with FaultServer(script) as upstream:
        client = await start(upstream, keys={"k": {"hash": hash_key(key), "rate": rate}})
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.chat(headers=headers))[0] == 200
        running = [asyncio.ensure_future(client.chat("hang", headers=headers)) for _ in range(2)]
        while upstream.call_count < 3:
            await asyncio.sleep(0.005)
        status, reply, hint = await client.chat(headers=headers)
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while client.gateway.rates.total:
            await asyncio.sleep(0.005)
        status, reply, hint = await client.chat(headers=headers)
    assert (status, reply["error"]["code"]) == (429, "rate_limit")
    assert 0 < int(hint["retry-after-ms"]) <= 20_000 and hint["x-should-retry"] == "true"


def test_a_key_ring_without_expiry_dates_that_can_be_read_does_not_start() -> None:
    from tfgrpo.errors import ConfigError

    with pytest.raises(ConfigError, match=r"keys\.x"):
        KeyRing({"x": KeySettings(hash=hash_key(new_key()), expires="tomorrow")})


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs Linux")
async def test_a_journal_that_cannot_be_written_stops_requests_before_they_are_sent(
    start: Start,
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        assert (await client.chat())[0] == 200
        client.gateway.journal.writer.connection.execute("PRAGMA query_only=1")
        status, reply, headers = await client.chat()
        async with client.get("/ready") as response:
            ready = response.status
        client.gateway.journal.writer.connection.execute("PRAGMA query_only=0")
        again, _, _ = await client.chat()
    assert (status, reply["error"]["code"]) == (503, "storage")
    assert headers["x-should-retry"] == "true" and again == 200 and ready in (200, 503)
    assert upstream.call_count == 2
    assert client.rows("SELECT count(*) FROM calls") == [(2,)]


async def test_a_reply_that_was_paid_goes_out_while_the_disk_is_full_and_is_written_later(
    start: Start,
) -> None:
    with FaultServer(answers.say("paid").after(0.2)) as upstream:
        client = await start(upstream)
        connection = client.gateway.journal.writer.connection
        asked = asyncio.ensure_future(client.chat())
        while not upstream.calls:
            await asyncio.sleep(0.005)
        connection.execute("PRAGMA query_only=1")
        status, reply, _ = await asked
        assert status == 200 and reply["choices"][0]["message"]["content"] == "paid"
        connection.execute("PRAGMA query_only=0")
    assert client.rows("SELECT state FROM replies") == [("ok",)]
    assert client.gateway.book.failed_writes == 1


async def test_secrets_of_this_process_are_not_kept_from_prompts(start: Start) -> None:
    secret = Secret("CANARY-in-a-prompt-123456", "a test")
    try:
        with FaultServer(answers.say(f"I was told {secret.value}")) as upstream:
            client = await start(upstream, routes={"r": {"capture": True}})
            await client.chat(f"remember {secret.value}")
        prompts = client.rows("SELECT prompt FROM requests")
        bodies = client.rows("SELECT body FROM choices")
        assert secret.value.encode() not in prompts[0][0] + bodies[0][0]
    finally:
        forget_secrets()
