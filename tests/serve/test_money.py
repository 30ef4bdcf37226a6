"""Caps: exact under concurrency, after a restart, and told apart from what may be tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.serve.conftest import Start
from tfgrpo.errors import ConfigError
from tfgrpo.serve.access.caps import KeyCaps, Scope, Spent
from tfgrpo.serve.access.keys import hash_key, new_key
from tfgrpo.serve.settings import BudgetSettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

USAGE = {"prompt_tokens": 10, "completion_tokens": 100, "total_tokens": 110}
# At $1 and $2 a million: $0.00021 a call. Worst case: the body's bytes / 4, and max_tokens = 100.
COST = 0.00021


async def test_sixty_four_clients_at_once_never_pass_a_cap(start: Start) -> None:
    cap = 20.5 * COST
    with FaultServer(answers.say("x", usage=USAGE).after(0.02)) as upstream:
        client = await start(upstream, routes={"r": {"budget": {"usd_per_day": cap}}})
        asked = [client.chat(f"question {i}", max_tokens=100) for i in range(64)]
        replies = await asyncio.gather(*asked)
    spent = client.rows("SELECT sum(cost_usd) FROM results")[0][0]
    codes = [r[1]["error"]["code"] for r in replies if r[0] != 200]
    assert spent <= cap + 1e-12
    assert sum(r[0] == 200 for r in replies) == upstream.call_count
    assert upstream.call_count >= 18  # what fits, less one worst case
    assert set(codes) == {"budget_exceeded"}
    headers = next(r[2] for r in replies if r[0] != 200)
    assert headers["x-should-retry"] == "false"
    message = next(r[1]["error"]["message"] for r in replies if r[0] != 200)
    assert "route:r" in message and "resets at" in message


async def test_a_cap_holds_over_a_restart(start: Start, tmp_path: Path) -> None:
    with FaultServer(answers.say("x", usage=USAGE)) as upstream:
        first = await start(upstream, routes={"r": {"budget": {"usd_total": 3.9 * COST}}})
        for _ in range(3):
            assert (await first.chat(max_tokens=100))[0] == 200
        assert (await first.chat(max_tokens=100))[0] == 429
        await first.running.stop(0.0)
        again = await start(upstream, routes={"r": {"budget": {"usd_total": 3.9 * COST}}})
        status, reply, _ = await again.chat(max_tokens=100)
    assert (status, reply["error"]["type"]) == (429, "insufficient_quota")
    assert "does not reset" in reply["error"]["message"]


async def test_a_refused_call_is_not_sent_and_leaves_no_row(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(upstream, routes={"r": {"budget": {"usd_total": 1e-9}}})
        status, _, _ = await client.chat(max_tokens=100)
        capped, reply, _ = await client.chat(max_tokens=100, tfgrpo={"max_cost_usd": 1e-9})
    assert status == capped == 429 and reply["error"]["code"] == "budget_exceeded"
    assert upstream.call_count == 0 and client.rows("SELECT count(*) FROM requests") == [(0,)]


async def test_under_a_money_cap_the_longest_reply_is_limited_upstream(start: Start) -> None:
    with FaultServer() as upstream:
        client = await start(
            upstream, routes={"r": {"budget": {"usd_total": 1.0}, "max_reply_tokens": 77}}
        )
        await client.chat()
        await client.chat(max_tokens=5)
    assert [c.body["max_tokens"] for c in upstream.calls] == [77, 5]


async def test_keys_and_end_users_have_caps_of_their_own(start: Start) -> None:
    one, two = new_key(), new_key()
    keys = {
        "one": {"hash": hash_key(one), "budget": {"calls_per_day": 3},
                "user_budget": {"calls_per_day": 1}},
        "two": {"hash": hash_key(two)},
    }  # fmt: skip
    with FaultServer() as upstream:
        client = await start(upstream, keys=keys)

        async def ask(key: str, user: str) -> int:
            found = await client.chat(
                headers={"authorization": f"Bearer {key}"}, tfgrpo={"end_user": user}
            )
            return found[0]

        statuses = [await ask(one, u) for u in ("a", "a", "b", "c", "d")]
        assert statuses == [200, 429, 200, 200, 429]
        assert [await ask(two, "a") for _ in range(3)] == [200, 200, 200]
    users = client.rows("SELECT DISTINCT end_user FROM requests")
    assert all(len(u) == 16 and u not in ("a", "b", "c") for (u,) in users)


def test_a_money_cap_over_an_unknown_price_is_refused_at_the_start(tmp_path: Path) -> None:
    from tests.serve.conftest import settings
    from tfgrpo.serve.gateway import Gateway

    found = settings(
        tmp_path,
        upstreams={"a": {"lm": "http://127.0.0.1:9/v1#m", "price": None}},
        routes={"r": {"budget": {"usd_total": 1.0}}},
    )
    with pytest.raises(ConfigError, match="price"):
        Gateway(found)


async def test_a_clock_that_goes_back_never_opens_a_spent_day() -> None:
    day = 20_000
    now = [day * 86_400.0 + 5]
    scope = [Scope("key:x", BudgetSettings(usd_per_day=1.0))]
    caps = KeyCaps([Spent("key:x", day, 0.9, 3)], clock=lambda: now[0])
    now[0] -= 2 * 86_400
    with pytest.raises(ApiError):
        await caps.reserve(scope, 0.2, 1)
    now[0] += 3 * 86_400
    (await caps.reserve(scope, 0.2, 1)).settle({"cost_usd": 0.2, "calls": 1})


async def test_sums_of_ledgers_equal_sums_of_results_under_random_leaving(start: Start) -> None:
    import random

    rng = random.Random(5)
    with FaultServer(answers.say("x", usage=USAGE).after(0.03)) as upstream:
        client = await start(upstream, routes={"r": {"budget": {"usd_total": 1.0}}})

        async def one(i: int) -> None:
            task = asyncio.ensure_future(client.chat(f"q{i}", stream=False, max_tokens=50))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.05)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(i) for i in range(60)))
        async with asyncio.timeout(20):
            while client.gateway.rates.total:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        scope = Scope("route:r", BudgetSettings(usd_total=1.0))
        ((_, _, spent, _),) = client.gateway.caps.standing(scope)
        rows = client.rows(
            "SELECT sum(CASE WHEN r.kind = 'ok' THEN r.cost_usd ELSE c.cost_usd END)"
            " FROM calls c LEFT JOIN results r ON r.call = c.call WHERE coalesce(r.kind, '')"
            " NOT IN ('not_sent', 'rejected')"
        )
    assert spent == pytest.approx(rows[0][0], abs=1e-12)
