"""Policy losses as pure functions of a `TokenBatch`: one differentiable value a token.

Aggregation to one number is a separate choice (`aggregations.py`), and so are KL and entropy
terms (`logprob.py`). Symbols: r = exp(log π − log π_old), A advantage.
"""

from __future__ import annotations

import torch

from tfgrpo.rl.batch import TokenBatch
from tfgrpo.rl.registry import Entry, register

LOSSES: dict[str, Entry] = {}


@register(
    LOSSES,
    "clip",
    source="PPO (arXiv 1707.06347, eq. 7); DAPO's higher upper bound (arXiv 2503.14476, eq. 10)",
    formula="-min(r A, clip(r, 1-eps_low, 1+eps_high) A)",
    certainty="code",
    test="tests/rl/registry/test_losses.py::test_clip_matches_the_hand_computed_cases",
)
def clip(batch: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> torch.Tensor:
    """Return the clipped surrogate, negated: D.

    `eps_low` in [0, 1) and `eps_high` >= 0 bound the probability ratio.
    """
    ratio_D = (batch.logp_D - batch.old_logp_D).exp()
    clipped_D = ratio_D.clamp(1 - eps_low, 1 + eps_high)
    return -torch.minimum(ratio_D * batch.advantage_D, clipped_D * batch.advantage_D)
