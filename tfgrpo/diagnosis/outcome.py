"""What became of a run's libraries, one word for each state.

    kept                  the choice at the end took a library; it is what is exported
    candidate, not kept   libraries were proposed, and the choice took none of them
    nothing proposed      no library was ever proposed
    not ended             the run stopped before the choice; the same command goes on

Does not know why (`reasons`). Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["NOT_KEPT", "RunOutcome", "State", "edited_version", "outcome_of"]

State = Literal["kept", "candidate, not kept", "nothing proposed", "not ended"]
NOT_KEPT: State = "candidate, not kept"
"""A library that was proposed and that the choice at the end did not take."""
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run's choice ended."""

    state: State
    version_id: str = ""
    """Which library was kept; empty where none was."""
    reason: str = ""
    """What the choice said."""

    @property
    def is_kept(self) -> bool:
        """True where a library was kept."""
        return self.state == "kept"

    def word_of(self, version_id: str) -> State:
        """Return the state of one library of the run."""
        if self.is_kept and self.version_id.partition("/")[0] == version_id:
            return "kept"
        return "not ended" if self.state == "not ended" else NOT_KEPT


def edited_version(version_id: str, edits: Sequence[Mapping[str, Any]]) -> str:
    """Return what a person made of a kept library by pins, bans and undos, oldest first.

    >>> edited_version("a/top-3", [{"from": "a", "to": "b"}, {"from": "x", "to": "y"}])
    'b/top-3'
    """
    name, slash, selection = version_id.partition("/")
    for edit in edits:
        if edit.get("from") == name:
            name = str(edit.get("to") or name)
    return name + slash + selection


def outcome_of(final: Mapping[str, Any] | None, has_candidates: bool) -> RunOutcome:
    """Return how a run ended.

    Args:
        final: the newest `final` decision of the run; None where there is none yet.
        has_candidates: whether any library was recorded.
    """
    if final is None:
        return RunOutcome("not ended")
    version, reason = str(final.get("version_id") or ""), str(final.get("reason") or "")
    if version and version != EMPTY:
        return RunOutcome("kept", version, reason)
    return RunOutcome(NOT_KEPT if has_candidates else "nothing proposed", "", reason)
