"""Answers of tools, remembered by what they depend on.

A pure tool's answer depends on the call alone; a reading or changing one's on the state as well.
Keys without the state are the known mistake of tool caches: the same question after a change gets
the old answer. A call that is being answered is waited for, not made twice (single flight).

Failures have a short life: they are forgotten at once by default, since most of them pass.
Does not know trees. Source: own, after a defect read in a published planner.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from tfgrpo.search.environments.protocol import Effect, Environment, StepResult
from tfgrpo.search.node import action_key

__all__ = ["CachedEnvironment"]

_Key = tuple[str, str]


class CachedEnvironment:
    """An environment that runs no call twice from the same state.

    A cached outcome says `tool_calls=0`. Where the inner environment has no state key, only pure
    calls are remembered.

    Args:
        inner: the environment that runs calls.
        max_entries: outcomes kept; the one not used longest leaves.
        failure_uses: how often a failure is handed out again before it is tried anew.
    """

    def __init__(
        self, inner: Environment, *, max_entries: int = 10_000, failure_uses: int = 0
    ) -> None:
        self.inner = inner
        self.is_simulator = inner.is_simulator
        self._max, self._failure_uses = max_entries, failure_uses
        self._kept: OrderedDict[_Key, StepResult] = OrderedDict()
        self._uses: dict[_Key, int] = {}
        self._waiting: dict[_Key, asyncio.Future[StepResult]] = {}
        self.hits = self.misses = 0

    async def start(self) -> Any:
        """Return the inner start."""
        return await self.inner.start()

    def _key_of(self, handle: Any, action: Any) -> _Key | None:
        if self.inner.effects(action) == "pure":
            return ("", action_key(action))
        state_key = self.inner.key(handle)
        return None if state_key is None else (state_key, action_key(action))

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Return a remembered outcome, or run the call once for everybody who asks."""
        key = self._key_of(handle, action)
        if key is None:
            self.misses += 1
            return await self.inner.apply(handle, action)
        while key not in self._kept and key in self._waiting:
            shared = self._waiting[key]
            await asyncio.wait([shared])
            if not shared.cancelled() and shared.exception() is None:
                self.hits += 1
                return self._handed_out(shared.result(), handle, key)
        if key in self._kept:
            return self._from_kept(key, handle)
        return await self._run(key, handle, action)

    async def _run(self, key: _Key, handle: Any, action: Any) -> StepResult:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self.misses += 1
        try:
            outcome = await self.inner.apply(handle, action)
        except BaseException:
            future.cancel()  # those who wait try it themselves
            raise
        finally:
            del self._waiting[key]
        future.set_result(outcome)
        if not outcome.error or self._failure_uses:
            self._kept[key] = outcome
            self._uses[key] = self._failure_uses
            while len(self._kept) > self._max:
                oldest, _ = self._kept.popitem(last=False)
                self._uses.pop(oldest, None)
        return outcome

    def _from_kept(self, key: _Key, handle: Any) -> StepResult:
        outcome = self._kept[key]
        self._kept.move_to_end(key)
        self.hits += 1
        if outcome.error:
            self._uses[key] -= 1
            if self._uses[key] <= 0:
                del self._kept[key]
        return self._handed_out(outcome, handle, key)

    def _handed_out(self, outcome: StepResult, handle: Any, key: _Key) -> StepResult:
        """A pure call leaves the asker in its own state, whoever asked first."""
        fields = {name: getattr(outcome, name) for name in StepResult.__dataclass_fields__}
        fields |= {"tool_calls": 0, "usage": type(outcome.usage)()}
        if key[0] == "" and not outcome.error:
            fields |= {"state": handle, "state_key": self.inner.key(handle)}
        return StepResult(**fields)

    def fork(self, handle: Any) -> Any:
        """Return the inner fork."""
        return self.inner.fork(handle)

    def release(self, handle: Any) -> None:
        """Keep the handle: a remembered outcome may still lead to it."""

    def key(self, handle: Any) -> str | None:
        """Return the inner key."""
        return self.inner.key(handle)

    def effects(self, action: Any) -> Effect:
        """Return the inner effect."""
        return self.inner.effects(action)
