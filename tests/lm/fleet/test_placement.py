"""Placement: keys stay, loads stay bounded, and a server that leaves moves its own keys only."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis
from hypothesis import strategies as st

from tfgrpo.lm.fleet.hedging import Hedging
from tfgrpo.lm.fleet.placement import Placement, affinity_key, capacity, preference
from tfgrpo.runtime.call_scope import CallScope

SERVERS = [f"http://h{i}:8000/v1" for i in range(8)]


def test_a_server_that_leaves_moves_its_own_keys_only() -> None:
    keys = [f"k{i}" for i in range(2000)]
    before = {k: preference(k, SERVERS)[0] for k in keys}
    after = {k: preference(k, SERVERS[1:])[0] for k in keys}
    moved = {k for k in keys if before[k] != after[k]}
    assert moved == {k for k in keys if before[k] == SERVERS[0]}
    # each server is best for an eighth: 250 of 2,000, five standard deviations either way
    assert all(180 < n < 320 for n in Counter(before.values()).values())


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=400),
    st.integers(1, 4),
)
def test_no_server_passes_its_bound_as_long_as_any_has_room(
    events: list[tuple[int, bool]], room: int
) -> None:
    placement = Placement(1.25, room)
    loads = dict.fromkeys(SERVERS[:5], 0.0)
    running: list[str] = []
    for key, ends in events:
        if ends and running:
            loads[running.pop(key % len(running))] -= 1
            continue
        limit = capacity(sum(loads.values()), len(loads), 1.25, room)
        first = placement.order(f"k{key}", loads)[0]
        assert loads[first] < limit
        loads[first] += 1
        running.append(first)


def test_a_key_stays_where_it_went_and_leaves_only_a_full_server() -> None:
    placement = Placement(1.25, room=4)
    loads = dict.fromkeys(SERVERS, 0.0)
    home = placement.order("task", loads)[0]
    assert home == preference("task", SERVERS)[0]
    loads = dict.fromkeys(SERVERS, 1.0)
    assert placement.order("task", loads)[0] == home
    full = {**dict.fromkeys(SERVERS, 0.0), home: 9.0}
    order = placement.order("task", full)
    assert order[0] != home and order[-1] == home and sorted(order) == sorted(SERVERS)
    assert placement.order("task", dict.fromkeys(SERVERS, 0.0))[0] == home
    del loads[home]
    moved = placement.order("task", loads)[0]
    assert moved != home
    assert placement.order("task", dict.fromkeys(SERVERS, 0.0))[0] == moved


def test_groups_of_draws_share_a_server_and_the_load_stays_even() -> None:
    """A closed loop of 96 calls over 8 equal servers, groups of 8 draws, exponential times."""
    rng = random.Random(4)
    placement, loads = Placement(1.25, 16), dict.fromkeys(SERVERS, 0.0)
    calls = [f"t{i // 8}" for i in range(16_000)]
    homes: dict[str, Counter[str]] = {}
    served: Counter[str] = Counter()
    running: list[tuple[float, str]] = []
    now = 0.0
    for key in calls:
        if len(running) == 96:
            running.sort()
            now, done = running.pop(0)
            loads[done] -= 1
        server = placement.order(key, loads)[0]
        loads[server] += 1
        served[server] += 1
        homes.setdefault(key, Counter())[server] += 1
        running.append((now + rng.expovariate(1.0), server))
    together = sum(max(c.values()) for c in homes.values()) / len(calls)
    assert together > 0.95
    assert max(served.values()) / (len(calls) / 8) < 1.1


def test_a_key_is_the_task_with_its_first_turn_or_the_turns_up_to_the_users() -> None:
    system = {"role": "system", "content": "lessons"}
    ask = {"role": "user", "content": "what"}
    said = {"role": "assistant", "content": "that"}
    task = CallScope("practice", "t1", "g-0", 0)
    other_draw = CallScope("practice", "t1", "g-3", 3)
    assert affinity_key([system, ask], task) == affinity_key([system, ask, said], other_draw)
    assert affinity_key([system, ask], task) != affinity_key([system, ask], CallScope(task_id="t2"))
    changed = {"role": "system", "content": "other lessons"}
    assert affinity_key([system, ask], task) != affinity_key([changed, ask], task)
    nobody = CallScope()
    assert affinity_key([system, ask], nobody) == affinity_key([system, ask, said], nobody)
    assert affinity_key([system, ask], nobody) != affinity_key([system, said], nobody)
    assert affinity_key([], nobody) == ""


def test_without_a_key_the_less_loaded_of_two_is_asked_first() -> None:
    placement = Placement(rng=random.Random(0))
    loads = {"a": 5.0, "b": 0.0, "c": 5.0}
    firsts = Counter(placement.order("", loads)[0] for _ in range(300))
    assert firsts["b"] > 150  # in two of three pairs
    assert sorted(placement.order("", loads)) == ["a", "b", "c"]
    assert placement.order("", {"a": 1.0}) == ["a"] and placement.order("", {}) == []


def test_hedges_wait_for_times_and_stay_within_their_share() -> None:
    hedging = Hedging(0.05, 0.9)
    for _ in range(49):
        hedging.observe(1.0)
    assert hedging.delay() is None
    hedging.observe(3.0)
    assert hedging.delay() == 1.1  # a tenth above the 45th of 50
    hedging.calls = 19
    assert not hedging.may_hedge()
    hedging.calls = 20
    assert hedging.may_hedge()
    hedging.hedges = 1
    assert not hedging.may_hedge()
    never = Hedging(0.0, 0.9)
    for _ in range(50):
        never.observe(1.0)
    assert never.delay() is None
