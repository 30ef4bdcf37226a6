"""What workers and runs speak through: frames in any pieces, and an endpoint that knows its own."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.workers import worlds
from tests.workers.conftest import TOKEN
from tfgrpo.errors import ExecutorError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope, current_scope
from tfgrpo.testing import check_lm
from tfgrpo.workers.endpoint import RunEndpoint
from tfgrpo.workers.frames import Frames
from tfgrpo.workers.remote_lm import EndpointClient, LmFacts, RemoteLM

pytest.importorskip("aiohttp")

ASK = Request((Message("user", "101"),))


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@hypothesis.given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_messages_arrive_whole_however_the_bytes_are_cut(
    messages: list[dict[str, str]], cuts: list[int]
) -> None:
    pipe, arrived = Pipe(), []
    sender = Frames(lambda m: None, lambda: None)
    sender.connection_made(pipe)  # type: ignore[arg-type]
    sender.send(messages)
    receiver = Frames(arrived.append, lambda: None)
    places = sorted({0, len(pipe.data), *(c for c in cuts if c < len(pipe.data))})
    for start, end in pairwise(places):
        receiver.data_received(pipe.data[start:end])
    assert arrived == messages


async def remote(lm: Any, token: str = TOKEN, name: str = "main") -> Any:
    endpoint = RunEndpoint({"main": lm}, TOKEN)
    client = EndpointClient(await endpoint.start(), token)
    return endpoint, client, RemoteLM(client, name, LmFacts.of(lm))


async def test_an_lm_of_the_run_keeps_the_contract_from_afar() -> None:
    lm = worlds.scripted()
    endpoint, client, far = await remote(lm)
    assert (far.model_id, far.identity, far.prefers_n) == (lm.model_id, lm.identity, False)
    await check_lm(far, is_deterministic=True)
    await client.aclose()
    await endpoint.aclose()


async def test_a_reply_and_a_failure_come_back_whole_and_the_scope_goes_along() -> None:
    seen: list[CallScope] = []

    def script(request: Request, seed: int | None) -> Completion | ProviderError:
        seen.append(current_scope())
        if seed == 1:
            return ProviderError("slow down", kind="rate_limit", status=429, retry_after_s=2.5)
        return Completion(
            "x", "length", "thought", token_ids=(1, 2), logprobs=(-0.5, -1.0),
            top_logprobs=({"a": -0.5}, {"b": -1.0}), usage=Usage(1, 2, 3, 4, 5, 1, 0.25, True),
            model="m",
        )  # fmt: skip

    endpoint, client, far = await remote(ScriptedLM(script))
    scope = CallScope("gate", "tâsk \ud83d", "g-7", 7)
    with call_scope(scope):
        (reply,) = await far.complete(ASK, 1, [0])
        with pytest.raises(ProviderError) as caught:
            await far.complete(ASK, 1, [1])
    assert reply == script(ASK, 0)
    assert seen[:2] == [scope, scope]
    assert (caught.value.kind, caught.value.retry_after_s) == ("rate_limit", 2.5)
    await client.aclose()
    await endpoint.aclose()


@pytest.mark.parametrize(
    ("token", "name", "words"), [("another-token", "main", "HTTP 401"), (TOKEN, "x", "HTTP 404")]
)
async def test_a_wrong_token_and_an_unknown_lm_are_refused(
    token: str, name: str, words: str
) -> None:
    endpoint, client, far = await remote(worlds.scripted(), token, name)
    with pytest.raises(ExecutorError, match=words) as caught:
        await far.complete(ASK, 1, [0])
    assert TOKEN not in str(caught.value)
    await client.aclose()
    await endpoint.aclose()


async def test_an_endpoint_that_is_gone_is_no_failure_of_a_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, client, far = await remote(worlds.scripted())
    await endpoint.aclose()
    monkeypatch.setattr("tfgrpo.workers.remote_lm._FIRST_WAIT_S", 0.0)
    with pytest.raises(ExecutorError, match="cannot be reached"):
        await far.complete(ASK, 1, [0])
    await client.aclose()


async def test_a_call_whose_worker_has_left_is_finished() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedLM):
        async def complete(self, *args: Any) -> list[Completion]:
            began.set()
            await asyncio.sleep(0.2)
            replies = await super().complete(*args)
            ended.set()
            return replies

    endpoint, client, far = await remote(Slow("x"))
    asking = asyncio.create_task(far.complete(ASK, 1, [0]))
    await began.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.aclose()
    await ended.wait()
    await endpoint.aclose()
