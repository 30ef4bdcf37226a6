"""One contract for a journal in a file and one on a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import Where
from tests.store.driver import (
    MODEL,
    PRICES,
    CountingServer,
    ServerLM,
    Settings,
    learn,
    result_of,
    run_whole,
)
from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import BudgetError, ChangedSettingsError, ConfigError, StoreError
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task, Usage
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.store.budget import Budget, Ledger
from tfgrpo.store.calls import CallEnd, CallStart
from tfgrpo.store.forking import fork_run
from tfgrpo.testing import check_recorder

SETTINGS = Settings()


def group(name: str = "g", stage: str = "practice", n: int = 3) -> RolloutGroup:
    rollouts = tuple(
        Rollout(f"{name}-{i}", "t", (Step(Message("assistant", f"answer {i}")),), sample_index=i)
        .graded(Score(float(i % 2), feedback="f" * 6000))
        for i in range(n)
    )  # fmt: skip
    return RolloutGroup(
        name,
        Task("t", "a prompt", reference="r"),
        rollouts,
        Context((ContextPart("lesson", "be brief"),)),
        "policy",
        {"stage": stage, "verifier_id": "v"},
    )


def test_a_run_is_the_same_wherever_it_is_kept(where: Where, tmp_path: Path) -> None:
    server = CountingServer()
    result = run_whole(where("run"), server, SETTINGS)
    in_a_file = run_whole(tmp_path / "reference", CountingServer(), SETTINGS)
    assert result == in_a_file
    with Journal.open(tmp_path / "reference", readonly=True) as store:
        expected = store.state()
    with Journal.open(where("run"), readonly=True) as store:
        state = store.state()
        assert result_of(store) == in_a_file
        assert store.ledger.spent["calls"] == 26
    for name in ("sessions", "interruptions", "rollouts", "outcomes", "truncated", "groups",
                 "library_id", "library", "decisions"):  # fmt: skip
        assert getattr(state, name) == getattr(expected, name), name
        assert type(getattr(state, name)) is type(getattr(expected, name)), name
    before = dict(server.received)
    assert run_whole(where("run"), server, SETTINGS) == in_a_file
    assert server.received == before and set(before.values()) == {1}


def test_what_is_recorded_is_found(where: Where) -> None:
    with Journal.open(where("run"), create=True) as store:
        check_recorder(store, group())
        assert list(store.groups()) == [group()]
        assert list(store.groups("gate")) == []
    with Journal.open(where("run")) as store:
        assert store.is_resumed
        store.record_group(group())
        assert list(store.groups("practice")) == [group()]
        rows = store._writer.read("SELECT count(*) FROM groups UNION ALL"
                                  " SELECT count(*) FROM rollouts")  # fmt: skip
        assert rows == [(1,), (3,)]


def test_the_newest_record_of_a_rollout_counts(where: Where) -> None:
    failed = Rollout("g-0", "t").failed("provider_failed", "down")
    done = group().rollouts[0]
    with Journal.open(where("run"), create=True) as store:
        store.record_rollout(failed, group_id="g", verifier_id="v")
        assert store.find_rollout("g-0", "v") is None
        store.record_rollout(done, group_id="g", verifier_id="v")
        assert store.find_rollout("g-0", "v") == done
        assert dict(store.state().outcomes) == {"graded": 1}


@pytest.mark.parametrize("stage", ["practice", "test"])
def test_a_failed_rollout_of_a_closed_group_stays_where_others_build_on_it(
    where: Where, stage: str
) -> None:
    failed = replace(group().rollouts[0].failed("provider_failed", "down"), score=None)
    with Journal.open(where("run"), create=True) as store:
        store.record_group(replace(group(stage=stage), rollouts=(failed,)))
        found = store.find_rollout("g-0", "v")
    assert (found == failed) is (stage == "practice")


@pytest.mark.parametrize(
    "name", ["\ud800 alone", "nul \x00 inside", "\x01", "\x01\x02 \x01\x01", "ünï 漢", "\x00json:x"]
)
def test_odd_names_come_back_as_they_were(where: Where, name: str) -> None:
    odd = replace(group(name), metadata={"stage": name, "verifier_id": name})
    with Journal.open(where("run"), create=True) as store:
        store.record_group(odd)
        store.record_decision(name, {"what": name}, key=name)
        store.record_library(name, [name])
        store.calls.count_hit(name, name)
    with Journal.open(where("run")) as store:
        assert [g.group_id for g in store.groups(name)] == [name]
        assert store.find_rollout(f"{name}-1", name) == odd.rollouts[1]
        assert store.decisions(name) == [(name, {"what": name})]
        assert store.libraries() == [(name, [name])]
        assert [(r.stage, r.model, r.hits) for r in store.spend()] == [(name, name, 1)]
        assert store.damaged == []


def test_decisions_and_libraries_are_kept_once_while_they_stay_equal(where: Where) -> None:
    with Journal.open(where("run"), create=True) as store:
        for payload in (1, 1, 2, 1):
            store.record_decision("kind", payload, key="k")
            store.record_library(f"v{payload}", [payload])
        store.record_decision("kind", 1)
        store.record_decision("kind", 1)
        assert store.decisions("kind") == [("k", 1), ("k", 2), ("k", 1), ("", 1), ("", 1)]
        assert store.libraries() == [("v1", [1]), ("v2", [2]), ("v1", [1])]
        assert store.state().library_id == "v1"


def test_a_row_that_nothing_can_hold_is_set_aside_and_the_rest_is_written(
    where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    hit = "INSERT INTO hits VALUES (?, ?, ?)"
    with Journal.open(where("run"), create=True) as store:
        with caplog.at_level(logging.ERROR):
            store._writer.commit_now(
                [(hit, ("s", "m", 1)), (hit, ("s", "m", 2**70)), (hit, ("s", "m", 4))]
            )
        assert store.spend()[0].hits == 5
        ((table, why),) = store._writer.read("SELECT tbl, why FROM set_aside")
    assert table == "hits" and "could not be written" in why
    assert "set aside" in caplog.text


def test_a_damaged_value_is_a_miss_and_named(where: Where) -> None:
    with Journal.open(where("run"), create=True) as store:
        store.record_library("v0", ["sound"])
        store._writer.commit_now(
            [("INSERT INTO libraries (version_id, at, body, digest) VALUES (?, ?, ?, ?)",
              ("v1", 0.0, b"[1]", b"0" * 16))]
        )  # fmt: skip
        assert store.libraries() == [("v0", ["sound"])]
        assert store.state().library_id == "v0"
        assert len(store.damaged) == 1 and "does not match its digest" in store.damaged[0]
    with Journal.open(where("run")) as store:
        assert store.libraries() == [("v0", ["sound"])]
        assert store.damaged == []  # told once


def test_changed_settings_are_refused_and_a_fork_takes_over_what_fits(where: Where) -> None:
    server = CountingServer()
    run_whole(where("run"), server, SETTINGS)
    changed = replace(SETTINGS, verifier_id="even-2")
    with pytest.raises(ChangedSettingsError, match="verifier: 'even-1' -> 'even-2'"):
        Journal.open(where("run"), config=changed.to_config())
    before = dict(server.received)
    with fork_run(where("run"), changed.to_config()) as store:
        assert "-fork1" in str(store.place)
        asyncio.run(learn(store, server, changed))
        forked = result_of(store)
        assert len(store.decisions("fork")) == 1
    assert {k: server.received[k] for k in before} == before
    fresh = run_whole(where("fresh"), CountingServer(), changed)
    assert (forked.library, forked.groups) == (fresh.library, fresh.groups)
    with fork_run(where("run"), changed.to_config()) as store:
        assert "-fork2" in str(store.place)


def test_a_second_learner_is_refused_by_name_until_the_first_is_gone(where: Where) -> None:
    first = Journal.open(where("run"), create=True)
    with pytest.raises(StoreError, match=r"in use by this process \(pid \d+ on host"):
        Journal.open(where("run"))
    first.record_decision("kind", 1)
    first.abandon()
    with Journal.open(where("run")) as store:
        assert store.decisions("kind") == [("", 1)]
        assert (store.state().sessions, store.state().interruptions) == (2, 1)


def test_looking_beside_a_writer_changes_nothing(where: Where) -> None:
    with pytest.raises(StoreError, match="there is no run"):
        Journal.open(where("run"), readonly=True)
    with Journal.open(where("run"), create=True) as store:
        store.record_group(group())
        with Journal.open(where("run"), readonly=True) as beside:
            assert list(beside.groups()) == [group()]
            assert beside.spend() == []
        store.record_decision("kind", 1)


def test_a_cap_holds_over_sessions_and_can_be_raised(where: Where) -> None:
    server = CountingServer()
    for cap in (7, 15):
        with Journal.open(where("run"), create=True, budget=Budget(calls=cap)) as store:
            with pytest.raises(BudgetError, match="calls") as refused:
                asyncio.run(learn(store, server, SETTINGS))
            assert refused.value.resource == "calls"
            assert store.ledger.spent["calls"] == cap
            assert set(store.ledger.reserved.values()) == {0.0}
        assert sum(server.received.values()) == cap
    with Journal.open(where("run"), budget=Budget(calls=26)) as store:
        asyncio.run(learn(store, server, SETTINGS))
    assert set(server.received.values()) == {1}


class _Hanging(ServerLM):
    """Answers nothing until it is told."""

    def __init__(self, server: CountingServer) -> None:
        super().__init__(server)
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        self.asked.set()
        await self.go_on.wait()
        return await super().complete(request, n, seeds)


def ask(text: str = "q") -> Request:
    return Request((Message("user", text),), sampling=Sampling(max_tokens=8))


async def test_a_cancelled_call_is_booked_and_asked_again(where: Where) -> None:
    lm = _Hanging(CountingServer())
    with Journal.open(where("run"), create=True, budget=Budget(cost_usd=1.0)) as store:
        journaled = JournaledLM(lm, store, prices=PRICES)
        task = asyncio.create_task(journaled.complete(ask(), 1, [0]))
        await lm.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        lm.go_on.set()
        await journaled.complete(ask(), 1, [0])
        store._writer.flush()
        (row,) = store.spend()
        assert (row.booked.calls, row.usage.calls) == (1, 1)
        worst_and_real = (row.booked.cost_usd or 0) + (row.usage.cost_usd or 0)
        assert store.ledger.spent["cost_usd"] == pytest.approx(worst_and_real)
    with Journal.open(where("run"), readonly=True) as store:
        assert store.ledger.spent["cost_usd"] == pytest.approx(worst_and_real)


async def test_a_call_that_is_cancelled_before_it_is_sent_costs_nothing(where: Where) -> None:
    server = CountingServer()
    with Journal.open(where("run"), create=True) as store:
        start = CallStart(b"k" * 32, "s", MODEL, "r", 1, 5, 8, 1e-5)
        task = asyncio.create_task(store.calls.claim(start, (b"k" * 32,)))
        await asyncio.sleep(0)  # handed over
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        claim = await _when_claimed(store, start)
        assert claim is not None
        await store.calls.end(claim, CallEnd("rejected", Usage(calls=1), 0.1))
        (row,) = store.spend()
        assert (row.usage.calls, row.booked.calls) == (1, 0)
    assert not server.received


async def _when_claimed(store: Journal, start: CallStart) -> int | None:
    for _ in range(200):
        claim = await store.calls.claim(start, (start.key,))
        if claim.call is not None:
            return claim.call
        await asyncio.sleep(0.05)
    return None


async def test_equal_calls_at_once_are_one_call(where: Where) -> None:
    server = CountingServer()
    with Journal.open(where("run"), create=True) as store:
        lm = JournaledLM(ServerLM(server), store, prices=PRICES)
        replies = await asyncio.gather(*(lm.complete(ask(), 1, [0]) for _ in range(20)))
        assert len({r[0].text for r in replies}) == 1
    assert sum(server.received.values()) == 1


async def test_without_the_cache_it_is_asked_again_and_kept_all_the_same(where: Where) -> None:
    server = CountingServer()
    with Journal.open(where("run"), create=True) as store:
        for _ in range(2):
            await JournaledLM(ServerLM(server), store, cache=False).complete(ask(), 1, [0])
        assert len(store._writer.read("SELECT key FROM completions")) == 2
    assert sum(server.received.values()) == 2


async def test_a_damaged_reply_is_asked_for_again(where: Where) -> None:
    server = CountingServer()
    lm = ServerLM(server)
    with Journal.open(where("run"), create=True) as store:
        await JournaledLM(lm, store).complete(ask(), 1, [0])
        ((key,),) = store._writer.read("SELECT key FROM completions")
    with Journal.open(where("damaged"), create=True) as store:
        store._writer.commit_now(
            [("INSERT INTO completions (key, call, finish, body, digest) VALUES (?, ?, ?, ?, ?)",
              (key, None, "stop", b"{}", b"0" * 16))]
        )  # fmt: skip
    with Journal.open(where("damaged")) as store:
        await JournaledLM(lm, store).complete(ask(), 1, [0])
        assert len(store.damaged) == 1
    with Journal.open(where("damaged")) as store:
        await JournaledLM(lm, store).complete(ask(), 1, [0])
    assert sum(server.received.values()) == 2


def test_time_of_earlier_sessions_counts(where: Where) -> None:
    now = [0.0]
    with Journal.open(where("run"), create=True, budget=Ledger(clock=lambda: now[0])) as store:
        now[0] = 40.0
        assert store.ledger.spent["seconds"] == 40.0
    with Journal.open(where("run"), readonly=True) as store:
        assert store.state().seconds == pytest.approx(40.0)


def test_settings_are_kept_without_secrets(where: Where) -> None:
    config = {"lm": "x", "url": "https://me:canary-secret-77@host/v1"}
    with Journal.open(where("run"), create=True, config=config) as store:
        assert "canary" not in str(store.config) and store.config is not None
        assert store.config["lm"] == "x"


def test_a_value_without_a_json_form_is_refused(where: Where) -> None:
    with (
        Journal.open(where("run"), create=True) as store,
        pytest.raises(ConfigError, match="cannot be kept as JSON"),
    ):
        store.record_decision("kind", float("nan"))


def test_a_library_as_large_as_it_gets_comes_back(where: Where) -> None:
    payload: Any = {"entries": ["ä" * 1000] * 3000}
    with Journal.open(where("run"), create=True) as store:
        store.record_library("v", payload)
        assert store.libraries() == [("v", payload)]
