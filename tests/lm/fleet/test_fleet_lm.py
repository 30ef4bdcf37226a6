"""A fleet of real sockets: servers that die, drain, refuse, hang, and lists that change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.errors import BudgetError, ConfigError, ProviderError
from tfgrpo.lm import fleet_options, open_lm
from tfgrpo.lm.fleet.fleet_lm import FleetLM
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.runtime.call_scope import CallScope, call_scope, extra_calls
from tfgrpo.testing import FaultServer, check_lm, hang, reset, say, status
from tfgrpo.testing.answers import Call

pytestmark = pytest.mark.real


def question(text: str = "What is 17 times 23?") -> Request:
    return Request((Message("system", "Be brief."), Message("user", text)))


@asynccontextmanager
async def fleet(*servers: FaultServer, **options: Any) -> AsyncIterator[FleetLM]:
    """A fleet that looks at its servers often."""
    given = {"servers": [s.base_url for s in servers], "model": "scripted", "health_s": 0.02}
    lm = FleetLM("own", **(given | options))
    try:
        yield lm
    finally:
        await lm.aclose()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def states(lm: FleetLM) -> list[str]:
    return [row["state"] for row in lm.fleet.figures()["servers"].values()]


async def ask(lm: Any, task: str, draw: int = 0) -> str:
    with call_scope(CallScope("practice", task, f"g{task}-{draw}", draw)):
        return (await lm.complete(question(task), 1, [draw]))[0].text


async def test_the_contract_of_a_backend_holds() -> None:
    with FaultServer() as a, FaultServer() as b:
        options = {"servers": [a.base_url, b.base_url], "model": "scripted"}
        await check_lm(open_lm("fleet:own", **options), is_deterministic=True)
        assert sorted((a.call_count > 0, b.call_count > 0)) == [False, True]  # one prompt


async def test_one_dies_one_is_slow_one_has_another_model_and_no_call_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:
        dies, good = (FaultServer(), FaultServer())
        slow = FaultServer(lambda call: say(f"reply {call.text}").after(0.05))
        wrong = FaultServer(models=["another"])
        for server in (good, slow, wrong):
            stack.enter_context(server)
        dies.__enter__()
        raw = FleetLM("own", servers=[s.base_url for s in (dies, good, slow, wrong)],
                      model="scripted", health_s=0.02, room=4)  # fmt: skip
        lm = RetryingLM(raw, RetryPolicy(first_wait_s=0.01))

        async def work(n: int) -> str:
            if n == 100:
                await asyncio.to_thread(dies.__exit__, None, None, None)
            return await ask(lm, f"t{n // 4}", n % 4)

        gate = asyncio.Semaphore(12)

        async def gated(n: int) -> str:
            async with gate:
                return await work(n)

        replies = await asyncio.gather(*(gated(n) for n in range(300)))
        assert len(replies) == 300 and all(replies)
        await until(lambda: states(raw) == ["down", "up", "up", "refused"])
        await raw.aclose()
    assert wrong.call_count == 0 and dies.call_count > 0
    assert f"{wrong.base_url} is refused: it has no model 'scripted', but 'another'" in caplog.text


async def test_draws_of_a_group_and_turns_of_a_task_go_to_one_server() -> None:
    with FaultServer() as a, FaultServer() as b, FaultServer() as c:
        async with fleet(a, b, c, hedge_share=0) as lm:
            for _ in range(2):
                for task in range(12):
                    await asyncio.gather(*(ask(lm, f"t{task}", i) for i in range(8)))
        homes = {t: set[int]() for t in range(12)}
        for place, server in enumerate((a, b, c)):
            for call in server.calls:
                homes[int(call.text[1:])].add(place)
    assert all(len(places) == 1 for places in homes.values())
    assert Counter(next(iter(p)) for p in homes.values()).keys() == {0, 1, 2}


async def test_a_refused_call_goes_to_the_next_server_at_once_and_is_counted() -> None:
    asked: list[ProviderError | None] = []
    with FaultServer(status(503)) as broken, FaultServer() as good:
        async with fleet(broken, good) as lm:
            with extra_calls(lambda reported, failure: asked.append(failure)):
                for task in range(40):
                    assert await ask(lm, f"t{task}")
            assert good.call_count == 40
            # three failures within ten seconds, then it rests
            assert broken.call_count == 3
            assert [e.kind for e in asked if e] == ["overloaded"] * 3
            assert lm.fleet.figures()["servers"][broken.base_url]["rests"] == 1


async def test_a_reply_that_breaks_off_is_a_failure_that_leaves() -> None:
    with FaultServer(reset(after=40)) as a, FaultServer(reset(after=40)) as b:
        async with fleet(a, b) as lm:
            with pytest.raises(ProviderError) as caught:
                await ask(lm, "t")
    assert caught.value.kind in ("connection", "bad_reply")
    assert a.call_count + b.call_count == 1


async def test_a_server_that_is_not_healthy_drains_and_comes_back() -> None:
    with FaultServer(say("yes").after(0.3)) as a, FaultServer() as b:
        async with fleet(a, b) as lm:
            await lm.fleet.watch.ready()
            home = next(
                f"t{i}" for i in range(99)
                if lm.fleet.members.candidates(f"k{i}")[0].url == a.base_url
            )  # fmt: skip
            key = home.replace("t", "k")
            running = asyncio.create_task(_at_key(lm, key))
            await until(lambda: a.call_count == 1)
            a.is_healthy = False
            await until(lambda: "draining" in states(lm))
            assert await _at_key(lm, key) != "yes"
            assert await running == "yes"  # what was in flight ended
            a.is_healthy = True
            await until(lambda: states(lm) == ["up", "up"])


async def _at_key(lm: FleetLM, key: str) -> str:
    async def begin(url: str, tell: Callable[[], None]) -> str:
        return (await lm._lm_of(url).complete(question(), 1, [0]))[0].text

    attempt = await lm.fleet.calls.first(key, begin, may_hedge=False)
    return await attempt.task


async def test_a_file_of_servers_is_read_again_while_it_is_used(tmp_path: Path) -> None:
    listed = tmp_path / "servers.txt"
    with FaultServer() as a, FaultServer() as b, FaultServer(models=["other"]) as c:
        listed.write_text(f"# the first\n{a.base_url}  # in rack 1\n")
        async with fleet(servers=str(listed)) as lm:
            assert await ask(lm, "t")
            identity = lm.identity
            listed.write_text(f"{b.base_url}\n{c.base_url}\n")
            await until(lambda: states(lm) == ["up", "refused"])
            assert await ask(lm, "t")
            assert (a.call_count, b.call_count, c.call_count) == (1, 1, 0)
            assert lm.identity == identity and a.base_url not in lm._lms
            listed.unlink()  # an unreadable list changes nothing
            assert await ask(lm, "u")


async def test_other_weights_under_the_same_name_are_refused() -> None:
    with FaultServer() as a, FaultServer() as b:
        a.root, b.root = "/weights/v1", "/weights/v2"
        async with fleet(a, b) as lm:
            assert await ask(lm, "t")
            assert sorted(states(lm)) == ["refused", "up"]
        async with fleet(a, b, same_root=False) as lm:
            assert await ask(lm, "t")
            assert states(lm) == ["up", "up"]


async def test_with_no_server_left_the_error_names_each() -> None:
    with FaultServer(models=["x"]) as a, FaultServer(models=["y"]) as b:
        async with fleet(a, b) as lm:
            with pytest.raises(ProviderError, match="is refused") as caught:
                await ask(lm, "t")
    assert caught.value.kind == "not_found" and caught.value.was_sent is False
    async with fleet(a, b) as lm:
        with pytest.raises(ProviderError, match="is down: no connection") as caught:
            await ask(lm, "t")
    assert caught.value.kind == "connection" and a.base_url in str(caught.value)


def late(lm: FleetLM) -> None:
    """Let every call be late after 20 ms, and allow hedges."""
    for _ in range(64):
        lm.fleet.hedging.observe(0.02)
    lm.fleet.hedging.calls = 1000


async def test_a_late_first_token_is_asked_for_elsewhere_and_the_loser_is_left() -> None:
    counted: list[bool] = []
    with FaultServer(hang()) as stuck, FaultServer(say("yes")) as good:
        async with fleet(stuck, good) as lm:
            late(lm)
            with extra_calls(lambda reported, failure: counted.append(reported)):
                replies = [await ask(lm, f"t{i}") for i in range(30)]
            await until(lambda: stuck.open_connections == 0 or stuck.dropped == stuck.call_count)
            hedges = lm.fleet.hedging.hedges
    assert replies == ["yes"] * 30
    assert hedges == len(counted) >= stuck.call_count > 0


async def test_a_cap_on_calls_forbids_the_second_copy_and_keeps_the_first() -> None:
    def refuse(reported: bool, failure: ProviderError | None) -> None:
        raise BudgetError("no further call", resource="calls")

    with FaultServer(say("a").after(0.1)) as a, FaultServer(say("b").after(0.1)) as b:
        async with fleet(a, b) as lm:
            late(lm)
            with extra_calls(refuse):
                assert await ask(lm, "t") in ("a", "b")
            assert lm.fleet.hedging.hedges == 0
    assert a.call_count + b.call_count == 1


async def test_replies_that_are_not_streamed_are_never_sent_twice() -> None:
    with FaultServer(say("a").after(0.1)) as a, FaultServer(say("b").after(0.1)) as b:
        async with fleet(a, b, supports_n=True) as lm:
            late(lm)
            with call_scope(CallScope("practice", "t", "g-0", 0)):
                assert len(await lm.complete(question(), 3, [0, 1, 2])) == 3
    assert a.call_count + b.call_count == 1


async def test_hedging_does_not_choose_by_length() -> None:
    """First tokens come late by chance, replies have any length: means are equal draw by draw."""

    def script(call: Call) -> Any:
        long = call.seed is not None and call.seed % 2
        waits = 0.08 if call.index % 10 == 0 else 0.0
        return say("word " * (40 if long else 2)).after(waits)

    lengths: dict[float, list[int]] = {}
    for share in (0.5, 0.0):
        with FaultServer(script) as a, FaultServer(script) as b:
            async with fleet(a, b, hedge_share=share) as lm:
                late(lm)
                lengths[share] = [len(await ask(lm, f"t{i}", i)) for i in range(120)]
                hedges = lm.fleet.hedging.hedges
        assert bool(hedges) == bool(share)
    assert lengths[0.5] == lengths[0.0]


def test_the_identity_is_the_fleets_and_not_its_servers() -> None:
    def lm(**options: Any) -> FleetLM:
        return FleetLM("own", **({"servers": ["http://a/v1"], "model": "m"} | options))

    assert lm().identity == lm(servers=["http://b/v1", "http://c/v1"]).identity
    assert lm().identity != lm(revision="2").identity != lm(model="n").identity
    assert lm().model_id == "fleet:own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"\[fleets.own\]"),
        ({"servers": [], "model": "m"}, r"\[fleets.own\]"),
        ({"servers": ["ftp://a"], "model": "m"}, "is not a URL"),
        ({"servers": ["http://a/v1", "http://a/v1/"], "model": "m"}, "stands there twice"),
        ({"servers": ["http://u:pa55word@a/v1"], "model": "m"}, "use api_key_env"),
        ({"servers": "absent.txt", "model": "m"}, "cannot be read"),
        ({"servers": ["http://a/v1"], "model": "m", "load_factor": 0.5}, "load_factor"),
        ({"servers": ["http://a/v1"], "model": "m", "hedges": 1}, "no option 'hedges'"),
    ],
)
def test_settings_that_cannot_work_say_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_lm("fleet:own", **options)
    assert "pa55word" not in str(caught.value)


def test_a_config_names_fleets_once() -> None:
    fleets = {"own": {"servers": ["http://a/v1"], "model": "m"}}
    assert fleet_options("fleet:own", fleets) == fleets["own"]
    assert fleet_options("fleet:other", fleets) == fleet_options("scripted:echo", fleets) == {}
