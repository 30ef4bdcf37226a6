"""Group-aware batched sampling on the trainer's own weights.

A prompt is prefilled once and its keys and values are copied to the rows of its group. All rows
decode together in slots; finished rows are compacted away or their slots refilled from a queue.
On CUDA one graph a row count replays the whole step, drawing included. Each token is drawn with a
number fixed by (row seed, position), so a row's tokens don't depend on its neighbours, up to
the rounding of matrix products of another height; `fixed_rows` keeps the height and so is exact.

Does not know tasks, rewards or text, except to cut at stop strings. Ideas: continuous batching
(Orca), slot refill without paging for short sequences, hints that re-enter the queue (own).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Generated, Generator, Sampling
from tfgrpo.rl.draws import uniforms
from tfgrpo.rl.kernels import Slots, add_rms_norm, decode_attention, pick_and_advance, silu_mul
from tfgrpo.rl.model import Decoder, decoder_from_hf, hf_views, load_hf_weights, why_unsupported
from tfgrpo.rl.packing import Packed

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Row counts that the step is run with (one CUDA graph each, made on first use)."""
PREFILL_TOKENS = 16_384
LENGTH_STEP = 128
"""A cache's length is a multiple of this, so that a somewhat longer prompt needs no new graphs."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Ask for one continuation a seed."""

    key: Any
    """Given back with the result."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int
    """Limit of each continuation; cut to what the context allows."""


OnDone = Callable[[GroupRequest, list[Generated]], Iterable[GroupRequest]]
"""Called when a group's last row ends; may return further requests for the free slots."""


@dataclass(slots=True)
class Counters:
    """What the last run cost, in tokens and steps."""

    prefill_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    """Rows decoded, idle ones included: steps × row count."""
    new_tokens: int = 0


@dataclass(slots=True)
class _Open:
    request: GroupRequest
    done: list[Generated | None]


@dataclass(slots=True)
class _Cache:
    """Keys and values of all slots, and the graphs captured over them."""

    k: list[Tensor]
    v: list[Tensor]
    slots: Slots
    angles: tuple[Tensor, Tensor]
    capacity: int
    graphs: dict[tuple[int, float], Any] = field(default_factory=dict)

    @property
    def new(self) -> int:
        """Longest continuation."""
        return int(self.slots.uniform.shape[1])

    def holds(self, length: int, new: int) -> bool:
        """True when a sequence of these lengths fits in."""
        return self.capacity >= length and self.new >= new


class GroupGenerator:
    """`protocols.Generator` over a `Decoder`; also serves a queue (`run`).

    Args:
        decoder: weights, read at every step; never copied.
        eos_ids: tokens that end a continuation; the ending token is part of it.
        detokenize: token ids to text, needed for stop strings only.
        max_rows: slots; memory grows with it.
        poll_steps: steps between two looks at which rows have ended.
        fixed_rows: always run all slots, so that results are independent of the batch bit by bit.
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
        self._detokenize = detokenize
        self._max_rows = max_rows
        self._poll_steps = poll_steps
        self._fixed_rows = fixed_rows
        self._graphs = graphs and decoder.embed.is_cuda
        self._graph_pool: Any = None
        self._cache: _Cache | None = None

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

    def run(
        self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone
    ) -> Counters:
        """Serve requests, and those that `on_done` adds, until none is left.

        Raises:
            ConfigError: a prompt that fills the context, no token limit, or a setting not known.
        """
        with torch.no_grad():
            return _Run(self, sampling, on_done).serve(requests)

    def reserve(self, rows: int, length: int, new: int) -> None:
        """Allocate for at least these sizes: what fits in later costs no new cache and no graphs.

        Args:
            rows: decoded at once, up to `max_rows`.
            length: tokens of a prompt and its continuation.
            new: tokens of a continuation.
        """
        self._prepare(min(rows, self._max_rows), length, new)

    def _prepare(self, rows: int, length: int, new: int) -> _Cache:
        """Return a cache for at least these sizes; an existing one is kept when it is enough."""
        cache = self._cache
        if cache is not None:
            if cache.holds(length, new) and len(cache.slots.token) >= rows:
                return cache
            rows = max(rows, len(cache.slots.token))
            length, new = max(length, cache.capacity), max(new, cache.new)
        self.release()
        self._cache = self._empty(rows, length, new)
        return self._cache

    def _grow(self, length: int, new: int) -> _Cache:
        """Return a longer cache with all that the present one holds; graphs are made again."""
        old = self._cache
        assert old is not None
        self.release()
        made = self._empty(len(old.slots.token), max(length, old.capacity), max(new, old.new))
        old.graphs.clear()
        for name in ("k", "v"):
            for layer, before in zip(getattr(made, name), getattr(old, name), strict=True):
                layer[:, :, : old.capacity] = before
        for state, before in zip(made.slots.per_row(), old.slots.per_row(), strict=True):
            state[..., : before.shape[-1]] = before
        made.slots.eos.copy_(old.slots.eos)
        self._cache = made
        return made

    def _empty(self, rows: int, length: int, new: int) -> _Cache:
        shape, device = self.decoder.shape, self.decoder.embed.device
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        size = (rows, shape.kv_heads, length, shape.head_dim)
        cos, sin = self.decoder.angles(torch.arange(length, device=device))
        return _Cache(
            k=[self.decoder.embed.new_zeros(size) for _ in range(shape.layers)],
            v=[self.decoder.embed.new_zeros(size) for _ in range(shape.layers)],
            slots=Slots.empty(rows, new, len(self.eos_ids), device),
            angles=(cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()),
            capacity=length,
        )

    def _step(self, cache: _Cache, rows: int, top_p: float, mask: Tensor | None) -> None:
        """Decode one token in the first `rows` slots."""
        decoder, shape = self.decoder, self.decoder.shape
        x = F.embedding(cache.slots.token[:rows], decoder.embed)
        delta: Tensor | None = None
        for i, layer in enumerate(decoder.layers):
            normed = add_rms_norm(x, delta, layer.norm1, shape.eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            mixed = decode_attention(
                qkv, cache.k[i], cache.v[i], cache.slots, cache.angles, layer.qk_norms, shape, mask
            )
            delta = F.linear(mixed, layer.o)
            normed = add_rms_norm(x, delta, layer.norm2, shape.eps)
            delta = F.linear(silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        hidden = add_rms_norm(x, delta, decoder.norm, shape.eps)
        pick_and_advance(F.linear(hidden, decoder.head_weight), cache.slots, top_p)

    def _steps(self, cache: _Cache, rows: int, n: int, top_p: float, longest: int) -> None:
        """Decode n tokens; `longest` bounds the positions reached (exclusive)."""
        if self._graphs:
            graph = cache.graphs.get((rows, top_p)) or self._capture(cache, rows, top_p)
            for _ in range(n):
                graph.replay()
            return
        on_cuda = self.decoder.embed.is_cuda
        for i in range(n):
            mask = None
            if not on_cuda:
                reach = torch.arange(max(1, longest - n + i + 1))
                mask = (reach <= cache.slots.position[:rows, None])[:, None, None]
            self._step(cache, rows, top_p, mask)

    def _capture(self, cache: _Cache, rows: int, top_p: float) -> Any:
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
        cache.graphs[(rows, top_p)] = graph
        return graph


class _Run:
    """One service of a queue: which row stands in which slot."""

    def __init__(self, owner: GroupGenerator, sampling: Sampling, on_done: OnDone) -> None:
        self.owner = owner
        self.sampling = sampling
        self.on_done = on_done
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1")
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        if temperature < 0:
            raise ConfigError(f"temperature {temperature} must be 0 (greedy) or above")
        self.inv_temperature = 0.0 if temperature == 0 else 1.0 / temperature
        if sampling.stop and owner._detokenize is None:
            raise ConfigError("stop strings need a generator made with a tokenizer")
        self.ignore_eos = bool(sampling.extra.get("ignore_eos", False))
        self.waiting: deque[tuple[_Open, int]] = deque()
        self.needs = (0, 0)
        """Longest sequence and longest continuation asked for so far."""
        self.complete: list[_Open] = []
        """Groups whose rows have all ended and that were not handed over yet."""
        self.held: list[tuple[_Open, int] | None] = []
        self.made: list[int] = []
        """Tokens made by the row in each slot, as last polled."""

    def serve(self, requests: Iterable[GroupRequest]) -> Counters:
        owner = self.owner
        owner.counters = counters = Counters()
        self._enqueue(requests)
        while not self.waiting:
            if not self.complete:
                return counters
            self._hand_over()
        cache = self._prepare()
        cache.slots.alive.zero_()
        cache.slots.eos.fill_(-1)
        if not self.ignore_eos and owner.eos_ids:
            cache.slots.eos[: len(owner.eos_ids)] = torch.tensor(owner.eos_ids)
        self.held = [None] * len(cache.slots.token)
        self.made = [0] * len(self.held)
        while True:
            if self.waiting:
                if not cache.holds(*self.needs):
                    cache = owner._grow(*self.needs)
                self._admit(cache)
            living = [s for s, held in enumerate(self.held) if held is not None]
            if not living:
                if not self.complete:
                    return counters
                self._hand_over()
                continue
            rows = self._choose_rows(cache, living)
            living = [s for s, held in enumerate(self.held) if held is not None]
            left = max(self._limit(s) - self.made[s] for s in living)
            n = min(owner._poll_steps, left)
            longest = max(self._prompt(s) + self.made[s] for s in living) + n - 1
            owner._steps(cache, rows, n, self.top_p, longest)
            self._hand_over()  # whoever grades works while the device decodes
            counters.steps += n
            counters.row_steps += n * rows
            self._collect(cache, living)

    def _enqueue(self, requests: Iterable[GroupRequest]) -> None:
        context = self.owner.decoder.shape.context
        for request in requests:
            n = len(request.prompt_ids)
            if not 0 < n < context:
                raise ConfigError(
                    f"prompt {request.key!r} has {n} tokens; it needs at least one and must leave "
                    f"room in the model's context of {context}: shorten the task or its context"
                )
            if request.max_tokens < 1:
                raise ConfigError(f"max_tokens is {request.max_tokens}; set it to 1 or more")
            entry = _Open(request, [None] * len(request.seeds))
            if not request.seeds:
                self.complete.append(entry)
            self.waiting.extend((entry, i) for i in range(len(request.seeds)))
            allowed = self._allowed(request)
            self.needs = (max(self.needs[0], n + allowed), max(self.needs[1], allowed))

    def _hand_over(self) -> None:
        """Give complete groups to `on_done` and queue what it asks for."""
        complete, self.complete = self.complete, []
        for entry in complete:
            rows = [row for row in entry.done if row is not None]
            self._enqueue(self.on_done(entry.request, rows))

    def _allowed(self, request: GroupRequest) -> int:
        context = self.owner.decoder.shape.context
        return min(request.max_tokens, context - len(request.prompt_ids))

    def _prepare(self) -> _Cache:
        length, new = self.needs
        wanted = min(len(self.waiting), self.owner._max_rows)
        rows = self.owner._max_rows if self.owner._fixed_rows else _bucket(wanted)
        return self.owner._prepare(min(rows, self.owner._max_rows), length, new)

    def _limit(self, slot: int) -> int:
        held = self.held[slot]
        assert held is not None
        return self._allowed(held[0].request)

    def _prompt(self, slot: int) -> int:
        held = self.held[slot]
        assert held is not None
        return len(held[0].request.prompt_ids)

    def _admit(self, cache: _Cache) -> None:
        """Put waiting rows into free slots and prefill their prompts."""
        free = [s for s, held in enumerate(self.held) if held is None]
        taken: list[int] = []
        while free and self.waiting:
            slot = free.pop(0)
            self.held[slot] = self.waiting.popleft()
            self.made[slot] = 0
            taken.append(slot)
        if not taken:
            return
        self._prefill(cache, taken)
        rows = [self.held[s] for s in taken]
        opened = [(h[0].request, h[1]) for h in rows if h is not None]
        device = cache.slots.token.device
        index = torch.tensor(taken, device=device)

        def fill(target: Tensor, values: Any) -> None:
            target[index] = torch.as_tensor(values).to(device, target.dtype)

        fill(cache.slots.token, [r.prompt_ids[-1] for r, _ in opened])
        fill(cache.slots.position, [len(r.prompt_ids) - 1 for r, _ in opened])
        fill(cache.slots.limit, [self._allowed(r) for r, _ in opened])
        fill(cache.slots.inv_temperature, [self.inv_temperature] * len(opened))
        width = max(self._allowed(r) for r, _ in opened)
        drawn = uniforms([r.seeds[i] for r, i in opened], 0, width)
        cache.slots.uniform[index, :width] = torch.as_tensor(drawn).to(device)
        fill(cache.slots.count, [0] * len(opened))
        fill(cache.slots.alive, [1] * len(opened))

    def _prefill(self, cache: _Cache, taken: Sequence[int]) -> None:
        """Compute each distinct prompt once (without its last token) and copy it to its rows."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for slot in taken:
            held = self.held[slot]
            assert held is not None
            ids = held[0].request.prompt_ids[:-1]
            if ids:
                by_prompt.setdefault(ids, []).append(slot)
        batch: list[tuple[int, ...]] = []
        for ids in by_prompt:
            if batch and sum(map(len, batch)) + len(ids) > PREFILL_TOKENS:
                self._prefill_batch(cache, batch, by_prompt)
                batch = []
            batch.append(ids)
        if batch:
            self._prefill_batch(cache, batch, by_prompt)

    def _prefill_batch(
        self,
        cache: _Cache,
        prompts: Sequence[tuple[int, ...]],
        slots_of: Mapping[tuple[int, ...], Sequence[int]],
    ) -> None:
        device = cache.slots.token.device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        packed = Packed(
            ids_T=torch.tensor([t for ids in prompts for t in ids], device=device),
            position_T=torch.cat([torch.arange(len(ids)) for ids in prompts]).to(device),
            prompt_lengths=tuple(len(ids) for ids in prompts),
            suffix_lengths=((),) * len(prompts),
            head_D=nothing,
            target_D=nothing,
            row_D=nothing,
            rows=(),
        )
        self.owner.counters.prefill_tokens += packed.n_tokens
        source, row, at = [], [], []
        start = 0
        for ids in prompts:
            span = torch.arange(len(ids))
            for slot in slots_of[ids]:
                source.append(span + start)
                row.append(torch.full((len(ids),), slot))
                at.append(span)
            start += len(ids)
        where = [torch.cat(x).to(device) for x in (source, row, at)]
        _, kept = self.owner.decoder(packed, keep_kv=True)
        for i, (k, v) in enumerate(kept):
            cache.k[i][where[1], :, where[2]] = k[where[0]]
            cache.v[i][where[1], :, where[2]] = v[where[0]]

    def _choose_rows(self, cache: _Cache, living: Sequence[int]) -> int:
        """How many slots to run; living rows move down when a smaller count would do."""
        total = len(self.held)
        if self.owner._fixed_rows:
            return total
        rows = min(_bucket(len(living)), total)
        if living[-1] >= rows:
            if len(living) > 0.8 * min(_bucket(living[-1] + 1), total):
                return min(_bucket(living[-1] + 1), total)
            movers = [s for s in living if s >= rows]
            holes = [s for s in range(rows) if self.held[s] is None][: len(movers)]
            self._move(cache, movers, holes)
        return rows

    def _move(self, cache: _Cache, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = cache.slots.token.device
        src, dst = (torch.tensor(list(x), device=device) for x in (sources, targets))
        longest = max(self._prompt(s) + self.made[s] for s in sources)
        for layer in (*cache.k, *cache.v):
            layer[dst, :, :longest] = layer[src, :, :longest]
        for state in cache.slots.per_row():
            state[dst] = state[src]
        cache.slots.alive[src] = 0
        for source, target in zip(sources, targets, strict=True):
            self.held[target], self.held[source] = self.held[source], None
            self.made[target] = self.made[source]

    def _collect(self, cache: _Cache, living: Sequence[int]) -> None:
        """Look at the rows, take the finished ones out and hand over complete groups."""
        counts = cache.slots.count.tolist()
        alive = cache.slots.alive.tolist()
        for slot in living:
            self.made[slot] = counts[slot]
        ended = [s for s in living if not alive[s]]
        cuts = self._stopped(cache, living) if self.sampling.stop else {}
        ended.extend(s for s in cuts if alive[s])
        if not ended:
            return
        index = torch.tensor(ended, device=cache.slots.token.device)
        cache.slots.alive[index] = 0
        tokens = cache.slots.out_token[index].tolist()
        logps = cache.slots.out_logp[index].tolist()
        for slot, ids, values in zip(ended, tokens, logps, strict=True):
            held = self.held[slot]
            assert held is not None
            n = cuts.get(slot, self.made[slot])
            by_stop = slot in cuts or (not self.ignore_eos and ids[n - 1] in self.owner.eos_ids)
            held[0].done[held[1]] = Generated(
                tuple(ids[:n]), tuple(values[:n]), "stop" if by_stop else "length"
            )
            self.owner.counters.new_tokens += n
            self.held[slot] = None
            if all(row is not None for row in held[0].done):
                self.complete.append(held[0])

    def _stopped(self, cache: _Cache, living: Sequence[int]) -> dict[int, int]:
        """Rows whose text holds a stop string, with the tokens up to and including it."""
        text_of = self.owner._detokenize
        assert text_of is not None
        cuts = {}
        for slot in living:
            ids = cache.slots.out_token[slot, : self.made[slot]].tolist()
            if not any(stop in text_of(ids) for stop in self.sampling.stop):
                continue
            low, high = 1, len(ids)
            while low < high:
                middle = (low + high) // 2
                if any(stop in text_of(ids[:middle]) for stop in self.sampling.stop):
                    high = middle
                else:
                    low = middle + 1
            cuts[slot] = low
        return cuts


def _bucket(rows: int) -> int:
    """The smallest allowed row count that holds `rows`."""
    for bucket in BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // 256) * 256


def eos_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a reply, from the generation config and the tokenizer."""
    found: list[int] = []
    configs = (getattr(model, "generation_config", None), model.config, tokenizer)
    for holder, name in zip(configs, ("eos_token_id",) * 3, strict=True):
        value = getattr(holder, name, None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return tuple(found)


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
