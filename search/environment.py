"""What an action does: the environment a search acts in, and ways to branch it.

A handle stands for one state of the world. `apply` never changes the state behind the handle it is
given; it returns a new handle, so that siblings can start from the same place. How that is done is
the environment's own business:

    Immutable   the state is a value; the function returns a new one
    Deepcopy    the state is an object; each call works on a copy of its own
    Journal     one shared store with an undo log (see `journal.py`): branching costs what changed
    Replay      nothing can be copied: start anew and run the path's actions again

Effect classes of tools: `pure` (the same answer always), `read` (depends on the state, changes
nothing), `idempotent` (twice is once), `reversible` (another tool or the undo log takes it back),
`irreversible`. The search phase runs no irreversible tool unless the environment is a simulator.

Does not know models, trees or budgets. Idea: snapshot and branch as the environment's primitive,
behind one interface (asked for in many agent projects; own form).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tfgrpo.canonical import digest
from tfgrpo.errors import PolicyError, boundary
from tfgrpo.rollout import Usage
from tfgrpo.search.node import FINISH, action_name

__all__ = [
    "CHANGING",
    "DeepcopyEnvironment",
    "Effect",
    "Environment",
    "ImmutableEnvironment",
    "Outcome",
    "ReplayEnvironment",
    "TextEnvironment",
]

Effect = Literal["pure", "read", "idempotent", "reversible", "irreversible"]
CHANGING: frozenset[str] = frozenset({"idempotent", "reversible", "irreversible"})
"""The effect classes that may change a state."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running one action gave. A failure is an outcome, not an exception."""

    state: Any = None
    """Handle of the new state; None where the action failed."""
    observation: str = ""
    state_key: str | None = None
    """Equal exactly for equal states; None where the environment cannot tell."""
    is_terminal: bool = False
    is_goal: bool | None = None
    """Whether the task is solved here; None where only a verifier can say."""
    reward: float | None = None
    error: str = ""
    notes: tuple[str, ...] = ()
    """What was contained: a cut observation, a mutation of shared state, …"""
    usage: Usage = field(default_factory=Usage)
    tool_calls: int = 1
    """Executions that this took; 0 for a cached answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the state."""
        row: dict[str, Any] = {}
        for name in ("observation", "state_key", "is_terminal", "is_goal", "reward", "error"):
            value = getattr(self, name)
            if value not in ("", None, False) or (name == "is_goal" and value is False):
                row[name] = value
        if self.notes:
            row["notes"] = list(self.notes)
        if self.tool_calls != 1:
            row["tool_calls"] = self.tool_calls
        if self.usage.calls or self.usage.total_tokens:
            row["usage"] = self.usage.to_dict()
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], state: Any = None) -> Outcome:
        """Restore an outcome; the state is given separately or made again by replay."""
        fields = dict(row)
        fields["notes"] = tuple(fields.get("notes", ()))
        fields["usage"] = Usage.from_dict(fields.get("usage") or {})
        return cls(state=state, **fields)


class Environment(Protocol):
    """Where actions happen.

    Contract:
        1. `start` gives the handle of the first state; `apply` leaves every other handle usable.
        2. A tool's failure is an `Outcome` with `error`; only a broken environment raises.
        3. `key` is equal exactly for equal states, or None.
        4. `effects` answers without running anything.
        5. `release` may be called once for a handle that is no longer needed.
        6. Safe to call from many asyncio tasks at once.
    """

    is_simulator: bool
    """True when nothing real can happen, so that irreversible tools may run during search."""

    async def start(self) -> Any:
        """Return the handle of the first state."""
        ...

    async def apply(self, handle: Any, action: Any) -> Outcome:
        """Run one action in the state behind the handle."""
        ...

    def fork(self, handle: Any) -> Any:
        """Return a second, independent handle of the same state."""
        ...

    def release(self, handle: Any) -> None:
        """Forget a handle."""
        ...

    def key(self, handle: Any) -> str | None:
        """Return a text for the state."""
        ...

    def effects(self, action: Any) -> Effect:
        """Return what kind of effect the action has."""
        ...


Transition = Callable[[Any, Any], Any | Awaitable[Any]]


async def _run(step: Transition, state: Any, action: Any) -> Outcome:
    """Call a user's transition and make an outcome of whatever comes."""
    try:
        with boundary(PolicyError, f"action {action_name(action)!r}"):
            result = step(state, action)
            if inspect.isawaitable(result):
                result = await result
    except PolicyError as exc:
        return Outcome(error=str(exc))
    if isinstance(result, Outcome):
        return result
    return Outcome(state=result)


class ImmutableEnvironment:
    """States are values (tuples, frozen records, strings) and the step returns a new one.

    Args:
        state: the first state.
        step: `(state, action)` to the new state, or to an `Outcome` where there is an observation
            to give; what it raises becomes a failed outcome. Synchronous or async.
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
        self._key = key or _digest_or_none
        self._effect = effect
        self._guard = guard
        self.is_simulator = is_simulator

    async def start(self) -> Any:
        """Return the first state."""
        return self._state

    async def apply(self, handle: Any, action: Any) -> Outcome:
        """Return what the step makes of the state."""
        before = copy.deepcopy(handle) if self._guard else None
        outcome = await _run(self._step, handle, action)
        if self._guard and not _equal(before, handle):
            _put_back(handle, before)
            return Outcome(
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


def finish_outcome(
    outcome: Outcome,
    key: Callable[[Any], str | None],
    goal: Callable[[Any], bool] | None,
) -> Outcome:
    """Add the state's key and the goal test to an outcome; a goal ends the path."""
    if outcome.error or outcome.state is None:
        return outcome
    is_goal = outcome.is_goal
    if is_goal is None and goal is not None:
        try:
            with boundary(PolicyError, "goal test"):
                is_goal = bool(goal(outcome.state))
        except PolicyError as exc:
            return Outcome(error=str(exc))
    state_key = outcome.state_key if outcome.state_key is not None else key(outcome.state)
    if is_goal is outcome.is_goal and state_key == outcome.state_key:
        return outcome
    return Outcome(
        state=outcome.state,
        observation=outcome.observation,
        state_key=state_key,
        is_terminal=outcome.is_terminal or bool(is_goal),
        is_goal=is_goal,
        reward=outcome.reward,
        notes=outcome.notes,
        usage=outcome.usage,
        tool_calls=outcome.tool_calls,
    )


def _digest_or_none(state: Any) -> str | None:
    try:
        return digest(state, 24)
    except (TypeError, ValueError):
        return None


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
            becomes text) or an `Outcome` whose `state` is ignored.
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
        self._key = key or _digest_or_none
        self._effect = effect
        self.is_simulator = is_simulator

    async def start(self) -> Any:
        """Return the first state."""
        return self._state

    async def apply(self, handle: Any, action: Any) -> Outcome:
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

    async def run(_: Any, action: Any) -> Outcome:
        result = step(state, action)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Outcome):
            return result if result.error else _with_state(result, state)
        return Outcome(state=state, observation=result if isinstance(result, str) else str(result))

    return run


def _with_state(outcome: Outcome, state: Any) -> Outcome:
    fields = {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}
    return Outcome(**fields | {"state": state})


class Session(Protocol):
    """A live world that can only go forward: one conversation with a server, one game."""

    async def act(self, action: Any) -> Outcome:
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
        open_session: Callable[[], Awaitable[Session]],
        *,
        effect: Effect | Callable[[Any], Effect] = "reversible",
        is_simulator: bool = True,
    ) -> None:
        self._open_session = open_session
        self._effect = effect
        self.is_simulator = is_simulator
        self.replayed = 0
        self._session: Session | None = None
        self._at: tuple[Any, ...] = ()
        self._lock: Any = None

    async def start(self) -> Any:
        """Return the handle of the first state; no session is opened yet."""
        return _Past()

    async def apply(self, handle: Any, action: Any) -> Outcome:
        """Run an action after the path, on the open session where it stands there."""
        async with self._exclusive():
            past: tuple[Any, ...] = handle.actions
            failed = await self._go_to(past)
            if failed is not None:
                return failed
            assert self._session is not None
            outcome = await self._session.act(action)
            if self.effects(action) in ("pure", "read"):  # the session stands where it stood
                return outcome if outcome.error else _with_state(outcome, handle)
            if outcome.error:
                await self._drop()
                return outcome
            self._at = (*past, action)
            return _with_state(outcome, _Past(self._at))

    def _exclusive(self) -> Any:
        import asyncio

        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _go_to(self, past: tuple[Any, ...]) -> Outcome | None:
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
                return Outcome(
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


class TextEnvironment:
    """For reasoning without tools: a step of text changes nothing, a finish action ends the path.

    Args:
        is_finish: whether an action ends the path; by default a text with `answer` in its first
            word, or a call of the tool `finish`.
    """

    is_simulator = True

    def __init__(self, is_finish: Callable[[Any], bool] | None = None) -> None:
        self._is_finish = is_finish or _says_finish

    async def start(self) -> Any:
        """Return the empty state."""
        return ()

    async def apply(self, handle: Any, action: Any) -> Outcome:
        """Return the same state, ended by a finish action."""
        return Outcome(
            state=handle, is_terminal=self._is_finish(action), tool_calls=0, state_key=None
        )

    def fork(self, handle: Any) -> Any:
        """There is only one state."""
        return handle

    def release(self, handle: Any) -> None:
        """Nothing to free."""

    def key(self, handle: Any) -> str | None:
        """Unknown: what matters is the path."""
        return None

    def effects(self, action: Any) -> Effect:
        """Text has no effect."""
        return "pure"


def _says_finish(action: Any) -> bool:
    if isinstance(action, str):
        words: Sequence[str] = action.split(None, 1)
        return bool(words) and words[0].lower().startswith("answer")
    return action_name(action) == FINISH
