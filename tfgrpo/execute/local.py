"""This process as the place where rollouts run: attempt, deadline, verification.

Does not know the order of units, recording, or calls' money. Source: own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from tfgrpo.errors import PolicyError, boundary
from tfgrpo.execute.judging import judge
from tfgrpo.execute.protocol import Unit, UnitSettings
from tfgrpo.protocols import GroupPolicy, Policy, Verifier
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.call_scope import CallScope, call_scope

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """Runs units of one policy under one verifier in this process.

    Args:
        policy: what acts.
        verifier: what judges; None leaves every attempt `ungraded`.
        settings: deadlines, and what to do with cut replies.
    """

    def __init__(
        self, policy: Policy, verifier: Verifier | None, settings: UnitSettings | None = None
    ) -> None:
        self._policy = policy
        self._verifier = verifier
        self._settings = settings or UnitSettings()

    async def submit(self, unit: Unit) -> AsyncGenerator[Rollout, None]:
        """Run a unit; its attempts are made together, then judged one after the other."""
        for rollout in await self._attempt(unit):
            if self._verifier is None:
                yield rollout
                continue
            yield await judge(
                rollout,
                unit.task,
                self._verifier,
                timeout_s=self._settings.verifier_timeout_s,
                on_truncated=self._settings.on_truncated,
            )

    async def aclose(self) -> None:
        """Nothing is held."""

    async def _attempt(self, unit: Unit) -> list[Rollout]:
        policy, task = self._policy, unit.task
        seeds, ids = unit.seeds, unit.rollout_ids
        scope = CallScope(unit.stage, task.task_id, ids[0], unit.indices[0])
        started = time.monotonic()
        made: Sequence[Rollout]
        error = ""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                with call_scope(scope), boundary(PolicyError, f"policy {policy.policy_id!r}"):
                    if len(unit.indices) > 1 and isinstance(policy, GroupPolicy):
                        made = await policy.attempt_group(task, unit.context, seeds)
                    else:
                        made = [await policy.attempt(task, unit.context, seeds[0])]
            if len(made) != len(ids):
                raise PolicyError(
                    f"policy {policy.policy_id!r} returned {len(made)} rollouts, "
                    f"asked for {len(ids)}"
                )
        except TimeoutError:
            error = f"no answer within {self._settings.timeout_s:g} s"
            made = [Rollout(i, task.task_id).failed("timed_out", error) for i in ids]
        except PolicyError as exc:
            made = [Rollout(i, task.task_id).failed("policy_failed", str(exc)) for i in ids]
        seconds = time.monotonic() - started
        return [
            replace(
                rollout,
                rollout_id=ids[k],
                task_id=task.task_id,
                sample_index=unit.indices[k],
                seed=seeds[k],
                duration_s=rollout.duration_s or seconds,
            )
            for k, rollout in enumerate(made)
        ]
