"""Rows that a local model queues, as requests of the group generator.

Rows join while others decode and leave when nobody waits for them. Does not know how a token is
made, or who asks. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfgrpo.lm.local.rows import DecodeRow, RowQueue
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.requests import GroupRequest


def row_request(row: DecodeRow) -> GroupRequest:
    """Return a row as a request for one continuation."""
    return GroupRequest(row, row.prompt, (row.seed,), row.max_tokens)


class RowFeed:
    """A `serving.Feed` over the rows of one sampling.

    Args:
        source: where rows come from and go to.
        sampling: of the rows that may join.
    """

    def __init__(self, source: RowQueue, sampling: Sampling) -> None:
        self._source = source
        self._sampling = sampling
        self._has_begun = False

    def more(self, free: int) -> list[GroupRequest]:
        """Return waiting rows for the free slots; after the first time none that would have rows
        of another sampling wait longer."""
        rows = self._source.take(free, like=self._sampling, in_order=self._has_begun)
        self._has_begun = True
        return [row_request(r) for r in rows]

    def is_cancelled(self, request: GroupRequest, made: int) -> bool:
        """True when nobody waits for the row any more."""
        return bool(request.key.is_cancelled)

    def on_done(self, request: GroupRequest, made: list[Generated]) -> Iterable[GroupRequest]:
        """Hand a finished row over; nothing follows from it."""
        row: DecodeRow = request.key
        row.token_ids, row.logprobs = list(made[0].token_ids), list(made[0].logprobs)
        self._source.finish(row, made[0])
        return ()
