"""The default `Generator`: a decode loop over any transformers causal LM, rows coming and going.

Rows share one write position of a cache that is allocated ahead, right-aligned: a row of length L
that joins at position t fills columns t-L to t, whatever its neighbours' lengths, and a finished
row's place is taken over by the next waiting one. A prompt that several rows share is read once.
On grouped-query models the query heads of a key head are given to attention as query positions,
so that no key or value is copied.

Does not know chat, text (but for stop strings), asyncio. Idea: continuous batching (Orca, Yu et
al. 2022) in the small; own code.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tfgrpo.lm.draws import draw_tokens, uniforms
from tfgrpo.protocols import Generated, Sampling

if TYPE_CHECKING:
    import torch

_GROWTH = 64
_PREFILL_TOKENS = 4096
_ATTENTION = "tfgrpo_grouped"


@dataclass(slots=True, eq=False)
class Row:
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
    on_token: Callable[[Row], None] | None = None
    uniforms: Any = None

    @property
    def total(self) -> int:
        """Cache columns that the row may need."""
        return len(self.prompt) + self.max_tokens


class RowSource(Protocol):
    """Where rows come from and go to."""

    def take(self, count: int) -> list[Row]:
        """Return up to `count` waiting rows."""
        ...

    def finish(self, row: Row, generated: Generated) -> None:
        """Take a finished row."""
        ...


class RowQueue(RowSource, Protocol):
    """A source that can hand out rows of one sampling."""

    def take(
        self, count: int, *, like: Sampling | None = None, in_order: bool = False
    ) -> list[Row]:
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


class HFGenerator:
    """Continuations from a transformers model.

    Args:
        model: a causal LM in eval mode.
        eos_ids: tokens that end a reply.
        decode: ids to text, for stop strings; None leaves those to the caller.
        max_rows: rows decoded at once.
        cache_bytes: how much memory keys and values may take; bounds the rows of long prompts.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_rows: int = 64,
        cache_bytes: int = 2_000_000_000,
    ) -> None:
        self._model = model
        self._eos = frozenset(eos_ids)
        self._decode = decode
        self._max_rows = max_rows
        self._grouped = _use_grouped_attention(model)
        self._max_columns = max(1, cache_bytes // _bytes_per_token(model))

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt; see `Generator`."""
        limit = sampling.max_tokens or 512
        rows = [
            Row(tuple(prompt), seed, sampling, limit, tag=(p, g))
            for p, (prompt, its_seeds) in enumerate(zip(token_ids, seeds, strict=True))
            for g, seed in enumerate(list(its_seeds)[:n])
        ]
        source = _ListSource(rows)
        self.serve(source)
        return [[source.results[p, g] for g in range(n)] for p in range(len(token_ids))]

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Copy the given tensors into the model's parameters of those names."""
        import torch

        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, value in named_params.items():
                own[name].copy_(value)

    def serve(self, source: RowSource) -> None:
        """Decode rows until the source has none left."""
        import torch

        with torch.inference_mode():
            batch = _Batch(self._model, grouped=self._grouped)
            waiting: deque[Row] = deque()
            while True:
                self._admit(batch, waiting, source)
                if not batch.rows:
                    return
                logits = batch.step()
                self._advance(batch, list(range(len(batch.slots))), logits, source)
                if not waiting:
                    batch.shrink()

    def _admit(self, batch: _Batch, waiting: deque[Row], source: RowSource) -> None:
        """Fill free places with waiting rows; several prompts are read in one pass."""
        live = len(batch.rows)
        # Reading one prompt costs about a decode step: wait until an eighth of the places is free.
        if live and self._max_rows - live < max(1, self._max_rows // 8):
            return
        while True:
            free = self._max_rows - len(batch.rows)
            if free > len(waiting):
                waiting.extend(source.take(free - len(waiting)))
            joining: list[Row] = []
            longest = max((r.total for r in batch.rows), default=0)
            while waiting and len(joining) < free:
                longest = max(longest, waiting[0].total)
                if (len(batch.rows) + len(joining) + 1) * longest > self._max_columns and (
                    batch.rows or joining
                ):
                    break
                row = waiting.popleft()
                if not row.is_cancelled:
                    row.uniforms = uniforms(row.seed, row.max_tokens)
                    joining.append(row)
            if not joining:
                return
            slots, logits = batch.join(joining)
            self._advance(batch, slots, logits, source)
            if batch.rows:
                return

    def _advance(
        self, batch: _Batch, slots: Sequence[int], logits: torch.Tensor, source: RowSource
    ) -> None:
        """Draw the next token of the rows in `slots` (one row of logits a slot) and drop the
        finished ones."""
        import torch

        places = [i for i, slot in enumerate(slots) if batch.slots[slot] is not None]
        rows = [r for r in (batch.slots[slots[i]] for i in places) if r is not None]
        if len(places) < len(slots):
            logits = logits[torch.tensor(places, device=logits.device)]
        device = logits.device
        token_B, logp_B, normaliser_B = draw_tokens(
            logits,
            torch.tensor([_temperature(r.sampling) for r in rows], device=device),
            torch.tensor([_top_p(r.sampling) for r in rows], device=device),
            torch.tensor(
                [r.uniforms[len(r.token_ids)] for r in rows], dtype=torch.float64, device=device
            ),
        )
        self._note_alternatives(rows, logits, normaliser_B)
        tokens, logps = token_B.tolist(), logp_B.tolist()
        for place, row, token, logp in zip(places, rows, tokens, logps, strict=True):
            slot = slots[place]
            row.token_ids.append(token)
            row.logprobs.append(logp)
            finish = self._finish(row, token)
            if row.on_token is not None:
                row.on_token(row)
            if finish is not None or row.is_cancelled:
                batch.leave(slot)
                generated = Generated(tuple(row.token_ids), tuple(row.logprobs), finish or "length")
                source.finish(row, generated)
            else:
                batch.last[slot] = token

    def _finish(self, row: Row, token: int) -> Any:
        if token in self._eos:
            return "stop"
        if row.sampling.stop and self._decode is not None:
            tail = self._decode(row.token_ids[-_stop_window(row.sampling) :])
            if any(s in tail for s in row.sampling.stop):
                return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    @staticmethod
    def _note_alternatives(
        rows: Sequence[Row], logits: torch.Tensor, normaliser_B: torch.Tensor
    ) -> None:
        for i, row in enumerate(rows):
            if row.sampling.top_logprobs:
                values, ids = logits[i].float().topk(row.sampling.top_logprobs)
                logps = (values - normaliser_B[i]).tolist()
                row.top.append(dict(zip(ids.tolist(), logps, strict=True)))


class _ListSource:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = deque(rows)
        self.results: dict[Any, Generated] = {}

    def take(self, count: int) -> list[Row]:
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    def finish(self, row: Row, generated: Generated) -> None:
        self.results[row.tag] = generated


class _Batch:
    """The rows being decoded, their cache and the shared write position."""

    def __init__(self, model: Any, *, grouped: bool) -> None:
        self._model = model
        self._device = model.device
        self._grouped = grouped
        self._cache_word = _cache_word(model)
        self._cache = _SlotCache(model)
        self.slots: list[Row | None] = []
        self.last: list[int] = []
        self._start: list[int] = []

    @property
    def rows(self) -> list[Row]:
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

    def join(self, rows: Sequence[Row]) -> tuple[list[int], torch.Tensor]:
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

    def _places(self, rows: Sequence[Row]) -> list[int]:
        """Make room for rows: free places first, then new ones; columns for the longest prompt."""
        longest = max(len(r.prompt) for r in rows)
        live = [i for i, r in enumerate(self.slots) if r is not None]
        if not live:
            self.slots, self.last, self._start = [], [], []
            self._cache.reset()
        missing = len(rows) - (len(self.slots) - len(live))
        if missing > 0 or longest > self._cache.length:
            size = len(self.slots) + max(0, missing)
            self._cache.rebuild(list(range(len(self.slots))), size, 0, _GROWTH, at_least=longest)
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
            cache.rebuild(list(range(len(self.slots))), len(self.slots), first, _GROWTH)
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


class _SlotCache:
    """Keys and values of all places, allocated ahead: `[places, heads, columns, width]` each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.capacity = 0
        self.shifted = 0
        self.cache: Any = None
        self._layers: list[Any] = []

    def rebuild(
        self, keep: Sequence[int], places: int, first: int, room: int, *, at_least: int = 0
    ) -> None:
        """Move the kept places, from column `first` on, into a cache of `places` places with `room`
        free columns; `at_least` columns are filled or skipped before the write position."""
        import torch

        used = self.length - first
        length = max(used, at_least)
        self.shifted = length - used - first
        capacity = length + max(room, _GROWTH)
        index = None if list(keep) == list(range(len(keep))) else torch.tensor(list(keep))
        for layer in self._layers:
            layer.move(index, len(keep), places, (first, self.length), length, capacity)
        self.length, self.capacity = length, capacity
        self._places = places
        if self.cache is not None:
            for layer in self._layers:
                layer.owner_length = self.length

    def write(self, slot: int, layers: Any, i: int, length: int) -> None:
        """Copy one read prompt, the last `length` columns of row i, before the write position."""
        if self.cache is None:
            self.cache, self._layers = _slot_layers(
                layers, self._places, self.capacity, lambda: self.length
            )
        for mine, read in zip(self._layers, layers, strict=True):
            columns = slice(self.length - length, self.length)
            mine.key_buffer[slot, :, columns] = read.keys[i, :, -length:]
            mine.value_buffer[slot, :, columns] = read.values[i, :, -length:]


def _cache_word(model: Any) -> str:
    """The name of the cache argument, which newer transformers shortened."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _slot_layers(
    like: Any, places: int, capacity: int, length: Callable[[], int]
) -> tuple[Any, list[Any]]:
    """A transformers cache whose layers write in place and hand out views."""
    import torch
    from transformers.cache_utils import Cache, DynamicLayer

    class SlotLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]
        owner_length = 0

        def allocate(self, like: torch.Tensor, places: int, capacity: int) -> torch.Tensor:
            # Zeros, not empty: a masked column times NaN garbage would still be NaN.
            return torch.zeros(
                (places, like.shape[1], capacity, like.shape[3]),
                dtype=like.dtype,
                device=like.device,
            )

        def move(
            self,
            index: torch.Tensor | None,
            kept: int,
            places: int,
            columns: tuple[int, int],
            length: int,
            capacity: int,
        ) -> None:
            first, last = columns
            for name in ("key_buffer", "value_buffer"):
                old = getattr(self, name)
                new = self.allocate(old, places, capacity)
                part = old[:kept] if index is None else old[index.to(old.device)]
                new[:kept, :, length - (last - first) : length] = part[:, :, first:last]
                setattr(self, name, new)

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            t = length()
            self.key_buffer[:, :, t : t + 1] = key_states
            self.value_buffer[:, :, t : t + 1] = value_states
            return self.key_buffer[:, :, : t + 1], self.value_buffer[:, :, : t + 1]

        def get_seq_length(self) -> int:
            return length()

    layers = []
    for read in like:
        layer = SlotLayer()
        layer.is_initialized = True
        layer.device, layer.dtype = read.keys.device, read.keys.dtype
        layer.key_buffer = layer.allocate(read.keys, places, capacity)
        layer.value_buffer = layer.allocate(read.values, places, capacity)
        layer.keys, layer.values = layer.key_buffer, layer.value_buffer
        layers.append(layer)
    return Cache(layers=layers), layers


def _use_grouped_attention(model: Any) -> bool:
    """Switch the model to `_grouped_attention` where its attention is plain; False elsewhere."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    is_plain = (
        kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
        and config.model_type in ("llama", "qwen2", "qwen3", "smollm3", "mistral")
        and model.device.type == "cpu"
    )
    if not is_plain:
        return False
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _grouped_attention)
    model.set_attn_implementation(_ATTENTION)
    return True


def _grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' interface; `[B, H, T, D]` in, `[B, T, H, D]` out."""
    import torch.nn.functional as F

    rows, heads, steps, width = query.shape
    groups = key.shape[1]
    if steps == 1:
        packed = query.reshape(rows, groups, heads // groups, width)
        mask = attention_mask
        if mask is not None:
            mask = mask.expand(rows, 1, heads // groups, key.shape[2])
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, 1, width).transpose(1, 2), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=heads != groups,
    )
    return out.transpose(1, 2).contiguous(), None


def _chunks(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts of rising length in runs of at most 4,096 padded tokens."""
    runs: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if runs and (len(runs[-1]) + 1) * len(prompt) <= _PREFILL_TOKENS:
            runs[-1].append(prompt)
        else:
            runs.append([prompt])
    return runs


def _temperature(sampling: Sampling) -> float:
    return 1.0 if sampling.temperature is None else sampling.temperature


def _top_p(sampling: Sampling) -> float:
    return 1.0 if sampling.top_p is None else sampling.top_p


def _stop_window(sampling: Sampling) -> int:
    """Last tokens that can hold a stop string: one a byte at worst, plus a cut character."""
    return max(len(s.encode("utf-8", "surrogatepass")) for s in sampling.stop) + 4


def _bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = next(model.parameters()).element_size()
    return int(2 * config.num_hidden_layers * heads * width * itemsize)


def default_threads() -> int:
    """Threads that may run here: more than free cores make every CPU engine crawl."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
