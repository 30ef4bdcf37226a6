"""The rows being decoded together: reading their prompts and stepping all of them by one position.

A finished row's place is taken over by one that joins, and places are dropped once the larger half
is free. A prompt that several rows share is read once.

Does not know drawing, stop rules or where rows come from. Idea: continuous batching (Orca, Yu et
al. 2022) in the small; own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfgrpo.lm.local.kv_slots import GROWTH, SlotCache
from tfgrpo.lm.local.rows import DecodeRow

if TYPE_CHECKING:
    import torch

_PREFILL_TOKENS = 4096


class Batch:
    """The rows being decoded, their cache and the shared write position."""

    def __init__(self, model: Any, *, grouped: bool) -> None:
        self._model = model
        self._device = model.device
        self._grouped = grouped
        self._cache_word = _cache_word(model)
        self._cache = SlotCache(model)
        self.slots: list[DecodeRow | None] = []
        self.last: list[int] = []
        self._start: list[int] = []

    @property
    def rows(self) -> list[DecodeRow]:
        """The live rows."""
        return [r for r in self.slots if r is not None]

    def leave(self, slot: int) -> None:
        """Free a place; its cache is overwritten by whoever joins."""
        self.slots[slot] = None
        self.last[slot] = 0

    def shrink(self) -> None:
        """Drop free places once they are the larger half."""
        live = [i for i, r in enumerate(self.slots) if r is not None]
        if live and len(live) * 2 <= len(self.slots):
            first = min(self._start[i] for i in live)
            self._cache.rebuild(live, len(live), first, max(r.max_tokens for r in self.rows))
            self.slots = [self.slots[i] for i in live]
            self.last = [self.last[i] for i in live]
            self._start = [self._start[i] - first for i in live]

    def join(self, rows: Sequence[DecodeRow]) -> tuple[list[int], torch.Tensor]:
        """Read the prompts of new rows; returns their places and logits."""
        import torch

        prompts = sorted({r.prompt for r in rows}, key=len)
        read: dict[tuple[int, ...], tuple[Any, int]] = {}
        logits: dict[tuple[int, ...], torch.Tensor] = {}
        for chunk in _chunks(prompts):
            layers, chunk_logits = self._prefill(chunk)
            for i, prompt in enumerate(chunk):
                read[prompt] = (layers, i)
                logits[prompt] = chunk_logits[i]
        slots = self._places(rows)
        for row, slot in zip(rows, slots, strict=True):
            layers, i = read[row.prompt]
            length = len(row.prompt)
            self._start[slot] = self._cache.length - length
            self._cache.write(slot, layers, i, length)
            self.slots[slot] = row
        return slots, torch.stack([logits[r.prompt] for r in rows])

    def _places(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Make room for rows: free places first, then new ones; columns for the longest prompt."""
        longest = max(len(r.prompt) for r in rows)
        live = [i for i, r in enumerate(self.slots) if r is not None]
        if not live:
            self.slots, self.last, self._start = [], [], []
            self._cache.reset()
        missing = len(rows) - (len(self.slots) - len(live))
        if missing > 0 or longest > self._cache.length:
            size = len(self.slots) + max(0, missing)
            self._cache.rebuild(list(range(len(self.slots))), size, 0, GROWTH, at_least=longest)
            shift = self._cache.shifted
            self._start = [s + shift for s in self._start] + [0] * (size - len(self.slots))
            self.last += [0] * (size - len(self.slots))
            self.slots += [None] * (size - len(self.slots))
        return [i for i, r in enumerate(self.slots) if r is None][: len(rows)]

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Any, torch.Tensor]:
        import torch

        width = max(len(p) for p in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = True
        position = (mask.long().cumsum(-1) - 1).clamp_(min=0)
        cache = _new_cache()
        attention: torch.Tensor = mask
        if self._grouped:
            causal = torch.ones((width, width), dtype=torch.bool).tril_()
            attention = mask[:, None, None, :] & causal
            # A padding position attends to itself: a row of no keys would make NaNs.
            attention = attention | torch.eye(width, dtype=torch.bool)
        out = self._model(
            input_ids=ids.to(self._device),
            attention_mask=attention.to(self._device),
            position_ids=position.to(self._device),
            **{self._cache_word: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        return cache.layers, out.logits[:, -1]

    def step(self) -> torch.Tensor:
        """Decode one position of every place; returns logits a place."""
        import torch

        cache = self._cache
        if cache.length == cache.capacity:
            live = [s for s, r in zip(self._start, self.slots, strict=True) if r is not None]
            first = min(live)
            cache.rebuild(list(range(len(self.slots))), len(self.slots), first, GROWTH)
            self._start = [max(0, s - first) for s in self._start]
        start = torch.tensor(self._start, device=self._device)
        position = (cache.length - start)[:, None]
        columns = torch.arange(cache.length + 1, device=self._device)
        mask = columns[None, :] >= start[:, None]
        out = self._model(
            input_ids=torch.tensor(self.last, device=self._device)[:, None],
            attention_mask=mask[:, None, None, :] if self._grouped else mask,
            position_ids=position,
            **{self._cache_word: cache.cache},
            use_cache=True,
            logits_to_keep=1,
        )
        cache.length += 1
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def _cache_word(model: Any) -> str:
    """The name of the cache argument, which newer transformers shortened."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _chunks(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts of rising length in runs of at most 4,096 padded tokens."""
    runs: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if runs and (len(runs[-1]) + 1) * len(prompt) <= _PREFILL_TOKENS:
            runs[-1].append(prompt)
        else:
            runs.append([prompt])
    return runs
