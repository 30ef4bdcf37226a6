"""Learning from groups: edits of an experience library, the critic behind them, gate and export.

Pure functions of groups with one thin asynchronous driver, the critic. Does not know how rollouts
are made or where records are kept. Source: Training-Free GRPO, with the repairs listed in
`settings.Repairs`.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
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
    from tfgrpo.experience.placement import prompt_context
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

_HOME = {
    "EMPTY_LIBRARY": "library",
    "Artefact": "artefact",
    "Caps": "draft",
    "Conventions": "reflect.conventions",
    "Card": "artefact",
    "Critic": "critic.critic",
    "Edit": "edits",
    "EditCounts": "edits",
    "EditOutcome": "edits",
    "Experience": "entry",
    "ExperienceSettings": "settings",
    "FinalChoice": "gate_rules",
    "GateDecision": "gate_rules",
    "Guards": "guards",
    "Library": "library",
    "LibraryProposal": "critic.proposal",
    "Proposer": "critic.proposal",
    "Provenance": "entry",
    "Reflector": "reflect.reflector",
    "RejectedEdits": "gate_rules",
    "Repairs": "settings",
    "Teaching": "informative",
    "TopK": "select",
    "Value": "entry",
    "estimate_tokens": "tfgrpo.runtime.token_estimates",
    "export_artefact": "artefact",
    "final_choice": "gate_rules",
    "gate_step": "gate_rules",
    "load_artefact": "artefact",
    "preset": "settings",
    "prompt_context": "placement",
    "smaller_sets": "gate_rules",
    "stalled": "critic.proposal",
    "teaching_groups": "informative",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
