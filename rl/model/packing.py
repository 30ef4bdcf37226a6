"""Rows of tokens laid end to end, every shared prompt once.

Layout of a micro-batch of T tokens: all prompts first, then all suffixes, grouped. A suffix sees
its group's prompt and itself, and its positions go on after the prompt, so logits equal those of
the repeated form. The last prompt token heads every suffix of the group. Groups stay whole while
they fit; a larger one is cut into parts that each carry the prompt.

Does not know models or losses. Idea: shared-prompt packing as in johncaged/PrefixGrouper, with the
attention split into two variable-length calls (own).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout as token ids."""

    index: int
    """Number in the optimiser batch."""
    prompt_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    """Everything after the prompt: sampled tokens and, in between, tool output."""
    loss_positions: tuple[int, ...] | None = None
    """Which suffix positions carry a loss, ascending; None means all."""

    @property
    def n_loss(self) -> int:
        """Loss-bearing tokens."""
        return len(self.suffix_ids if self.loss_positions is None else self.loss_positions)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Which token each of the K keys is, and where each of the T tokens is a key."""

    token_K: torch.Tensor
    order_K: torch.Tensor
    """int32: the keys sorted by token."""
    start_T: torch.Tensor
    """int32: where each token's keys begin in `order_K`, and their number: T + 1."""


@dataclass(frozen=True)
class Packed:
    """One micro-batch. Axes: T input tokens, D loss-bearing tokens, S segments."""

    ids_T: torch.Tensor
    position_T: torch.Tensor
    prompt_lengths: tuple[int, ...]
    suffix_lengths: tuple[tuple[int, ...], ...]
    """Per prompt: the lengths of its suffixes."""
    head_D: torch.Tensor
    """Index into T of the hidden state that predicts each loss-bearing token."""
    target_D: torch.Tensor
    row_D: torch.Tensor
    """Row number of the optimiser batch, per loss-bearing token."""
    rows: tuple[int, ...]
    """Row numbers in the order of their tokens."""

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts: where suffixes begin."""
        return sum(self.prompt_lengths)

    @property
    def n_tokens(self) -> int:
        """Input tokens T."""
        return int(self.ids_T.shape[0])

    @cached_property
    def cu_self(self) -> torch.Tensor:
        """int32 boundaries of all segments, prompts then suffixes: S + 1."""
        flat = [n for group in self.suffix_lengths for n in group]
        return self._boundaries([*self.prompt_lengths, *flat])

    @cached_property
    def max_self(self) -> int:
        """Longest segment."""
        return max([*self.prompt_lengths, *(n for g in self.suffix_lengths for n in g)])

    @cached_property
    def cu_keys(self) -> torch.Tensor:
        """int32 boundaries of what each segment sees, prompts then suffixes: S + 1."""
        return self._boundaries([*self.prompt_lengths, *self._seen_by_suffixes])

    @cached_property
    def max_keys(self) -> int:
        """Most tokens that a segment sees."""
        return max([*self.prompt_lengths, *self._seen_by_suffixes])

    @property
    def _seen_by_suffixes(self) -> list[int]:
        pairs = zip(self.prompt_lengths, self.suffix_lengths, strict=True)
        return [prompt + n for prompt, group in pairs for n in group]

    @cached_property
    def seen(self) -> KeyTable:
        """The tokens behind `cu_keys`."""
        prompt_ends, at = np.cumsum(self.prompt_lengths), self.n_prompt
        parts = [np.arange(at)]
        for end, n, group in zip(prompt_ends, self.prompt_lengths, self.suffix_lengths):
            for length in group:
                parts += [np.arange(end - n, end), np.arange(at, at + length)]
                at += length
        index = np.concatenate(parts)
        ends = np.bincount(index, minlength=self.n_tokens).cumsum()
        device = self.ids_T.device
        return KeyTable(
            to_device(index, device),
            to_device(np.argsort(index, kind="stable").astype(np.int32), device),
            to_device(np.concatenate([[0], ends]).astype(np.int32), device),
        )

    @cached_property
    def group_masks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per group its token indices (into T) and who may see whom: the dense form for CPUs."""
        masks = []
        prompt_at, suffix_at = 0, self.n_prompt
        device = self.ids_T.device
        for n_prompt, suffixes in zip(self.prompt_lengths, self.suffix_lengths, strict=True):
            n_suffix = sum(suffixes)
            index = torch.cat(
                [
                    torch.arange(prompt_at, prompt_at + n_prompt, device=device),
                    torch.arange(suffix_at, suffix_at + n_suffix, device=device),
                ]
            )
            owner = torch.repeat_interleave(
                torch.arange(len(suffixes) + 1), torch.tensor([n_prompt, *suffixes])
            ).to(device)
            may_see = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0)
            order = torch.arange(len(index), device=device)
            masks.append((index, may_see & (order[:, None] >= order[None, :])))
            prompt_at += n_prompt
            suffix_at += n_suffix
        return masks

    def _boundaries(self, lengths: Sequence[int]) -> torch.Tensor:
        total = np.cumsum([0, *lengths], dtype=np.int32)
        return to_device(total, self.ids_T.device)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for the work that it has been given.

    A plain copy waits, which leaves a GPU idle while the next micro-batch is laid out.
    """
    made = torch.from_numpy(values)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def pack(rows: Sequence[Row], *, share: bool = True, device: str | torch.device = "cpu") -> Packed:
    """Lay rows out as one micro-batch; rows with equal prompts next to each other share it.

    Args:
        rows: at least one; none with an empty prompt or suffix.
        share: False stores the prompt once a row (for comparison).
        device: where the tensors live.
    """
    groups: list[tuple[tuple[int, ...], list[Row]]] = []
    for row in rows:
        if not row.prompt_ids or not row.suffix_ids:
            raise ConfigError(
                f"row {row.index} has {len(row.prompt_ids)} prompt and {len(row.suffix_ids)} "
                "completion tokens; both need at least one"
            )
        if share and groups and groups[-1][0] == row.prompt_ids:
            groups[-1][1].append(row)
        else:
            groups.append((row.prompt_ids, [row]))
    layout = _Layout()
    for prompt, _ in groups:
        layout.add_prompt(prompt)
    for number, (_, members) in enumerate(groups):
        for row in members:
            layout.add_suffix(number, row)

    def tensor(parts: list[NDArray[np.int64]]) -> torch.Tensor:
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return to_device(flat, torch.device(device))

    return Packed(
        ids_T=tensor(layout.ids),
        position_T=tensor(layout.positions),
        prompt_lengths=tuple(len(prompt) for prompt, _ in groups),
        suffix_lengths=tuple(tuple(len(r.suffix_ids) for r in members) for _, members in groups),
        head_D=tensor(layout.heads),
        target_D=tensor(layout.targets),
        row_D=tensor(layout.owners),
        rows=tuple(row.index for _, members in groups for row in members),
    )


@dataclass(slots=True)
class _Layout:
    """Pieces of a micro-batch's index arrays, in the order of their tokens."""

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    heads: list[NDArray[np.int64]] = field(default_factory=list)
    targets: list[NDArray[np.int64]] = field(default_factory=list)
    owners: list[NDArray[np.int64]] = field(default_factory=list)
    prompt_ends: list[int] = field(default_factory=list)
    used: int = 0

    def add_prompt(self, prompt: tuple[int, ...]) -> None:
        """Lay a prompt; all of them come before the first suffix."""
        self.ids.append(np.array(prompt, dtype=np.int64))
        self.positions.append(np.arange(len(prompt)))
        self.used += len(prompt)
        self.prompt_ends.append(self.used)

    def add_suffix(self, group: int, row: Row) -> None:
        """Lay a suffix of a group; its first token is predicted by the prompt's last."""
        suffix = np.array(row.suffix_ids, dtype=np.int64)
        places = row.loss_positions
        at = np.arange(len(suffix)) if places is None else np.array(places, dtype=np.int64)
        self.heads.append(np.where(at > 0, self.used + at - 1, self.prompt_ends[group] - 1))
        self.targets.append(suffix[at])
        self.owners.append(np.full(len(at), row.index, dtype=np.int64))
        start = len(row.prompt_ids)
        self.ids.append(suffix)
        self.positions.append(np.arange(start, start + len(suffix)))
        self.used += len(suffix)


def by_row(
    found: Sequence[tuple[Sequence[Row], torch.Tensor]],
) -> dict[int, tuple[float, ...]]:
    """Cut values of micro-batches' loss-bearing tokens, read from the device in one go, into rows.

    Args:
        found: each micro-batch's rows and their values: D.
    """
    values = torch.cat([value_D for _, value_D in found]).tolist() if found else []
    at = 0
    cut: dict[int, tuple[float, ...]] = {}
    for row in (row for part, _ in found for row in part):
        cut[row.index] = tuple(values[at : at + row.n_loss])
        at += row.n_loss
    return cut


def micro_batches(
    rows: Iterable[Row], max_tokens: int, *, together: Mapping[int, Hashable] | None = None
) -> list[list[Row]]:
    """Cut rows, in order, into as few micro-batches of at most `max_tokens` input tokens as go.

    Of the cuts with that many the one whose largest micro-batch is smallest is taken: it costs no
    launch and lowers the peak of memory. A prompt counts once for the rows that follow each other
    with it. A row that alone passes the limit gets a micro-batch of its own. With `together`, row
    index to group, rows of one group that follow each other are never parted, even where they pass
    the limit.
    """
    units: list[_Unit] = []
    before: tuple[int, ...] | None = None
    for _, members in groupby(rows, lambda r: together[r.index] if together else r.index):
        unit = list(members)
        prompts = [prompt for prompt, _ in groupby(r.prompt_ids for r in unit)]
        own = sum(len(r.suffix_ids) for r in unit) + sum(map(len, prompts[1:]))
        units.append(_Unit(unit, own, len(prompts[0]), begins_group=prompts[0] != before))
        before = prompts[-1]
    fewest = len(_cut(units, max_tokens))
    if fewest > 1:
        limits = range(sum(u.own for u in units) // fewest, max_tokens)
        # fewer tokens allowed never need fewer micro-batches
        at = bisect_left(limits, True, key=lambda limit: len(_cut(units, limit)) <= fewest)
        max_tokens = limits[at] if at < len(limits) else max_tokens
    return _cut(units, max_tokens)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that stay together."""

    rows: list[Row]
    own: int
    """Tokens without the first prompt."""
    prompt: int
    """Tokens of the first prompt."""
    begins_group: bool
    """The row before has another prompt."""


def _cut(units: Sequence[_Unit], limit: int) -> list[list[Row]]:
    """Fill one micro-batch after the other."""
    batches: list[list[Row]] = []
    used = 0
    for unit in units:
        cost = unit.own + (unit.prompt if unit.begins_group else 0)
        if not batches or used + cost > limit:
            batches.append([])
            used = 0
            cost = unit.own + unit.prompt
        batches[-1].extend(unit.rows)
        used += cost
    return batches
