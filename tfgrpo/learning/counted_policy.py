"""A policy whose calls the journal cannot see, counted by its attempts.

A function or object of the user's asks models on its own. Each of its attempts is booked as a call
before it starts and settled after, with what it returns as `Rollout.usage` where it tells; so that
a cap on calls holds, progress shows that something happens, and money nobody told is unknown and
not 0. Does not know tasks or verifiers. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tfgrpo.context import Context
from tfgrpo.protocols import GroupPolicy, Policy
from tfgrpo.rollout import Rollout, Task, Usage
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.canonical import digest
from tfgrpo.store import Journal
from tfgrpo.store.booking import checked_usage, settlement
from tfgrpo.store.calls import CallEnd, CallStart

__all__ = ["counted"]


def counted(policy: Policy, store: Journal) -> Policy:
    """Return the policy with every attempt booked in the journal; its identity stays."""
    if isinstance(policy, GroupPolicy):
        return _CountedGroups(policy, store)
    return _Counted(policy, store)


class _Counted:
    """Books one call for each attempt."""

    def __init__(self, policy: Policy, store: Journal) -> None:
        self._policy = policy
        self._store = store

    @property
    def policy_id(self) -> str:
        """The wrapped policy's own."""
        return self._policy.policy_id

    def __getattr__(self, name: str) -> Any:
        """What else the policy tells, such as its sampling."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._policy, name)

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        """Return one attempt, booked; raises `BudgetError` where a cap leaves no room."""
        made: list[Rollout] = []
        async with _Booking(self._store, self.policy_id, 1) as booking:
            made.append(await self._policy.attempt(task, context, seed))
            booking.made(made)
        return made[0]


class _CountedGroups(_Counted):
    """The same for a policy that makes several attempts at once."""

    async def attempt_group(
        self, task: Task, context: Context, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Return the attempts, booked as one call unless their usage says otherwise."""
        async with _Booking(self._store, self.policy_id, len(seeds)) as booking:
            made = list(await self._policy.attempt_group(task, context, seeds))  # type: ignore[attr-defined]
            booking.made(made)
        return made


class _Booking:
    """One call of the journal, from its reservation to its end."""

    def __init__(self, store: Journal, policy_id: str, n: int) -> None:
        self._store = store
        self._policy_id = policy_id
        self._n = n
        self._usage: Usage | None = None

    def made(self, rollouts: Sequence[Rollout]) -> None:
        """Take what the attempts say they used."""
        told = [r.usage for r in rollouts if r.usage != Usage()]
        used = sum((checked_usage(u, 0, 0) for u in told), Usage())
        self._usage = used if used.calls else Usage(calls=1, cost_usd=used.cost_usd) + used
        if not told:
            self._usage = Usage(calls=1, cost_usd=None)

    async def __aenter__(self) -> _Booking:
        scope = current_scope()
        self._reservation = self._store.ledger.reserve(calls=1)
        self._began = time.monotonic()
        start = CallStart(
            key=digest([self._policy_id, scope.rollout_id, scope.sample_index]).encode(),
            stage=scope.stage,
            model=self._policy_id,
            rollout_id=scope.rollout_id,
            n=self._n,
            prompt_tokens=0,
            completion_tokens=0,
            cost_usd=None,
        )
        try:
            self._number = await self._store.calls.start(start)
        except BaseException:
            self._reservation.release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began
        if self._usage is None:  # cancelled, or an error: what it used is unknown
            self._reservation.settle()
            self._store.calls.end_soon(self._number, CallEnd("unsettled", Usage(), seconds))
            return
        end = CallEnd("ok", self._usage, seconds, self._n, self._policy_id)
        self._reservation.settle(**settlement(end, self._reservation.amounts))
        await self._store.calls.end(self._number, end)
