"""What an escalation says before it starts and when it has ended, for people and programs.

Does not know how it was done. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.escalate.comparison import Table
from tfgrpo.escalate.cost import Cost
from tfgrpo.escalate.distil_stage import Distilled
from tfgrpo.escalate.grpo_stage import Practised
from tfgrpo.escalate.plan import RunEvidence, TrainingPlan


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be done and what it would cost."""

    model: str
    evidence: RunEvidence
    plan: TrainingPlan
    cost: Cost
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return it for people."""
        e = self.evidence
        return [
            f"model to train: {self.model}",
            f"evidence: {e.practice_tasks} practice tasks, {e.verified_tasks} with a verified "
            f"reply, {e.all_fail_tasks} fail as a whole",
            *(f"advice: {a.headline} [{a.kind}] {a.gain or ''}".rstrip() for a in e.advice[:3]),
            *self.plan.lines(),
            *self.cost.lines(),
            *(f"note: {note}" for note in self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "model": self.model,
            "evidence": self.evidence.to_dict(),
            "plan": self.plan.to_dict(),
            "cost": self.cost.to_dict(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Escalated:
    """What an escalation came to."""

    folder: Path
    preview: Preview
    model: str
    """`local:` spec of the model that was kept; the starting one where training did not help."""
    kept: str
    """`base`, `distilled` or `grpo`."""
    choice: str
    distilled: Distilled | None
    practised: Practised | None
    table: Table
    seconds: dict[str, float]
    """Wall time of the stages of this session."""

    @property
    def exit_code(self) -> int:
        """0 the trained model beats the base on the test tasks, 1 it does not, 5 inconclusive."""
        return self.table.verdict.exit_code

    def lines(self) -> list[str]:
        """Return the result for people."""
        return [
            f"kept: {self.kept} ({self.choice})",
            *self.table.lines(),
            f"the model is {self.model}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        distilled, practised = self.distilled, self.practised
        return {
            "schema": 1,
            **self.preview.to_dict(),
            "model_start": self.preview.model,
            "model": self.model,
            "kept": self.kept,
            "choice": self.choice,
            "distilled": None
            if distilled is None
            else {
                "rows": distilled.rows,
                "tasks": distilled.tasks,
                "looks": distilled.looks,
                "steps": distilled.steps,
            },
            "grpo": None
            if practised is None
            else {
                "tasks": practised.tasks,
                "hinted": practised.hinted,
                "steps": practised.steps,
                "reason": practised.reason,
            },
            **self.table.to_dict(),
            "seconds": self.seconds,
            "exit_code": self.exit_code,
        }

    def markdown(self) -> str:
        """Return the result as a Markdown page."""
        plan = "\n".join(self.preview.plan.lines())
        return (
            f"# Escalation: {self.kept} is kept\n\n{self.table.markdown()}\n"
            f"Chosen on the {self.choice}.\n\nModel: `{self.model}`, from "
            f"`{self.preview.model}`.\n\n## Plan\n\n{plan}\n"
        )
