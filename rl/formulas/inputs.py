"""Inputs of losses and advantages: flat token arrays and per-rollout arrays.

Axes: R rollouts (rows) of the whole optimiser batch, D their loss-bearing tokens laid end to end,
M named rewards. Tokens without a loss (prompt, padding, tool output) are not in D at all, so no
function needs a mask. Does not know models or tokens' texts. Source: own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Input of a policy loss; the loss returns one differentiable value a token (`loss_D`).

    For a token-local loss D may be any chunk of the batch; a loss registered with `sequence` in
    `needs` always gets whole rows.
    """

    logp_D: torch.Tensor
    """log π of each sampled token under the weights being trained; carries the gradient."""
    old_logp_D: torch.Tensor
    """log π_old at the start of the optimiser batch (equal to `logp_D` detached on-policy)."""
    advantage_D: torch.Tensor
    row_D: torch.Tensor
    """int64: which row a token belongs to, 0 … R-1 of the chunk's `n_rows`; non-decreasing."""
    n_rows: int
    entropy_D: torch.Tensor | None = None
    """Entropy of each next-token distribution (carries a gradient), where the loss needs it."""
    ref_logp_D: torch.Tensor | None = None
    """log π_ref, where a reference is kept."""
    behaviour_logp_D: torch.Tensor | None = None
    """log-probability as the sampling engine reported it, where it may differ from π_old."""
    group_R: torch.Tensor | None = None
    """int64 group of each row, for losses that need `group`."""
    reward_R: torch.Tensor | None = None
    """Reward of each row, for losses that need `group`."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further facts a token, by name: D. `width`: factor of the clip's widths; `segment`: number of
    the turn, line or item that a token belongs to; others are a loss's own."""
    vocabulary: int = 0
    """Tokens of the vocabulary; 0 where unknown."""

    def segments(self) -> tuple[torch.Tensor, int]:
        """Number the segments of all rows: D, and how many there are at most."""
        segment_D = self.columns.get("segment")
        if segment_D is None or not len(segment_D):
            return self.row_D, self.n_rows
        most = int(segment_D.max()) + 1
        return self.row_D * most + segment_D.long(), self.n_rows * most

    def row_mean(self, value_D: torch.Tensor) -> torch.Tensor:
        """Mean of a per-token value over each row: R."""
        total_R = self.row_sum(value_D)
        count_R = self.row_sum(value_D.detach().new_ones(value_D.shape))
        return total_R / count_R.clamp_min(1)

    def row_sum(self, value_D: torch.Tensor) -> torch.Tensor:
        """Sum of a per-token value over each row: R."""
        return value_D.new_zeros(self.n_rows).index_add(0, self.row_D, value_D)


@dataclass(frozen=True, slots=True)
class RatioFacts:
    """Statistics of π/π_old over the tokens of one optimiser batch, before its update."""

    variance: float
    """Mean of (r − 1)²."""
    tokens: int


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Input of an advantage estimator; it returns `advantage_R`, or `advantage_D` where it says so.

    Rows of one group need not be adjacent; `group_R` tells. Only graded rollouts are rows.
    """

    reward_R: Floats
    group_R: Ints
    """Group number of each row, 0 … P-1."""
    length_R: Ints
    """Loss-bearing tokens of each row."""
    part_RM: Floats | None = None
    """Named reward components, one column each, order of `part_names`."""
    part_names: tuple[str, ...] = ()
    logp_R: Floats | None = None
    """Summed log π_old of each row."""
    logp_D: Floats | None = None
    entropy_D: Floats | None = None
    token_D: Ints | None = None
    """Token ids, rows end to end."""
    step_R: Sequence[Ints] | None = None
    """Per row: which step (turn) each of its tokens belongs to."""
    state_keys_R: Sequence[Sequence[Hashable]] | None = None
    """Per row: a key of the state before each step, for estimators that anchor on equal states."""
    step_reward_R: Sequence[Floats] | None = None
    """Per row: reward of each step, the rollout's outcome (`reward_R`) not in it."""
    answer_R: Sequence[Hashable] | None = None
    """Per row: the final answer's equivalence class, for semantic entropy."""
    baseline_R: Floats | None = None
    """Reward of a greedy or reference rollout of the row's task, where one was made."""
    extra: Mapping[str, Floats] = field(default_factory=dict)
    is_tree: bool = False
    """True where the sampler makes trees: a step without any fork is chance, not a mistake."""

    @property
    def n_groups(self) -> int:
        """Number of groups P."""
        return int(self.group_R.max()) + 1 if len(self.group_R) else 0

    def groups(self) -> list[Ints]:
        """Row numbers of each group, in order."""
        return [np.flatnonzero(self.group_R == g) for g in range(self.n_groups)]
