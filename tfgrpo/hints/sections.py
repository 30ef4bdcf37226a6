"""Keys that sections of several hint methods share, and what a run must know of a method.

Does not know any method. Source: own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tfgrpo.hints.metadata import MetadataHints
from tfgrpo.hints.state import Record
from tfgrpo.protocols import HintScheduler


class Recorded(HintScheduler, Protocol):
    """A scheduler that keeps a `Record`."""

    record: Record


class Common(BaseModel, ABC):
    """Keys of every method."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    success_above: float = 0.0
    solution_key: str = "solution"
    missing: Literal["error", "plain"] = "error"

    forces_prefix: ClassVar[bool] = False
    """Some replies begin with tokens that the policy did not choose: rollouts of one turn only."""
    advantage: ClassVar[str] = ""
    """The advantage that the method is defined with; empty for any."""

    @property
    def needs_ratio(self) -> bool:
        """True where rollouts are trained over their sampler's log-probs."""
        return False

    @property
    def adds_rows(self) -> bool:
        """True where good rollouts are trained once more, under the bare prompt."""
        return False

    @abstractmethod
    def make(self) -> Recorded:
        """Build the scheduler."""


class Levels(Common):
    """Keys of methods that climb levels of hints."""

    max_level: int = Field(default=3, ge=1)
    hints_key: str = "hints"

    def plans(self) -> MetadataHints:
        """Where this section's hint texts come from."""
        return MetadataHints(self.max_level, self.hints_key, self.solution_key, self.missing)


class WriterKeys(Levels):
    """Keys of methods whose hints a model may write."""

    writer: str = "given"
    """`given` reads the tasks' hints and solutions; `self` has the policy write hints before
    training; else the spec of a teacher LM."""
    retries: int = Field(default=3, ge=0)
    writer_tokens: int = Field(default=512, ge=1)
