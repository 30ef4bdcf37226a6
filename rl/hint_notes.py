"""What a rollout's hint plan asks of its training row: prompt, prefix, weight, baseline.

`note_of` writes what training must know into a rollout's metadata when it is made; `by_baseline`
and `shaped` read it. Rows without a note pass through unchanged. A row's prompt is what it was
rolled under, a forced prefix included, so that log-probs are conditioned as rolled; only a plan
that asks for another condition, or for a loss on its prefix, changes the row.

Does not know schedulers or losses; imports no torch. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import HintPlan
from tfgrpo.hints.adhint import consistency_weights_T
from tfgrpo.rollout import Rollout, RolloutGroup

if TYPE_CHECKING:
    from tfgrpo.rl.model.packing import Row
    from tfgrpo.rl.update.accumulate import TrainRow

EntropyOf = Callable[[Sequence["Row"]], Mapping[int, Sequence[float]]]
"""Rows to the policy's entropy at each of their loss-bearing tokens, nats, by row index."""


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
    if plan.text and plan.condition == "original":
        note["bare_prompt"] = list(bare_prompt)
    if plan.weight != 1.0:
        note["weight"] = plan.weight
    if plan.group_key:
        note["key"] = plan.group_key
    return note


def is_hinted(rollout: Rollout) -> bool:
    """True when a rollout was made under help, by what `note_of` left in it."""
    return "label" in _note(rollout)


def by_baseline(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups with those apart whose rollouts' plans have different keys."""
    found: list[RolloutGroup] = []
    for group in groups:
        keys = list(dict.fromkeys(_note(r).get("key", "") for r in group.rollouts))
        if len(keys) < 2:
            found.append(group)
            continue
        for key in keys:
            own = tuple(r for r in group.rollouts if _note(r).get("key", "") == key)
            found.append(replace(group, group_id=f"{group.group_id}:{key}", rollouts=own))
    return found


def shaped(
    rows: Sequence[TrainRow], rollouts: Mapping[int, Rollout], entropy_of: EntropyOf
) -> list[TrainRow]:
    """Return the rows as their plans want them.

    Args:
        rows: rows with the estimator's advantages.
        rollouts: by row index.
        entropy_of: asked only where a plan weighs its prefix.

    Raises:
        ConfigError: an advantage a token on a rollout whose prefix is trained.
    """
    made = [_shaped(row, _note(rollouts[row.row.index])) for row in rows]
    kept = [row for row in made if row is not None]
    weighed = {
        row.row.index: int(note["prefix_tokens"])
        for row in kept
        if (note := _note(rollouts[row.row.index])).get("weigh_prefix")
        and len(row.row.suffix_ids) > _generated(rollouts[row.row.index])
    }
    if not weighed:
        return kept
    entropies = entropy_of([row.row for row in kept if row.row.index in weighed])
    return [
        _with_weights(row, weighed[row.row.index], entropies[row.row.index])
        if row.row.index in weighed
        else row
        for row in kept
    ]


def _note(rollout: Rollout) -> Mapping[str, Any]:
    note: Mapping[str, Any] = rollout.metadata.get("hint", {})
    return note


def _generated(rollout: Rollout) -> int:
    return sum(len(s.token_ids or ()) for s in rollout.steps)


def _shaped(row: TrainRow, note: Mapping[str, Any]) -> TrainRow | None:
    if not note:
        return row
    if note.get("train_on") == "none":
        return None
    if "advantage" in note:
        row = replace(row, advantage=float(note["advantage"]))
    if "weight" in note:
        row = replace(row, weight=row.weight * float(note["weight"]))
    n_prefix = int(note.get("prefix_tokens", 0))
    if "bare_prompt" in note:
        forced = row.row.prompt_ids[len(row.row.prompt_ids) - n_prefix :]
        prompt = (*note["bare_prompt"], *forced)
        # what the sampler reported belongs to the other prompt
        row = replace(row, row=replace(row.row, prompt_ids=prompt), engine_logp=None)
    if n_prefix and note.get("train_on") == "generated_and_prefix_if_positive":
        return _with_prefix(row, n_prefix)
    return row


def _with_prefix(row: TrainRow, n_prefix: int) -> TrainRow:
    """Move a forced prefix from the prompt into what is trained, unless it would be pushed down."""
    if isinstance(row.advantage, tuple):
        raise ConfigError(
            "this hint method trains the forced start of a response and needs one advantage a "
            "rollout; choose an estimator without advantages by token"
        )
    if row.advantage <= 0:
        return row
    ids = row.row
    prompt, prefix = ids.prompt_ids[:-n_prefix], ids.prompt_ids[-n_prefix:]
    moved = replace(ids, prompt_ids=prompt, suffix_ids=(*prefix, *ids.suffix_ids))
    if ids.loss_positions is not None:
        own = (*range(n_prefix), *(n_prefix + p for p in ids.loss_positions))
        moved = replace(moved, loss_positions=own)
    return replace(row, row=moved, engine_logp=None)  # nobody sampled the prefix


def _with_weights(row: TrainRow, n_prefix: int, entropy_T: Sequence[float]) -> TrainRow:
    """Weigh prefix tokens by how near their entropy is to the mean of the rest."""
    assert not isinstance(row.advantage, tuple)  # `_with_prefix` refused it
    own_T = entropy_T[n_prefix:]
    mean = sum(own_T) / len(own_T)
    if mean <= 0:
        return row
    weights_T = consistency_weights_T(entropy_T[:n_prefix], mean)
    advantage = row.advantage
    return replace(
        row, advantage=(*(advantage * w for w in weights_T), *((advantage,) * len(own_T)))
    )
