"""The contract of an executor as a check against one that runs in this process.

Raises `AssertionError` with the broken line of the contract. Does not know where the executor runs
its units. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from tfgrpo.execute.protocol import Executor, Unit
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.canonical import canonical_json
from tfgrpo.testing.contracts import _require

__all__ = ["check_executor"]


async def check_executor(executor: Executor, local: Executor, units: Sequence[Unit]) -> None:
    """Check that an executor gives what one in this process does; runs every unit a few times.

    Args:
        executor: what is checked; it is not closed.
        local: a `LocalExecutor` of an equal policy and verifier.
        units: at least two, of several rollouts where the policy makes groups; one that takes
            a while lets the check of closing mean something.

    Raises:
        AssertionError: a line of the contract does not hold.
    """
    expected = [await _run(local, unit) for unit in units]
    for unit, wanted in zip(units, expected):
        made = await _run(executor, unit)
        _require(
            [r.sample_index for r in made] == list(unit.indices),
            f"1: rollouts {[r.sample_index for r in made]} for indices {list(unit.indices)}",
        )
        _check_same(made, wanted)
    together = await asyncio.gather(*(_run(executor, unit) for unit in units))
    for made, wanted in zip(together, expected):
        _check_same(made, wanted)
    async with aclosing(executor.submit(units[0])) as finished:
        waiting = asyncio.ensure_future(anext(finished))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    _check_same(await _run(executor, units[0]), expected[0])


async def _run(executor: Executor, unit: Unit) -> list[Rollout]:
    async with aclosing(executor.submit(unit)) as finished:
        return [rollout async for rollout in finished]


def _check_same(made: Sequence[Rollout], wanted: Sequence[Rollout]) -> None:
    for one, other in zip(made, wanted, strict=True):
        _require(
            canonical_json(_timeless(one)) == canonical_json(_timeless(other)),
            f"1: rollout {one.rollout_id!r} differs from the one made in this process",
        )


def _timeless(rollout: Rollout) -> dict[str, Any]:
    row = rollout.to_dict()
    row.pop("duration_s", None)
    return row
