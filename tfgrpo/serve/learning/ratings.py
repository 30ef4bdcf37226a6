"""What feedback adds up to: a pure fold of its rows, in any order of arrival.

A slot is (target, choice, metric, kind, source). In a slot the record with the latest `at` is in
force; withdrawing a record takes it and everything it replaced away. Of several sources the highest
rank decides (`verifier` > `human` > `rule` > `judge` > `implicit`), the others stay as parts; where
values differ by half the range or more, the rating is in conflict until a person settles it.
Silence is missing, never 0.

Does not know HTTP, groups or files. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tfgrpo.serve.settings import FeedbackSettings

__all__ = ["RANKS", "FeedbackRow", "Rating", "in_force", "rank_of", "rate", "scaled"]

RANKS = ("verifier", "human", "rule", "judge", "implicit")
"""Kinds of sources, the most trusted first; a source is `KIND` or `KIND:NAME`."""
CONFLICT = 0.5
"""Share of the range from which two values contradict each other."""


@dataclass(frozen=True, slots=True)
class FeedbackRow:
    """One record."""

    number: int
    """Order of arrival."""
    feedback_id: str
    received: float
    at: float
    target_kind: str
    """`response`, `session` or `group`."""
    target: str
    choice: int | None
    metric: str
    kind: str
    """`reward`, `answer`, `comment`, `withdrawn` (value: the id withdrawn) or `settled`."""
    value: Any
    source: str = "human"

    @property
    def slot(self) -> tuple[Any, ...]:
        """What at most one value of is in force."""
        return (self.target_kind, self.target, self.choice, self.metric, self.kind, self.source)


def rank_of(source: str) -> int:
    """Return the rank of a source, 0 the most trusted; unknown kinds rank last."""
    kind = source.partition(":")[0]
    return RANKS.index(kind) if kind in RANKS else len(RANKS)


def scaled(value: Any, settings: FeedbackSettings) -> float:
    """Return a value on [0, 1]; booleans are the ends of the range."""
    if isinstance(value, bool):
        return float(value)
    return (float(value) - settings.low) / (settings.high - settings.low)


def in_force(rows: Iterable[FeedbackRow]) -> list[FeedbackRow]:
    """Return the records that count, one a slot, oldest first."""
    given = list(rows)
    gone = {str(r.value) for r in given if r.kind == "withdrawn"}
    latest: dict[tuple[Any, ...], FeedbackRow] = {}
    cut: dict[tuple[Any, ...], tuple[float, str]] = {}
    for row in given:
        if row.kind == "withdrawn":
            continue
        order = (row.at, row.feedback_id)
        if row.feedback_id in gone:
            cut[row.slot] = max(cut.get(row.slot, order), order)
        found = latest.get(row.slot)
        if found is None or order > (found.at, found.feedback_id):
            latest[row.slot] = row
    kept = [
        row for slot, row in latest.items()
        if slot not in cut or (row.at, row.feedback_id) > cut[slot]
    ]  # fmt: skip
    return sorted(kept, key=lambda r: (r.at, r.feedback_id))


@dataclass(frozen=True, slots=True)
class Rating:
    """What feedback says of one response (or session)."""

    reward: float | None = None
    """In [0, 1]; None where nothing is in force."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """`METRIC/SOURCE` and other metrics, scaled where they are the reward's."""
    sources: tuple[str, ...] = ()
    """Sources behind the reward."""
    answer: Any = None
    comments: tuple[str, ...] = ()
    is_conflict: bool = False
    revision: int = 0
    """How many records there are: a later one makes another revision."""


def rate(
    rows: Sequence[FeedbackRow],
    settings: FeedbackSettings,
    choice: int | None = None,
    session: Sequence[FeedbackRow] = (),
) -> Rating:
    """Return the rating of one response's choice.

    Args:
        rows: records of the response, of any choice; those without a choice count for each.
        settings: metric and range of the reward.
        choice: which draw.
        session: records of its session; they become the part `session` and no reward.
    """
    mine = [r for r in rows if r.choice in (None, choice) or choice is None]
    force = in_force(mine)
    rewards = [r for r in force if r.kind == "reward" and r.metric == settings.metric]
    values = {r.source: scaled(r.value, settings) for r in rewards}
    parts = {f"{settings.metric}/{source}": value for source, value in values.items()}
    parts |= {
        f"{r.metric}/{r.source}": float(r.value)
        for r in force
        if r.kind == "reward" and r.metric != settings.metric
    }
    best = min((rank_of(s) for s in values), default=0)
    deciding = sorted(s for s in values if rank_of(s) == best)
    reward = fmean(values[s] for s in deciding) if deciding else None
    is_conflict = bool(values) and max(values.values()) - min(values.values()) >= CONFLICT
    settled = [r for r in force if r.kind == "settled"]
    if settled:
        reward, is_conflict = scaled(settled[-1].value, settings), False
        deciding = [settled[-1].source]
    whole = rate(session, settings) if session else None
    if whole is not None and whole.reward is not None:
        parts["session"] = whole.reward
    answers = [r for r in force if r.kind == "answer"]
    answers.sort(key=lambda r: (-rank_of(r.source), r.at))
    return Rating(
        reward,
        parts,
        tuple(deciding),
        answers[-1].value if answers else None,
        tuple(str(r.value) for r in force if r.kind == "comment"),
        is_conflict,
        len(mine),
    )
