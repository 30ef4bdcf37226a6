"""Continuous batching: which row of a group decodes in which slot, admitted, moved, removed.

Finished rows are compacted away or their slots refilled. A group is handed over when its last row
has ended, while the device decodes the others, and may bring further requests. Does not know how a
token is made. Ideas: continuous batching (Orca), slot refill without paging for short sequences,
hints that re-enter the queue (own).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.generation.counter_rng import uniforms
from tfgrpo.rl.generation.decode_ops import MEMBERS
from tfgrpo.rl.generation.kv_cache import Cache
from tfgrpo.rl.generation.requests import Counters, DecodeEngine, Feed, GroupRequest, OnDone
from tfgrpo.rl.model.packing import Packed, to_device

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Row counts that the step is run with (one CUDA graph each, made on first use)."""
PREFILL_TOKENS = 16_384


@dataclass(slots=True)
class _Open:
    request: GroupRequest
    done: list[Generated | None]


class BatchScheduler:
    """One service of a queue: which row stands in which slot."""

    def __init__(
        self, owner: DecodeEngine, sampling: Sampling, on_done: OnDone, feed: Feed | None = None
    ) -> None:
        self.feed = feed
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
        if sampling.stop and owner.detokenize is None:
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
        self.limit: list[int] = []
        """Tokens that it may make."""
        self.prompt: list[int] = []
        """Tokens of its prompt."""
        self.rows = 0
        """Slots that were run last."""
        self.has_changed = False
        """Slots were filled or moved, or the cache is another, since prompts were shared."""
        self.home: list[int] = []
        """Slot whose copy of the prompt it reads."""

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
        self.made, self.limit, self.prompt, self.home = ([0] * len(self.held) for _ in range(4))
        while True:
            if self.feed is not None:
                self._enqueue(self.feed.more(max(0, self.held.count(None) - len(self.waiting))))
            if self.waiting:
                if not cache.holds(*self.needs):
                    cache = owner.grow(*self.needs)
                    self.has_changed = True
                self._admit(cache)
            living = [s for s, held in enumerate(self.held) if held is not None]
            if not living:
                if not self.complete:
                    return counters
                self._hand_over()
                continue
            rows = self._choose_rows(cache, living)
            if self.has_changed or rows != self.rows:
                self._share_prompts(cache)
                self.rows, self.has_changed = rows, False
            living = [s for s, held in enumerate(self.held) if held is not None]
            left = max(self.limit[s] - self.made[s] for s in living)
            n = min(owner.poll_steps, left)
            lengths = [self.prompt[s] + self.made[s] for s in living]
            longest = max(lengths) + n - 1
            owner.steps(cache, rows, n, self.top_p, longest)
            self._hand_over()  # whoever grades works while the device decodes
            counters.steps += n
            counters.row_steps += n * rows
            counters.cache_tokens += n * (sum(lengths) - self._read_by_others(living))
            counters.cache_tokens += len(lengths) * (n * (n - 1) // 2)
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

    def _prepare(self) -> Cache:
        length, new = self.needs
        wanted = min(len(self.waiting), self.owner.max_rows)
        takes_all = self.owner.fixed_rows or self.feed is not None
        rows = self.owner.max_rows if takes_all else _bucket(wanted)
        return self.owner.prepare(min(rows, self.owner.max_rows), length, new)

    def _is_cancelled(self, slot: int) -> bool:
        held = self.held[slot]
        assert held is not None and self.feed is not None
        return self.feed.is_cancelled(held[0].request, self.made[slot])

    def _drop_cancelled(self) -> None:
        """End waiting rows that nobody waits for, without a token."""
        if self.feed is None:
            return
        kept: deque[tuple[_Open, int]] = deque()
        for entry, i in self.waiting:
            if not self.feed.is_cancelled(entry.request, 0):
                kept.append((entry, i))
                continue
            entry.done[i] = Generated((), (), "partial")
            if all(row is not None for row in entry.done):
                self.complete.append(entry)
        self.waiting = kept

    def _admit(self, cache: Cache) -> None:
        """Put waiting rows into free slots and prefill their prompts."""
        self._drop_cancelled()
        free = [s for s, held in enumerate(self.held) if held is None]
        taken: list[int] = []
        while free and self.waiting:
            slot = free.pop(0)
            self.held[slot] = entry, _ = self.waiting.popleft()
            self.made[slot] = 0
            self.limit[slot] = self._allowed(entry.request)
            self.prompt[slot] = len(entry.request.prompt_ids)
            taken.append(slot)
        if not taken:
            return
        self._prefill(cache, taken)
        rows = [self.held[s] for s in taken]
        opened = [(h[0].request, h[1]) for h in rows if h is not None]
        width = max(self._allowed(r) for r, _ in opened)
        drawn = np.empty((len(opened), width))
        for start in {r.start for r, _ in opened}:
            mine = [k for k, (r, _) in enumerate(opened) if r.start == start]
            seeds = [opened[k][0].seeds[opened[k][1]] for k in mine]
            drawn[mine] = uniforms(seeds, start, start + width)
        slots, device = cache.slots, cache.slots.token.device
        index = to_device(np.array(taken), device)

        def fill(target: Tensor, values: Sequence[float]) -> None:
            target[index] = to_device(np.array(values), device).to(target.dtype)

        fill(slots.token, [r.prompt_ids[-1] for r, _ in opened])
        fill(slots.position, [len(r.prompt_ids) - 1 for r, _ in opened])
        fill(slots.limit, [self._allowed(r) for r, _ in opened])
        fill(slots.inv_temperature, [self.inv_temperature] * len(opened))
        slots.uniform[index, :width] = to_device(drawn, device)
        fill(slots.count, [0] * len(opened))
        fill(slots.alive, [1] * len(opened))
        self.has_changed = True

    def _share_prompts(self, cache: Cache) -> None:
        """Have the rows of a group read one copy of the prompt, eight at a time that of the first.

        To be done anew whenever a slot is filled or moved, in a new cache, and when fewer slots are
        run, since the kernels look at all members. A slot that merely ended keeps its copy.
        """
        slots = cache.slots
        shared = [0] * len(self.held)
        members = np.full(slots.members.shape, -1, dtype=np.int32)
        latest: dict[int, list[int]] = {}
        for slot, held in enumerate(self.held):
            if held is None:
                continue
            rows = latest.get(id(held[0]), [])
            rows = [*rows, slot] if len(rows) < MEMBERS else [slot]
            latest[id(held[0])] = rows
            self.home[slot] = rows[0]
            members[rows[0], len(rows) - 1] = slot
            shared[slot] = self.prompt[slot] - 1  # the last token is decoded by each row
        device = slots.home.device
        slots.home.copy_(to_device(np.array(self.home), device))
        slots.shared.copy_(to_device(np.array(shared), device))
        slots.members.copy_(to_device(members, device))
        # how prompts are read must not depend on the neighbours' with `fixed_rows`
        cache.longest_prompt = 0 if self.owner.fixed_rows else max(shared)

    def _read_by_others(self, living: Sequence[int]) -> int:
        """Cached tokens of prompts that living rows look at and another row does, too."""
        seen: set[int] = set()
        again = 0
        for slot in living:
            again += self.prompt[slot] - 1 if self.home[slot] in seen else 0
            seen.add(self.home[slot])
        return again

    def _prefill(self, cache: Cache, taken: Sequence[int]) -> None:
        """Compute each distinct prompt once (without its last token) and copy it to its rows.

        With `fixed_rows` each has a pass of its own, so that its bits do not depend on the others.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for slot in taken:
            held = self.held[slot]
            assert held is not None
            ids = held[0].request.prompt_ids[:-1]
            if ids:
                by_prompt.setdefault(ids, []).append(slot)
        batch: list[tuple[int, ...]] = []
        most = 0 if self.owner.fixed_rows else PREFILL_TOKENS
        for ids in by_prompt:
            if batch and sum(map(len, batch)) + len(ids) > most:
                self._prefill_batch(cache, batch, by_prompt)
                batch = []
            batch.append(ids)
        if batch:
            self._prefill_batch(cache, batch, by_prompt)

    def _prefill_batch(
        self,
        cache: Cache,
        prompts: Sequence[tuple[int, ...]],
        slots_of: Mapping[tuple[int, ...], Sequence[int]],
    ) -> None:
        device = cache.slots.token.device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        spans = [np.arange(len(ids)) for ids in prompts]
        packed = Packed(
            ids_T=to_device(np.concatenate([np.array(ids) for ids in prompts]), device),
            position_T=to_device(np.concatenate(spans), device),
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
        for ids, span in zip(prompts, spans, strict=True):
            slots = slots_of[ids]
            source.append(np.tile(span + start, len(slots)))
            row.append(np.repeat(slots, len(span)))
            at.append(np.tile(span, len(slots)))
            start += len(span)
        where = [to_device(np.concatenate(x), device) for x in (source, row, at)]
        _, kept = self.owner.decoder(packed, keep_kv=True)
        for i, (k, v) in enumerate(kept):
            cache.k[i][where[1], :, where[2]] = k[where[0]]
            cache.v[i][where[1], :, where[2]] = v[where[0]]

    def _choose_rows(self, cache: Cache, living: Sequence[int]) -> int:
        """How many slots to run; living rows move down when a smaller count would do."""
        total = len(self.held)
        if self.owner.fixed_rows:
            return total
        rows = min(_bucket(len(living)), total)
        if living[-1] >= rows:
            if len(living) > 0.8 * min(_bucket(living[-1] + 1), total):
                return min(_bucket(living[-1] + 1), total)
            movers = [s for s in living if s >= rows]
            holes = [s for s in range(rows) if self.held[s] is None][: len(movers)]
            self._move(cache, movers, holes)
        return rows

    def _move(self, cache: Cache, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = cache.slots.token.device
        src, dst = (torch.tensor(list(x), device=device) for x in (sources, targets))
        longest = max(self.prompt[s] + self.made[s] for s in sources)
        for layer in (*cache.k, *cache.v):
            layer[dst, :, :longest] = layer[src, :, :longest]
        for state in cache.slots.per_row():
            state[dst] = state[src]
        cache.slots.alive[src] = 0
        for source, target in zip(sources, targets, strict=True):
            self.held[target], self.held[source] = self.held[source], None
            for of in (self.made, self.limit, self.prompt):
                of[target] = of[source]
        self.has_changed = True

    def _collect(self, cache: Cache, living: Sequence[int]) -> None:
        """Look at the rows, take the finished ones out and hand over complete groups."""
        counts = cache.slots.count.tolist()
        alive = cache.slots.alive.tolist()
        for slot in living:
            self.made[slot] = counts[slot]
        ended = [s for s in living if not alive[s]]
        cuts = self._stopped(cache, living) if self.sampling.stop else {}
        ended.extend(s for s in cuts if alive[s])
        cancelled: set[int] = set()
        if self.feed is not None:
            cancelled = {s for s in living if s not in ended and self._is_cancelled(s)}
            ended.extend(s for s in living if s in cancelled)
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
            finish: Literal["stop", "length", "partial"] = "stop" if by_stop else "length"
            if slot in cancelled:
                finish = "partial"
            held[0].done[held[1]] = Generated(tuple(ids[:n]), tuple(values[:n]), finish)
            self.owner.counters.new_tokens += n
            self.held[slot] = None
            if all(row is not None for row in held[0].done):
                self.complete.append(held[0])

    def _stopped(self, cache: Cache, living: Sequence[int]) -> dict[int, int]:
        """Rows whose text holds a stop string, with the tokens up to and including it."""
        text_of = self.owner.detokenize
        assert text_of is not None
        cuts = {}
        for slot in living:
            held = self.held[slot]
            assert held is not None
            request = held[0].request
            before = list(request.prompt_ids[len(request.prompt_ids) - request.start :])
            ids = cache.slots.out_token[slot, : self.made[slot]].tolist()
            if not any(stop in text_of([*before, *ids]) for stop in self.sampling.stop):
                continue
            low, high = 1, len(ids)
            while low < high:
                middle = (low + high) // 2
                if any(stop in text_of([*before, *ids[:middle]]) for stop in self.sampling.stop):
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
