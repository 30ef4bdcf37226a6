"""Training rows as their rollouts' hint plans ask: prompt, forced prefix, weight, advantage.

A row's prompt is what it was rolled under, a forced prefix included, so that log-probs are
conditioned as rolled; only a plan that asks for another condition, or for a loss on its prefix,
changes the row. Does not know schedulers or losses. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.hints.adhint import consistency_weights_T
from tfgrpo.rl.hint_notes import hint_note
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow
from tfgrpo.rollout import Rollout

EntropyOf = Callable[[Sequence[Row]], Mapping[int, Sequence[float]]]
"""Rows to the policy's entropy at each of their loss-bearing tokens, nats, by row index."""


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
    made = [_shaped(row, hint_note(rollouts[row.row.index])) for row in rows]
    kept = [row for row in made if row is not None]
    weighed = {
        row.row.index: int(note["prefix_tokens"])
        for row in kept
        if (note := hint_note(rollouts[row.row.index])).get("weigh_prefix")
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
