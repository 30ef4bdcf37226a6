"""The result of a learning run as lines for people: what was kept or why not, proof, spend, next.

Does not know how a run is made. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.diagnosis import Reason
from tfgrpo.learning.gatekeeper import look_word
from tfgrpo.learning.result import Result
from tfgrpo.nudges import nudge_totals, total_lines
from tfgrpo.rollout import Usage
from tfgrpo.runtime.terminal import one_line, printable
from tfgrpo.statistics import Interval, level_words
from tfgrpo.store.fold import SpendRow

__all__ = ["interval_words", "reason_lines", "result_lines", "spend_lines"]


def result_lines(result: Result, config: str = "CONFIG.toml") -> list[str]:
    """Return a result for people.

    Args:
        result: of a finished run.
        config: path of its settings, for the commands that go on from it.
    """
    learned = result.learned
    lines = [f"run: {result.folder}"]
    if learned.stopped_by:
        lines.append(f"ended early: {learned.stopped_by}")
    lines.extend(
        f"gate, step {look.step}, {look.what}: {look_word(look.decision)}: {look.decision.reason}"
        for look in learned.looks
    )
    lines.extend(_what_helped(result))
    lines.extend(_kept(result, config))
    lines.extend(_proof(result))
    totals = nudge_totals(learned.nudges)
    lines.extend(total_lines(totals) if totals is not None else ())
    for stage, counts in result.outcomes.items():
        ended = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        lines.append(f"rollouts of {stage}: {ended}")
    lines.extend(f"note: {note}" for note in result.notes)
    lines.extend(spend_lines(result.spend))
    if result.verdict is not None:
        lines.append(result.verdict.text)
    lines.append(_next(result))
    return [printable(line) for line in lines]


def reason_lines(reasons: Sequence[Reason], config: str = "CONFIG.toml") -> list[str]:
    """Return causes with what to do about each, and the command where settings do it."""
    lines = []
    for number, reason in enumerate(reasons, 1):
        lines.append(f"  {number}. {one_line(reason.text, 600)}")
        command = reason.command(config)
        lines.append(f"     do: {reason.remedy}" + (f": {command}" if command else ""))
    return lines


def interval_words(interval: Interval | None) -> str:
    """Return an estimate with its interval."""
    if interval is None:
        return "nothing was scored"
    return (
        f"{interval.estimate:.3f} ({level_words(interval.level)} interval {interval.low:.3f} to "
        f"{interval.high:.3f}, {interval.n_tasks} tasks)"
    )


def spend_lines(rows: Sequence[SpendRow]) -> list[str]:
    """Return what was spent by stage, and in all: the total that the caps have counted."""
    lines = []
    spent, booked = Usage(), Usage()
    for row in rows:
        spent, booked = spent + row.usage, booked + row.booked
        worst = f"; {_worst(row.booked)}" if row.booked.calls else ""
        failed = f", {row.failed_calls} of them failed" if row.failed_calls else ""
        lines.append(f"spent: {row.stage:<10} {row.model}: {_usage(row.usage)}{failed}{worst}")
    if len(rows) > 1:
        worst = f"; {_worst(booked)}" if booked.calls else ""
        lines.append(f"spent: in all {_usage(spent)}{worst}")
    return lines


def _usage(usage: Usage) -> str:
    cost = "money unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
    mark = "≈" if usage.is_estimated else ""
    tokens = f"{mark}{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens"
    return f"{usage.calls:,} calls, {tokens}, {cost}"


def _worst(booked: Usage) -> str:
    return f"at most {_usage(booked)} more, of calls whose end nobody saw"


def _kept(result: Result, config: str) -> list[str]:
    outcome, choice = result.outcome, result.learned.choice
    if not outcome.is_kept:
        lines = [f"{outcome.state}: {choice.reason}"]
        if result.why_not_kept:
            lines.append("why nothing was kept:")
        return lines + reason_lines(result.why_not_kept, config)
    lines = [f"kept: version {result.learned.version.version_id}: {choice.reason}"]
    for entry in result.library.shown:
        lines.append(f"  {entry.experience_id} {entry.kind}: {one_line(entry.body, 160)}")
    if result.why_not_kept:
        lines.append("why its gain is not proven:")
    return lines + reason_lines(result.why_not_kept, config)


def _proof(result: Result) -> list[str]:
    proof = result.learned.proof
    if proof is None:
        return []
    lines = [f"test split, empty library: {interval_words(result.empty_score)}"]
    if result.outcome.is_kept:
        lines.append(f"test split, kept library:  {interval_words(result.library_score)}")
    if proof.difference is not None:
        lines.append(f"paired difference:         {interval_words(proof.difference)}")
    if result.min_detectable is not None:
        lines.append(f"smallest gain the test could have seen: {result.min_detectable:.3f}")
    if proof.noise_floor is not None:
        lines.append(f"the same library twice differs by up to {proof.noise_floor:.3f}, by chance")
    return lines


def _next(result: Result) -> str:
    run = result.folder
    if result.outcome.is_kept:
        return f"next: tfgrpo library show {run} · tfgrpo report {run} · docs/use.md"
    return f"next: tfgrpo advise {run} · tfgrpo report {run}"


def _what_helped(result: Result) -> list[str]:
    """Say it when lessons were tried and did not help."""
    tried = [look for look in result.learned.looks if look.what in ("lessons", "one lesson")]
    if not tried or any(look.decision.accepted for look in tried):
        return []
    kept = {entry.kind for entry in result.library.shown}
    instead = ": worked examples did" if kept == {"exemplar"} else ""
    return [f"lessons did not help this model{instead}"]
