"""A fleet as an upstream: untouched bytes, invisible failover, sessions that stay, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serve.conftest import Start
from tfgrpo.errors import ConfigError
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.serve.wire.fleet import FleetUpstream
from tfgrpo.serve.wire.opening import open_upstream
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

pytestmark = pytest.mark.real


def own(*servers: FaultServer, **options: Any) -> dict[str, Any]:
    """Settings of a gateway whose one upstream is a fleet."""
    rows = {"servers": [s.base_url for s in servers], "model": "scripted", "health_s": 0.02}
    return {"fleets": {"own": rows | options}, "upstreams": {"a": {"lm": "fleet:own"}}}


async def test_fields_travel_untouched_and_the_call_is_booked_on_the_fleet(start: Start) -> None:
    with FaultServer(answers.say("yes", extra={"odd": [1]})) as a:
        client = await start(**own(a))
        status, reply, headers = await client.chat("hi", new_field={"a": [1.5]})
    assert status == 200 and reply["choices"][0]["odd"] == [1]
    assert a.calls[0].body["new_field"] == {"a": [1.5]} and a.calls[0].body["model"] == "scripted"
    assert float(headers["x-tfgrpo-cost-usd"]) > 0
    assert client.rows("SELECT model FROM calls") == [("fleet:own",)]


async def test_a_session_stays_on_one_server_of_the_fleet(start: Start) -> None:
    with FaultServer() as a, FaultServer() as b, FaultServer() as c:
        client = await start(**own(a, b, c))
        for turns in range(1, 5):
            for session in range(9):
                status, *_ = await client.chat(
                    messages=[{"role": "user", "content": "hi"}] * turns,
                    headers={"x-tfgrpo-session-id": f"s{session}"},
                )
                assert status == 200
        fleet = client.gateway.models["a"].upstream
        assert isinstance(fleet, FleetUpstream)
        shares = [row["calls"] for row in fleet.fleet.figures()["servers"].values()]
    assert sum(shares) == 36 and all(n % 4 == 0 for n in shares)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_server_that_fails_before_any_content_is_passed_over_unseen(
    start: Start, streams: bool
) -> None:
    with (
        FaultServer(answers.status(503)) as a,
        FaultServer(answers.reset(after=0)) as b,
        FaultServer(answers.say("yes")) as good,
    ):
        client = await start(**own(a, b, good))
        for n in range(12):
            body = {"model": "r", "messages": [{"role": "user", "content": f"q{n}"}]}
            async with client.post("/v1/chat/completions", body | {"stream": streams}) as got:
                assert got.status == 200
                assert ("[DONE]" if streams else "yes") in await got.text()
        assert good.call_count == 12
        assert client.gateway.resting(client.gateway.routes["r"]) == []
        calls = client.rows("SELECT sum(calls) FROM results")
        assert calls == [(12 + a.call_count + b.call_count,)]


async def test_a_late_stream_is_asked_for_elsewhere(start: Start) -> None:
    with FaultServer(answers.hang()) as stuck, FaultServer(answers.say("yes")) as good:
        client = await start(**own(stuck, good))
        upstream = client.gateway.models["a"].upstream
        assert isinstance(upstream, FleetUpstream)
        for _ in range(64):
            upstream.fleet.hedging.observe(0.02)
        upstream.fleet.hedging.calls = 1000
        for n in range(20):
            body = {"model": "r", "stream": True,
                    "messages": [{"role": "user", "content": f"q{n}"}]}  # fmt: skip
            async with client.post("/v1/chat/completions", body) as got:
                assert "[DONE]" in await got.text()
        hedges = upstream.fleet.figures()["hedges"]
        async with client.get("/metrics") as got:
            text = await got.text()
    assert hedges >= stuck.call_count > 0
    assert f'tfgrpo_fleet_hedges{{upstream="a"}} {hedges}' in text
    assert f'tfgrpo_fleet_server_up{{upstream="a",server="{good.base_url}"}} 1' in text


async def test_a_client_that_leaves_frees_the_server(start: Start) -> None:
    with FaultServer(answers.hang()) as stuck:
        client = await start(**own(stuck))
        body = {"model": "r", "stream": True, "messages": [{"role": "user", "content": "q"}]}
        asking = asyncio.create_task(client.post("/v1/chat/completions", body).__aenter__())
        while not stuck.call_count:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not stuck.dropped:
            await asyncio.sleep(0.01)
        upstream = client.gateway.models["a"].upstream
        assert isinstance(upstream, FleetUpstream)
        while upstream.fleet.figures()["servers"][stuck.base_url]["in_flight"]:
            await asyncio.sleep(0.01)


def test_a_fleet_without_servers_or_with_unknown_keys_is_refused() -> None:
    settings = GatewaySettings.from_mapping({"upstreams": {"a": {"lm": "fleet:own"}}})
    with pytest.raises(ConfigError, match=r"\[fleets.own\]"):
        open_upstream(settings.upstreams["a"].lm, {})
    with pytest.raises(ConfigError, match="unknown here: supports_n"):
        open_upstream("fleet:own", {"servers": ["http://h/v1"], "model": "m", "supports_n": True})
