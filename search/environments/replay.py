"""An environment for worlds that can be started anew but not copied.

Does not know what the world is (`mcp_environment.py` is one use). Idea: restore a state by
replaying its actions, as the tree search for web agents by Koh et al. does; the open session: own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tfgrpo.search.environments.protocol import Effect, StepResult, with_state
from tfgrpo.search.node import action_name

__all__ = ["ReplayEnvironment", "LiveWorld"]


class LiveWorld(Protocol):
    """A live world that can only go forward: one conversation with a server, one game."""

    async def act(self, action: Any) -> StepResult:
        """Run one action; `state` of the outcome is ignored."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...


@dataclass(frozen=True, slots=True)
class _Past:
    """A state as the actions that lead to it."""

    actions: tuple[Any, ...] = ()


class ReplayEnvironment:
    """For worlds that can be started anew but not copied: a state is its path of actions.

    The last session stays open; an action that continues it costs one execution, any other one
    starts a session and runs the whole path again (`replayed` counts those executions).

    Args:
        open_session: starts a world in its first state.
        effect: effect class of an action; reading ones leave the path as it is.
        is_simulator: whether the sessions touch nothing real. Replay runs actions more than once,
            so anything but `read` is refused by the driver where this is False.
    """

    def __init__(
        self,
        open_session: Callable[[], Awaitable[LiveWorld]],
        *,
        effect: Effect | Callable[[Any], Effect] = "reversible",
        is_simulator: bool = True,
    ) -> None:
        self._open_session = open_session
        self._effect = effect
        self.is_simulator = is_simulator
        self.replayed = 0
        self._session: LiveWorld | None = None
        self._at: tuple[Any, ...] = ()
        self._lock: Any = None

    async def start(self) -> Any:
        """Return the handle of the first state; no session is opened yet."""
        return _Past()

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Run an action after the path, on the open session where it stands there."""
        async with self._exclusive():
            past: tuple[Any, ...] = handle.actions
            failed = await self._go_to(past)
            if failed is not None:
                return failed
            assert self._session is not None
            outcome = await self._session.act(action)
            if self.effects(action) in ("pure", "read"):  # the session stands where it stood
                return outcome if outcome.error else with_state(outcome, handle)
            if outcome.error:
                await self._drop()
                return outcome
            self._at = (*past, action)
            return with_state(outcome, _Past(self._at))

    def _exclusive(self) -> Any:
        import asyncio

        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _go_to(self, past: tuple[Any, ...]) -> StepResult | None:
        """Stand at the end of `past`; return the failure where that is not possible."""
        if self._session is not None and self._at == past:
            return None
        await self._drop()
        self._session = await self._open_session()
        for action in past:
            outcome = await self._session.act(action)
            self.replayed += 1
            if outcome.error:
                await self._drop()
                return StepResult(
                    error=f"replay of {action_name(action)!r} failed where it had worked before: "
                    f"{outcome.error}",
                    notes=("not reproducible",),
                )
        self._at = past
        return None

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """End the open session."""
        async with self._exclusive():
            await self._drop()

    def fork(self, handle: Any) -> Any:
        """A path serves everybody."""
        return handle

    def release(self, handle: Any) -> None:
        """Nothing to free."""

    def key(self, handle: Any) -> str | None:
        """Unknown: two paths may or may not end in the same state."""
        return None

    def effects(self, action: Any) -> Effect:
        """Return the declared effect."""
        return self._effect(action) if callable(self._effect) else self._effect
