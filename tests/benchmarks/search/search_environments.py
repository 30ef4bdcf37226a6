"""Branching the tau-bench airline database by journal: what it costs, and that nothing leaks."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from statistics import median
from typing import Any

from tests.benchmarks.environments import airline
from tfgrpo.runtime.canonical import digest
from tfgrpo.search.environments.undo_log import UndoLogEnvironment, UndoPoint


async def replay_recordings(environment: UndoLogEnvironment) -> tuple[int, int]:
    """Run every recorded call; return how many answers are equal, and how many there are."""
    equal = total = 0
    start = await environment.start()
    for run in airline.read_recordings():
        handle = start
        for action, recorded in run:
            outcome = await environment.apply(handle, action)
            handle = outcome.state if outcome.state is not None else handle
            total += 1
            equal += airline.same_answer(outcome.observation, recorded)
    return equal, total


def writing_actions() -> list[Any]:
    """Return the recorded calls that write, in order of occurrence."""
    calls = [action for run in airline.read_recordings() for action, _ in run]
    return [a for a in calls if airline.effects(a) == "reversible"]


async def branch_ms(environment: UndoLogEnvironment, rounds: int = 300) -> list[float]:
    """Return milliseconds of running one writing call in a state that is not the present one."""
    actions, start = writing_actions(), await environment.start()
    versions, times = [start], []
    rng = random.Random(0)
    for i in range(rounds):
        handle = versions[rng.randrange(len(versions))]
        begun = time.perf_counter()
        outcome = await environment.apply(handle, actions[i % len(actions)])
        times.append((time.perf_counter() - begun) * 1e3)
        versions.append(outcome.state)
    return times


async def random_operations(
    environment: UndoLogEnvironment, plain: airline.Data, operations: int = 1_000, checks: int = 12
) -> dict[str, int]:
    """Fork, apply and release at random; compare the start and some paths with plain replays."""
    rng = random.Random(1)
    calls = [action for run in airline.read_recordings() for action, _ in run]
    start = await environment.start()
    known: list[tuple[UndoPoint, tuple[Any, ...]]] = [(start, ())]
    before = digest(environment.journal.data, 24)
    for _ in range(operations):
        kind = rng.choice(("apply", "apply", "fork", "release"))
        at = rng.randrange(len(known))
        handle, path = known[at]
        if kind == "apply":
            action = calls[rng.randrange(len(calls))]
            outcome = await environment.apply(handle, action)
            known.append((outcome.state, (*path, action)))
        elif kind == "fork":
            known.append((environment.fork(handle), path))
        elif at > 0:
            environment.release(handle)
            del known[at]
    environment.journal.go(start)
    equal_start = digest(environment.journal.data, 24) == before
    longest = sorted(known, key=lambda k: -len(k[1]))[: checks // 2]
    others = [known[rng.randrange(len(known))] for _ in range(checks - len(longest))]
    equal = 0
    for handle, path in [*longest, *others]:
        data = copy.deepcopy(plain)
        for action in path:
            airline.step(data, action)
        environment.journal.go(handle)
        equal += digest(environment.journal.data, 24) == digest(data, 24)
    return {"start_equal": int(equal_start), "paths_equal": equal, "paths_checked": checks}


def environment_figures() -> dict[str, Any]:
    """Recorded calls, branching cost, and 1,000 random operations."""
    plain = airline.read_data()
    equal, total = asyncio.run(replay_recordings(airline.environment(copy.deepcopy(plain))))
    times = asyncio.run(branch_ms(airline.environment(copy.deepcopy(plain))))
    begun = time.perf_counter()
    copy.deepcopy(plain)
    copying = (time.perf_counter() - begun) * 1e3
    leaks = asyncio.run(random_operations(airline.environment(copy.deepcopy(plain)), plain))
    times.sort()
    return {
        "airline_branch_ms": round(median(times), 3),
        "airline_branch_p95_ms": round(times[int(len(times) * 0.95)], 3),
        "airline_deepcopy_ms": round(copying, 1),
        "airline_calls_equal": f"{equal}/{total}",
        "airline_random_operations": leaks,
    }
