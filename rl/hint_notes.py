"""What training must know of a rollout's hint plan, in its metadata: prefix, weight, baseline key.

`note_of` writes it when a rollout is made; `by_baseline` and `update.hint_shaping` read it.
Rollouts without a note pass through unchanged. Does not know rows, schedulers or losses; imports
no torch. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.hint_plan import HintPlan
from tfgrpo.rollout import Rollout, RolloutGroup


def note_of(plan: HintPlan, *, n_prefix: int, bare_prompt: Sequence[int]) -> dict[str, Any]:
    """Return what a rollout under this plan keeps in `metadata["hint"]`, as JSON; empty for none.

    Args:
        plan: what it was given.
        n_prefix: forced tokens at the end of its prompt's ids.
        bare_prompt: token ids of the task's prompt without help.
    """
    note: dict[str, Any] = {}
    if not plan.is_bare:
        note |= {"label": plan.label, "level": plan.level}
    if n_prefix:
        note |= {"prefix_tokens": n_prefix, "train_on": plan.train_on}
        note |= {"weigh_prefix": True} if plan.weigh_prefix else {}
    elif plan.train_on == "none":
        note["train_on"] = plan.train_on
    if plan.condition != "as_rolled" and (plan.text or plan.turns):
        note["bare_prompt"] = list(bare_prompt)
        note |= {"corrected": True} if plan.condition == "corrected" else {}
    if plan.distil:
        note |= {"distil": plan.distil, "distil_prompt": list(bare_prompt)}
    if plan.shaping:
        note["shaping"] = plan.shaping
    if plan.weight != 1.0:
        note["weight"] = plan.weight
    if plan.group_key:
        note["key"] = plan.group_key
    return note


def is_hinted(rollout: Rollout) -> bool:
    """True when a rollout was made under help, by what `note_of` left in it."""
    return "label" in hint_note(rollout)


def by_baseline(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups with those apart whose rollouts' plans have different keys."""
    found: list[RolloutGroup] = []
    for group in groups:
        keys = list(dict.fromkeys(hint_note(r).get("key", "") for r in group.rollouts))
        if len(keys) < 2:
            found.append(group)
            continue
        for key in keys:
            own = tuple(r for r in group.rollouts if hint_note(r).get("key", "") == key)
            found.append(replace(group, group_id=f"{group.group_id}:{key}", rollouts=own))
    return found


def hint_note(rollout: Rollout) -> Mapping[str, Any]:
    """Return what `note_of` left in a rollout; empty for none."""
    note: Mapping[str, Any] = rollout.metadata.get("hint", {})
    return note
