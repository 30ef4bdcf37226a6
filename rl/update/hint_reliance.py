"""How much a step's hinted rollouts lean on their hints: one number for the log.

Does not know methods. Source: `hints.record.reliance` (our reading of HiLL, arXiv 2604.00698).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tfgrpo.hints.state import reliance
from tfgrpo.rl.hint_notes import is_hinted
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import score_rows
from tfgrpo.rollout import RolloutGroup, Task

MOST_ROWS = 64
"""Hinted rollouts scored a step; taken evenly over the step's."""


def hint_reliance(
    groups: Sequence[RolloutGroup],
    decoder: Decoder,
    bare_ids: Callable[[Task], Sequence[int]],
    *,
    max_tokens: int,
    chunk: int,
) -> float | None:
    """Return the mean gain in log-prob a token that hints gave this step's hinted rollouts, nats.

    None where nothing was hinted or no sampler log-probs are there. Only rollouts of one turn are
    looked at. About 0: the policy could have written them alone.

    Args:
        groups: of the step.
        decoder: the weights that sampled them.
        bare_ids: a task's prompt without help, as token ids.
        max_tokens: input tokens of one forward.
        chunk: tokens whose logits exist at once.
    """
    hinted = [
        (g.task, r.steps[0])
        for g in groups
        for r in g.rollouts
        if is_hinted(r) and len(r.steps) == 1 and r.steps[0].logprobs
    ]
    hinted = hinted[:: -(-len(hinted) // MOST_ROWS)] if hinted else []
    rows = [
        Row(i, tuple(bare_ids(task)), tuple(step.token_ids or ()))
        for i, (task, step) in enumerate(hinted)
    ]
    if not rows:
        return None
    bare = score_rows(decoder, rows, temperature=1.0, max_tokens=max_tokens, chunk=chunk)
    gains = [reliance(step.logprobs or (), bare[i]) for i, (_, step) in enumerate(hinted)]
    return math.fsum(gains) / len(gains)
