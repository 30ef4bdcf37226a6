"""The rows being decoded together: reading their prompts and stepping all of them by one position.

A finished row's place is taken over by one that joins, and places are dropped once the larger half
is free. A prompt that several rows share is read once, and so is the beginning that all prompts of
a join share (instructions, worked examples).

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
_LEAST_SHARED = 16
"""Leading tokens that must be common to prompts before they are read on their own."""


class DecodeBatch:
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
        self._prefix: tuple[int, ...] = ()
        self._prefix_layers: Any = None

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
        shared = self._shared_tokens(prompts)
        for chunk in _chunks(prompts):
            layers, chunk_logits = self._prefill(chunk, shared)
            for i, prompt in enumerate(chunk):
                read[prompt] = (layers, i)
                logits[prompt] = chunk_logits[i]
        slots = self._places(rows)
        for row, slot in zip(rows, slots, strict=True):
            layers, i = read[row.prompt]
            length = len(row.prompt)
            self._start[slot] = self._cache.length - length
            self._cache.write(slot, layers, i, length, shared)
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

    def _shared_tokens(self, prompts: Sequence[tuple[int, ...]]) -> int:
        """Return how many leading tokens of all prompts are read already; reads them if it pays."""
        if not self._grouped:  # other attentions may look at a window only
            return 0
        low, high = min(prompts), max(prompts)
        shared = min(_common(low, high), min(map(len, prompts)) - 1)
        known = min(_common(self._prefix, low), shared)
        if known >= _LEAST_SHARED and (2 * known >= shared or len(prompts) == 1):
            return known
        if shared < _LEAST_SHARED or len(prompts) == 1:
            return 0
        self._prefix_layers, _ = self._prefill([low[:shared]], 0)
        self._prefix = low[:shared]
        return shared

    def _prefill(self, prompts: Sequence[tuple[int, ...]], shared: int) -> tuple[Any, torch.Tensor]:
        """Read prompts behind their `shared` first tokens; returns layers whose columns are those,
        then padding, then the rest, and the logits of each prompt's last token."""
        import torch

        width = max(len(p) for p in prompts) - shared
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) + shared :] = torch.tensor(prompt[shared:])
            mask[i, width - len(prompt) + shared :] = True
        position = (mask.long().cumsum(-1) - 1).clamp_(min=0) + shared
        cache = _new_cache()
        for i, layer in enumerate(self._prefix_layers if shared else ()):
            both = (layer.keys[:, :, :shared], layer.values[:, :, :shared])
            cache.update(*(x.expand(len(prompts), -1, -1, -1) for x in both), i)
        attention: torch.Tensor = mask
        if self._grouped:
            causal = torch.ones((width, width), dtype=torch.bool).tril_()
            attention = mask[:, None, None, :] & causal
            # A padding position attends to itself: a row of no keys would make NaNs.
            attention = attention | torch.eye(width, dtype=torch.bool)
            attention = torch.nn.functional.pad(attention, (shared, 0), value=True)
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


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _chunks(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts of rising length in runs of at most 4,096 padded tokens."""
    runs: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if runs and (len(runs[-1]) + 1) * len(prompt) <= _PREFILL_TOKENS:
            runs[-1].append(prompt)
        else:
            runs.append([prompt])
    return runs
