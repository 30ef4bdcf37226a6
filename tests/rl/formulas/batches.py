"""Small batches written out row by row, the common material of the registry's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tfgrpo.rl.formulas.inputs import RewardBatch, TokenBatch

Rows = Sequence[Sequence[float]]


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def tokens(
    log_ratio: Rows,
    advantage: Sequence[float] | Rows,
    *,
    old: Rows | None = None,
    **fields: Any,
) -> TokenBatch:
    """A batch whose log π is log π_old (default −1) plus the given log-ratios."""
    lengths = [len(row) for row in log_ratio]
    old_D = flat(old) if old is not None else torch.full((sum(lengths),), -1.0, dtype=torch.float64)
    spread = [
        [a] * n if isinstance(a, int | float) else a
        for a, n in zip(advantage, lengths, strict=True)
    ]
    return TokenBatch(
        logp_D=(old_D + flat(log_ratio)).requires_grad_(),
        old_logp_D=old_D,
        advantage_D=flat(spread),
        row_D=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        n_rows=len(lengths),
        **fields,
    )


def slopes(loss: Callable[..., torch.Tensor], batch: TokenBatch, **options: Any) -> list[float]:
    """∂(sum of the token losses)/∂log π of each token."""
    (grad_D,) = torch.autograd.grad(loss(batch, **options).sum(), batch.logp_D)
    return grad_D.tolist()


def values(loss: Callable[..., torch.Tensor], batch: TokenBatch, **options: Any) -> list[float]:
    return loss(batch, **options).detach().tolist()


def rewards(*groups: Sequence[float], lengths: Sequence[int] | None = None, **fields: Any) -> Any:
    """A reward batch of groups laid end to end; rows have one token unless told."""
    flat_R = np.array([r for g in groups for r in g], dtype=np.float64)
    group_R = np.array([i for i, g in enumerate(groups) for _ in g], dtype=np.int64)
    length_R = np.array(lengths if lengths is not None else [1] * len(flat_R), dtype=np.int64)
    return RewardBatch(reward_R=flat_R, group_R=group_R, length_R=length_R, **fields)
