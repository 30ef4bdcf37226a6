"""Learning from groups: edits of an experience library, the critic behind them, gate and export.

Pure functions of groups with one thin asynchronous driver, the critic. Does not know how rollouts
are made or where records are kept. Source: Training-Free GRPO, with the repairs listed in
`settings.Repairs`.
"""

from tfgrpo.experience.artefact import Artefact, Card, export_artefact, load_artefact
from tfgrpo.experience.critic.critic import Critic
from tfgrpo.experience.critic.proposal import LibraryProposal, Proposer, stalled
from tfgrpo.experience.draft import Caps
from tfgrpo.experience.edits import Edit, EditCounts, EditOutcome
from tfgrpo.experience.entry import Experience, Provenance, Value
from tfgrpo.experience.gate_rules import (
    FinalChoice,
    GateDecision,
    RejectedEdits,
    final_choice,
    gate_step,
    smaller_sets,
)
from tfgrpo.experience.guards import Guards
from tfgrpo.experience.informative import Teaching, teaching_groups
from tfgrpo.experience.library import EMPTY_LIBRARY, Library
from tfgrpo.experience.prompt_context import prompt_context
from tfgrpo.experience.reflect.conventions import Conventions
from tfgrpo.experience.reflect.reflector import Reflector
from tfgrpo.experience.select import TopK
from tfgrpo.experience.settings import ExperienceSettings, Repairs, preset
from tfgrpo.runtime.token_estimates import estimate_tokens

__all__ = [
    "EMPTY_LIBRARY",
    "Artefact",
    "Caps",
    "Conventions",
    "Card",
    "Critic",
    "Edit",
    "EditCounts",
    "EditOutcome",
    "Experience",
    "ExperienceSettings",
    "FinalChoice",
    "GateDecision",
    "Guards",
    "Library",
    "LibraryProposal",
    "Proposer",
    "Provenance",
    "Reflector",
    "RejectedEdits",
    "Repairs",
    "Teaching",
    "TopK",
    "Value",
    "estimate_tokens",
    "export_artefact",
    "final_choice",
    "gate_step",
    "load_artefact",
    "preset",
    "prompt_context",
    "smaller_sets",
    "stalled",
    "teaching_groups",
]
