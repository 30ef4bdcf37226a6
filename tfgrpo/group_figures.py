"""`GroupFigures`: what statistics need of a group, without its texts.

A run of a hundred thousand groups has gigabytes of texts; its rewards, outcomes and tokens fit into
some tens of megabytes. The journal keeps these figures beside each group's ids, under the same
digest, so that a report reads no text but that of the groups it shows.

Does not know who counts, or files. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.redaction import redact_known

__all__ = ["GroupFigures", "OneOfEach", "figures_of"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_ERROR_CHARS = 200


class OneOfEach:
    """Gives one object for equal values, of which the groups of a run have few."""

    def __init__(self, most: int = 10_000) -> None:
        self._seen: dict[str, Any] = {}
        self._most = most

    def of(self, value: Any) -> Any:
        """Return the first value that was equal, or this one; past `most` different ones no
        further one is remembered."""
        name = repr(value)
        if len(self._seen) < self._most:
            return self._seen.setdefault(name, value)
        return self._seen.get(name, value)


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The numbers of one group."""

    group_id: str
    task_id: str
    policy_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    rewards_G: tuple[float, ...] = ()
    """Rewards of the graded rollouts, in order."""
    outcomes: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    """How many rollouts ended in each way."""
    truncated: int = 0
    """Rollouts in which a reply hit its token limit."""
    tokens: int = 0
    """Of all rollouts."""
    readable: int = 0
    """Graded rollouts that have a text."""
    has_feedback: bool = False
    """A verifier said why, of a graded rollout that has a text."""
    has_reference: bool = False
    sources: tuple[str, ...] = ()
    """Where the parts of the context come from, such as ids of entries."""
    is_bare: bool = True
    """The context was empty."""
    is_hinted: bool = False
    cut_rewards: tuple[float, ...] = ()
    """Rewards of the graded rollouts in which a reply hit its token limit."""
    errors: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """For each outcome with a message, how its first one begins."""

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Return the figures of a group."""
        readable = [r for r in group.rollouts if r.score is not None and r.steps]
        cut = [r for r in group.rollouts if r.is_truncated]
        failed = [r for r in reversed(group.rollouts) if r.error]
        return cls(
            group_id=group.group_id,
            task_id=group.task.task_id,
            policy_id=group.policy_id,
            metadata=group.metadata,
            rewards_G=group.rewards_G,
            outcomes={str(k): n for k, n in group.outcome_counts().items()},
            truncated=len(cut),
            tokens=sum(r.usage.total_tokens for r in group.rollouts),
            readable=len(readable),
            has_feedback=any(r.score is not None and r.score.feedback for r in readable),
            has_reference=group.task.reference is not None,
            sources=tuple(p.source for p in group.context.parts),
            is_bare=group.context.is_empty,
            is_hinted=bool(group.context.of_kind("hint")),
            cut_rewards=tuple(r.reward for r in cut if r.reward is not None),
            errors={str(r.outcome): redact_known(r.error)[:_ERROR_CHARS] for r in failed},
        )

    def sharing(self, shared: OneOfEach) -> Self:
        """Return the same figures, which share with others what is equal, so that those of a large
        run take little room."""
        return replace(
            self,
            policy_id=shared.of(self.policy_id),
            metadata=shared.of(self.metadata),
            rewards_G=shared.of(self.rewards_G),
            outcomes=shared.of(self.outcomes),
            sources=shared.of(self.sources),
        )

    @property
    def n_rollouts(self) -> int:
        """Rollouts of the group."""
        return sum(self.outcomes.values())

    @property
    def spread(self) -> float:
        """Largest minus smallest reward; 0 for fewer than two graded rollouts."""
        return max(self.rewards_G) - min(self.rewards_G) if len(self.rewards_G) > 1 else 0.0

    def is_informative(self, tolerance: float = 1e-9) -> bool:
        """True when at least two graded rollouts differ in reward by more than `tolerance`."""
        return self.spread > tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the ids and metadata that stand beside it in a journal."""
        row: dict[str, Any] = {
            "task_id": self.task_id,
            "outcomes": dict(self.outcomes),
            "tokens": self.tokens,
        }
        row |= {"rewards": list(self.rewards_G), "readable": self.readable}
        row |= {"truncated": self.truncated} if self.truncated else {}
        row |= {"cut_rewards": list(self.cut_rewards)} if self.cut_rewards else {}
        row |= {"errors": dict(self.errors)} if self.errors else {}
        row |= {"sources": list(self.sources)} if self.sources else {}
        flags = {
            "feedback": self.has_feedback,
            "reference": self.has_reference,
            "filled": not self.is_bare,
            "hinted": self.is_hinted,
        }
        return row | {name: True for name, value in flags.items() if value}

    @classmethod
    def from_dict(
        cls, row: Mapping[str, Any], group_id: str, policy_id: str, metadata: Mapping[str, Any]
    ) -> Self:
        """Restore figures from their JSON form and what stands beside it."""
        return cls(
            group_id,
            row["task_id"],
            policy_id,
            metadata,
            tuple(row["rewards"]),
            row["outcomes"],
            row.get("truncated", 0),
            row["tokens"],
            row["readable"],
            row.get("feedback", False),
            row.get("reference", False),
            tuple(row.get("sources", ())),
            not row.get("filled", False),
            row.get("hinted", False),
            tuple(row.get("cut_rewards", ())),
            row.get("errors", _EMPTY),
        )


def figures_of(groups: Iterable[RolloutGroup | GroupFigures]) -> Iterator[GroupFigures]:
    """Yield the figures of groups, or what are figures already."""
    for group in groups:
        yield GroupFigures.of(group) if isinstance(group, RolloutGroup) else group
