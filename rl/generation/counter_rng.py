"""One uniform random number per row and position, from a counter; tokens by inverse CDF.

The number depends on (seed, position) alone, so a row's draws don't depend on who shares its
batch, and a resumed run draws what an uninterrupted one would have drawn. One number a token is
enough: the token is where the cumulated probability passes it.

Does not know models. Sources: SplitMix64 (Steele, Lea, Flood 2014) as the counter hash; the
two-level search over block sums is own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Tokens summed together before the search."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], start: int, stop: int) -> NDArray[np.float64]:
    """Return rows of numbers in [0, 1), one a position from `start` to `stop`.

    >>> a, b = uniforms([7], 0, 4), uniforms([3, 7], 2, 4)
    >>> bool((a[0, 2:] == b[1]).all())
    True
    """
    row = np.asarray([s & (2**64 - 1) for s in seeds], dtype=np.uint64)[:, None]
    position = np.arange(start, stop, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(row + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pick(
    logits: Tensor, uniform: Tensor, inv_temperature: Tensor, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; return ids and raw log-probabilities (temperature 1, no truncation).

    Args:
        logits: R × V in any float type.
        uniform: R numbers in [0, 1), float64.
        inv_temperature: R; 0 means greedy (the first of equal maxima).
        top_p: keep the likeliest tokens whose probability reaches this share; 1 keeps all.
    """
    wide = logits.float()
    peak = wide.amax(-1, keepdim=True)
    plain = bool((inv_temperature == 1).all()) and top_p >= 1
    n, vocab = wide.shape
    n_blocks = -(-vocab // BLOCK)
    mass = wide.new_empty(n, n_blocks * BLOCK)
    mass[:, vocab:] = 0
    shifted = torch.sub(wide, peak, out=mass[:, :vocab])
    raw_total: Tensor | None = None
    if not plain:
        raw_total = shifted.exp().sum(-1).double()
        shifted *= inv_temperature[:, None]
    shifted.exp_()
    if top_p < 1:
        _truncate(mass, top_p)
    # a sum of float64 numbers would take fifteen times as long, and blocks are short
    block_mass = mass.view(n, n_blocks, BLOCK).sum(-1).double()
    cumulated = block_mass.cumsum(-1)
    total = cumulated[:, -1]
    threshold = (uniform * total)[:, None]
    block = (cumulated <= threshold).sum(-1, keepdim=True).clamp_max(n_blocks - 1)
    # the very number that the threshold was found to reach: a difference could round above it
    before = F.pad(cumulated, (1, 0)).gather(-1, block)
    inside = mass.view(n, n_blocks, BLOCK).gather(1, block[..., None].expand(-1, -1, BLOCK))
    inside = inside.squeeze(1).double()
    at = (inside.cumsum(-1) <= threshold - before).sum(-1)
    last_positive = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    token = block.squeeze(-1) * BLOCK + torch.minimum(at, last_positive)
    greedy = inv_temperature == 0
    if bool(greedy.any()):
        token = torch.where(greedy, wide.argmax(-1), token)
    raw_total = total if raw_total is None else raw_total
    logp = (wide.gather(-1, token[:, None]) - peak).squeeze(-1).double() - raw_total.log()
    return token, logp.float()


def _truncate(mass: Tensor, top_p: float) -> None:
    """Zero, in place, what lies outside the nucleus of each row."""
    ordered, index = mass.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p * ordered.sum(-1, keepdim=True)] = 0
    mass.zero_().scatter_(-1, index, ordered)
