"""Whether a proposed library replaces the current one, and which one wins in the end.

A step is accepted when the paired mean difference on the gate split is at least `min_difference`
and its one-sided lower bound is above `-max_harm`. At the end the winner among the empty library
and all accepted versions is chosen; the empty one wherever the interval of the best includes zero.
Does not know rollouts or libraries: scores by task come in, a decision with its evidence goes out.
Source: own; intervals over tasks from `tfgrpo.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tfgrpo.experience.edits import Edit
from tfgrpo.statistics import Interval, Scores, level_words, lower_bound, paired_difference

EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate says about one proposal, with its evidence."""

    accepted: bool
    reason: str
    difference: Interval | None
    """Proposed minus current, two-sided at 95 %; None where nothing could be compared."""
    bound: float | None
    """One-sided lower bound at `level`."""
    level: float
    tasks: int
    """Tasks that were scored in both arms."""
    dropped: tuple[str, ...] = ()
    """Tasks scored in one arm only; they count in neither."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "accepted": self.accepted,
            "reason": self.reason,
            "difference": None if self.difference is None else self.difference.to_dict(),
            "bound": self.bound,
            "level": self.level,
            "tasks": self.tasks,
            "dropped": list(self.dropped),
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(
            row["accepted"],
            row["reason"],
            interval_of(row["difference"]),
            row["bound"],
            row["level"],
            row["tasks"],
            tuple(row["dropped"]),
        )


def gate_step(
    current: Scores,
    proposed: Scores,
    *,
    min_difference: float = 0.0,
    max_harm: float = 0.01,
    level: float = 0.90,
    seed: int = 0,
    reward_range: tuple[float, float] | None = None,
) -> GateDecision:
    """Judge a proposed library against the current one.

    Args:
        current: rewards of graded rollouts by gate task under the current library.
        proposed: the same tasks and sample indices under the proposed one.
        min_difference: least paired mean difference, in units of reward.
        max_harm: the lower bound must be above minus this.
        level: one-sided; pass `statistics.gate_level(look, looks)` to account for many looks.
        seed: fixes the bootstrap.
        reward_range: least and largest reward, where known: no interval is wider.
    """
    both = {t for t in current if current[t] and proposed.get(t)}
    scored = {t for s in (current, proposed) for t, rewards in s.items() if rewards}
    dropped = tuple(sorted(scored - both))
    if not both:
        reason = "no gate task was scored in both arms"
        return GateDecision(False, reason, None, None, level, 0, dropped)
    difference = paired_difference(current, proposed, seed=seed)
    bound = lower_bound(current, proposed, level=level, seed=seed)
    if reward_range is not None:
        difference = difference.within(reward_range, of_difference=True)
        bound = max(bound, reward_range[0] - reward_range[1])
    found = f"{difference.estimate:+.3f} (at worst {bound:+.3f})"
    if difference.estimate < min_difference:
        wanted = f", and gate.min_difference asks for {min_difference:g}" * (min_difference != 0)
        reason = f"{'worse' if difference.estimate < 0 else 'too little'}: {found}{wanted}"
        return GateDecision(False, reason, difference, bound, level, len(both), dropped)
    if bound <= -max_harm:
        reason = f"not better beyond noise: {found}"
        return GateDecision(False, reason, difference, bound, level, len(both), dropped)
    return GateDecision(True, f"better: {found}", difference, bound, level, len(both), dropped)


@dataclass(frozen=True, slots=True)
class FinalChoice:
    """Which version is shipped, and why."""

    version_id: str
    """`empty` for no library."""
    reason: str
    difference: Interval | None
    """The best version minus the empty library."""
    considered: Mapping[str, Interval]
    """Each version minus the empty library, at the same level."""

    @property
    def is_empty(self) -> bool:
        """True when no library is better than none, as far as can be told."""
        return self.version_id == EMPTY

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version_id": self.version_id,
            "reason": self.reason,
            "difference": None if self.difference is None else self.difference.to_dict(),
            "considered": {k: i.to_dict() for k, i in self.considered.items()},
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        considered = {k: Interval(**i) for k, i in row["considered"].items()}
        return cls(row["version_id"], row["reason"], interval_of(row["difference"]), considered)


def interval_of(row: Mapping[str, Any] | None) -> Interval | None:
    """Read what `Interval.to_dict` wrote, or None where there was none."""
    return None if row is None else Interval(**row)


def final_choice(
    candidates: Mapping[str, Scores],
    *,
    level: float = 0.95,
    seed: int = 0,
    reward_range: tuple[float, float] | None = None,
) -> FinalChoice:
    """Choose among the empty library and the accepted versions by their gate scores.

    The best mean difference to the empty library wins, the later version on a tie. The choice is
    made among several and looks at the same tasks as the steps did, so its figures decide and are
    never reported as the effect: that is what the test split is for.

    Args:
        candidates: gate scores by version id, in the order of acceptance; `empty` is one of them.
        level: of the two-sided paired interval that must exclude zero.
        seed: fixes the bootstrap.
        reward_range: least and largest reward, where known: no interval is wider.

    Raises:
        ValueError: `empty` is not among the candidates.
    """
    if EMPTY not in candidates:
        raise ValueError(f"{EMPTY!r} must be a candidate; there are {sorted(candidates)}")
    empty = candidates[EMPTY]
    considered: dict[str, Interval] = {}
    for version, scores in candidates.items():
        if version != EMPTY and any(empty.get(t) and rewards for t, rewards in scores.items()):
            found = paired_difference(empty, scores, level=level, seed=seed)
            considered[version] = (
                found if reward_range is None else found.within(reward_range, of_difference=True)
            )
    if not considered:
        return FinalChoice(EMPTY, "no version was scored beside the empty library", None, {})
    order = list(considered)
    best = max(order, key=lambda v: (considered[v].estimate, order.index(v)))
    interval = considered[best]
    if interval.low > 0:
        reason = f"{best} is better than no library: {interval}"
        return FinalChoice(best, reason, interval, considered)
    reason = (
        f"the best candidate gains {interval.estimate:+.3f} on the gate tasks, and its "
        f"{level_words(level)} interval {interval.low:+.3f} to {interval.high:+.3f} includes zero"
    )
    return FinalChoice(EMPTY, reason, interval, considered)


@dataclass(frozen=True, slots=True)
class RejectedEdits:
    """Edits that a gate did not accept, kept with the evidence against them."""

    step: int
    edits: tuple[Edit, ...]
    decision: GateDecision

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "step": self.step,
            "edits": [e.to_dict() for e in self.edits],
            "decision": self.decision.to_dict(),
        }


def smaller_sets(edits: Sequence[Edit], limit: int) -> list[tuple[Edit, ...]]:
    """Return the sets to try after a whole set was rejected: single edits, the likeliest first.

    Edits that several groups spoke for come first, then exemplars (they were verified), then the
    order given. A set of one has no smaller set.

    >>> smaller_sets([Edit("add", "a")], 3)
    []
    """
    if len(edits) < 2:
        return []
    ranked = sorted(edits, key=lambda e: (-len(e.provenance.group_ids), e.kind != "exemplar"))
    return [(edit,) for edit in ranked[:limit]]
