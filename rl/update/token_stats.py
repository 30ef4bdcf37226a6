"""Log-probs, entropies and Σπ² of rows' sampled tokens in one pass, for estimators that ask.

Does not know estimators. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Row, by_row, micro_batches, pack

Tokens = dict[int, tuple[float, ...]]
"""Per row index: one number a loss-bearing token."""


@dataclass(slots=True)
class Measured:
    """What a pass told."""

    logp: Tokens = field(default_factory=dict)
    entropy: Tokens = field(default_factory=dict)
    """Nats."""
    sum_square: Tokens = field(default_factory=dict)
    """Σπ² over the vocabulary."""
    mean_logp: Tokens = field(default_factory=dict)
    """Mean of log π over the vocabulary."""


def measure_rows(
    decoder: Decoder, rows: Sequence[Row], *, temperature: float, max_tokens: int, chunk: int
) -> Measured:
    """Return what the policy said at each sampled token; no gradients.

    Args:
        decoder: the weights.
        rows: rows of one prompt next to each other.
        temperature: divides the logits; above 0.
        max_tokens: input tokens of one forward.
        chunk: tokens whose logits exist at once.
    """
    found: list[tuple[list[Row], torch.Tensor]] = []
    chunk = max(1, chunk // 4)  # four tensors of a chunk's logits live at once
    with torch.no_grad():
        for part in micro_batches(rows, max_tokens):
            packed = pack(part, device=decoder.embed.device)
            hidden_D = decoder(packed)[packed.head_D]
            pieces = []
            for at in range(0, len(packed.target_D), chunk):
                logits = F.linear(hidden_D[at : at + chunk], decoder.head_weight)
                wide = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
                logp = wide.log_softmax(-1)
                pi = logp.exp()
                target = packed.target_D[at : at + chunk, None]
                pieces.append(
                    torch.stack(
                        [
                            logp.gather(-1, target).squeeze(-1),
                            -(pi * logp).sum(-1),
                            (pi * pi).sum(-1),
                            logp.mean(-1),
                        ]
                    )
                )
            found.append((part, torch.cat(pieces, dim=1)))
    return Measured(*(by_row([(part, values[i]) for part, values in found]) for i in range(4)))
