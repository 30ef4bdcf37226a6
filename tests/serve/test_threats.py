"""Threats against a gateway, each through the running server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.patience import LONG_S
from tests.serve.conftest import Start
from tests.serve.test_process import program
from tfgrpo.serve.access.keys import hash_key, new_key
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

ASKED: dict[str, Any] = {"model": "r", "messages": [{"role": "user", "content": "hi"}]}


class Trap:
    """A listening port that counts who comes."""

    def __enter__(self) -> Trap:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.visits = 0
        self._thread = Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def _accept(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            visitor.close()

    def __exit__(self, *_: object) -> None:
        self._socket.close()


# A client that wants to choose where a request goes, or whose key it carries.


async def test_no_field_or_header_of_a_client_chooses_where_a_request_goes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer() as upstream, Trap() as trap:
        monkeypatch.setenv("HTTP_PROXY", trap.url)
        monkeypatch.setenv("http_proxy", trap.url)
        client = await start(upstream)
        fields = {"api_base": trap.url, "base_url": trap.url, "api_key": "k", "url": trap.url,
                  "provider": "x", "extra_headers": {"host": "evil.example"}}  # fmt: skip
        headers = {
            "x-portkey-custom-host": trap.url, "x-portkey-provider": "openai",
            "x-litellm-api-base": trap.url, "openai-organization": "theirs", "forwarded": "for=1",
            "x-forwarded-host": "evil.example", "x-forwarded-for": "8.8.8.8",
            "cookie": "a=b", "x-api-key": "sk-client-0123456789",
        }  # fmt: skip
        status, _, _ = await client.chat(**fields, headers=headers)
        sent = upstream.calls[0]
    assert status == 200 and trap.visits == 0
    assert {k: sent.body[k] for k in fields} == fields  # unknown fields travel, as data
    assert not {k.lower() for k in sent.headers} & set(headers)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "URL/a.png"}},
        {"type": "image_url", "image_url": "URL/a.png"},
        {"type": "file", "file": {"url": "URL/a.pdf"}},
        {"type": "input_image", "image_url": "URL/a.png"},
        {"type": "video_url", "video_url": {"url": "URL/a.mp4"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    ],
)
async def test_a_url_in_a_prompt_is_refused_and_nobody_fetches_it(
    start: Start, part: dict[str, Any]
) -> None:
    with FaultServer() as upstream, Trap() as trap:
        client = await start(upstream)
        told = json.loads(json.dumps(part).replace("URL", trap.url))
        body = {"model": "r", "messages": [{"role": "user", "content": [told]}]}
        async with client.post("/v1/chat/completions", body) as response:
            assert response.status == 400
        async with client.post("/v1/responses", {"model": "r", "input": body["messages"]}) as reply:
            assert reply.status == 400
    assert upstream.call_count == 0 and trap.visits == 0


async def test_a_route_that_passes_urls_fetches_none_itself(start: Start) -> None:
    with FaultServer() as upstream, Trap() as trap:
        client = await start(upstream, routes={"r": {"urls": "pass", "capture": True}})
        part = {"type": "image_url", "image_url": {"url": f"{trap.url}/a.png"}}
        body = {"model": "r", "messages": [{"role": "user", "content": [part]}]}
        async with client.post("/v1/chat/completions", body) as response:
            assert response.status == 200
    assert upstream.calls[0].body["messages"][0]["content"] == [part] and trap.visits == 0


async def test_an_upstream_behind_a_metadata_address_is_refused(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, upstreams={"a": {"lm": "http://rebound.test:80/v1#m"}})
        session = client.gateway.models["a"].upstream._get_session()  # type: ignore[attr-defined]
        resolver = session.connector._resolver

        class Rebinds:
            @staticmethod
            async def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))]

        resolver._loop = Rebinds()
        status, reply, _ = await client.chat()
    assert status == 502 and "link-local" in reply["error"]["message"]


# Somebody without a key, or with words of SQL in it.

WORDS = [
    "' OR '1'='1",
    "tf_x'; DROP TABLE requests; --",
    'tf_" OR 1=1 --',
    "tf_%",
    "tf_" + "é" * 40,
]


@pytest.mark.parametrize("word", WORDS)
async def test_words_of_sql_are_a_wrong_key_a_wrong_id_and_harm_nothing(
    start: Start, word: str
) -> None:
    key = new_key()
    with FaultServer() as upstream:
        client = await start(upstream, keys={"k": {"hash": hash_key(key)}})
        right = {"headers": {"authorization": f"Bearer {key}"}}
        assert (await client.chat(**right))[0] == 200
        wrong = {"headers": {"authorization": f"Bearer {word}"}}
        assert (await client.chat(**wrong))[0] == 401
        rows = client.rows("SELECT count(*) FROM requests")
        bearer = right["headers"]
        for path in ("/v1/feedback?response_id=", "/tfgrpo/v1/responses/", "/v1/models/"):
            async with client.session.get(client.url + path + word, headers=bearer) as response:
                assert response.status == 404, path
        for name in ("response_id", "session_id", "group_id"):
            record = {name: word, "value": 1}
            async with client.post("/v1/feedback", record, **bearer) as response:
                assert response.status == 404
        assert client.rows("SELECT count(*) FROM requests") == rows
    assert upstream.call_count == 1


@pytest.mark.parametrize("head", ["", "Basic dGZfeA==", "Bearer", "Bearer ", "bearer tf_", "tf_x"])
async def test_without_a_right_key_nothing_is_told_or_done(start: Start, head: str) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, keys={"k": {"hash": hash_key(new_key())}})
        headers = {"authorization": head} if head else {}
        async with client.post("/v1/chat/completions", ASKED, **headers) as response:
            assert response.status == 401
        for path in ("/v1/models", "/v1/feedback?response_id=x", "/tfgrpo/v1/responses/x"):
            async with client.get(path, **headers) as response:
                assert response.status == 401, path
    assert upstream.call_count == 0


async def test_a_host_header_never_opens_an_admin_path(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, serve={"admin_listen": "127.0.0.1:0"})
        page = client.running.page_url.removeprefix("http://").rstrip("/")
        for path in ("/admin/act", "/admin/forget", "/routes/r", "/login", f"http://{page}/"):
            async with client.get(path if path[0] == "/" else "/" + path, host=page) as response:
                assert response.status == 421  # the page's name is not served here
            async with client.get(path if path[0] == "/" else "/" + path) as response:
                assert response.status == 404


# Development endpoints of model servers.


@pytest.mark.parametrize(
    "path",
    ["/v1/load_lora_adapter", "/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache",
     "/v1/completions", "/update_weights", "/server_info", "/tokenize", "/v1/audio/speech",
     "/r/r/v1/load_lora_adapter", "/v1/chat/completions/../../collective_rpc"],
)  # fmt: skip
async def test_development_endpoints_of_a_server_are_out_of_reach(start: Start, path: str) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        host = client.url.removeprefix("http://")
        raw = json.dumps(ASKED).encode()
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        status = (await reader.read()).split(b" ", 2)[1]
        writer.close()
    assert status in (b"404", b"405") and upstream.call_count == 0


# Two tenants that say the same.


async def test_two_tenants_with_one_prompt_share_no_reply(start: Start) -> None:
    one, two = new_key(), new_key()
    keys = {"one": {"hash": hash_key(one)}, "two": {"hash": hash_key(two)}}
    with FaultServer(lambda call: answers.say(f"reply {call.index}")) as upstream:
        client = await start(upstream, keys=keys, routes={"r": {"capture": True}})
        found = []
        for key in (one, two, one):
            headers = {"authorization": f"Bearer {key}", "idempotency-key": "same"}
            _, reply, _ = await client.chat("equal words", headers=headers)
            found.append(reply["choices"][0]["message"]["content"])
        other = {"authorization": f"Bearer {two}"}
        (first,) = client.rows("SELECT response_id FROM requests WHERE key = 'one'")[0]
        async with client.get(f"/tfgrpo/v1/responses/chatcmpl-{first}", **other) as response:
            assert response.status == 404
    assert found == ["reply 0", "reply 1", "reply 0"] and upstream.call_count == 2


# Clients that ask for too much, leave, or never read.


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"n": 1_000_000}, 400), ({"tfgrpo": {"samples": 1_000_000}}, 400), ({"n": -1}, 400),
     ({"tfgrpo": {"max_cost_usd": 1e-9}}, 429), ({"tfgrpo": {"samples": 65}}, 400)],
)  # fmt: skip
async def test_a_request_for_very_many_draws_is_refused(
    start: Start, fields: Any, status: int
) -> None:
    with FaultServer() as upstream:
        client = await start(upstream)
        assert (await client.chat(**fields))[0] == status
    assert upstream.call_count == 0


async def test_a_client_that_leaves_after_content_stops_the_upstream(start: Start) -> None:
    chunk = {"id": "u", "choices": [{"index": 0, "delta": {"content": "word "}}]}
    endless = answers.events([chunk] * 5000, done=False).drip(0.01, size=80)
    with FaultServer(endless) as upstream:
        client = await start(upstream, routes={"r": {"capture": True}})
        body = {**ASKED, "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            assert b"word" in await response.content.readline()
        async with asyncio.timeout(20):
            while not upstream.dropped or not client.rows("SELECT 1 FROM replies"):
                await asyncio.sleep(0.01)
    assert client.rows("SELECT state FROM replies") == [("left",)]
    assert client.rows("SELECT finish FROM choices") == [("cut",)]
    assert client.rows("SELECT kind FROM results") == [("unsettled",)]


async def test_a_stream_that_was_left_may_be_booked_by_what_was_seen(start: Start) -> None:
    chunk = {"id": "u", "choices": [{"index": 0, "delta": {"content": "word " * 8}}]}
    endless = answers.events([chunk] * 5000, done=False).drip(0.01, size=120)
    with FaultServer(endless) as upstream:
        client = await start(upstream, routes={"r": {"on_cancel": "seen"}})
        body = {**ASKED, "stream": True}
        async with client.post("/v1/chat/completions", body) as response:
            assert b"word" in await response.content.readline()
        async with asyncio.timeout(20):
            while not client.rows("SELECT 1 FROM results"):
                await asyncio.sleep(0.01)
        (row,) = client.gateway.journal.spend()
    assert client.rows("SELECT kind, error FROM results") == [("rejected", "left")]
    assert row.booked.calls == 0 and row.estimated.text_tokens >= 10  # 40 letters and more
    assert 0 < (row.usage.cost_usd or 0.0) < 0.008  # the worst case of 4,096 tokens


async def test_a_client_with_a_large_body_that_leaves_is_noticed(start: Start) -> None:
    """The server stops reading a connection while a body of over 64 KB waits."""
    with FaultServer(answers.hang()) as upstream:
        client = await start(upstream)
        body = {"model": "r", "messages": [{"role": "user", "content": "x" * 900_000}]}
        task = asyncio.ensure_future(client.session.post(
            client.url + "/v1/chat/completions", json=body))  # fmt: skip
        while not upstream.calls:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(20):
            while not upstream.dropped:
                await asyncio.sleep(0.01)


async def test_a_client_that_leaves_before_its_request_was_looked_at_costs_nothing(
    start: Start,
) -> None:
    from tfgrpo.serve.wire.http import Leaving

    told: list[str] = []
    leaving = Leaving(lambda: told.append("read on"))
    leaving.watch(first := lambda: told.append("first"))
    leaving.unwatch(first)
    leaving.left()
    leaving.watch(lambda: told.append("second"))
    assert told == ["read on", "second"]


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(LONG_S)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
async def test_a_thousand_clients_that_never_read_hold_little_memory_and_nobody_else(
    tmp_path: Path,
) -> None:
    slow, quick = new_key(), new_key()
    chunk = {"id": "u", "choices": [{"index": 0, "delta": {"content": "x" * 8000}}]}
    flood = answers.events([chunk] * 150, done=False)  # 1.2 MB for each, if anybody held it

    def script(call: Any) -> Any:
        return flood if call.is_stream else answers.say("quick")

    with FaultServer(script) as upstream:
        config = tmp_path / "gateway.toml"
        config.write_text(f"""
[serve]
folder = "gateway"
listen = "127.0.0.1:0"
admin_listen = ""
drop_after_s = 600
[upstreams.a]
lm = "{upstream.spec("m")}"
[routes.r]
upstreams = ["a"]
[keys.slow]
hash = "{hash_key(slow)}"
rate = {{ in_flight = 1000 }}
[keys.quick]
hash = "{hash_key(quick)}"
""")
        with program(tmp_path, "--config", str(config)) as (process, url):
            host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
            client = Asks(host, int(port))
            assert b" 200 " in await client.ask(quick, stream=False)
            before = rss_mb(process.pid)
            deaf = [client.open(slow) for _ in range(1000)]
            while upstream.call_count < 1001:
                await asyncio.sleep(0.05)
            assert b" 429 " in await client.ask(slow, stream=False)  # its own limit
            for _ in range(30):
                assert b" 200 " in await client.ask(quick, stream=False)
            grown = rss_mb(process.pid) - before
            for one in deaf:
                one.close()
    # Half a megabyte each: what was read ahead of the upstream, and what waits for the client.
    assert grown < 1000 * 0.6, f"{grown:.0f} MB"


class Asks:
    """Raw connections, whose replies are read or not."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def _request(self, key: str, *, stream: bool) -> bytes:
        raw = json.dumps({**ASKED, "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"authorization: Bearer {key}\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
        )
        return head.encode() + b"\r\n" + raw

    def open(self, key: str) -> socket.socket:
        """Ask for a stream and never read it."""
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((self._host, self._port))
        narrow.sendall(self._request(key, stream=True))
        return narrow

    async def ask(self, key: str, *, stream: bool) -> bytes:
        """Return a whole reply."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._request(key, stream=stream))
        found = await reader.read()
        writer.close()
        return found
