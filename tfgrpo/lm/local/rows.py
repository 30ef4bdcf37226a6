"""A row, one continuation being made, and the protocols by which rows come and go.

Does not know who asks for a row or how its tokens are made. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tfgrpo.protocols import Generated, Sampling


@dataclass(slots=True, eq=False)
class DecodeRow:
    """One continuation being made."""

    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    max_tokens: int
    tag: Any = None
    """Whatever the source wants back."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """Per token the `top_logprobs` likeliest ids, where the sampling asks for them."""
    is_cancelled: bool = False
    on_token: Callable[[DecodeRow], None] | None = None
    uniforms: Any = None

    @property
    def total(self) -> int:
        """Cache columns that the row may need."""
        return len(self.prompt) + self.max_tokens


class RowSource(Protocol):
    """Where rows come from and go to."""

    def take(self, count: int) -> list[DecodeRow]:
        """Return up to `count` waiting rows."""
        ...

    def finish(self, row: DecodeRow, generated: Generated) -> None:
        """Take a finished row."""
        ...


class RowQueue(RowSource, Protocol):
    """A source that can hand out rows of one sampling."""

    def take(
        self, count: int, *, like: Sampling | None = None, in_order: bool = False
    ) -> list[DecodeRow]:
        """Return up to `count` waiting rows.

        Args:
            count: at most so many.
            like: only rows of an equal sampling.
            in_order: none that came after a row of another sampling, so that this one's turn comes.
        """
        ...


@runtime_checkable
class RowServer(Protocol):
    """A generator that takes rows in while others are decoded."""

    def serve(self, source: RowQueue) -> None:
        """Decode rows until the source has none left; cancelled ones leave early."""
        ...
