"""How calls reach a server: proxies, certificates, redirects, odd sizes, connections left open."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.testing import FaultServer, raw, say, status

pytestmark = pytest.mark.real

ASK = Request((Message("user", "What is 17 times 23?"),))
ELSEWHERE = "http://model.invalid/v1#m"
REPLY = {"choices": [{"message": {"content": "391"}, "finish_reason": "stop"}]}
PROXIES = ("all_proxy", "https_proxy", "http_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *(n.upper() for n in PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


async def ask(spec: str, request: Request = ASK, **options: object) -> Completion:
    lm = open_lm(spec, **options)
    try:
        (reply,) = await lm.complete(request, 1, [0])
        return reply
    finally:
        await lm.aclose()


async def failure_of(spec: str, **options: object) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await ask(spec, **options)
    return caught.value


@asynccontextmanager
async def serving(
    answer: Callable[[bytes], bytes], context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server of one answer a connection, by the head that it was sent; gives its port."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(head))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def whole(body: bytes = json.dumps(REPLY).encode(), head: str = "") -> bytes:
    lines = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{head}\r\n"
    return lines.encode() + body


# --- proxies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_a_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with FaultServer(say("through")) as proxy:
        monkeypatch.setenv(variable, f"http://user:CANARY-0123456789@127.0.0.1:{proxy.port}")
        assert (await ask(ELSEWHERE)).text == "through"
        (call,) = proxy.calls
    assert call.path == "http://model.invalid/v1/chat/completions"
    assert call.headers["proxy-authorization"].startswith("Basic ")


async def test_a_host_of_no_proxy_and_this_machine_are_asked_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultServer(say("through")) as proxy, FaultServer(say("directly")) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        assert (await ask(server.spec())).text == "directly"
        monkeypatch.setenv("NO_PROXY", "model.invalid")
        error = await failure_of(ELSEWHERE)
        assert (error.kind, error.was_sent, proxy.call_count) == ("connection", False, 0)


async def test_a_proxy_that_refuses_a_tunnel_is_a_connection_failure_and_nothing_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[bytes] = []

    def refuse(head: bytes) -> bytes:
        heads.append(head)
        return b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n"

    monkeypatch.setenv("KEY", "CANARY-7f3a9c51d2e84b60")
    async with serving(refuse) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{port}")
        error = await failure_of("https://model.invalid/v1#m", api_key_env="KEY")
    assert (error.kind, error.was_sent) == ("connection", False)
    assert heads[0].startswith(b"CONNECT model.invalid:443 ") and b"CANARY" not in heads[0]


# --- certificates ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of this machine that nobody trusts yet, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is absent")
    folder = tmp_path_factory.mktemp("certificate")
    found, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
               "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
               "-keyout", str(key), "-out", str(found)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    return found, key


async def test_a_server_is_believed_only_with_a_certificate_that_the_environment_trusts(
    monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with serving(lambda head: whole(), context) as port:
        spec = f"https://localhost:{port}/v1#m"
        error = await failure_of(spec, stream=False)
        assert (error.kind, error.was_sent) == ("connection", False)
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert (await ask(spec, stream=False)).text == "391"


async def test_a_certificate_file_that_is_absent_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        await ask("https://model.invalid/v1#m")


def test_a_key_log_that_cannot_be_written_is_named() -> None:
    """In a process of its own: the HTTP library opens it while it is imported."""
    code = "from tfgrpo.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "models", "--check", "https://model.invalid/v1#m"],
        env={**os.environ, "SSLKEYLOGFILE": "/nowhere/keys.log"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2 and "SSLKEYLOGFILE='/nowhere/keys.log'" in ran.stderr


# --- what is not done -----------------------------------------------------------------------------


async def test_no_password_of_a_netrc_file_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine model.invalid login me password CANARY-0123456789\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HOME", str(tmp_path))
    with FaultServer(say("x")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        await ask(ELSEWHERE)
        headers = proxy.calls[0].headers
    assert not {"authorization", "proxy-authorization"} & set(headers)


async def test_no_redirect_is_followed_and_no_cookie_kept() -> None:
    with FaultServer(say("other")) as other:
        moved = status(307, location=f"{other.base_url}/chat/completions")
        with FaultServer(moved) as server:
            assert (await failure_of(server.spec())).kind == "not_found"
        assert other.call_count == 0
    heads: list[bytes] = []

    def cookie(head: bytes) -> bytes:
        heads.append(head.lower())
        return whole(head="set-cookie: id=1; path=/\r\n")

    async with serving(cookie) as port:
        lm = open_lm(f"http://127.0.0.1:{port}/v1#m", stream=False)
        for _ in range(2):
            await lm.complete(ASK, 1, [0])
        await lm.aclose()
    assert len(heads) == 2 and not any(b"cookie" in head for head in heads)


# --- sizes and forms ------------------------------------------------------------------------------


async def test_a_request_of_megabytes_arrives_whole() -> None:
    request = Request((Message("user", "ü" * 1_500_000),))
    with FaultServer(lambda call: say(str(len(call.text)))) as server:
        assert (await ask(server.spec(), request)).text == "1500000"


async def test_a_compressed_answer_is_read_though_none_was_asked_for() -> None:
    body = gzip.compress(json.dumps(REPLY).encode())
    async with serving(lambda head: whole(body, "content-encoding: gzip\r\n")) as port:
        assert (await ask(f"http://127.0.0.1:{port}/v1#m", stream=False)).text == "391"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + json.dumps(REPLY).encode(),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
    ids=["short", "no chunk", "no status", "no HTTP", "nothing"],
)
async def test_what_is_no_whole_http_answer_is_a_connection_failure(answer: bytes) -> None:
    async with serving(lambda head: answer) as port:
        error = await failure_of(f"http://127.0.0.1:{port}/v1#m", stream=False)
    assert (error.kind, error.was_sent) == ("connection", None)
    assert error.__cause__ is None and error.__context__ is None


@pytest.mark.parametrize("size", [100, 2_000_000])
async def test_a_long_error_page_is_cut(size: int) -> None:
    with FaultServer(raw(b"x" * size, code=500)) as server:
        error = await failure_of(server.spec())
    assert error.kind == "overloaded" and len(str(error)) < 1000


async def test_a_header_that_cannot_be_written_is_a_bad_request() -> None:
    with FaultServer(say("x")) as server:
        error = await failure_of(server.spec(), headers={"X-Team": "a\r\nHost: evil"})
        assert error.kind == "bad_request" and server.call_count == 0


@pytest.mark.parametrize("host", ["h:99999", "h:0", "[::1", "a b\u2028c", "x" * 300])
async def test_an_address_that_is_none_is_told(host: str) -> None:
    with pytest.raises((ConfigError, ProviderError)) as caught:
        await ask(f"http://{host}/v1#m")
    if isinstance(caught.value, ProviderError):
        assert caught.value.was_sent is False or caught.value.kind == "bad_request"


@pytest.mark.parametrize("value", [float("nan"), object()])
async def test_a_value_that_json_does_not_have_is_a_bad_request(value: object) -> None:
    request = Request(ASK.messages)
    object.__setattr__(request.sampling, "extra", {"x": value})
    with FaultServer(say("x")) as server:
        with pytest.raises(ProviderError) as caught:
            await ask(server.spec(), request)
        assert caught.value.kind == "bad_request" and server.call_count == 0


# --- loops and ends -------------------------------------------------------------------------------


async def left_open(server: FaultServer) -> None:
    await open_lm(server.spec()).complete(ASK, 1, [0])


def test_who_never_closes_hears_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    async def wait_for_the_end(server: FaultServer) -> None:
        await left_open(server)
        async with asyncio.timeout(PATIENCE_S):
            while server.open_connections:
                gc.collect()
                await asyncio.sleep(0.01)

    caplog.set_level(logging.INFO)
    with FaultServer(say("x")) as server:
        asyncio.run(left_open(server))
        gc.collect()
        asyncio.run(wait_for_the_end(server))
    assert [r for r in caplog.records if r.name.startswith(("asyncio", "aiohttp"))] == []


async def test_connections_are_kept_and_used_again() -> None:
    with FaultServer(say("x")) as server:
        lm = open_lm(server.spec())
        for _ in range(5):
            await lm.complete(ASK, 1, [0])
            assert server.open_connections == 1
        await lm.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while server.open_connections:
                await asyncio.sleep(0.01)
