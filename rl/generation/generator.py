"""Group-aware batched sampling on the trainer's own weights.

A prompt is prefilled once and its keys and values are copied to the rows of its group. All rows
decode together in slots (`serving` says which stands where). On CUDA one graph a row count replays
the whole step, drawing included. Each token is drawn with a number fixed by (row seed, position),
so a row's tokens don't depend on its neighbours, up to the rounding of matrix products of another
height; `fixed_rows` keeps the height and so is exact.

Does not know tasks, rewards or text, except to cut at stop strings. Source: own; graphs a row count
as in serving engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.errors import ConfigError
from tfgrpo.lm.local.rows import RowQueue
from tfgrpo.protocols import Generated, Generator, Sampling
from tfgrpo.rl.checkpoints.loaded_model import eos_ids_of
from tfgrpo.rl.generation.decode_ops import (
    add_rms_norm,
    decode_attention,
    long_product,
    pick_and_advance,
    silu_mul,
)
from tfgrpo.rl.generation.kv_cache import Cache
from tfgrpo.rl.generation.requests import Counters, Feed, GroupRequest, OnDone
from tfgrpo.rl.generation.row_feed import RowFeed, row_request
from tfgrpo.rl.generation.scheduler import BatchScheduler
from tfgrpo.rl.kernels import device
from tfgrpo.rl.model.decoder import Decoder, decoder_from_hf, hf_views, load_hf_weights
from tfgrpo.rl.model.shape import why_unsupported


class GroupGenerator:
    """`protocols.Generator` over a `Decoder`; also serves a queue (`run`).

    Args:
        decoder: weights, read at every step; never copied.
        eos_ids: tokens that end a continuation; the ending token is part of it.
        detokenize: token ids to text, needed for stop strings only.
        max_rows: slots; memory grows with it.
        poll_steps: steps between two looks at which rows have ended.
        fixed_rows: always run all slots and read each prompt alone, so that results are independent
            of the batch bit by bit; on a CPU while the cache keeps its size (see `reserve`).
        graphs: False runs CUDA steps eagerly.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos_ids: Sequence[int],
        detokenize: Callable[[Sequence[int]], str] | None = None,
        max_rows: int = 64,
        poll_steps: int = 8,
        fixed_rows: bool = False,
        graphs: bool = True,
    ) -> None:
        if max_rows < 1 or poll_steps < 1:
            raise ConfigError(f"max_rows {max_rows} and poll_steps {poll_steps} must be at least 1")
        self.decoder = decoder
        self.eos_ids = tuple(eos_ids)
        self.counters = Counters()
        self.detokenize = detokenize
        self.max_rows = max_rows
        self.poll_steps = poll_steps
        self.fixed_rows = fixed_rows
        self._graphs = graphs and decoder.embed.is_cuda
        self._graph_pool: Any = None
        self._cache: Cache | None = None
        self._memory: Tensor | None = None

    def lend(self, memory: Tensor | None) -> None:
        """Take float32 memory for keys and values, used on CUDA as far as it goes; others may
        write there between runs."""
        # torch's masked attention multiplies what it masks by 0, which leaves NaN of others' bits
        self._memory = memory if device.uses_kernels(self.decoder.embed) else None

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt; `sampling.max_tokens` must be set.

        `sampling.extra["ignore_eos"]` makes every continuation reach its limit.
        """
        if any(len(row) != n for row in seeds) or len(seeds) != len(token_ids):
            raise ConfigError(
                f"{len(token_ids)} prompts × {n} draws need as many seeds; got "
                f"{[len(row) for row in seeds]}"
            )
        limit = sampling.max_tokens or 0
        found: dict[int, list[Generated]] = {}

        def keep(request: GroupRequest, rows: list[Generated]) -> Iterable[GroupRequest]:
            found[request.key] = rows
            return ()

        self.run(
            [
                GroupRequest(i, tuple(ids), tuple(seeds[i]), limit)
                for i, ids in enumerate(token_ids)
            ],
            sampling,
            keep,
        )
        return [found[i] for i in range(len(token_ids))]

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Take weights under Hugging Face names; those that share our storage cost nothing."""
        views = hf_views(self.decoder)
        fresh = {
            name: value
            for name, value in named_params.items()
            if name in views and views[name].data_ptr() != value.data_ptr()
        }
        if fresh:
            load_hf_weights(self.decoder, {**views, **fresh})

    def release(self) -> None:
        """Free caches and graphs; the next run makes new ones."""
        self._cache = None
        self._graph_pool = None

    def serve(self, source: RowQueue) -> None:
        """Serve rows that somebody else queues, in runs of rows of one sampling."""
        while rows := source.take(1):
            sampling = rows[0].sampling
            feed = RowFeed(source, sampling)
            self.run([row_request(rows[0])], sampling, feed.on_done, feed)

    def run(
        self,
        requests: Iterable[GroupRequest],
        sampling: Sampling,
        on_done: OnDone,
        feed: Feed | None = None,
    ) -> Counters:
        """Serve requests, and those that `on_done` and `feed` add, until none is left.

        Raises:
            ConfigError: a prompt that fills the context, no token limit, or a setting not known.
        """
        with torch.no_grad():
            return BatchScheduler(self, sampling, on_done, feed).serve(requests)

    def reserve(self, rows: int, length: int, new: int) -> None:
        """Allocate for at least these sizes: what fits in later costs no new cache and no graphs.

        Args:
            rows: decoded at once, up to `max_rows`.
            length: tokens of a prompt and its continuation.
            new: tokens of a continuation.
        """
        self.prepare(min(rows, self.max_rows), length, new)

    def prepare(self, rows: int, length: int, new: int) -> Cache:
        """Return a cache for at least these sizes; an existing one is kept when it is enough."""
        cache = self._cache
        if cache is not None:
            if cache.holds(length, new) and len(cache.slots.token) >= rows:
                return cache
            rows = max(rows, len(cache.slots.token))
            length, new = max(length, cache.capacity), max(new, cache.new)
        self.release()
        self._cache = self._made(rows, length, new)
        return self._cache

    def _made(self, rows: int, length: int, new: int) -> Cache:
        return Cache.empty(self.decoder, rows, length, new, len(self.eos_ids), self._memory)

    def grow(self, length: int, new: int) -> Cache:
        """Return a longer cache with all that the present one holds; graphs are made again."""
        old = self._cache
        assert old is not None
        self.release()
        rows = len(old.slots.token)
        length, new = max(length, old.capacity), max(new, old.new)
        old.graphs.clear()
        if self._memory is not None:
            old.leave()
        made = self._made(rows, length, new)
        made.take(old)
        self._cache = made
        return made

    def _step(self, cache: Cache, rows: int, top_p: float, mask: Tensor | None) -> None:
        """Decode one token in the first `rows` slots."""
        decoder, shape = self.decoder, self.decoder.shape
        x = F.embedding(cache.slots.token[:rows], decoder.embed)
        delta: Tensor | None = None
        parts = cache.prompt_parts(rows)
        for i, layer in enumerate(decoder.layers):
            normed = add_rms_norm(x, delta, layer.norm1, shape.eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            layer_cache = (cache.k[i], cache.v[i])
            mixed = decode_attention(
                qkv,
                layer_cache,
                cache.slots,
                cache.angles,
                layer.qk_norms,
                shape,
                mask,
                parts,
            )
            delta = F.linear(mixed, layer.o)
            normed = add_rms_norm(x, delta, layer.norm2, shape.eps)
            delta = long_product(silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        hidden = add_rms_norm(x, delta, decoder.norm, shape.eps)
        pick_and_advance(F.linear(hidden, decoder.head_weight), cache.slots, top_p)

    def steps(self, cache: Cache, rows: int, n: int, top_p: float, longest: int) -> None:
        """Decode n tokens; `longest` bounds the positions reached (exclusive)."""
        if self._graphs:
            key = (rows, top_p, cache.prompt_parts(rows))
            graph = cache.graphs.get(key)
            if graph is None:
                graph = cache.graphs[key] = self._capture(cache, rows, top_p)
            for _ in range(n):
                graph.replay()
            return
        on_cuda = self.decoder.embed.is_cuda
        for i in range(n):
            mask = None
            if not on_cuda:
                # masked columns too can change a sum's last bit
                width = cache.capacity
                if not self.fixed_rows:  # the longest row may end before all n steps are made
                    width = min(width, max(1, longest - n + i + 1))
                reach = torch.arange(width)
                mask = (reach <= cache.slots.position[:rows, None])[:, None, None]
            self._step(cache, rows, top_p, mask)

    def _capture(self, cache: Cache, rows: int, top_p: float) -> Any:
        """Record the step as a CUDA graph; a rehearsal on idle slots compiles the kernels."""
        living = cache.slots.alive.clone()
        cache.slots.alive.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(cache, rows, top_p, None)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            self._step(cache, rows, top_p, None)
        self._graph_pool = graph.pool()
        cache.slots.alive.copy_(living)
        return graph


def make_generator(model: Any, tokenizer: Any = None, *, max_rows: int = 64) -> Generator | None:
    """Return a generator for a Hugging Face causal LM, or None where its family is not supported.

    A supported model's parameters become views into fused storage, so the model stays usable and
    no weight is held twice.

    Args:
        model: a loaded causal LM in evaluation mode, or a record that holds one beside its
            tokenizer (`.model`, `.tokenizer`).
        tokenizer: its tokenizer; `decode` serves stop strings, `eos_token_id` ends replies.
        max_rows: rows decoded at once; more wait in a queue.
    """
    if tokenizer is None:
        model, tokenizer = model.model, model.tokenizer
    if why_unsupported(model.config):
        return None

    def text_of(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    return GroupGenerator(
        decoder_from_hf(model),
        eos_ids=eos_ids_of(model, tokenizer),
        detokenize=text_of,
        max_rows=max_rows,
    )
