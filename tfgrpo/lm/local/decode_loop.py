"""The default `Generator`: a decode loop over any transformers causal LM, rows coming and going.

Waiting rows are admitted as places get free and as memory allows; every step draws one token a row,
and a row leaves once it ends or nobody waits for it.

Does not know chat, text (but for stop strings), asyncio, how keys and values lie in memory. Idea:
continuous batching (Orca, Yu et al. 2022) in the small; own code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfgrpo.lm.local.counter_rng import draw_tokens, uniforms
from tfgrpo.lm.local.decode_batch import DecodeBatch
from tfgrpo.lm.local.gqa_attention import use_grouped_attention
from tfgrpo.lm.local.rows import DecodeRow, RowSource
from tfgrpo.protocols import Generated, Sampling

if TYPE_CHECKING:
    import torch


class HFGenerator:
    """Continuations from a transformers model.

    Args:
        model: a causal LM in eval mode.
        eos_ids: tokens that end a reply.
        decode: ids to text, for stop strings; None leaves those to the caller.
        max_rows: rows decoded at once.
        cache_bytes: how much memory keys and values may take; bounds the rows of long prompts.
        threads: asked before each step how many threads torch may use; None leaves them alone.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_rows: int = 64,
        cache_bytes: int = 2_000_000_000,
        threads: Callable[[], int] | None = None,
    ) -> None:
        self._model = model
        self._eos = frozenset(eos_ids)
        self._decode = decode
        self._max_rows = max_rows
        self._threads = threads
        self._grouped = use_grouped_attention(model)
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
            DecodeRow(tuple(prompt), seed, sampling, limit, tag=(p, g))
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
            batch = DecodeBatch(self._model, grouped=self._grouped)
            waiting: deque[DecodeRow] = deque()
            while True:
                if self._threads and (count := self._threads()) != torch.get_num_threads():
                    torch.set_num_threads(count)
                self._admit(batch, waiting, source)
                if not batch.rows:
                    return
                logits = batch.step()
                self._advance(batch, list(range(len(batch.slots))), logits, source)
                if not waiting:
                    batch.shrink()

    def _admit(self, batch: DecodeBatch, waiting: deque[DecodeRow], source: RowSource) -> None:
        """Fill free places with waiting rows; several prompts are read in one pass."""
        live = len(batch.rows)
        # Reading one prompt costs about a decode step: wait until an eighth of the places is free.
        if live and self._max_rows - live < max(1, self._max_rows // 8):
            return
        while True:
            free = self._max_rows - len(batch.rows)
            if free > len(waiting):
                waiting.extend(source.take(free - len(waiting)))
            joining: list[DecodeRow] = []
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
        self, batch: DecodeBatch, slots: Sequence[int], logits: torch.Tensor, source: RowSource
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

    def _finish(self, row: DecodeRow, token: int) -> Any:
        if token in self._eos:
            return "stop"
        if row.sampling.stop and self._decode is not None:
            tail = self._decode(row.token_ids[-_stop_window(row.sampling) :])
            if any(s in tail for s in row.sampling.stop):
                return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    @staticmethod
    def _note_alternatives(
        rows: Sequence[DecodeRow], logits: torch.Tensor, normaliser_B: torch.Tensor
    ) -> None:
        for i, row in enumerate(rows):
            if row.sampling.top_logprobs:
                values, ids = logits[i].float().topk(row.sampling.top_logprobs)
                logps = (values - normaliser_B[i]).tolist()
                row.top.append(dict(zip(ids.tolist(), logps, strict=True)))


class _ListSource:
    def __init__(self, rows: Sequence[DecodeRow]) -> None:
        self._rows = deque(rows)
        self.results: dict[Any, Generated] = {}

    def take(self, count: int) -> list[DecodeRow]:
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    def finish(self, row: DecodeRow, generated: Generated) -> None:
        self.results[row.tag] = generated


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
