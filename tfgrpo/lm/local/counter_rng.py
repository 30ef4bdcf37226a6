"""Drawing one token a row from logits, each row with its own stream of random numbers.

A row's draws depend on its logits, its seed and its step, never on its neighbours: uniforms come
from a counter-based generator (Philox) keyed by the row's seed, and are turned into tokens by
inverting the cumulative distribution. The inversion is two-level (blocks of 256, then one
block), so the vocabulary is read three times and never sorted; `top_p` looks only at the largest
probabilities, as many as it takes.

Does not know models, prompts, stop rules. Source: Philox (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"); inverse-transform sampling; nucleus sampling (Holtzman et al. 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_BLOCK = 256


def uniforms(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the first `count` uniforms in [0, 1) of a seed's stream; a longer request begins with
    the same numbers."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


def draw_tokens(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    uniform_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (token a row, its log-probability, the row's log-normaliser).

    Args:
        logits_BV: any float type; not changed.
        temperature_B: float32, 0 or more; 0 takes the most likely token.
        top_p_B: float32 in (0, 1]; 1 keeps all tokens.
        uniform_B: float64 in [0, 1).

    The log-probability is that of the raw softmax (temperature 1, nothing cut off).

    Raises:
        FloatingPointError: a row's logits are not finite.
    """
    import torch

    raw_BV = logits_BV.float()
    most_B1, best_B1 = raw_BV.max(dim=-1, keepdim=True)
    shifted_BV = raw_BV - most_B1
    greedy_B = temperature_B <= 0
    is_plain = bool(torch.all((temperature_B == 1) | greedy_B))
    if is_plain:
        weight_BV = shifted_BV.exp_()
        raw_sum_B = weight_BV.sum(dim=-1)
    else:
        raw_sum_B = shifted_BV.exp().sum(dim=-1)
        safe_B = torch.where(greedy_B, torch.ones_like(temperature_B), temperature_B)
        weight_BV = shifted_BV.div_(safe_B[:, None]).exp_()
    if not bool(torch.isfinite(raw_sum_B).all()):
        raise FloatingPointError("the model's logits are not finite")
    token_B = best_B1[:, 0].clone()
    nucleus_B = (top_p_B < 1) & ~greedy_B
    whole_B = ~nucleus_B & ~greedy_B
    if bool(whole_B.any()):
        rows = whole_B.nonzero()[:, 0]
        pick = weight_BV if len(rows) == len(weight_BV) else weight_BV[rows]
        token_B[rows] = _invert(pick, uniform_B[rows])
    if bool(nucleus_B.any()):
        rows = nucleus_B.nonzero()[:, 0]
        token_B[rows] = _invert_nucleus(weight_BV[rows], top_p_B[rows], uniform_B[rows])
    normaliser_B = most_B1[:, 0] + raw_sum_B.log()
    logp_B = raw_BV.gather(1, token_B[:, None])[:, 0] - normaliser_B
    return token_B, logp_B, normaliser_B


def _invert(weight_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    import torch

    rows, vocabulary = weight_BV.shape
    padding = -vocabulary % _BLOCK
    if padding:
        weight_BV = torch.nn.functional.pad(weight_BV, (0, padding))
    blocks = weight_BV.view(rows, -1, _BLOCK)
    upto_BN = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target_B1 = uniform_B[:, None] * upto_BN[:, -1:]
    block_B1 = torch.searchsorted(upto_BN, target_B1, right=True).clamp_(max=upto_BN.shape[1] - 1)
    before_B1 = torch.where(
        block_B1 > 0, upto_BN.gather(1, (block_B1 - 1).clamp(min=0)), torch.zeros_like(target_B1)
    )
    inside_BK = blocks[torch.arange(rows, device=weight_BV.device), block_B1[:, 0]]
    upto_BK = inside_BK.double().cumsum(dim=-1)
    place_B1 = torch.searchsorted(upto_BK, target_B1 - before_B1, right=True)
    # Rounding can leave the target at the block's very end: then its likeliest token is taken.
    last_B1 = inside_BK.argmax(dim=-1, keepdim=True)
    place_B1 = torch.where(place_B1 >= _BLOCK, last_B1, place_B1)
    return (block_B1 * _BLOCK + place_B1)[:, 0]


def _invert_nucleus(
    weight_BV: torch.Tensor, top_p_B: torch.Tensor, uniform_B: torch.Tensor
) -> torch.Tensor:
    import torch

    vocabulary = weight_BV.shape[1]
    wanted_B = top_p_B.double() * weight_BV.sum(dim=-1).double()
    count = min(64, vocabulary)
    while True:
        largest_BK, ids_BK = weight_BV.topk(count, dim=-1)
        upto_BK = largest_BK.double().cumsum(dim=-1)
        if count == vocabulary or bool((upto_BK[:, -1] >= wanted_B).all()):
            break
        count = min(count * 8, vocabulary)
    # The nucleus is the shortest run of largest probabilities that reaches top_p.
    last_B1 = torch.searchsorted(upto_BK, wanted_B[:, None]).clamp_(max=count - 1)
    target_B1 = uniform_B[:, None] * upto_BK.gather(1, last_B1)
    place_B1 = torch.searchsorted(upto_BK, target_B1, right=True)
    return ids_BK.gather(1, torch.minimum(place_B1, last_B1))[:, 0]
