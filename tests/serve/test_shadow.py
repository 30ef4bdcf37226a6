"""Shadow draws: further draws of served requests, judged by the route's verifier."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Client, Start, settings
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Task
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer


def is_long(rollout: Rollout, task: Task) -> float:
    """Judge in [0, 1] whether an answer has more than one word."""
    return float(" " in rollout.steps[-1].action.content)


LEARN: dict[str, Any] = {
    "verifier": {"kind": "function", "function": f"{__name__}:is_long"},
    "shadow": {"group_size": 4, "usd_per_day": 1.0, "share": 1.0},
    "min_informative": 99,
}
ROUTE: dict[str, Any] = {"capture": True, "learn": LEARN}


def mixed(call: Any) -> Any:
    return answers.say("short" if call.index % 2 else "a long one")


async def tick(client: Client) -> Any:
    learning = client.running.learning.routes["r"]
    await learning.tick()
    return learning


async def test_a_served_request_becomes_a_group_with_the_served_reply_among_its_draws(
    start: Start,
) -> None:
    with FaultServer(mixed) as upstream:
        client = await start(upstream, routes={"r": ROUTE})
        _, reply, _ = await client.chat("why?", temperature=0.7, tfgrpo={"task_id": "t"})
        learning = await tick(client)
        (group,) = learning.traffic.groups(client.gateway.journal)
        asked = upstream.call_count
        await tick(client)
    served = reply["choices"][0]["message"]["content"]
    texts = [r.steps[-1].action.content for r in group.rollouts]
    assert len(texts) == 4 and texts[-1] == served
    assert [r.score.reward for r in group.rollouts] == [float(" " in t) for t in texts]
    assert group.task.task_id == "t"
    assert all(c.body["temperature"] == 0.7 for c in upstream.calls)
    assert upstream.call_count == asked  # a request is drawn for once


async def test_the_draws_are_booked_under_a_purse_of_their_own_and_stop_with_it(
    start: Start,
) -> None:
    limited = {**LEARN, "shadow": {"group_size": 2, "calls_per_day": 1, "share": 1.0}}
    with FaultServer(mixed) as upstream:
        client = await start(upstream, routes={"r": {**ROUTE, "learn": limited}})
        for text in ("one", "two", "three"):
            await client.chat(text)
        await tick(client)
        await tick(client)
        assert upstream.call_count == 4  # three served, one drawn
        keys = dict(client.rows("SELECT key, count(*) FROM requests GROUP BY key"))
        await client.running.stop(0.0)
        again = await start(upstream, routes={"r": {**ROUTE, "learn": limited}})
        await again.chat("four")
        await tick(again)
        assert upstream.call_count == 5  # what the purse spent is remembered
    assert keys == {"": 3, "~shadow:r": 1}


async def test_a_live_test_and_other_keys_never_see_a_shadow(start: Start) -> None:
    from tfgrpo.serve.learning.evidence import read_units

    with FaultServer(mixed) as upstream:
        client = await start(upstream, routes={"r": ROUTE})
        await client.chat("one")
        learning = await tick(client)
        units = read_units(client.gateway.journal, "r", learning.settings.feedback, now=4e9)
        (shadow,) = client.rows("SELECT response_id FROM requests WHERE key = '~shadow:r'")[0]
        async with client.get(f"/v1/feedback?response_id=chatcmpl-{shadow}") as response:
            assert response.status == 404
    assert len(units) == 1


@pytest.mark.parametrize("why", ["rate", "tools", "session", "share", "prediction"])
async def test_nothing_is_drawn_where_that_would_be_wrong(start: Start, why: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def script(asked: Any) -> Any:
        return answers.say("", tool_calls=(call,)) if why == "tools" else mixed(asked)

    learn = {**LEARN, "shadow": {**LEARN["shadow"], "share": 1e-9 if why == "share" else 1.0}}
    with FaultServer(script) as upstream:
        client = await start(upstream, routes={"r": {**ROUTE, "learn": learn}})
        await client.chat("one", tfgrpo={"session_id": "s"} if why == "session" else {})
        if why == "rate":
            client.gateway.routes["r"].limited_at = time.monotonic()
        if why == "prediction":
            client.rows("SELECT 1")
            client.gateway.journal.writer.connection.execute(
                "UPDATE requests SET prediction = 0.97"
            )
        await tick(client)
    assert upstream.call_count == 1


async def test_a_refusal_for_the_rate_is_remembered(start: Start) -> None:
    with FaultServer(answers.status(429)) as upstream:
        client = await start(upstream, routes={"r": ROUTE})
        before = client.gateway.routes["r"].limited_at
        await client.chat("one")
    assert before < client.gateway.routes["r"].limited_at <= time.monotonic()


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ({"capture": False, "learn": LEARN}, "capture"),
        ({"capture": True, "learn": {**LEARN, "verifier": {"kind": "judge", "rubric": "x"}}},
         "asks no model"),
        ({"capture": True, "learn": {**LEARN, "shadow": {"group_size": 3}}}, "calls_per_day"),
        ({"capture": True, "max_samples": 2, "learn": LEARN}, "max_samples"),
        ({"capture": True, "learn": {**LEARN, "verifier": {"kind": "majority"}}}, "each alone"),
        ({"verifier": {"kind": "win_rate", "rubric": "x"}}, "each alone"),
    ],
)  # fmt: skip
def test_shadow_draws_that_cannot_work_are_refused(tmp_path: Path, route: Any, said: str) -> None:
    with FaultServer() as upstream, pytest.raises(ConfigError, match=said):
        settings(tmp_path, upstream, routes={"r": route})


async def test_a_draw_that_fails_is_booked_and_the_request_is_left_alone(start: Start) -> None:
    def script(call: Any) -> Any:
        return answers.say("served once") if call.index == 0 else answers.status(500)

    with FaultServer(script) as upstream:
        client = await start(upstream, routes={"r": ROUTE}, upstreams={"a": {"rest_s": 0}})
        await client.chat("one")
        learning = await tick(client)
        await tick(client)
        groups = learning.traffic.groups(client.gateway.journal)
    assert groups == [] and upstream.call_count == 2
    assert client.rows("SELECT count(*) FROM results") == [(2,)]


async def test_the_verifier_speaks_for_users_who_say_nothing(start: Start) -> None:
    from tests.serve.test_loop import LEARN as LIVE
    from tests.serve.test_loop import Loop
    from tfgrpo.serve.learning.evidence import read_units

    learn = {**LIVE["learn"], "verifier": LEARN["verifier"],
             "feedback": {"window_h": 0.001, "missing": "verifier"}}  # fmt: skip
    with FaultServer(mixed) as upstream:
        client = await start(upstream, routes={"r": {**LIVE, "holdout": 0.0, "learn": learn}})
        loop = Loop(client)
        await loop.to_waiting()
        await loop.learning.act("approve", "person")
        replies = {}
        for i in range(6):
            _, reply, _ = await client.chat("why?", tfgrpo={"session_id": f"s{i}"})
            replies[i] = reply
        record = {"response_id": replies[0]["id"], "value": 0.5}
        async with client.post("/v1/feedback", record) as response:
            assert response.status == 201
        loop.ahead_s = 60.0
        await loop.learning.tick()
        client.rows("SELECT 1")
        units = read_units(client.gateway.journal, "r", loop.learning.settings.feedback, now=4e9,
                           experiment="x1")  # fmt: skip
    texts = [r["choices"][0]["message"]["content"] for r in replies.values()]
    assert [u.outcome for u in units] == [0.5, *(float(" " in t) for t in texts[1:])]
    assert [u.has_feedback for u in units] == [True, *[False] * 5]  # silence stays silence
