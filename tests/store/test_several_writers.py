"""Several writers of one run on a server: one call a draw, one cap, one learner, nobody's ghost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.store.conftest import Where
from tests.store.driver import (
    MODEL,
    PRICES,
    CountingServer,
    EvenVerifier,
    ServerLM,
    Settings,
    learn,
    result_of,
)
from tests.store.postgres_server import PostgresServer, programs
from tests.store.test_both_stores import ask, group
from tfgrpo.errors import BudgetError, ProviderError, StoreError
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import RolloutGroup, Task, Usage
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Journal, JournaledLM, OpenOptions
from tfgrpo.store import journal as journal_module
from tfgrpo.store.budget import UNIT, Budget, Ledger
from tfgrpo.store.calls import CallEnd, CallStart
from tfgrpo.store.postgres.seat import Terms

_SERVER = programs()
pytestmark = pytest.mark.skipif(
    _SERVER is not None and "pgserver" in str(_SERVER),
    reason="these tests were seen to hang on the server of the PyPI package: install PostgreSQL",
)

QUICK = Terms(lease_s=0.4, call_s=0.4, beat_s=0.1)
"""Seats that are lost soon."""


def writer(place: str, terms: Terms | None = None, **parts: Any) -> Journal:
    options = OpenOptions(terms=terms)
    return Journal.open(place, create=True, role="writer", options=options, **parts)


def start(key: bytes = b"k" * 32, cost_usd: float = 1e-5) -> CallStart:
    return CallStart(key, "s", MODEL, "r", 1, 5, 8, cost_usd)


def books(store: Journal) -> dict[str, tuple[int, int, int]]:
    """Return cap, spent and held by resource, in units."""
    rows = store._writer.read(
        "SELECT resource, cap, spent, held FROM tfgrpo.ledgers WHERE run = tfgrpo.run()"
    )
    return {name: (cap, spent, held) for name, cap, spent, held in rows}


async def until(truth: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.02)):
        if truth():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came")


# Calls ----------------------------------------------------------------------------------


async def test_writers_that_want_the_same_replies_pay_for_each_once(on_server: Where) -> None:
    server = CountingServer()
    stores = [writer(on_server("run"), budget=Budget(calls=1000)) for _ in range(3)]
    try:
        lms = [JournaledLM(ServerLM(server), s, prices=PRICES) for s in stores]
        asked = [lm.complete(ask(f"q{i}"), 1, [0]) for i in range(20) for lm in lms]
        texts = [reply[0].text for reply in await asyncio.gather(*asked)]
    finally:
        for store in stores:
            store.close()
    assert set(server.received.values()) == {1} and len(server.received) == 20
    assert all(len({*texts[i : i + 3]}) == 1 for i in range(0, 60, 3))
    with Journal.open(on_server("run"), readonly=True) as store:
        (row,) = store.spend()
        assert (row.usage.calls, row.hits, row.booked.calls) == (20, 40, 0)


async def test_a_draw_is_free_again_when_the_call_that_asked_for_it_has_failed(
    on_server: Where,
) -> None:
    with writer(on_server("run")) as first, writer(on_server("run")) as second:
        mine = await first.calls.claim(start(), (b"k" * 32,))
        assert mine.call is not None
        assert (await second.calls.claim(start(), (b"k" * 32,))).call is None
        await first.calls.end(mine.call, CallEnd("rejected", Usage(calls=1), 0.1))
        theirs = await second.calls.claim(start(), (b"k" * 32,))
        assert theirs.call is not None and theirs.call != mine.call
        # a call without draws asks whatever others do
        assert isinstance(await first.calls.start(start()), int)


async def test_of_several_draws_a_call_gets_those_that_nobody_asks_for(on_server: Where) -> None:
    keys = [bytes([i]) * 32 for i in range(4)]
    with writer(on_server("run")) as first, writer(on_server("run")) as second:
        await first.calls.claim(start(), keys[1:3])
        claim = await second.calls.claim(start(), keys)
        assert claim.call is not None and claim.keys is not None
        assert set(claim.keys) == {keys[0], keys[3]}


class _Together(ServerLM):
    """Draws several at once."""

    prefers_n = True

    async def complete(self, request: Request, n: int, seeds: Any) -> list[Completion]:
        return [(await super(_Together, self).complete(request, 1, [s]))[0] for s in seeds]


async def test_groups_of_draws_that_overlap_are_asked_for_once(on_server: Where) -> None:
    server = CountingServer()
    with writer(on_server("run")) as first, writer(on_server("run")) as second:
        lms = [JournaledLM(_Together(server), s, prices=PRICES) for s in (first, second)]

        async def draws(lm: JournaledLM, n: int) -> list[str]:
            replies: list[Completion] = []
            while len(replies) < n:
                found = await lm.complete(ask(), n, list(range(n)))
                replies = found if len(found) > len(replies) else replies
            return [r.text for r in replies]

        both = await asyncio.gather(draws(lms[0], 6), draws(lms[1], 4))
    assert both[0][:4] == both[1]


async def test_a_writer_that_is_gone_loses_its_draws_at_once_and_its_calls_are_booked(
    on_server: Where,
) -> None:
    first = writer(on_server("run"), budget=Budget(cost_usd=1.0))
    assert (await first.calls.claim(start(cost_usd=0.25), (b"k" * 32,))).call is not None
    first.abandon()
    with writer(on_server("run"), budget=Budget(cost_usd=1.0)) as second:
        assert (await second.calls.claim(start(), (b"k" * 32,))).call is not None
        assert books(second)["cost_usd"] == (UNIT, UNIT // 4, 0)
        assert second.spend()[0].booked.cost_usd == pytest.approx(0.25, abs=1e-4)


async def test_a_frozen_writer_sends_nothing_that_it_no_longer_owns(on_server: Where) -> None:
    patient = Terms(lease_s=0.4, call_s=0.4, beat_s=0.1, send_within_s=0.3)
    with writer(on_server("run"), terms=patient) as store:
        batches: Any = store._writer._batches  # type: ignore[attr-defined]
        once, thawed = batches.once, threading.Event()

        def frozen(*given: Any) -> Any:
            done = once(*given)
            thawed.wait(0.6)  # between the commit and whoever waits for it
            thawed.set()
            return done

        batches.once = frozen
        claim = await store.calls.claim(start(), (b"k" * 32,))
        assert thawed.is_set()
        store._writer.flush()
        numbers = [n for (n,) in store._writer.read("SELECT call FROM calls ORDER BY call")]
        unsent = store._writer.read("SELECT call FROM results WHERE kind = 'not_sent'")
    assert claim.call == numbers[-1] and len(numbers) == 2
    assert unsent == [(numbers[0],)]


def _freeze(store: Journal) -> Callable[[], None]:
    """Stop a writer's signs of life, as a stopped process does; returns what lets it go on."""
    database: Any = store._writer
    batches = database._batches
    go_on, save, beat = threading.Event(), batches.save, batches.beat

    def later(items: Any) -> None:
        go_on.wait(PATIENCE_S)
        save(items)

    batches.save = later
    batches.beat = lambda: go_on.wait(PATIENCE_S) and beat()
    return go_on.set


async def test_a_writer_whose_lease_is_over_is_closed_and_goes_on_with_a_new_session(
    on_server: Where,
) -> None:
    budget = Budget(cost_usd=1.0)
    first = writer(on_server("run"), budget=budget, terms=QUICK)
    with first, writer(on_server("run"), budget=budget, terms=QUICK) as second:
        call = (await first.calls.claim(start(cost_usd=0.5), (b"a" * 32,))).call
        assert call is not None
        thaw, before = _freeze(first), first._writer.session
        await until(lambda: second._writer.read(
            "SELECT count(*) FROM live") == [(1,)])  # fmt: skip
        assert books(second)["cost_usd"][1:] == (UNIT // 2, 0)  # booked at its worst case
        # the reply that comes late is kept, and the booking corrected when it leaves
        ended = asyncio.create_task(
            first.calls.end(call, CallEnd("ok", Usage(calls=1, cost_usd=0.125), 0.1, 1))
        )
        thaw()
        await ended
        again = await first.calls.claim(start(cost_usd=0.25), (b"b" * 32,))
        assert again.call is not None and first._writer.session > before
        await first.calls.end(again.call, CallEnd("ok", Usage(calls=1, cost_usd=0.25), 0.1, 1))
        first.close()
        assert books(second)["cost_usd"] == (UNIT, 3 * UNIT // 8, 0)


async def test_a_draw_of_a_lapsed_writer_is_free_when_its_call_can_no_longer_be_under_way(
    on_server: Where,
) -> None:
    slow = Terms(lease_s=0.3, call_s=1.5, beat_s=0.1)
    first = writer(on_server("run"), terms=slow)
    with first, writer(on_server("run"), terms=slow) as second:
        await first.calls.claim(start(), (b"k" * 32,))
        thaw = _freeze(first)
        await until(lambda: second._writer.read("SELECT count(*) FROM live") == [(1,)])
        assert (await second.calls.claim(start(), (b"k" * 32,))).call is None
        dead = "SELECT dead_at < clock_timestamp() FROM tfgrpo.draws WHERE run = tfgrpo.run()"
        await until(lambda: second._writer.read(dead) == [(True,)])
        assert (await second.calls.claim(start(), (b"k" * 32,))).call is not None
        thaw()


# Money ----------------------------------------------------------------------------------


async def test_a_cap_holds_over_all_writers_and_is_used_up(on_server: Where) -> None:
    server = CountingServer()
    cap = 60
    stores = [writer(on_server("run"), budget=Budget(calls=cap), terms=QUICK) for _ in range(4)]
    refused = 0

    async def spend(number: int, lm: JournaledLM) -> None:
        nonlocal refused
        for i in range(40):
            try:
                await lm.complete(ask(f"{number}/{i}"), 1, [0])
            except BudgetError as exc:
                assert exc.resource == "calls"
                refused += 1
                return

    try:
        lms = [JournaledLM(ServerLM(server), s, prices=PRICES) for s in stores]
        await asyncio.gather(*(spend(n, lm) for n, lm in enumerate(lms)))
        cap_, spent, held = books(stores[0])["calls"]
        assert spent + held <= cap_ == cap * UNIT
    finally:
        for store in stores:
            store.close()
    assert sum(server.received.values()) == cap and refused == 4
    with Journal.open(on_server("run"), readonly=True) as store:
        assert books(store)["calls"] == (cap * UNIT, cap * UNIT, 0)


async def test_what_one_writer_holds_idle_comes_back_to_another(on_server: Where) -> None:
    budget = Budget(calls=10)
    with writer(on_server("run"), budget=budget, terms=QUICK) as first:
        held = await first.reserve(calls=1)
        held.settle(calls=0)  # the rest of its tranche lies idle
        with writer(on_server("run"), budget=budget, terms=QUICK) as second:
            reservation = await second.reserve(calls=10)
            with pytest.raises(BudgetError, match="10 at most"):
                first.ledger.reserve(calls=1)
            reservation.release()
            second.ledger.reserve(calls=1).release()


async def test_money_is_free_again_only_when_the_journal_says_what_a_call_has_cost(
    on_server: Where,
) -> None:
    class Answering(ServerLM):
        async def complete(self, *given: Any) -> list[Completion]:
            thaw.append(_freeze(store))
            return await super().complete(*given)

    thaw: list[Callable[[], None]] = []
    server = CountingServer()
    with writer(on_server("run"), budget=Budget(cost_usd=1.0)) as store:
        lm = JournaledLM(Answering(server), store, prices=PRICES)
        task = asyncio.create_task(lm.complete(ask(), 1, [0]))
        await until(lambda: bool(server.answered))
        await asyncio.sleep(0.05)
        worst = store.ledger.reserved["cost_usd"]
        assert worst > 0.0 and store.ledger.spent["cost_usd"] == 0.0
        thaw[0]()
        await task
        assert store.ledger.reserved["cost_usd"] == 0.0
        assert 0.0 < store.ledger.spent["cost_usd"] < worst


async def test_a_sign_of_life_while_a_run_is_opened_moves_no_money(
    on_server: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(cost_usd=1.0)
    with writer(on_server("run"), budget=budget) as first:
        call = (await first.calls.claim(start(cost_usd=0.5), (b"k" * 32,))).call
        assert call is not None
        await first.calls.end(call, CallEnd("ok", Usage(calls=1, cost_usd=0.5), 0.1, 1))
    looked = journal_module.folding.fold_spend

    def slowly(rows: Any) -> Any:
        found = looked(rows)
        if getattr(rows, "_batches", None) is not None:
            threading.Event().wait(0.5)  # beats pass meanwhile
        return found

    monkeypatch.setattr(journal_module.folding, "fold_spend", slowly)
    with writer(on_server("run"), budget=budget, terms=QUICK) as second:
        assert books(second)["cost_usd"] == (UNIT, UNIT // 2, 0)
        rows = "SELECT overshoot FROM tfgrpo.ledgers WHERE run = tfgrpo.run()"
        assert second._writer.read(rows) == [(0,)]


async def test_late_results_count_once_also_after_the_books_were_made_anew(
    on_server: Where,
) -> None:
    budget = Budget(cost_usd=1.0)
    first = writer(on_server("run"), budget=budget, terms=QUICK)
    with first:
        call = (await first.calls.claim(start(cost_usd=0.5), (b"a" * 32,))).call
        assert call is not None
        thaw = _freeze(first)
        watcher = writer(on_server("run"), budget=budget, terms=QUICK)
        await until(lambda: watcher._writer.read("SELECT count(*) FROM live") == [(1,)])
        watcher.close()
        with writer(on_server("run"), budget=budget, terms=QUICK) as alone:  # counts from the rows
            assert books(alone)["cost_usd"] == (UNIT, UNIT // 2, 0)
            thaw()
            await first.calls.end(call, CallEnd("ok", Usage(calls=1, cost_usd=0.125), 0.1, 1))
            first.close()
            assert books(alone)["cost_usd"] == (UNIT, UNIT // 8, 0)


async def test_writers_under_other_caps_are_refused(on_server: Where) -> None:
    with writer(on_server("run"), budget=Budget(calls=10)) as first:
        with pytest.raises(StoreError, match="under other caps \\(calls 10; asked: calls 11\\)"):
            writer(on_server("run"), budget=Budget(calls=11))
        with writer(on_server("run")) as second:  # takes the run's
            assert second.ledger.budget.calls == 10
        first.ledger.reserve(calls=10).release()
    with writer(on_server("run"), budget=Budget(calls=11)) as alone:
        assert books(alone)["calls"][0] == 11 * UNIT


async def test_an_overdrawn_call_is_seen_by_all(on_server: Where) -> None:
    budget = Budget(cost_usd=1.0)
    with writer(on_server("run"), budget=budget, terms=QUICK) as first:
        reservation = await first.reserve(cost_usd=0.5)
        call = (await first.calls.claim(start(cost_usd=0.5), (b"k" * 32,))).call
        assert call is not None
        reservation.settle(cost_usd=1.5)
        await first.calls.end(call, CallEnd("ok", Usage(calls=1, cost_usd=1.5), 0.1, 1))
        with writer(on_server("run"), budget=budget, terms=QUICK) as second:
            await until(lambda: books(second)["cost_usd"][1] >= 1.5 * UNIT)
            with pytest.raises(BudgetError, match=r"1\.5 spent"):
                await second.reserve(cost_usd=0.01)


# Deciding and sharing ------------------------------------------------------------------


def test_a_learner_may_have_writers_beside_it_and_no_second_learner(on_server: Where) -> None:
    with Journal.open(on_server("run"), create=True) as learner, writer(on_server("run")) as other:
        with pytest.raises(StoreError, match="its lease ends in"):
            Journal.open(on_server("run"))
        other.record_group(group())
        other._writer.flush()
        assert list(learner.groups()) == [group()]
        assert learner.find_rollout("g-0", "v") == group().rollouts[0]
        assert (learner.state().sessions, learner.state().interruptions) == (1, 0)


async def test_a_learner_whose_place_was_taken_keeps_what_is_paid_and_decides_nothing(
    on_server: Where,
) -> None:
    first = Journal.open(on_server("run"), create=True, options=OpenOptions(terms=QUICK))
    call = (await first.calls.claim(start(), (b"k" * 32,))).call
    assert call is not None
    thaw = _freeze(first)
    watcher = writer(on_server("run"), terms=QUICK)
    await until(lambda: watcher._writer.read("SELECT count(*) FROM live") == [(1,)])
    with watcher, Journal.open(on_server("run")) as second:
        thaw()
        await first.calls.end(call, CallEnd("ok", Usage(calls=1), 0.1, 1))
        with pytest.raises(StoreError, match="in use by"):
            first.record_decision("kind", "late")
        with pytest.raises(StoreError, match="in use by"):
            await first.calls.claim(start(), (b"b" * 32,))
        second.record_decision("kind", "mine")
        first.close()
        assert second.decisions("kind") == [("", "mine")]
        assert second.spend()[0].usage.calls == 1


def test_a_group_is_made_by_one_writer_until_it_is_closed_or_gone(on_server: Where) -> None:
    with writer(on_server("run")) as second:
        first = writer(on_server("run"))
        assert first.lease_group("g", "v") and first.lease_group("g", "v")
        assert not second.lease_group("g", "v")
        assert second.lease_group("g", "another")
        first.record_group(group())
        first._writer.flush()
        assert second.lease_group("g", "v")  # closed: what failed in it may be made anew
        assert first.lease_group("h", "v")
        first.close()
        assert second.lease_group("h", "v")


async def test_two_processes_that_sample_the_same_groups_share_them(on_server: Where) -> None:
    server = CountingServer()
    tasks = [Task(f"t{i}", f"question {i}") for i in range(10)]

    async def sample(store: Journal) -> list[RolloutGroup]:
        lm = JournaledLM(_Slow(server), store, prices=PRICES)
        policy = ChatPolicy(lm, sampling=Sampling(0.7, max_tokens=8))
        sampler = Sampler(policy, EvenVerifier(), SampleSettings(4, probe=0), recorder=store)
        return await sampler.groups(tasks, GroupSpec(3, stage="eval"))

    with writer(on_server("run")) as first, writer(on_server("run")) as second:
        found = await asyncio.gather(sample(first), sample(second))
        assert found[0] == found[1]
        rows = "SELECT count(*), count(DISTINCT rollout_id) FROM rollouts"
        assert first._writer.read(rows) == [(30, 30)]
        made = "SELECT count(DISTINCT session) FROM calls"
        assert first._writer.read(made) == [(2,)]
    assert set(server.received.values()) == {1} and len(server.received) == 30


def test_time_in_which_several_are_at_work_counts_once(on_server: Where) -> None:
    now = [0.0]
    stores = [writer(on_server("run"), budget=Ledger(clock=lambda: now[0])) for _ in range(3)]
    now[0] = 50.0
    for store in stores:
        store.close()
    with Journal.open(on_server("run"), readonly=True) as store:
        assert 50.0 <= store.state().seconds < 60.0


# Breaking ----------------------------------------------------------------------------------


def test_a_connection_that_breaks_in_a_commit_writes_each_row_once(on_server: Where) -> None:
    hit = "INSERT INTO hits VALUES (?, ?, ?)"
    with writer(on_server("run")) as store:
        batches: Any = store._writer._batches  # type: ignore[attr-defined]
        lost = {"left": 2}
        write = batches._write

        def breaking(connection: Any, *rest: Any) -> None:
            write(connection, *rest)
            if lost["left"]:
                lost["left"] -= 1
                if lost["left"]:  # committed, and the answer lost
                    connection.execute("COMMIT")
                connection.close()
                connection.execute("SELECT 1")

        batches._write = breaking
        store._writer.commit_now([(hit, ("s", "m", 1))])
        store._writer.commit_now([(hit, ("s", "m", 2))])
        assert store.spend()[0].hits == 3
    assert lost["left"] == 0


@pytest.mark.real
def test_the_server_may_be_killed_under_a_run(postgres: PostgresServer) -> None:
    address = f"{postgres.new_database()}#run"
    counting, given = CountingServer(), Settings(tasks=6, group_size=4, steps=3)
    done = threading.Event()

    def killing() -> None:
        while not done.wait(0.3):
            postgres.kill()
            postgres.start()

    with Journal.open(address, create=True, budget=Budget(calls=500)) as store:
        thread = threading.Thread(target=killing)
        thread.start()
        try:
            asyncio.run(learn(store, counting, given, _Slow(counting)))
            found = result_of(store)
        finally:
            done.set()
            thread.join()
    assert set(counting.received.values()) == {1}
    assert len(found.groups) == 18 and len(found.library) == 3
    with Journal.open(address, readonly=True) as store:
        assert result_of(store) == found
        assert sum(r.usage.calls for r in store.spend()) == sum(counting.received.values())


class _Slow(ServerLM):
    async def complete(self, request: Request, n: int, seeds: Any) -> list[Completion]:
        await asyncio.sleep(0.02)
        return await super().complete(request, n, seeds)


_CHILD = """
import asyncio, sys
from tests.store.driver import CountingServer, ServerLM, PRICES
from tests.store.test_both_stores import ask
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.store import journal as journal_module
from tfgrpo.store.budget import Budget

class Waits(ServerLM):
    async def complete(self, *given):
        print("asked", flush=True)
        await asyncio.sleep(1000)

async def main():
    store = Journal.open(sys.argv[1], create=True, budget=Budget(cost_usd=1.0))
    await JournaledLM(Waits(CountingServer()), store, prices=PRICES).complete(ask(), 1, [0])

asyncio.run(main())
"""


@pytest.mark.real
def test_after_kill_9_the_same_machine_goes_on_at_once(on_server: Where) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, on_server("run")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None and child.stdout.readline() == b"asked\n"
    with pytest.raises(StoreError, match=f"in use by process {child.pid}"):
        Journal.open(on_server("run"))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    server = CountingServer()
    with Journal.open(on_server("run"), budget=Budget(cost_usd=1.0)) as store:
        lm = JournaledLM(ServerLM(server), store, prices=PRICES)
        asyncio.run(lm.complete(ask(), 1, [0]))
        (row,) = store.spend()
        assert (row.booked.calls, row.usage.calls) == (1, 1)
        assert store.state().interruptions == 1


async def test_a_provider_that_fails_leaves_nothing_held(on_server: Where) -> None:
    class Failing(ServerLM):
        async def complete(self, *given: Any) -> list[Completion]:
            raise ProviderError("down", kind="overloaded", status=503)

    with writer(on_server("run"), budget=Budget(calls=5)) as store:
        lm = JournaledLM(Failing(CountingServer()), store, prices=PRICES)
        for _ in range(5):
            with pytest.raises(ProviderError):
                await lm.complete(ask(), 1, [0])
        with pytest.raises(BudgetError):
            await lm.complete(ask(), 1, [0])
        assert set(store.ledger.reserved.values()) == {0.0}
