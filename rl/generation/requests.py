"""Interfaces of the batch scheduler: group requests, their feed, the decode engine, counters.

Does not know how rows are scheduled or tokens made. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfgrpo.protocols import Generated
from tfgrpo.rl.generation.kv_cache import Cache
from tfgrpo.rl.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Ask for one continuation a seed."""

    key: Any
    """Given back with the result."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int
    """Limit of each continuation; cut to what the context allows."""
    start: int = 0
    """Tokens at the end of the prompt's that an earlier draw of the same seed made: the numbers
    that tokens are drawn with go on from there, and stop strings may begin in them."""


OnDone = Callable[[GroupRequest, list[Generated]], Iterable[GroupRequest]]
"""Called when a group's last row ends; may return further requests for the free slots."""


class Feed(Protocol):
    """Requests that come in while others are served."""

    def more(self, free: int) -> Iterable[GroupRequest]:
        """Return requests for that many free slots."""
        ...

    def is_cancelled(self, request: GroupRequest, made: int) -> bool:
        """True when nobody waits for a request any more, of which a row has made so many tokens;
        the row ends where it is, as `partial`."""
        ...


@dataclass(slots=True)
class Counters:
    """What the last run cost, in tokens and steps."""

    prefill_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    """Rows decoded, idle ones included: steps × row count."""
    new_tokens: int = 0
    cache_tokens: int = 0
    """Cached tokens that living rows looked at, over all steps; a group's prompt once a step."""

    def add(self, other: Counters) -> None:
        """Count another run's too."""
        self.prefill_tokens += other.prefill_tokens
        self.steps += other.steps
        self.row_steps += other.row_steps
        self.new_tokens += other.new_tokens
        self.cache_tokens += other.cache_tokens


class DecodeEngine(Protocol):
    """What makes tokens for the rows in a cache's slots."""

    decoder: Decoder
    eos_ids: tuple[int, ...]
    counters: Counters
    detokenize: Callable[[Sequence[int]], str] | None
    max_rows: int
    poll_steps: int
    fixed_rows: bool

    def prepare(self, rows: int, length: int, new: int) -> Cache:
        """Return a cache for at least these sizes."""
        ...

    def grow(self, length: int, new: int) -> Cache:
        """Return a longer cache with all that the present one holds."""
        ...

    def steps(self, cache: Cache, rows: int, n: int, top_p: float, longest: int) -> None:
        """Decode n tokens in the first `rows` slots."""
        ...
