"""Environments whose state is a value, or an object that can be copied.

Does not know trees, models or budgets. Source: own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from tfgrpo.errors import PolicyError, boundary
from tfgrpo.search.environments.protocol import (
    Effect,
    StepResult,
    finish_outcome,
    state_key_of,
    with_state,
)
from tfgrpo.search.node import action_name

__all__ = ["DeepcopyEnvironment", "ImmutableEnvironment"]

Transition = Callable[[Any, Any], Any | Awaitable[Any]]


async def _run(step: Transition, state: Any, action: Any) -> StepResult:
    """Call a user's transition and make an outcome of whatever comes."""
    try:
        with boundary(PolicyError, f"action {action_name(action)!r}"):
            result = step(state, action)
            if inspect.isawaitable(result):
                result = await result
    except PolicyError as exc:
        return StepResult(error=str(exc))
    if isinstance(result, StepResult):
        return result
    return StepResult(state=result)


class ImmutableEnvironment:
    """States are values (tuples, frozen records, strings) and the step returns a new one.

    Args:
        state: the first state.
        step: `(state, action)` to the new state, or to a `StepResult` where there is an
            observation to give; what it raises becomes a failed outcome. Synchronous or async.
        goal: whether a state solves the task. A goal ends the path.
        key: text of a state; by default the digest of its JSON, or None where it has none.
        effect: effect class of an action.
        guard: check after each call that the step left the state it was given as it was; a
            changed one is put back and reported. Costs one copy and one digest a call; leave it
            off for states that cannot change, such as tuples of texts.
    """

    def __init__(
        self,
        state: Any,
        step: Transition,
        *,
        goal: Callable[[Any], bool] | None = None,
        key: Callable[[Any], str | None] | None = None,
        effect: Effect | Callable[[Any], Effect] = "reversible",
        guard: bool = False,
        is_simulator: bool = True,
    ) -> None:
        self._state, self._step, self._goal = state, step, goal
        self._key = key or state_key_of
        self._effect = effect
        self._guard = guard
        self.is_simulator = is_simulator

    async def start(self) -> Any:
        """Return the first state."""
        return self._state

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Return what the step makes of the state."""
        before = copy.deepcopy(handle) if self._guard else None
        outcome = await _run(self._step, handle, action)
        if self._guard and not _equal(before, handle):
            _put_back(handle, before)
            return StepResult(
                error=f"action {action_name(action)!r} changed the state that it was given; the "
                "state was put back. Return a new state, or use DeepcopyEnvironment",
                notes=("mutated shared state",),
            )
        return finish_outcome(outcome, self._key, self._goal)

    def fork(self, handle: Any) -> Any:
        """The same value serves everybody."""
        return handle

    def release(self, handle: Any) -> None:
        """Nothing to free."""

    def key(self, handle: Any) -> str | None:
        """Return the state's text."""
        return self._key(handle)

    def effects(self, action: Any) -> Effect:
        """Return the declared effect."""
        return self._effect(action) if callable(self._effect) else self._effect


def _equal(before: Any, after: Any) -> bool:
    return type(before) is type(after) and bool(before == after)


def _put_back(state: Any, before: Any) -> None:
    """Restore a mutated container in place, so that everybody who holds it sees it as it was."""
    if isinstance(state, dict):
        state.clear()
        state.update(before)
    elif isinstance(state, list):
        state[:] = before
    elif isinstance(state, set):
        state.clear()
        state.update(before)
    elif hasattr(state, "__dict__"):
        state.__dict__.clear()
        state.__dict__.update(before.__dict__)


class DeepcopyEnvironment:
    """States are objects; each call works on a deep copy, which becomes the new state.

    Args:
        state: the first state; it is copied, never changed.
        step: `(state, action)` changes the state in place and returns the observation (any value
            becomes text) or an `StepResult` whose `state` is ignored.
        goal, key, effect, is_simulator: as for `ImmutableEnvironment`.
    """

    def __init__(
        self,
        state: Any,
        step: Callable[[Any, Any], Any],
        *,
        goal: Callable[[Any], bool] | None = None,
        key: Callable[[Any], str | None] | None = None,
        effect: Effect | Callable[[Any], Effect] = "reversible",
        is_simulator: bool = True,
    ) -> None:
        self._state, self._step, self._goal = copy.deepcopy(state), step, goal
        self._key = key or state_key_of
        self._effect = effect
        self.is_simulator = is_simulator

    async def start(self) -> Any:
        """Return the first state."""
        return self._state

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Return the outcome of the step on a copy."""
        effect = self.effects(action)
        state = handle if effect in ("pure", "read") else copy.deepcopy(handle)

        def step(_: Any, asked: Any) -> Any:
            return self._step(state, asked)

        outcome = await _run(_as_observation(step, state), state, action)
        return finish_outcome(outcome, self._key, self._goal)

    def fork(self, handle: Any) -> Any:
        """The copy is made when the state is used."""
        return handle

    def release(self, handle: Any) -> None:
        """Nothing to free."""

    def key(self, handle: Any) -> str | None:
        """Return the state's text."""
        return self._key(handle)

    def effects(self, action: Any) -> Effect:
        """Return the declared effect."""
        return self._effect(action) if callable(self._effect) else self._effect


def _as_observation(step: Callable[[Any, Any], Any], state: Any) -> Transition:
    """Wrap a step that changes `state` in place and returns its observation."""

    async def run(_: Any, action: Any) -> StepResult:
        result = step(state, action)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, StepResult):
            return result if result.error else with_state(result, state)
        return StepResult(
            state=state, observation=result if isinstance(result, str) else str(result)
        )

    return run
