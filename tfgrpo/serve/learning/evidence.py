"""What the journal holds of a route's traffic, as the pure parts want it.

Does not know what is made of it. Source: own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.serve.learning.canary import LiveUnit
from tfgrpo.serve.learning.grouping import CapturedRequest
from tfgrpo.serve.learning.ratings import FeedbackRow, rate
from tfgrpo.serve.learning.tool_failures import read_broken
from tfgrpo.serve.settings import FeedbackSettings
from tfgrpo.store import Journal

__all__ = ["SILENT", "closed_groups", "read_seen", "read_silent", "read_units"]

SILENT = "verifier:silent"
"""Source of what the verifier said of responses that nobody rated in time."""
_FEEDBACK = (
    "SELECT f.feedback, f.feedback_id, f.received, f.at, f.target_kind, f.target, f.choice,"
    " f.metric, f.kind, f.value, f.source FROM feedback f"
)


def _rows(journal: Journal, sql: str, values: tuple[Any, ...]) -> dict[str, list[FeedbackRow]]:
    found: dict[str, list[FeedbackRow]] = defaultdict(list)
    for a, b, c, d, e, f, g, h, i, value, source in journal.writer.read(sql, values):
        found[f].append(FeedbackRow(a, b, c, d, e, f, g, h, i, json.loads(value), source))
    return found


def _of_responses(journal: Journal, route: str, since: float) -> dict[str, list[FeedbackRow]]:
    sql = (
        f"{_FEEDBACK} JOIN requests q ON q.response_id = f.target"
        " WHERE f.target_kind = 'response' AND q.route = ? AND q.at >= ? ORDER BY f.feedback"
    )
    return _rows(journal, sql, (route, since))


def _of_sessions(journal: Journal, route: str, since: float) -> dict[str, list[FeedbackRow]]:
    sql = (
        f"{_FEEDBACK} WHERE f.target_kind = 'session' AND f.target IN"
        " (SELECT session_id FROM requests WHERE route = ? AND at >= ? AND session_id <> '')"
        " ORDER BY f.feedback"
    )
    return _rows(journal, sql, (route, since))


def _of_groups(journal: Journal, route: str, since: float) -> dict[str, list[FeedbackRow]]:
    sql = (
        f"{_FEEDBACK} WHERE f.target_kind = 'group' AND f.target IN"
        " (SELECT group_id FROM requests WHERE route = ? AND at >= ? AND group_id <> '')"
        " ORDER BY f.feedback"
    )
    return _rows(journal, sql, (route, since))


_IDENTIFIED = (
    " AND (q.task_id <> '' OR q.group_id <> '' OR EXISTS"
    " (SELECT 1 FROM choices d WHERE d.response_id = q.response_id AND d.choice > 0))"
)


def read_seen(
    journal: Journal,
    route: str,
    settings: FeedbackSettings,
    *,
    since: float,
    identified: bool = False,
) -> list[CapturedRequest]:
    """Return the captured requests of a route that were answered, oldest first, with ratings.

    Args:
        journal, route: where and whose.
        settings: metric and range.
        since: time of the first.
        identified: leave out what no client gave an identity and that has one draw, since no group
            can be made of it.
    """
    which = _IDENTIFIED if identified else ""
    responses = _of_responses(journal, route, since)
    sessions = _of_sessions(journal, route, since)
    groups = _of_groups(journal, route, since)
    choices: dict[str, dict[int, tuple[str, Any]]] = defaultdict(dict)
    for response_id, choice, finish, body in journal.writer.read(
        "SELECT c.response_id, c.choice, c.finish, c.body FROM choices c JOIN requests q"
        " ON q.response_id = c.response_id WHERE q.route = ? AND q.at >= ?"
        f" AND q.prompt NOT NULL AND c.body NOT NULL{which}",
        (route, since),
    ):
        choices[response_id][choice] = (finish, json.loads(body))
    seen = []
    for row in journal.writer.read(
        "SELECT q.response_id, q.at, q.task_id, q.session_id, q.group_id, q.task_digest,"
        " q.library, q.context, r.upstream, q.prompt, q.key, q.end_user FROM requests q"
        " JOIN replies r ON r.response_id = q.response_id WHERE q.route = ? AND q.at >= ?"
        f" AND r.state = 'ok' AND q.prompt NOT NULL{which} ORDER BY q.at",
        (route, since),
    ):
        a, at, task, session, group, task_digest, library, context, upstream, *rest = row
        prompt, key, end_user = rest
        rated = responses.get(row[0], [])
        mine = choices.get(row[0], {})
        ratings = {c: rate(rated, settings, c) for c in mine}
        whole = sessions.get(row[3]) if row[3] else None
        seen.append(
            CapturedRequest(
                a,
                at,
                task,
                session,
                group,
                task_digest,
                library,
                context,
                upstream,
                prompt=json.loads(prompt)["messages"],
                choices=mine,
                ratings=ratings,
                session_rating=rate(whole, settings) if whole else None,
                group_answer=rate(groups[group], settings).answer if group in groups else None,
                source=end_user or key,
            )
        )
    return seen


def closed_groups(journal: Journal, route: str) -> frozenset[str]:
    """Return the client group ids of a route that were closed early."""
    rows = journal.writer.read(
        "SELECT name FROM notes WHERE kind = 'group_closed' AND body = ?", (route,)
    )
    return frozenset(name for (name,) in rows)


def read_units(
    journal: Journal,
    route: str,
    settings: FeedbackSettings,
    *,
    now: float,
    experiment: str | None = None,
    since: float = 0.0,
) -> list[LiveUnit]:
    """Return the units whose window and all earlier ones' have closed, in order of assignment.

    A unit's outcome is its session's rating where there is one, else the mean of its responses';
    records that came after its window do not count.

    Args:
        journal: where they are.
        route: whose.
        settings: metric, range, window.
        now: seconds since the epoch.
        experiment: whose units; None takes all arms of all times, for the holdout.
        since: time of the first unit.
    """
    responses = _of_responses(journal, route, since)
    sessions = _of_sessions(journal, route, since)
    broken = read_broken(journal, route, experiment) if experiment is not None else frozenset()
    window_s = settings.window_h * 3600.0
    by_unit: dict[str, list[tuple[Any, ...]]] = {}
    where = "" if experiment is None else " AND q.experiment = ? AND q.experiment <> ''"
    values: tuple[Any, ...] = (route, since) if experiment is None else (route, since, experiment)
    for row in journal.writer.read(
        "SELECT q.unit, q.at, q.arm, q.share, q.prediction, q.response_id, q.session_id,"
        " r.state, r.cost_usd, r.duration_s FROM requests q LEFT JOIN replies r"
        " ON r.response_id = q.response_id WHERE q.route = ? AND q.at >= ? AND q.arm <> 'pinned'"
        f"{where} ORDER BY q.at, q.response_id",
        values,
    ):
        by_unit.setdefault(row[0], []).append(row)
    units = []
    for rows in by_unit.values():
        first_at = rows[0][1]
        if now < first_at + window_s:
            break  # those after it wait with it
        unit = _unit(rows, responses, sessions, settings, first_at + window_s)
        failed = sum(row[7] in ("failed", "cut") or row[5] in broken for row in rows)
        units.append(replace(unit, failures=failed))
    return units


def _unit(
    rows: Sequence[tuple[Any, ...]],
    responses: dict[str, list[FeedbackRow]],
    sessions: dict[str, list[FeedbackRow]],
    settings: FeedbackSettings,
    until: float,
) -> LiveUnit:
    _, at, arm, share, prediction, *_ = rows[0]
    rewards, silent = [], []
    for row in rows:
        given = responses.get(row[5], [])
        in_time = [f for f in given if f.received <= until and f.source != SILENT]
        rating = rate(in_time, settings)
        if rating.reward is not None and not rating.is_conflict:
            rewards.append(rating.reward)
        elif not in_time:
            judged = rate([f for f in given if f.source == SILENT], settings)
            silent += [] if judged.reward is None else [judged.reward]
    whole = [f for f in sessions.get(rows[0][6], []) if rows[0][6] and f.received <= until]
    of_session = rate(whole, settings)
    outcome = sum(rewards) / len(rewards) if rewards else None
    if of_session.reward is not None:
        outcome = None if of_session.is_conflict else of_session.reward
    if outcome is None and settings.missing == "verifier" and silent:
        outcome = sum(silent) / len(silent)
    elif outcome is None and isinstance(settings.missing, float):
        outcome = settings.missing
    has_feedback = bool(rewards) or of_session.reward is not None
    return LiveUnit(
        arm=arm,
        share=share,
        at=at,
        outcome=outcome,
        has_feedback=has_feedback,
        prediction=0.5 if prediction is None else prediction,
        requests=len(rows),
        cost_usd=sum(row[8] or 0.0 for row in rows),
        duration_s=max((row[9] or 0.0 for row in rows), default=0.0),
    )


def read_silent(
    journal: Journal, route: str, experiment: str, before: float
) -> list[tuple[str, str, Any, Any, Any]]:
    """Return (response, task, turns, reply, right answer or None) of a live test's captured
    responses before a time that nobody rated and no verifier judged."""
    rows = journal.writer.read(
        "SELECT q.response_id, q.task_id, q.prompt, c.body, (SELECT f.value FROM feedback f"
        "  WHERE f.target_kind = 'response' AND f.target = q.response_id AND f.kind = 'answer'"
        "  ORDER BY f.feedback DESC LIMIT 1)"
        " FROM requests q JOIN choices c ON c.response_id = q.response_id AND c.choice = 0"
        " WHERE q.experiment = ? AND q.experiment <> '' AND q.route = ? AND q.at < ?"
        " AND q.prompt NOT NULL AND NOT EXISTS (SELECT 1 FROM feedback f"
        "  WHERE f.target_kind = 'response' AND f.target = q.response_id AND f.kind = 'reward')",
        (experiment, route, before),
    )
    return [
        (response_id, task, json.loads(prompt)["messages"], json.loads(body),
         json.loads(answer) if answer else None)
        for response_id, task, prompt, body, answer in rows
    ]  # fmt: skip
