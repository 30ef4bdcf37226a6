"""A rollout as one training row, and the step of each of its sampled tokens.

Token-in/token-out: what the model wrote is kept as the ids it wrote. Only sampled tokens bear a
loss. Does not know losses. Idea: one growing sequence per rollout (verifiers, verl's agent loop);
the traps are re-tokenisation and off-by-one masks (trl#5224, verl#6719).
"""

from __future__ import annotations

from tfgrpo.errors import ConfigError
from tfgrpo.rl.model.packing import Row
from tfgrpo.rollout import Rollout


def row_of(rollout: Rollout, *, index: int) -> Row:
    """Return a rollout's steps as one row.

    Raises:
        ConfigError: a step has no token ids, or a later prompt does not continue the sequence
            (the text was tokenised again somewhere).
    """
    first = rollout.steps[0]
    if first.token_ids is None or first.prompt_token_ids is None:
        raise ConfigError(
            f"rollout {rollout.rollout_id!r} has no token ids: training needs an engine that "
            "returns them"
        )
    if len(rollout.steps) == 1:
        return Row(index, first.prompt_token_ids, first.token_ids)
    sequence: list[int] = [*first.prompt_token_ids]
    start = len(sequence)
    sampled: list[int] = []
    for number, step in enumerate(rollout.steps):
        if step.token_ids is None or step.prompt_token_ids is None:
            raise ConfigError(f"rollout {rollout.rollout_id!r}: step {number} has no token ids")
        if list(step.prompt_token_ids[: len(sequence)]) != sequence:
            raise ConfigError(
                f"rollout {rollout.rollout_id!r}: the prompt of step {number} does not continue "
                "the tokens so far; keep the sampled ids and append only the new turn's ids"
            )
        sequence.extend(step.prompt_token_ids[len(sequence) :])
        at = len(sequence) - start
        sampled.extend(range(at, at + len(step.token_ids)))
        sequence.extend(step.token_ids)
    return Row(index, tuple(sequence[:start]), tuple(sequence[start:]), tuple(sampled))


def segments_of(rollout: Rollout) -> list[int] | None:
    """Return the tokens of each segment of a reply that a strategy cut; None for whole turns."""
    found = rollout.metadata.get("segments")
    return None if found is None else [int(n) for n in found]


def n_steps(rollout: Rollout) -> int:
    """Return the number of steps: segments where a reply was cut into some, else turns."""
    cut = segments_of(rollout)
    return len(rollout.steps) if cut is None else len(cut)


def step_numbers(rollout: Rollout) -> tuple[int, ...]:
    """Return, per loss-bearing token, the number of the step that sampled it."""
    cut = segments_of(rollout)
    if cut is not None:
        return tuple(i for i, n in enumerate(cut) for _ in range(n))
    return tuple(i for i, step in enumerate(rollout.steps) for _ in step.token_ids or ())
