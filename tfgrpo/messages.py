"""Chat messages and tool calls, as every chat API knows them.

Does not know providers' wire formats (each backend translates) or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One request of the model to run a tool."""

    call_id: str
    name: str
    arguments: str
    """JSON text exactly as the model wrote it; it may be malformed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a call from its JSON form."""
        return cls(row["call_id"], row["name"], row["arguments"])


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls asked for by an assistant turn."""
    tool_call_id: str = ""
    """Which call a tool turn answers."""
    reasoning: str = ""
    """Thinking that the provider returned beside the answer; never sent back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, empty fields left out."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            row["tool_calls"] = [c.to_dict() for c in self.tool_calls]
        if self.tool_call_id:
            row["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            row["reasoning"] = self.reasoning
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a message from its JSON form."""
        calls = row.get("tool_calls")
        return cls(
            role=row["role"],
            content=row.get("content") or "",
            tool_calls=tuple(ToolCall.from_dict(c) for c in calls) if calls else (),
            tool_call_id=row.get("tool_call_id", ""),
            reasoning=row.get("reasoning", ""),
        )
