"""What making rollouts cost, counted per step. Does not know how they are made. Source: own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RolloutFigures:
    """What making the groups cost."""

    seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rollouts: int = 0
    """All that were made, those of failed groups included."""
    hinted_rollouts: int = 0
    dropped_rollouts: int = 0
    hints_too_long: int = 0
    """Plans that were not rolled, since their prompt fills the model's context."""
    value_rollouts: int = 0
    """Continuations that were judged for the value of a cut, and not trained."""
    writes: int = 0
    """Texts that the policy was asked for within visits, further tries included."""
    writes_unread: int = 0
    """Of those, replies that could not be read."""
    write_tokens: int = 0
    """Tokens of those replies; no part of `completion_tokens`."""
    levels: dict[str, int] = field(default_factory=dict)
    """Accepted groups by their plan's label; `none` is the bare task, `mixed` several plans."""

    def add(self, other: RolloutFigures) -> None:
        """Add another call's figures."""
        if other is self:
            return
        for name in RolloutFigures.__slots__:
            value, more = getattr(self, name), getattr(other, name)
            if isinstance(value, dict):
                for key, n in more.items():
                    value[key] = value.get(key, 0) + n
            else:
                setattr(self, name, value + more)
