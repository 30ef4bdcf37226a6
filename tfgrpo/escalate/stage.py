"""What both training stages of an escalation work on and with.

Does not know how a stage trains. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfgrpo.escalate.cost import Sizes
from tfgrpo.escalate.journal import EscalationJournal
from tfgrpo.escalate.plan import TrainingPlan
from tfgrpo.escalate.run_data import Material
from tfgrpo.escalate.settings import EscalateSettings, Say
from tfgrpo.escalate.student import Student
from tfgrpo.protocols import Verifier


@dataclass(frozen=True, slots=True)
class Stage:
    """One training stage: the student, what it learns from, and where it writes."""

    student: Student
    material: Material
    settings: EscalateSettings
    plan: TrainingPlan
    journal: EscalationJournal
    verifier: Verifier
    folder: Path
    full_marks: float
    """The reward of a task that is solved."""
    say: Say

    @property
    def sizes(self) -> Sizes:
        """Draws per task of practice, gate and test."""
        return Sizes.of(self.material, self.settings)
