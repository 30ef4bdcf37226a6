"""Crashes, caps and changed settings in any order against a run that was never stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.driver import (
    CountingServer,
    Result,
    Settings,
    learn,
    result_of,
    run_whole,
    scratch,
)
from tfgrpo.errors import BudgetError, ConfigError
from tfgrpo.store.budget import Budget
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.forking import fork_run
from tfgrpo.store.journal import Journal
from tfgrpo.store.rows import Statement

CRASH = st.tuples(st.integers(1, 110), st.booleans())
"""(rows until the process dies, whether the transaction that holds the last one gets through)"""


class Died(BaseException):
    """The process is gone."""


def doom(store: Journal, rows: int, gets_through: bool) -> None:
    """Let the store die when so many rows were handed over in this session."""
    writer: DatabaseWriter = store._writer
    write, state = writer._write, {"left": rows, "dead": False}

    def dying(batch: Sequence[Statement]) -> None:
        if threading.current_thread() is not threading.main_thread():
            # the journal's own thread, on a slow machine: there is no loop here to die with
            if not state["dead"]:
                state["left"] = max(1, state["left"] - len(batch))
                write(batch)
            return None
        if not state["dead"] and len(batch) < state["left"]:
            state["left"] -= len(batch)
            return write(batch)
        if not state["dead"] and gets_through:
            write(batch)
        state["dead"] = True
        for task in asyncio.all_tasks():
            task.cancel()
        raise Died

    writer._write = dying  # type: ignore[method-assign]


def run_until_death(
    folder: Path, server: CountingServer, given: Settings, rows: int, gets_through: bool
) -> bool:
    """Run one session; return whether it died."""
    store = Journal.open(folder, create=True, config=given.to_config(), budget=given.budget)
    doom(store, rows, gets_through)

    async def session() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await learn(store, server, given)

    try:
        asyncio.run(session())
    except (Died, asyncio.CancelledError, BaseExceptionGroup):
        store.abandon()
        return True
    store.abandon()  # finished, and killed before it could say so
    return False


def committed_keys(folder: Path) -> set[str]:
    with Journal.open(folder, readonly=True) as store:
        return {key.hex() for (key,) in store._writer.read("SELECT key FROM completions")}


REFERENCE: dict[Settings, Result] = {}


def reference(given: Settings) -> Result:
    plain = replace(given, concurrency=4, budget=Budget())
    if plain not in REFERENCE:
        with scratch() as folder:
            REFERENCE[plain] = run_whole(Path(folder) / "run", CountingServer(), plain)
    return REFERENCE[plain]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    crashes=st.lists(CRASH, min_size=1, max_size=4),
    concurrency=st.integers(1, 6),
    group_size=st.integers(2, 4),
    caps=st.lists(st.integers(1, 24), max_size=2),
)
def test_a_run_killed_anywhere_ends_like_one_that_was_not_and_pays_nothing_twice(
    crashes: list[tuple[int, bool]], concurrency: int, group_size: int, caps: list[int]
) -> None:
    given = Settings(group_size=group_size, concurrency=concurrency)
    server = CountingServer()
    paid: list[tuple[set[str], dict[str, int]]] = []
    deaths = 0
    with scratch() as root:
        folder = Path(root) / "a run"
        for rows, gets_through in crashes:
            deaths += run_until_death(folder, server, given, rows, gets_through)
            paid.append((committed_keys(folder), dict(server.received)))
        for calls in caps:
            capped = Budget(calls=calls)
            before = sum(server.received.values())
            with Journal.open(folder, config=given.to_config(), budget=capped) as store:
                already = store.ledger.spent["calls"]
                try:
                    asyncio.run(learn(store, server, given))
                except BudgetError as exc:
                    assert exc.resource == "calls"
                assert store.ledger.spent["calls"] <= max(calls, already)
                assert set(store.ledger.reserved.values()) == {0.0}
            assert sum(server.received.values()) - before <= max(0, calls - already)
            paid.append((committed_keys(folder), dict(server.received)))
        result = run_whole(folder, server, given)
        with Journal.open(folder, readonly=True) as store:
            rows = store.spend()
    for kept, received in paid:
        assert {k: server.received[k] for k in kept} == {k: received.get(k, 0) for k in kept}
    asked = sum(server.received.values())
    assert asked - len(server.received) <= deaths * concurrency
    settled = sum(row.usage.calls for row in rows)
    booked = sum(row.booked.calls for row in rows)
    assert settled <= asked <= settled + booked
    settled_usd = sum(row.usage.cost_usd or 0.0 for row in rows)
    booked_usd = sum(row.booked.cost_usd or 0.0 for row in rows)
    assert settled_usd - 1e-12 <= server.cost_usd <= settled_usd + booked_usd + 1e-12
    assert booked <= deaths * concurrency
    assert result == reference(given)


CHANGE = st.sampled_from(
    [{"temperature": 0.9}, {"verifier_id": "even-2"}, {"model": "http://server/v1#other"}]
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(crash=CRASH, change=CHANGE)
def test_changed_settings_are_refused_by_name_and_a_fork_pays_for_the_difference_alone(
    crash: tuple[int, bool], change: dict[str, object]
) -> None:
    given, server = Settings(), CountingServer()
    changed = replace(given, **change)  # type: ignore[arg-type]
    with scratch() as root:
        folder = Path(root) / "run"
        run_until_death(folder, server, given, *crash)
        kept, received = committed_keys(folder), dict(server.received)
        fresh = run_whole(Path(root) / "fresh", CountingServer(), changed)
        if not kept:  # nothing came of it yet: the settings may still be put right
            result = run_whole(folder, server, changed)
            assert (result.library, result.groups) == (fresh.library, fresh.groups)
            return
        name = {"verifier_id": "verifier"}.get(next(iter(change)), next(iter(change)))
        with pytest.raises(ConfigError, match=f"{name}: .* -> "):
            Journal.open(folder, config=changed.to_config())
        with fork_run(folder, changed.to_config()) as store:
            assert store.folder == folder.with_name("run-fork1")
            asyncio.run(learn(store, server, changed))
            forked = result_of(store)
        assert (forked.library, forked.groups) == (fresh.library, fresh.groups)
        assert {k: server.received[k] for k in kept} == {k: received[k] for k in kept}
        if change == {"verifier_id": "even-2"}:  # the same replies, judged again
            new = {k for k in server.received if k not in received}
            assert len(new) <= len(reference(given).groups) * given.group_size + 2 - len(kept)


@pytest.mark.parametrize("sample", range(10))
def test_b03_every_derived_figure_survives_a_kill_after_each_of_ten_samples(
    sample: int, tmp_path: Path
) -> None:
    given = Settings(tasks=10, group_size=1, steps=1, concurrency=1)
    whole = run_whole(tmp_path / "whole", CountingServer(), given)
    server = CountingServer()
    rows = 3 + (sample + 1) * 4
    died = run_until_death(tmp_path / "run", server, given, rows, True)
    with Journal.open(tmp_path / "run", readonly=True) as store:
        assert 0 < store.state().rollouts <= sample + 2
    assert run_whole(tmp_path / "run", server, given) == whole
    states = []
    for name in ("run", "whole"):
        with Journal.open(tmp_path / name, readonly=True) as store:
            states.append(store.state())
    assert states[0].outcomes == states[1].outcomes
    assert states[0].outcomes["truncated"] == states[0].truncated == states[1].truncated > 0
    assert died
    assert (states[0].interruptions, states[1].interruptions) == (1, 0)
    assert set(server.received.values()) == {1}
