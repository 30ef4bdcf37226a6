"""What a learning run came to: the result as an object and as JSON, and the artefact's files.

Does not know how a run is set up or learns. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.diagnosis import KINDS, Reason, RunOutcome, edited_version, outcome_of, why_not_kept
from tfgrpo.experience import (
    Artefact,
    Card,
    ExperienceSettings,
    Library,
    export_artefact,
)
from tfgrpo.experience.artefact import package_version
from tfgrpo.group_figures import GroupFigures
from tfgrpo.learning.components import sampling_of
from tfgrpo.learning.forecast import Forecast
from tfgrpo.learning.loop import LearnOutcome
from tfgrpo.nudges import nudge_totals
from tfgrpo.statistics import Interval, mean_interval, min_detectable
from tfgrpo.statistics.verdict import Verdict, judge_gain
from tfgrpo.store import Journal
from tfgrpo.store.fold import SpendRow
from tfgrpo.tasks import Splits
from tfgrpo.tasks.contamination import leaks_in_library

__all__ = ["Result", "kept_library", "make_result", "short_result", "write_artefact"]


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to, for people and programs."""

    folder: Path
    learned: LearnOutcome
    verdict: Verdict | None
    """Whether the kept library beats the empty one on the test split; None without a test."""
    forecast: Forecast
    spend: tuple[SpendRow, ...]
    splits: Splits
    notes: tuple[str, ...]
    outcomes: dict[str, dict[str, int]]
    """How many rollouts of each stage ended in each way."""
    min_detectable: float | None
    """Smallest true difference that the test split could have found with 80 % power, measured on
    the run's own draws."""
    outcome: RunOutcome
    """What became of the libraries: kept, or a candidate that was not kept."""
    why_not_kept: tuple[Reason, ...] = ()
    """Why nothing was kept, or what was kept is unproven, the likeliest cause first."""
    reward_range: tuple[float, float] | None = None
    """Least and largest reward of the verifier, where it has bounds."""

    def __str__(self) -> str:
        """What was kept and what it is worth, in a few lines."""
        verdict = "no test split, so no verdict" if self.verdict is None else self.verdict.text
        kept = f"{self.outcome.state}, {len(self.library.shown)} entries"
        why = [f"why: {reason.text}" for reason in self.why_not_kept[:3]]
        return "\n".join([f"run {self.folder}: {kept}", verdict, *why])

    def _repr_html_(self) -> str:
        """The same as a notebook shows it."""
        from html import escape

        rows = "".join(
            f"<tr><td>{escape(e.experience_id)}</td><td>{escape(e.kind)}</td>"
            f"<td>{escape(e.body)}</td></tr>"
            for e in self.library.shown
        )
        return f"<pre>{escape(str(self))}</pre><table>{rows}</table>"

    @property
    def library(self) -> Library:
        """The library that was kept; empty where none won."""
        return self.learned.version.library

    @property
    def empty_score(self) -> Interval | None:
        """Test-split mean of the empty library."""
        return self._mean("empty")

    @property
    def library_score(self) -> Interval | None:
        """Test-split mean of what was kept."""
        return self._mean("final")

    def _mean(self, arm: str) -> Interval | None:
        proof = self.learned.proof
        if proof is None:
            return None
        scores = proof.empty if arm == "empty" else proof.final
        found = mean_interval(scores) if any(scores.values()) else None
        known = self.reward_range
        return found if found is None or known is None else found.within(known)

    @property
    def exit_code(self) -> int:
        """0 verdict met, 1 not met, 4 stopped by a cap, 5 inconclusive."""
        if self.learned.stopped_by.startswith("budget"):
            return 4
        return self.verdict.exit_code if self.verdict is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        proof = self.learned.proof
        totals = nudge_totals(self.learned.nudges)
        return {
            "schema": 1,
            "folder": str(self.folder),
            "state": self.outcome.state,
            "version_id": self.learned.version.version_id,
            "entries": [e.to_dict() for e in self.library.shown],
            "choice": self.learned.choice.to_dict(),
            "empty_score": _row(self.empty_score),
            "library_score": _row(self.library_score),
            "difference": _row(proof.difference if proof else None),
            "noise_floor": proof.noise_floor if proof else None,
            "min_detectable": self.min_detectable,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "exit_code": self.exit_code,
            "stopped_by": self.learned.stopped_by,
            "splits": {k: len(v) for k, v in self.splits.to_dict().items()},
            "spend": [row.to_dict() for row in self.spend],
            "outcomes": self.outcomes,
            "why_not_kept": [r.to_dict() for r in self.why_not_kept],
            "notes": list(self.notes),
            **({} if totals is None else {"nudge": totals}),
        }


def make_result(
    config: Config,
    store: Journal,
    learned: LearnOutcome,
    plan: Forecast,
    splits: Splits,
    notes: tuple[str, ...],
    reward_range: tuple[float, float] | None = None,
) -> Result:
    """Put a finished run's figures together; a test task quoted in the library becomes a note."""
    proof, smallest, verdict = learned.proof, plan.min_detectable, None
    figures = list(store.figures())
    outcome, reasons = _outcome(store, figures)
    if proof is not None:
        verdict = judge_gain(proof.empty, proof.final)
        verdict = verdict if reward_range is None else verdict.within(reward_range)
        if not outcome.is_kept:
            verdict = verdict.of_nothing_kept()
        if len(splits.test) > 1:
            smallest = min_detectable(
                len(splits.test), config.gate.test_group_size, pilot=proof.empty
            )
    library = {e.experience_id: e.body for e in learned.version.library.shown}
    leaks = leaks_in_library((*splits.practice, *splits.gate), splits.test, library)
    quoted = sorted({leak.task_id for leak in leaks})
    if quoted:
        notes = (*notes, f"test tasks or answers stand in the library: {', '.join(quoted[:5])}")
    spend = tuple(store.spend())
    return Result(
        folder=store.folder,
        learned=learned,
        verdict=verdict,
        forecast=plan,
        spend=spend,
        splits=splits,
        notes=(*notes, *learned.notes),
        outcomes=_outcomes(figures),
        min_detectable=smallest,
        outcome=outcome,
        why_not_kept=tuple(reasons),
        reward_range=reward_range,
    )


def _outcome(store: Journal, figures: Sequence[GroupFigures]) -> tuple[RunOutcome, list[Reason]]:
    """Return what became of a run's libraries and why none was kept, as its records show it."""
    decisions = {kind: [payload for _, payload in store.decisions(kind)] for kind in KINDS}
    final = decisions["final"][-1] if decisions["final"] else None
    found = why_not_kept(figures, decisions, store.config or {})
    return outcome_of(final, bool(store.libraries())), found


def short_result(result: Result) -> dict[str, Any]:
    """Return what lists of runs show of a result."""
    proof = result.learned.proof
    gain = proof.difference if proof is not None else None
    return {
        "state": result.outcome.state,
        "verdict": None if result.verdict is None else result.verdict.status,
        "gain": None if gain is None else gain.estimate,
    }


def kept_library(store: Journal, result: Result) -> Library:
    """Return what the run kept, with the changes that a person made to it since."""
    kept = result.library
    edits = [payload for _, payload in store.decisions("edited")]
    version = edited_version(kept.version_id, edits)
    newest = dict(store.libraries()).get(version) if version != kept.version_id else None
    return kept if newest is None else Library.from_dict(newest)


def write_artefact(
    config: Config, result: Result, settings: ExperienceSettings, library: Library
) -> None:
    """Write the artefact into the run's folder: JSON, Markdown and the ready prompt.

    Also where nothing was kept: the empty library is an answer that loads and renders the bare
    prompt, and its card says why.
    """
    proof = result.learned.proof
    card = Card(
        name=result.folder.name,
        models={"policy": config.policy.lm, "critic": config.critic.lm or config.policy.lm},
        sampling=sampling_of(config.policy.sampling.model_dump()),
        tasks=result.to_dict()["splits"] | {"verifier": config.verifier},
        scores={
            "empty": _row(result.empty_score),
            "library": _row(result.library_score),
            "difference": _row(proof.difference if proof else None),
        },
        cost={"rows": [row.to_dict() for row in result.spend]},
        limits=(*_why_lines(result), *result.notes),
        created=datetime.now(UTC).date().isoformat(),
        package_version=package_version(),
    )
    artefact = Artefact(
        library=library,
        card=card,
        placement=settings.deployed_placement,
        template=settings.template,
        system=config.policy.system,
    )
    export_artefact(artefact, result.folder)


def _why_lines(result: Result) -> list[str]:
    if result.outcome.is_kept:
        return []
    found = [f"{result.outcome.state}: {result.outcome.reason}"]
    return found + [r.text for r in result.why_not_kept]


def _outcomes(figures: Iterable[GroupFigures]) -> dict[str, dict[str, int]]:
    """How the rollouts of each stage ended."""
    counts: dict[str, dict[str, int]] = {}
    for group in figures:
        row = counts.setdefault(str(group.metadata.get("stage", "other")), {})
        for outcome, n in group.outcomes.items():
            row[outcome] = row.get(outcome, 0) + n
    return counts


def _row(interval: Interval | None) -> dict[str, float | int] | None:
    return None if interval is None else interval.to_dict()
