"""What a journal adds up to: spend by stage and model, what is done, the newest library.

A fold reads rows and never bodies, except the newest library's, so that a run of 100,000 rollouts
opens in a moment. Everything that a resume needs follows from it.

Does not know how rows are written or what a library means. Idea: state is a fold of events (own).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tfgrpo.rollout import MOST_TOKENS, Usage
from tfgrpo.store.checked_values import DAMAGED, Values
from tfgrpo.store.codec import from_column
from tfgrpo.store.rows import RowStore

__all__ = ["RunState", "SpendRow", "fold"]

SETTLED = ("ok", "rejected", "not_sent")
"""Results whose cost is known; `unsettled` ones count at their worst case."""


@dataclass(frozen=True, slots=True)
class SpendRow:
    """What one stage has spent at one model."""

    stage: str
    model: str
    usage: Usage
    """Settled: replies, and failures that cost nothing but the call. `cost_usd` is None where the
    price of any of it is unknown."""
    estimated: Usage
    """The part of `usage` whose token counts are our estimate and not the provider's bill."""
    booked: Usage
    """Kept apart from `usage`, at the worst case: calls whose cost nobody can tell because the
    process was killed, or the connection lost, while they were in flight."""
    failed_calls: int
    """Calls that ended in a failure, whether or not they cost anything."""
    hits: int
    """Replies that were taken from the journal or the shared cache instead of a call."""
    duration_s: float
    """Sum of the calls' wall times in seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "stage": self.stage,
            "model": self.model,
            "usage": self.usage.to_dict(),
            "estimated": self.estimated.to_dict(),
            "booked": self.booked.to_dict(),
            "failed_calls": self.failed_calls,
            "hits": self.hits,
            "duration_s": self.duration_s,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> SpendRow:
        """Restore a row from its JSON form."""
        usages = {n: Usage.from_dict(row[n]) for n in ("usage", "estimated", "booked")}
        return cls(**{**row, **usages})


@dataclass(frozen=True, slots=True)
class RunState:
    """What a resume needs to know."""

    spend: tuple[SpendRow, ...]
    seconds: float
    """Wall time of all sessions so far."""
    sessions: int
    interruptions: int
    """Earlier sessions that did not end in order."""
    rollouts: int
    outcomes: Mapping[str, int]
    """Finished rollouts by outcome, the newest record of each."""
    truncated: int
    groups: int
    library_id: str
    """The newest library version; empty when there is none."""
    library: Any
    decisions: Mapping[str, int] = field(default_factory=dict)
    """How many decisions of each kind are recorded."""
    changed_at: float = 0.0
    """When the newest session or call began or ended, in seconds since 1970."""


def totals_of(state: RunState) -> dict[str, Any]:
    """Return the JSON form of a state, its library and its time left out."""
    row = {f.name: getattr(state, f.name) for f in fields(state)}
    del row["library"], row["changed_at"]
    return row | {"spend": [s.to_dict() for s in state.spend]}


def state_of(totals: Mapping[str, Any], changed_at: float) -> RunState:
    """Restore a state without its library from its JSON form."""
    spend = tuple(SpendRow.from_dict(row) for row in totals["spend"])
    return RunState(**{**totals, "spend": spend}, library=None, changed_at=changed_at)


def newest_numbers(writer: RowStore) -> str:
    """Return a text that changes when calls, rollouts, groups or decisions are added."""
    newest = " UNION ALL ".join(
        f"SELECT max({column}) FROM {table}" for table, column in _NUMBERED.items()
    )
    return "-".join(str(number or 0) for (number,) in writer.read(newest))


_NUMBERED = {
    "calls": "call",
    "completions": "completion",
    "rollouts": "rollout",
    "groups": "grp",
    "decisions": "decision",
}


def fold(writer: RowStore, values: Values) -> RunState:
    """Return the state of a journal; a damaged library gives way to the newest sound one."""
    at_work = " AND session NOT IN (SELECT session FROM live)" if writer.is_shared else ""
    sessions, ended = writer.read(
        "SELECT count(DISTINCT session), count(CASE event WHEN 'close' THEN 1 END) FROM sessions"
        f" WHERE session < (SELECT max(session) FROM sessions){at_work}"
    )[0]
    outcomes = writer.read(
        "SELECT outcome, count(*), sum(truncated) FROM rollouts WHERE rollout IN"
        " (SELECT max(rollout) FROM rollouts GROUP BY rollout_id, verifier_id) GROUP BY outcome"
    )
    version, library = _newest_library(writer, values)
    return RunState(
        spend=tuple(fold_spend(writer)),
        seconds=elapsed_seconds(writer),
        sessions=sessions + 1,
        interruptions=sessions - ended,
        rollouts=sum(n for _, n, _ in outcomes),
        outcomes={outcome: n for outcome, n, _ in outcomes},
        truncated=sum(int(t or 0) for _, _, t in outcomes),
        groups=writer.read("SELECT count(DISTINCT group_id) FROM groups")[0][0],
        library_id=version,
        library=library,
        decisions=dict(writer.read("SELECT kind, count(*) FROM decisions GROUP BY kind")),
        changed_at=_changed_at(writer),
    )


def _newest_library(writer: RowStore, values: Values) -> tuple[str, Any]:
    for (row,) in writer.read("SELECT library FROM libraries ORDER BY library DESC"):
        sql = "SELECT version_id, body, digest FROM libraries WHERE library = ?"
        name, body, mark = writer.read(sql, (row,))[0]
        value = values.get("libraries", row, body, mark)
        if value is not DAMAGED:
            return from_column(name), value
    return "", None


_BELIEVED = "(r.cost_usd IS NULL OR r.cost_usd BETWEEN 0 AND 1e9) AND " + " AND ".join(
    f"typeof(r.{name}) = 'integer' AND r.{name} BETWEEN 0 AND {16 * MOST_TOKENS}"
    for name in ("calls", "uncached", "cache_read", "cache_write", "text", "reasoning")
)
"""What a result's counts must be to be added up; another one counts at its worst case."""


_TEXT = "coalesce(CAST({} AS TEXT), '')"
"""A column's text, whatever a flipped bit made of its type."""


def fold_spend(writer: RowStore) -> list[SpendRow]:
    """Return what was spent, by stage and model, in that order.

    A call without a result counts as booked. While a run goes on that includes the calls in
    flight.
    """
    sums: dict[tuple[str, str], _Sums] = {}
    rows = writer.read(
        f"SELECT {_TEXT.format('c.stage')}, {_TEXT.format('c.model')},"
        f" CASE WHEN r.call IS NOT NULL AND NOT ({_BELIEVED}) THEN 'absurd'"
        " ELSE coalesce(r.kind, 'none') END AS how, coalesce(r.estimated, 0), count(*),"
        " total(r.calls), total(r.uncached), total(r.cache_read), total(r.cache_write),"
        " total(r.text), total(r.reasoning), total(r.cost_usd), count(r.cost_usd),"
        " total(r.duration_s), total(c.prompt_tokens), total(c.completion_tokens),"
        " total(c.cost_usd), count(c.cost_usd)"
        " FROM calls c LEFT JOIN results r ON r.call = c.call GROUP BY 1, 2, 3, 4"
    )
    for stage, model, kind, estimated, n, *amounts in rows:
        sums.setdefault((stage, model), _Sums()).add(kind, bool(estimated), n, amounts)
    hit_rows = writer.read(
        f"SELECT {_TEXT.format('stage')}, {_TEXT.format('model')}, total(n) FROM hits GROUP BY 1, 2"
    )
    for stage, model, hits in hit_rows:
        sums.setdefault((stage, model), _Sums()).hits += int(hits)
    return [sums[key].row(from_column(key[0]), from_column(key[1])) for key in sorted(sums)]


@dataclass(slots=True)
class _Sums:
    usage: Usage = field(default_factory=Usage)
    estimated: Usage = field(default_factory=Usage)
    booked: Usage = field(default_factory=Usage)
    failed: int = 0
    hits: int = 0
    duration_s: float = 0.0

    def add(self, kind: str, is_estimated: bool, n: int, amounts: list[Any]) -> None:
        calls, *tokens = (int(a or 0) for a in amounts[:6])
        cost, priced, duration_s = amounts[6] or 0.0, amounts[7], amounts[8] or 0.0
        worst, worst_priced = amounts[11:]
        prompt, completion = int(amounts[9]), int(amounts[10])
        self.duration_s += duration_s
        if kind in SETTLED:
            uncached, read, write, text, reasoning = tokens
            known = cost if priced == n else None
            usage = Usage(uncached, read, write, text, reasoning, calls, known, is_estimated)
            self.usage += usage
            if is_estimated:
                self.estimated += usage
        else:
            self.booked += Usage(
                uncached_tokens=prompt,
                text_tokens=completion,
                calls=n,
                cost_usd=worst if worst_priced == n else None,
                is_estimated=True,
            )
        if kind in ("rejected", "unsettled", "not_sent"):
            self.failed += n

    def row(self, stage: str, model: str) -> SpendRow:
        return SpendRow(
            stage,
            model,
            self.usage,
            self.estimated,
            self.booked,
            self.failed,
            self.hits,
            self.duration_s,
        )


_LAST_YEAR_S = 1e11
"""A time beyond it is damage."""


def _changed_at(writer: RowStore) -> float:
    rows = writer.read(
        "SELECT max(at) FROM (SELECT max(at) AS at FROM sessions"
        " UNION ALL SELECT max(at) FROM calls) e"
    )
    newest = rows[0][0]
    is_time = isinstance(newest, float) and 0 <= newest < _LAST_YEAR_S
    return newest if is_time else 0.0


def elapsed_seconds(writer: RowStore) -> float:
    """Return the wall time of all sessions: of a killed one, up to its last result; time in which
    several writers were at work counts once."""
    sessions = (
        "SELECT session, min(began) AS began, max(elapsed_s) AS longest FROM"
        " (SELECT session, at - elapsed_s AS began, elapsed_s FROM sessions UNION ALL"
        "  SELECT c.session, NULL, r.elapsed_s FROM results r JOIN calls c ON c.call = r.call) e"
        " GROUP BY session"
    )
    if not writer.is_shared:
        rows = writer.read(f"SELECT sum(longest) FROM ({sessions}) s")
        return max(0.0, float(rows[0][0] or 0.0))
    total, until = 0.0, float("-inf")
    for _, began, longest in writer.read(f"{sessions} ORDER BY began"):
        if began is not None:
            total += max(0.0, began + longest - max(began, until))
            until = max(until, began + longest)
    return total
