"""What an action does: the environment a search acts in, and ways to branch it.

A handle stands for one state of the world. `apply` never changes the state behind the handle it is
given; it returns a new handle, so that siblings can start from the same place. How that is done is
the environment's own business:

    Immutable   the state is a value; the function returns a new one (`value_environments.py`)
    Deepcopy    the state is an object; each call works on a copy of its own (same file)
    Journal     one shared store with an undo log (see `journal.py`): branching costs what changed
    Replay      nothing can be copied: start anew and run the path's actions again (see
                `replay_environment.py`)

Effect classes of tools: `pure` (the same answer always), `read` (depends on the state, changes
nothing), `idempotent` (twice is once), `reversible` (another tool or the undo log takes it back),
`irreversible`. The search phase runs no irreversible tool unless the environment is a simulator.

Does not know models, trees or budgets. Idea: snapshot and branch as the environment's primitive,
behind one interface (asked for in many agent projects; own form).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tfgrpo.errors import PolicyError, boundary
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import digest
from tfgrpo.search.node import FINISH, action_name

__all__ = [
    "CHANGING",
    "Effect",
    "Environment",
    "StepResult",
    "TextEnvironment",
    "finish_outcome",
    "state_key_of",
    "with_state",
]

Effect = Literal["pure", "read", "idempotent", "reversible", "irreversible"]
CHANGING: frozenset[str] = frozenset({"idempotent", "reversible", "irreversible"})
"""The effect classes that may change a state."""


@dataclass(frozen=True, slots=True)
class StepResult:
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
    def from_dict(cls, row: Mapping[str, Any], state: Any = None) -> StepResult:
        """Restore an outcome; the state is given separately or made again by replay."""
        fields = dict(row)
        fields["notes"] = tuple(fields.get("notes", ()))
        fields["usage"] = Usage.from_dict(fields.get("usage") or {})
        return cls(state=state, **fields)


class Environment(Protocol):
    """Where actions happen.

    Contract:
        1. `start` gives the handle of the first state; `apply` leaves every other handle usable.
        2. A tool's failure is an `StepResult` with `error`; only a broken environment raises.
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

    async def apply(self, handle: Any, action: Any) -> StepResult:
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


def state_key_of(state: Any) -> str | None:
    """Return a key that is equal exactly for equal states; None for one without a JSON form."""
    try:
        return digest(state, 24)
    except (TypeError, ValueError):
        return None


def finish_outcome(
    outcome: StepResult,
    key: Callable[[Any], str | None],
    goal: Callable[[Any], bool] | None,
) -> StepResult:
    """Add the state's key and the goal test to an outcome; a goal ends the path."""
    if outcome.error or outcome.state is None:
        return outcome
    is_goal = outcome.is_goal
    if is_goal is None and goal is not None:
        try:
            with boundary(PolicyError, "goal test"):
                is_goal = bool(goal(outcome.state))
        except PolicyError as exc:
            return StepResult(error=str(exc))
    state_key = outcome.state_key if outcome.state_key is not None else key(outcome.state)
    if is_goal is outcome.is_goal and state_key == outcome.state_key:
        return outcome
    return StepResult(
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


def with_state(outcome: StepResult, state: Any) -> StepResult:
    """Return the outcome with another state handle."""
    fields = {name: getattr(outcome, name) for name in StepResult.__dataclass_fields__}
    return StepResult(**fields | {"state": state})


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

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Return the same state, ended by a finish action."""
        return StepResult(
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
