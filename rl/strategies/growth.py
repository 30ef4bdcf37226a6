"""What a strategy asks for while it makes the rollouts of one group, and what it makes.

A strategy is a generator: it yields draws that continue given tokens, looks at distributions, or
judgements of finished replies, gets the answers sent back, and returns its leaves. Whoever drives
it serves many groups from one queue. Does not know the queue. Source: own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfgrpo.protocols import Generated
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import derive_seed

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Piece:
    """Further tokens of one row."""

    ids: tuple[int, ...]
    """Its tokens so far, after the prompt."""
    seed: int
    limit: int
    """Most further tokens."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Ask for further tokens of some rows; answered by one `Generated` each."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Ask what the policy's distributions were; answered by one `TokenDistributions` a row."""

    rows: tuple[tuple[int, ...], ...]
    """Tokens after the prompt."""
    first: tuple[int, ...]
    """From which of its tokens on each row is looked at."""
    k: int = 2
    """Likeliest tokens told."""


@dataclass(frozen=True, slots=True)
class TokenDistributions:
    """Distributions of a row's tokens from `first` on. Axes: T tokens, K likeliest."""

    top_TK: NDArray[np.int64]
    """Token ids, likeliest first."""
    p_TK: NDArray[np.float64]
    """Their probabilities at the temperature of sampling."""
    logp_TK: NDArray[np.float64]
    """Their log-probabilities at temperature 1."""
    entropy_T: NDArray[np.float64]
    """Nats, at the temperature of sampling."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Ask for the rewards of finished replies that are not trained; answered by a number or None
    each."""

    rows: tuple[tuple[int, ...], ...]


Ask = Draw | Look | Judge


@dataclass(frozen=True, slots=True)
class Leaf:
    """One rollout that a strategy made."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    seed: int
    is_cut: bool = False
    """It hit the limit of tokens."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """JSON: `segments` (tokens of each), `state_keys`, `step_rewards`."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where a group begins."""

    task: Task
    prompt_ids: tuple[int, ...]
    size: int
    """Rollouts wanted."""
    limit: int
    """Most tokens of a rollout."""
    seed: int
    step: int = 0
    """Of training, from 0."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a row."""

    def row_seed(self, index: int) -> int:
        """Return the seed of the row of this index; that of a plain rollout's where it is one."""
        return derive_seed(self.seed, self.task.task_id, index, 0)


class Growth(Protocol):
    """A strategy.

    Contract: `grow` depends on its argument and on what it is sent alone, returns `root.size`
    leaves, and never asks for tokens beyond `root.limit`.
    """

    def grow(self, root: Root) -> Generator[Ask, Any, list[Leaf]]:
        """Make a group."""
        ...


@dataclass(slots=True)
class Branch:
    """A row that grows."""

    seed: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_done: bool = False
    is_cut: bool = False

    def piece(self, root: Root, most: int | None = None) -> Piece:
        """Return the request for its next tokens."""
        left = root.limit - len(self.ids)
        return Piece(tuple(self.ids), self.seed, left if most is None else min(most, left))

    def take(self, made: Generated, limit: int) -> None:
        """Add tokens."""
        self.ids += made.token_ids
        self.logps += made.logprobs
        self.is_cut = made.finish != "stop" and len(self.ids) >= limit
        self.is_done = made.finish == "stop" or self.is_cut or not made.token_ids

    def fork(self, seed: int, at: int | None = None) -> Branch:
        """Return a row with the first `at` tokens of this one."""
        return Branch(seed, self.ids[:at], self.logps[:at])

    def leaf(self, **metadata: Any) -> Leaf:
        """Return it as it is."""
        return Leaf(tuple(self.ids), tuple(self.logps), self.seed, self.is_cut, metadata)


def draw_all(
    root: Root, rows: Sequence[Branch], most: int | None = None
) -> Generator[Ask, Any, None]:
    """Draw up to `most` further tokens of each row that is not done; to its end where None."""
    going = [row for row in rows if not row.is_done]
    if not going:
        return
    made: list[Generated] = yield Draw(tuple(row.piece(root, most) for row in going))
    for row, generated in zip(going, made, strict=True):
        row.take(generated, root.limit)
