"""What a sampler asks of the place where rollouts run.

Does not know any place, recording, or which units there are. Source: own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from tfgrpo.context import Context
from tfgrpo.rollout import Rollout, Task
from tfgrpo.runtime.canonical import derive_seed

__all__ = ["Executor", "OnTruncated", "Unit", "UnitSettings"]

OnTruncated = Literal["exclude", "grade"]


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """How a unit's rollouts are run, the same for all units of an executor."""

    timeout_s: float = 600.0
    """Wall time of one attempt, seconds."""
    verifier_timeout_s: float = 120.0
    """Wall time of one verification, seconds."""
    on_truncated: OnTruncated = "exclude"
    """What a reply that hit its token limit becomes: outcome `truncated`, or graded and flagged."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done at one time: one rollout, or a run of a group's rollouts in one call."""

    group_id: str
    task: Task
    context: Context
    stage: str
    seed: int
    """Of the group; each rollout's follows from it."""
    indices: tuple[int, ...]
    """Sample indices, consecutive."""
    losses: int = 0
    """How often the unit was lost with its worker before."""

    @property
    def rollout_ids(self) -> list[str]:
        """The ids of its rollouts, in order."""
        return [rollout_id(self.group_id, i) for i in self.indices]

    @property
    def seeds(self) -> list[int]:
        """The seeds of its rollouts, in order."""
        return [derive_seed(self.seed, self.task.task_id, i) for i in self.indices]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the context is named by its hash and travels once."""
        return {
            "group_id": self.group_id,
            "task": self.task.to_dict(),
            "context": self.context.context_hash,
            "stage": self.stage,
            "seed": self.seed,
            "indices": list(self.indices),
            "losses": self.losses,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], context: Context) -> Self:
        """Restore a unit from its JSON form and the context that it names."""
        return cls(
            row["group_id"],
            Task.from_dict(row["task"]),
            context,
            row["stage"],
            row["seed"],
            tuple(row["indices"]),
            row["losses"],
        )


def rollout_id(group_id: str, sample_index: int) -> str:
    """Return the id of a group's rollout."""
    return f"{group_id}-{sample_index}"


class Executor(Protocol):
    """Where units run.

    Contract:
        1. `submit` yields the unit's finished rollouts in index order, each as soon as it is
           judged; one that failed is a rollout, never an exception.
        2. It raises `UnitLost` where the place was lost with the unit. Nothing starts it again but
           a new submit, whose rollouts have the same ids, seeds and calls.
        3. What ends a run (wrong key, spent budget, bad setting) is raised as the same error.
        4. Closing the generator stops the unit within 2 s. Many may run at once.
        5. What leaves the process is JSON: no closure, no pickle, no key of a provider.
    """

    def submit(self, unit: Unit) -> AsyncGenerator[Rollout, None]:
        """Run a unit."""
        ...

    async def aclose(self) -> None:
        """Free what it holds; may be called twice."""
        ...
