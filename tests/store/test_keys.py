"""B01, F16, F36 and T16: what makes two calls the same call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.driver import CountingServer, Settings, learn
from tfgrpo.errors import ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Completion, Limits, Request, Sampling, ToolSpec
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.store.disk.cache import CallCache
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.store.keys import KeyMaker, RequestKey

TOOL = ToolSpec("area", "of a triangle", {"type": "object", "properties": {"base": {}}})
BASE = Request(
    (Message("system", "Answer in French."), Message("user", "Say good morning.")),
    tools=(TOOL,),
    tool_choice="auto",
    response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True}},
    sampling=Sampling(0.7, 0.9, 100, ("END",), reasoning_effort="low", extra={"min_p": 0.1}),
)
IDENTITY = {"backend": "openai", "model": "m", "base_url": "http://a/v1", "credential": "f00d"}


def turns(*messages: Message) -> Request:
    return replace(BASE, messages=messages)


CHANGES: dict[str, tuple[Request, Mapping[str, Any], int, int | None]] = {
    "system text": (
        turns(Message("system", "Answer in German."), BASE.messages[1]),
        IDENTITY,
        0,
        7,
    ),
    "earlier turns": (
        turns(BASE.messages[0], Message("assistant", "hm"), BASE.messages[1]),
        IDENTITY,
        0,
        7,
    ),
    "a tool call in a turn": (
        turns(*BASE.messages, Message("assistant", "", (ToolCall("1", "area", "{}"),))),
        IDENTITY,
        0,
        7,
    ),
    "library text": (
        turns(Message("system", "Answer in French.\n\n[1] be brief"), BASE.messages[1]),
        IDENTITY,
        0,
        7,
    ),
    "model": (BASE, IDENTITY | {"model": "m2"}, 0, 7),
    "base URL": (BASE, IDENTITY | {"base_url": "http://b/v1"}, 0, 7),
    "provider": (BASE, IDENTITY | {"backend": "litellm"}, 0, 7),
    "credential identity": (BASE, IDENTITY | {"credential": "beef"}, 0, 7),
    "temperature": (BASE.with_sampling(temperature=0.8), IDENTITY, 0, 7),
    "top-p": (BASE.with_sampling(top_p=0.8), IDENTITY, 0, 7),
    "max tokens": (BASE.with_sampling(max_tokens=101), IDENTITY, 0, 7),
    "stop": (BASE.with_sampling(stop=("END", "STOP")), IDENTITY, 0, 7),
    "log-probs": (BASE.with_sampling(logprobs=True), IDENTITY, 0, 7),
    "top log-probs": (BASE.with_sampling(top_logprobs=2), IDENTITY, 0, 7),
    "reasoning settings": (BASE.with_sampling(reasoning_effort="high"), IDENTITY, 0, 7),
    "extra fields": (BASE.with_sampling(extra={"min_p": 0.2}), IDENTITY, 0, 7),
    "tools": (replace(BASE, tools=()), IDENTITY, 0, 7),
    "a tool's schema": (
        replace(BASE, tools=(replace(TOOL, parameters={"type": "object"}),)),
        IDENTITY,
        0,
        7,
    ),
    "tool choice": (replace(BASE, tool_choice="none"), IDENTITY, 0, 7),
    "response format": (replace(BASE, response_format={"type": "text"}), IDENTITY, 0, 7),
    "sample index": (BASE, IDENTITY, 1, 7),
    "seed": (BASE, IDENTITY, 0, 8),
    "no seed": (BASE, IDENTITY, 0, None),
}


class Counting(ScriptedLM):
    """A scripted LM with a chosen identity."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        super().__init__(lambda request, seed: f"reply {len(self.requests)}")
        self._identity = identity

    @property
    def identity(self) -> Mapping[str, Any]:
        return self._identity


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "run", create=True) as opened:
        yield opened


async def ask(
    store: Journal, request: Request, identity: Mapping[str, Any], index: int, seed: int | None
) -> tuple[str, int]:
    """Return the reply and how many calls it took."""
    lm = Counting(identity)
    with call_scope(CallScope(sample_index=index)):
        reply = await JournaledLM(lm, store).complete(request, 1, [seed])
    return reply[0].text, len(lm.requests)


@pytest.mark.parametrize("field", CHANGES)
async def test_b01_each_field_makes_a_call_of_its_own(store: Journal, field: str) -> None:
    assert (await ask(store, BASE, IDENTITY, 0, 7))[1] == 1
    assert (await ask(store, *CHANGES[field]))[1] == 1
    assert (await ask(store, BASE, IDENTITY, 0, 7))[1] == 0
    assert (await ask(store, *CHANGES[field]))[1] == 0


async def test_b01_order_of_keys_time_limits_and_a_rerun_change_nothing(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True) as store:
        first, calls = await ask(store, BASE, IDENTITY, 0, 7)
        assert calls == 1
    parameters = {"properties": {"base": {}}, "type": "object"}
    other = replace(
        BASE,
        tools=(replace(TOOL, parameters=parameters),),
        response_format={"json_schema": {"strict": True, "name": "x"}, "type": "json_schema"},
        limits=Limits(timeout_s=1.0),
    )
    with Journal.open(tmp_path / "run") as store:
        turned = dict(reversed(IDENTITY.items()))
        assert await ask(store, other, turned, 0, 7) == (first, 0)


TEXT = st.text(max_size=6)
REQUESTS = st.builds(
    Request,
    st.lists(st.builds(Message, st.sampled_from(["system", "user"]), TEXT), max_size=2).map(tuple),
    sampling=st.builds(
        Sampling,
        st.sampled_from([None, 0.0, 0.5, 1.0]),
        max_tokens=st.sampled_from([None, 1, 2]),
        stop=st.lists(TEXT, max_size=2).map(tuple),
        extra=st.dictionaries(TEXT, st.integers(0, 1), max_size=2),
    ),
)


@given(REQUESTS, REQUESTS, st.integers(0, 1), st.integers(0, 1))
def test_b01_keys_are_equal_exactly_when_requests_are(
    a: Request, b: Request, i: int, j: int
) -> None:
    keys = [RequestKey(r, IDENTITY).draw(n, None) for r, n in ((a, i), (b, j))]
    assert (keys[0] == keys[1]) == ((a, i) == (b, j))


@given(st.lists(st.tuples(REQUESTS, st.sampled_from(["m1", "m2"])), max_size=5))
def test_a_key_maker_gives_the_same_keys_in_any_order(asked: list[tuple[Request, str]]) -> None:
    maker = KeyMaker()
    for request, model in asked:
        identity = IDENTITY | {"model": model}
        plain = RequestKey(request, identity).draw(0, 1)
        assert maker.key(request, identity).draw(0, 1) == plain


def test_b01_a_key_is_the_same_in_another_process() -> None:
    code = (
        "from tests.store.test_keys import BASE, IDENTITY, RequestKey;"
        "print(RequestKey(BASE, IDENTITY).draw(3, 7).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == RequestKey(BASE, IDENTITY).draw(3, 7).hex()


async def test_f36_fifty_equal_calls_at_once_are_one_request(store: Journal) -> None:
    lm = ScriptedLM(lambda r, s: f"reply {len(lm.requests)}", latency_s=0.01)
    journaled = JournaledLM(lm, store)
    replies = await asyncio.gather(*(journaled.complete(BASE, 1, [7]) for _ in range(50)))
    assert len(lm.requests) == 1
    assert {r[0].text for r in replies} == {"reply 1"}


async def test_f36_fifty_draws_at_once_are_fifty_requests_and_come_back_in_order(
    store: Journal,
) -> None:
    lm = ScriptedLM(lambda r, s: f"reply to seed {s}", latency_s=0.01)

    async def draw(i: int) -> str:
        with call_scope(CallScope(sample_index=i)):
            return (await JournaledLM(lm, store).complete(BASE, 1, [i]))[0].text

    first = await asyncio.gather(*(draw(i) for i in range(50)))
    assert len(lm.requests) == 50
    again = await JournaledLM(lm, store).complete(BASE, 50, list(range(50)))
    assert len(lm.requests) == 50
    assert [r.text for r in again] == first == [f"reply to seed {i}" for i in range(50)]


async def test_f36_when_the_one_request_fails_all_who_wait_are_told_and_it_counts_once(
    store: Journal,
) -> None:
    lm = ScriptedLM([ProviderError("busy", kind="overloaded"), "then fine"], latency_s=0.01)
    journaled = JournaledLM(lm, store)
    results = await asyncio.gather(
        *(journaled.complete(BASE, 1, [7]) for _ in range(5)), return_exceptions=True
    )
    assert all(isinstance(r, ProviderError) and r.kind == "overloaded" for r in results)
    assert [(r.failed_calls, r.usage.calls) for r in store.spend()] == [(1, 1)]
    assert (await journaled.complete(BASE, 1, [7]))[0].text == "then fine"


async def test_f36_when_the_one_who_asks_is_cancelled_another_takes_over(store: Journal) -> None:
    lm = ScriptedLM("reply", latency_s=1.0)
    journaled = JournaledLM(lm, store)
    first = asyncio.create_task(journaled.complete(BASE, 1, [7]))
    await asyncio.sleep(0.005)
    second = asyncio.create_task(journaled.complete(BASE, 1, [7]))
    await asyncio.sleep(0.005)
    first.cancel()
    assert (await second)[0].text == "reply"
    with pytest.raises(asyncio.CancelledError):
        await first
    row = store.spend()[0]
    assert (row.usage.calls, row.booked.calls) == (1, 1)
    assert set(store.ledger.reserved.values()) == {0.0}


async def test_f16_replies_that_overtake_each_other_reach_who_asked(store: Journal) -> None:
    class Reordering(ScriptedLM):
        async def complete(
            self, request: Request, n: int, seeds: Sequence[int | None]
        ) -> list[Completion]:
            text = request.messages[-1].content
            await asyncio.sleep(0.001 * (20 - int(text)))  # the last asked is answered first
            return [Completion(f"for {text}", model="m") for _ in range(n)]

    journaled = JournaledLM(Reordering(""), store)

    async def one(i: int) -> str:
        return (await journaled.complete(Request((Message("user", str(i)),)), 1, [None]))[0].text

    assert await asyncio.gather(*map(one, range(20))) == [f"for {i}" for i in range(20)]
    assert await asyncio.gather(*map(one, range(20))) == [f"for {i}" for i in range(20)]


async def test_switched_off_the_cache_asks_again_and_keeps_all_the_same(store: Journal) -> None:
    lm = ScriptedLM(["one", "two"])
    off = JournaledLM(lm, store, cache=False)
    assert [(await off.complete(BASE, 1, [7]))[0].text for _ in range(2)] == ["one", "two"]
    assert (await JournaledLM(lm, store).complete(BASE, 1, [7]))[0].text == "one"


async def test_f14_five_draws_of_eight_are_kept_and_three_asked_again(store: Journal) -> None:
    class Short(ScriptedLM):
        prefers_n = True  # type: ignore[assignment]
        asked: list[int] = []  # noqa: RUF012

        async def complete(
            self, request: Request, n: int, seeds: Sequence[int | None]
        ) -> list[Completion]:
            self.asked.append(n)
            return [Completion(f"seed {s}", model="m") for s in list(seeds)[: min(n, 5)]]

    lm = Short("")
    journaled = JournaledLM(lm, store)
    first = await journaled.complete(BASE, 8, list(range(8)))
    assert [r.text for r in first] == [f"seed {i}" for i in range(5)]
    second = await journaled.complete(BASE, 8, list(range(8)))
    assert [r.text for r in second] == [f"seed {i}" for i in range(8)]
    assert lm.asked == [8, 3]


async def test_f19_a_cut_reply_is_kept_as_cut_and_a_longer_limit_asks_anew(
    store: Journal,
) -> None:
    lm = ScriptedLM([Completion("half a less", finish="length"), Completion("a whole lesson")])
    journaled = JournaledLM(lm, store)
    short, long = BASE.with_sampling(max_tokens=4), BASE.with_sampling(max_tokens=400)
    for _ in range(2):
        assert (await journaled.complete(short, 1, [7]))[0].finish == "length"
    assert (await journaled.complete(long, 1, [7]))[0].finish == "stop"
    assert len(lm.requests) == 2


async def test_t16_a_shared_cache_keeps_accounts_and_servers_apart(tmp_path: Path) -> None:
    texts = {}
    with CallCache(tmp_path / "cache" / "calls.db") as cache:
        for run, identity in (
            ("a", IDENTITY),
            ("b", IDENTITY | {"credential": "beef"}),
            ("c", IDENTITY | {"base_url": "http://b/v1"}),
            ("d", IDENTITY),
        ):
            with Journal.open(tmp_path / run, create=True) as store:
                counted = Counting(identity)
                counted._script = f"for {run}"
                journaled = JournaledLM(counted, store, shared=cache)
                texts[run] = (await journaled.complete(BASE, 1, [7]))[0].text
    assert texts == {"a": "for a", "b": "for b", "c": "for c", "d": "for a"}
    with Journal.open(tmp_path / "d") as store:  # the hit lies in the run's own journal now
        lm2 = Counting(IDENTITY)
        assert (await JournaledLM(lm2, store).complete(BASE, 1, [7]))[0].text == "for a"
        assert not lm2.requests
        assert store.ledger.spent["calls"] == 0


async def test_a_new_verifier_judges_again_without_a_call(tmp_path: Path) -> None:
    server = CountingServer()
    with Journal.open(tmp_path / "run", create=True) as store:
        await learn(store, server, Settings(steps=1))
        before = dict(server.received)
        await learn(store, server, Settings(steps=1, verifier_id="even-2"))
    assert dict(server.received) == before
