"""Training rows as their rollouts' hint plans ask: prompt, forced prefix, weight, advantage.

A row's prompt is what it was rolled under, a forced prefix included, so that log-probs are
conditioned as rolled; only a plan that asks for another condition, or for a loss on its prefix,
changes the row. Does not know schedulers or losses. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tfgrpo.errors import ConfigError
from tfgrpo.hints.adhint import consistency_weights_T
from tfgrpo.rl.hint_notes import hint_note
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import ABSENT, TrainRow
from tfgrpo.rl.update.rollout_rows import step_numbers
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
    made = [_shaped(row, rollouts[row.row.index]) for row in rows]
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


def distilled(rows: Sequence[TrainRow], rollouts: Mapping[int, Rollout]) -> list[TrainRow]:
    """Return the further rows that raise good rollouts under the bare prompt, tasks together.

    Their term is weight · mean over rollouts of −A · length-normalised log π; the mean runs over
    all rows whose plan has the term.
    """
    notes = {r.row.index: hint_note(rollouts[r.row.index]) for r in rows}
    wanted = [r for r in rows if notes[r.row.index].get("distil")]
    first = max((r.row.index for r in rows), default=-1) + 1
    made = []
    for number, row in enumerate(sorted(wanted, key=lambda r: r.group)):
        note = notes[row.row.index]
        bare = replace(row.row, index=first + number, prompt_ids=tuple(note["distil_prompt"]))
        weight = float(note["distil"]) / (len(wanted) * bare.n_loss)
        made.append(replace(row, row=bare, engine_logp=None, token_weight=weight))
    return made


def _shaped(row: TrainRow, rollout: Rollout) -> TrainRow | None:
    note = hint_note(rollout)
    if not note:
        return row
    if note.get("train_on") == "none":
        return None
    if "advantage" in note:
        row = replace(row, advantage=float(note["advantage"]))
    if "weight" in note:
        row = replace(row, weight=row.weight * float(note["weight"]))
    if "shaping" in note:
        row = replace(row, shaping=float(note["shaping"]))
    n_prefix = int(note.get("prefix_tokens", 0))
    if "bare_prompt" in note:
        forced = row.row.prompt_ids[len(row.row.prompt_ids) - n_prefix :]
        prompt = (*note["bare_prompt"], *forced)
        row = replace(row, row=replace(row.row, prompt_ids=prompt))
        if not note.get("corrected"):
            # what the sampler reported belongs to the other prompt
            row = replace(row, engine_logp=None)
    if note.get("first_step"):
        return _from_step(row, rollout, int(note["first_step"]))
    if n_prefix and note.get("train_on") == "generated_and_prefix_if_positive":
        return _with_prefix(row, n_prefix)
    return row


def _from_step(row: TrainRow, rollout: Rollout, first: int) -> TrainRow | None:
    """Take the loss off the turns before `first`; None where none is left."""
    kept = [i for i, step in enumerate(step_numbers(rollout)) if step >= first]
    if not kept:
        return None
    places = row.row.loss_positions or tuple(range(len(row.row.suffix_ids)))
    advantage = row.advantage
    if isinstance(advantage, tuple):
        advantage = tuple(advantage[i] for i in kept)
    logp = row.engine_logp
    return replace(
        row,
        row=replace(row.row, loss_positions=tuple(places[i] for i in kept)),
        advantage=advantage,
        engine_logp=None if logp is None else tuple(logp[i] for i in kept),
        columns={n: tuple(v[i] for i in kept) for n, v in row.columns.items()},
    )


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
    columns = {n: (ABSENT.get(n, 0.0),) * n_prefix + v for n, v in row.columns.items()}
    return replace(row, row=moved, engine_logp=None, columns=columns)  # nobody sampled the prefix


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
