"""serve-model over real sockets: the protocol with a scripted model, then the embedded one."""

import asyncio
import contextlib
import json
import socket

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import httpx2

from tests.patience import PATIENCE_S
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.server.app import MAX_BODY_BYTES, ServerSettings, serve
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Limits, Request, Sampling
from tfgrpo.testing import ScriptedLM, check_lm

pytestmark = pytest.mark.real
HELLO = Request((Message("user", "Say hello."),))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(lm, name="m", **settings):
    port = free_port()
    ready = asyncio.Event()
    task = asyncio.ensure_future(
        serve(lm, ServerSettings(name, port=port, **settings), ready=ready)
    )
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait({task, waiting}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert ready.is_set()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def seeded(request, seed):
    return f"{request.messages[-1].content} with seed {seed}"


async def post(url, body, **options):
    async with httpx2.AsyncClient(trust_env=False) as client:
        return await client.post(f"{url}/chat/completions", **({"json": body} | options))


ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_models_choices_usage_and_seeds():
    async with serving(ScriptedLM(seeded)) as url:
        async with httpx2.AsyncClient(trust_env=False) as client:
            listed = (await client.get(f"{url}/models")).json()
        assert [m["id"] for m in listed["data"]] == ["m"]
        answer = (await post(url, {**ASK, "n": 3, "seed": 5})).json()
        texts = [c["message"]["content"] for c in answer["choices"]]
        assert texts == [f"hi with seed {s}" for s in (5, 6, 7)]
        usage = answer["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] == 15
        answer = (await post(url, {**ASK, "n": 2, "seeds": [9, 1]})).json()
        assert answer["choices"][1]["message"]["content"] == "hi with seed 1"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({**ASK, "model": "other"}, 404, "does not exist"),
        ({**ASK, "messages": []}, 400, "messages"),
        ({**ASK, "messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({**ASK, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        ({**ASK, "n": 0}, 400, "n 0"),
        ({**ASK, "n": 1_000_000}, 400, "n 1000000"),
        ({**ASK, "temperature": "hot"}, 400, "temperature"),
        ({**ASK, "top_p": 0}, 400, "top_p"),
        ({**ASK, "max_tokens": -3}, 400, "max_tokens"),
        ({**ASK, "stop": [1]}, 400, "stop"),
        ([1], 400, "object"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_reason(body, status, words):
    async with serving(ScriptedLM("x")) as url:
        answer = await post(url, body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


async def test_big_broken_and_foreign_requests_are_refused():
    async with serving(ScriptedLM("x")) as url:
        big = await post(url, None, content=b"x" * (MAX_BODY_BYTES + 1))
        assert big.status_code == 413
        broken = await post(url, None, content=b"{")
        assert broken.status_code == 400
        page = await post(url, ASK, headers={"Origin": "http://evil.example"})
        assert page.status_code == 403


async def test_a_token_is_asked_for(monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", "a-long-enough-token")
    async with serving(ScriptedLM("x"), token="a-long-enough-token") as url:
        assert (await post(url, ASK)).status_code == 401
        lm = open_lm(f"{url}#m", api_key_env="SERVE_TOKEN")
        assert (await lm.complete(HELLO, 1, [0]))[0].text == "x"
        await lm.aclose()


def test_other_hosts_need_a_token():
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.com"):
        with pytest.raises(ConfigError, match="token"):
            ServerSettings("m", host=host)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert ServerSettings("m", host=host).token == ""


@pytest.mark.parametrize(
    ("kind", "status"), [("context_too_long", 400), ("rate_limit", 429), ("overloaded", 503)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_models_failures_keep_their_kind_through_the_wire(kind, status, stream):
    lm = ScriptedLM(lambda request, seed: ProviderError("scripted", kind=kind))
    async with serving(lm) as url:
        client = open_lm(f"{url}#m", stream=stream)
        with pytest.raises(ProviderError) as caught:
            await client.complete(HELLO, 1, [0])
        await client.aclose()
    assert (caught.value.kind, caught.value.status) == (kind, status)


class SlowLM(ScriptedLM):
    cancelled = 0

    async def complete(self, request, n, seeds):
        try:
            return await super().complete(request, n, seeds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("stream", [True, False])
async def test_the_model_is_told_when_the_client_leaves(stream):
    lm = SlowLM("x", latency_s=30)
    async with serving(lm) as url:
        client = open_lm(f"{url}#m", stream=stream)
        request = Request(HELLO.messages, limits=Limits(timeout_s=0.3))
        with pytest.raises(ProviderError) as caught:
            await client.complete(request, 1, [0])
        await client.aclose()
        for _ in range(300):
            if lm.cancelled:
                break
            await asyncio.sleep(0.01)
        assert (caught.value.kind, lm.cancelled) == ("timeout", 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_ids_reasoning_and_finish_pass_through(stream):
    made = Completion("ab", "length", "hm", token_ids=(3, 4), logprobs=(-0.5, -0.25),
                      top_logprobs=({"a": -0.5}, {"b": -0.25}))  # fmt: skip
    async with serving(ScriptedLM(lambda request, seed: made)) as url:
        client = open_lm(f"{url}#m", stream=stream)
        (reply,) = await client.complete(HELLO.with_sampling(logprobs=True), 1, [0])
        await client.aclose()
    assert (reply.text, reply.finish, reply.reasoning) == ("ab", "length", "hm")
    assert (reply.token_ids, reply.logprobs) == ((3, 4), (-0.5, -0.25))
    assert reply.top_logprobs == ({"a": -0.5}, {"b": -0.25})


@pytest.fixture(scope="module")
def embedded():
    """One copy of the weights for all tests of this file."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from tfgrpo.errors import MissingExtraError
    from tfgrpo.lm.local.loading import load_model

    try:
        return load_model("smollm2-135m", threads=1)
    except MissingExtraError as exc:
        pytest.skip(str(exc))


CAPITAL = Request(
    (Message("user", "What is the capital of France?"),),
    sampling=Sampling(temperature=0.0, max_tokens=12),
)


async def test_the_embedded_model_answers_through_openai_and_litellm(embedded):
    from tfgrpo.lm.local.local_lm import LoadedWeights, LocalLM

    local = LocalLM("smollm2-135m", loaded=LoadedWeights(embedded))
    async with serving(local, "smollm2-135m") as url:
        direct = open_lm(f"{url}#smollm2-135m")
        plain = open_lm(f"{url}#smollm2-135m", stream=False)
        (a,), (b,) = await direct.complete(CAPITAL, 1, [0]), await plain.complete(CAPITAL, 1, [0])
        assert "Paris" in a.text and a.text == b.text
        assert a.usage.prompt_tokens == b.usage.prompt_tokens > 30 and not a.usage.is_estimated
        drawn = CAPITAL.with_sampling(temperature=1.0, logprobs=True)
        draws = await direct.complete(drawn, 4, [7] * 4)
        assert len(draws) == 4 and all(d.logprobs and d.token_ids is None for d in draws)
        with_ids = drawn.with_sampling(extra={"return_token_ids": True})
        again = await direct.complete(with_ids, 4, [7] * 4)
        assert [d.logprobs for d in again] == [d.logprobs for d in draws]
        assert all(len(d.token_ids) == len(d.logprobs) for d in again)
        assert len({d.text for d in draws}) > 1
        other = await _through_litellm(url)
        assert other is None or "Paris" in other
        await check_lm(direct, request=CAPITAL.with_sampling(max_tokens=2))
        await plain.aclose()


async def _through_litellm(url: str) -> str | None:
    """In a process of its own: importing litellm takes seconds and warns."""
    import sys

    program = (
        "import asyncio, sys\n"
        "from tfgrpo.lm import open_lm\n"
        "from tfgrpo.messages import Message\n"
        "from tfgrpo.protocols import Request, Sampling\n"
        "from tfgrpo.testing.contracts import check_lm_failure\n"
        "async def main():\n"
        "    lm = open_lm('litellm:openai/smollm2-135m', api_base=sys.argv[1], api_key_env='K')\n"
        "    ask = Request((Message('user', 'What is the capital of France?'),),\n"
        "                  sampling=Sampling(temperature=0.0, max_tokens=12))\n"
        "    replies = await lm.complete(ask, 2, [0, 1])\n"
        "    assert len(replies) == 2 and replies[0].usage.prompt_tokens > 30, replies\n"
        "    wrong = open_lm('litellm:openai/other', api_base=sys.argv[1], api_key_env='K')\n"
        "    error = await check_lm_failure(wrong)\n"
        "    assert error.kind == 'not_found', (error.kind, str(error))\n"
        "    print(replies[0].text)\n"
        "    await lm.aclose()\n"
        "asyncio.run(main())\n"
    )
    import importlib.util
    import os

    if importlib.util.find_spec("litellm") is None:
        return None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, url, env={**os.environ, "K": "key-for-the-test"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    assert "key-for-the-test" not in (out + err).decode()
    return out.decode()


async def test_the_embedded_model_streams_tokens(embedded):
    from tfgrpo.lm.local.local_lm import LoadedWeights, LocalLM

    local = LocalLM("smollm2-135m", loaded=LoadedWeights(embedded))
    async with serving(local, "smollm2-135m") as url, httpx2.AsyncClient(trust_env=False) as http:
        body = {
            "model": "smollm2-135m",
            "stream": True,
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        async with http.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines]
    assert len([p for p in pieces if p]) > 3, "the text came in one piece"
    assert "Paris" in "".join(p or "" for p in pieces)


def test_the_unpacked_weights_keep_their_checksum(embedded):
    from tfgrpo.lm.local.embedded import embedded_folder, is_whole, verify

    folder = embedded_folder()
    assert is_whole(folder) and verify(folder)
