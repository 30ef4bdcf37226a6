"""One pass over rows that tells each token's likeliest alternatives and entropy.

Does not know strategies. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Row, micro_batches, pack
from tfgrpo.rl.strategies.growth import Look, TokenDistributions


def look_at(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    look: Look,
    *,
    temperature: float,
    max_tokens: int,
    chunk: int,
) -> list[TokenDistributions]:
    """Return what the policy's distributions were at the rows' tokens; no gradients.

    Args:
        decoder: the weights that sample.
        prompt_ids: of all rows.
        look: rows, first tokens, and how many alternatives.
        temperature: of sampling; above 0.
        max_tokens: input tokens of one forward.
        chunk: tokens whose logits exist at once.
    """
    rows = [
        Row(i, tuple(prompt_ids), ids, tuple(range(first, len(ids))))
        for i, (ids, first) in enumerate(zip(look.rows, look.first, strict=True))
    ]
    found: dict[int, list[np.ndarray]] = {}
    with torch.no_grad():
        for part in micro_batches([r for r in rows if r.n_loss], max_tokens):
            packed = pack(part, device=decoder.embed.device)
            hidden_D = decoder(packed)[packed.head_D]
            pieces = []
            for at in range(0, len(packed.target_D), chunk):
                raw = F.linear(hidden_D[at : at + chunk], decoder.head_weight).double()
                logp = (raw / temperature).log_softmax(-1)
                p = logp.exp()
                top_p, top = p.topk(look.k, dim=-1)
                raw_logp = raw.log_softmax(-1).gather(-1, top)
                entropy = -(p * logp).sum(-1, keepdim=True)
                pieces.append(torch.cat([top.double(), top_p, raw_logp, entropy], dim=-1))
            values_D = torch.cat(pieces).cpu().numpy()
            start = 0
            for row in part:
                found[row.index] = [values_D[start : start + row.n_loss]]
                start += row.n_loss
    empty = np.zeros((0, 3 * look.k + 1))
    return [_seen(found.get(row.index, [empty])[0], look.k) for row in rows]


def _seen(values: np.ndarray, k: int) -> TokenDistributions:
    top, p, logp = (values[:, i * k : (i + 1) * k] for i in range(3))
    return TokenDistributions(top.astype(np.int64), p, logp, values[:, -1])
