"""Accumulates the gradients of one optimiser batch, packed, in one pass over the vocabulary.

Normalisers are fixed for the whole batch before the first micro-batch, so the gradient does not
depend on how the batch is cut. Rows whose every term is zero are not forwarded, yet they count in
the normaliser, which makes skipping exact. On-policy (a batch used once) the old log-probs are the
current ones and no pass is spent on them.

Does not know rewards, tasks or optimisers. Source: own; losses and weights come from registries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfgrpo.rl.distributed import is_sharded, most_over_ranks
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.inputs import Floats, TokenBatch
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import lookup
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Packed, Row, by_row, micro_batches, pack, to_device
from tfgrpo.rl.update.logprob import Closure, one_pass_loss, score_tokens


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What is minimised and how the batch is cut."""

    loss: str = "clip"
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token_mean"
    kl: float = 0.0
    entropy: float = 0.0
    log_entropy: bool = False
    skip_zero_advantage: bool = True
    temperature: float = 1.0
    max_tokens: int = 256
    """Longest completion allowed, for constant normalisers."""
    micro_batch_tokens: int = 8192
    chunk: int = 2048

    @property
    def may_skip(self) -> bool:
        """True when a row of advantage 0 has no gradient."""
        plain = not self.kl and not self.entropy
        return plain and self.skip_zero_advantage


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row with what the loss needs; per-token values belong to its loss-bearing tokens."""

    row: Row
    advantage: float | tuple[float, ...]
    reward: float = 0.0
    group: int = 0
    weight: float = 1.0
    """Multiplies the row's tokens (hint plans may weigh rows)."""
    old_logp: tuple[float, ...] | None = None
    """log π_old; None means on-policy."""
    ref_logp: tuple[float, ...] | None = None
    engine_logp: tuple[float, ...] | None = None
    """As the generator reported it."""
    token_weight: float | None = None
    """Weight of each of its tokens as it is; such a row does not count in the aggregation."""
    shaping: float = 0.0
    """γ of the ratio r/(r + γ) in place of the loss; 0 keeps the loss."""
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Further facts a token that the loss is given, see `TokenBatch.columns`."""

    @property
    def is_zero(self) -> bool:
        """True when no token has an advantage."""
        if isinstance(self.advantage, tuple):
            return not any(self.advantage)
        return self.advantage == 0.0


@dataclass(slots=True)
class UpdateResult:
    """What a pass over the batch told."""

    loss: float = 0.0
    logp: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Per row index: log π of its loss-bearing tokens before the update, rows forwarded only."""
    entropy_sum: float = 0.0
    trained_tokens: int = 0
    """Loss-bearing tokens forwarded."""
    input_tokens: int = 0
    skipped_tokens: int = 0
    carried: dict[int, dict[str, float]] = field(default_factory=dict)
    """Per row index: columns for the next pass over the batch, where the loss keeps some."""
    prompt_tokens_saved: int = 0
    """Prompt tokens that sharing did not repeat."""


def token_weights(rows: Sequence[TrainRow], settings: UpdateSettings) -> Floats:
    """Return the constant weight of each row's tokens, of the whole optimiser batch: R."""
    entry = lookup(AGGREGATIONS, "aggregation", settings.aggregation)
    weight_R = np.array([r.token_weight or 0.0 for r in rows], dtype=np.float64)
    counted = [i for i, r in enumerate(rows) if r.token_weight is None]
    length_R = np.array([rows[i].row.n_loss for i in counted], dtype=np.int64)
    found_R: Floats = entry.fn(length_R, max_tokens=settings.max_tokens)
    weight_R[counted] = found_R * np.array([rows[i].weight for i in counted])
    return weight_R


def accumulate(
    decoder: Decoder,
    rows: Sequence[TrainRow],
    settings: UpdateSettings,
    weight_R: Floats | None = None,
) -> UpdateResult:
    """Add the batch's gradients to the decoder's parameters and return what was seen.

    Args:
        decoder: parameters that require a gradient receive it.
        rows: the whole optimiser batch; rows of one prompt best next to each other.
        settings: loss, aggregation, cut.
        weight_R: token weight of each row; None takes them from the aggregation.
    """
    result = UpdateResult()
    weights = token_weights(rows, settings) if weight_R is None else weight_R
    by_index = {r.row.index: (r, float(w)) for r, w in zip(rows, weights, strict=True)}
    entry = lookup(LOSSES, "loss", settings.loss)
    may_skip = settings.may_skip and {"group", "every_row"}.isdisjoint(entry.needs)
    kept = [r for r in rows if not (may_skip and r.is_zero)]
    result.skipped_tokens = sum(r.row.n_loss for r in rows) - sum(r.row.n_loss for r in kept)
    groups: dict[int, int] | None = None
    if "group" in entry.needs:  # rows of a group may have several prompts
        kept.sort(key=lambda r: r.group)
        groups = {r.row.index: r.group for r in kept}
    seen: list[tuple[list[Row], Tensor, Tensor, Tensor | None, Mapping[str, Tensor]]] = []
    cut = micro_batches((r.row for r in kept), settings.micro_batch_tokens, together=groups)
    # asked before the first forward, while all are in step
    most = most_over_ranks(len(cut)) if is_sharded(decoder) else len(cut)
    for part in cut:
        packed = pack(part, device=decoder.embed.device)
        seen.append((part, *_micro_batch(decoder, packed, by_index, settings)))
        result.input_tokens += packed.n_tokens
        result.prompt_tokens_saved += sum(len(r.prompt_ids) for r in part) - packed.n_prompt
    _note(result, seen)
    for _ in range(most - len(cut)):
        # sharded weights are gathered by all processes together: keep in step at weight 0
        idle = Row(-1, (0,), (0,))
        nothing = TrainRow(idle, 0.0, old_logp=(0.0,), ref_logp=(0.0,), engine_logp=(0.0,))
        packed = pack([idle], device=decoder.embed.device)
        _micro_batch(decoder, packed, {-1: (nothing, 0.0)}, settings)
    return result


def _micro_batch(
    decoder: Decoder,
    packed: Packed,
    by_index: Mapping[int, tuple[TrainRow, float]],
    settings: UpdateSettings,
) -> tuple[Tensor, Tensor, Tensor | None, Mapping[str, Tensor]]:
    """Forward and backward of one micro-batch: loss, log-probs, entropies, what rows carry on."""
    entry = lookup(LOSSES, "loss", settings.loss)
    with_entropy = settings.log_entropy or settings.entropy != 0.0 or "entropy" in entry.needs
    hidden_D = decoder(packed)[packed.head_D]
    head = decoder.head_weight
    tokens = _tokens(packed, by_index, hidden_D, entry.needs, len(decoder.embed))
    closure = _closure(tokens, settings)
    carried: Mapping[str, Tensor] = {}
    if {"sequence", "group"} & set(entry.needs):
        scored = score_tokens(
            hidden_D.detach(),
            head,
            packed.target_D,
            temperature=settings.temperature,
            with_entropy=with_entropy,
            chunk=settings.chunk,
        )
        whole = slice(0, len(packed.target_D))
        _, d_logp_D, d_entropy_D = closure(whole, scored.logp_D, scored.entropy_D)
        total = _value(tokens, settings, whole, scored.logp_D, scored.entropy_D)
        share = total / max(1, len(packed.target_D))
        if entry.carry is not None:
            batch = _token_batch(tokens, whole, scored.logp_D, scored.entropy_D)
            carried = entry.carry(batch, **settings.options)

        def known(
            part: slice, logp: Tensor, entropy: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            d_entropy = None if entropy is None or d_entropy_D is None else d_entropy_D[part]
            return share * len(logp), d_logp_D[part], d_entropy

        closure = known
    loss, scored = one_pass_loss(
        hidden_D,
        head,
        packed.target_D,
        closure,
        temperature=settings.temperature,
        with_entropy=with_entropy,
        chunk=settings.chunk,
    )
    loss.backward()
    return loss.detach(), scored.logp_D, scored.entropy_D, carried


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Per-token constants of a micro-batch, on the device: D."""

    advantage_D: Tensor
    weight_D: Tensor
    row_D: Tensor
    n_rows: int
    old_D: Tensor | None
    ref_D: Tensor | None
    engine_D: Tensor | None
    group_R: Tensor
    reward_R: Tensor
    shaping_D: Tensor | None
    """γ of tokens whose ratio is shaped, 0 elsewhere; None where there are none."""
    columns: Mapping[str, Tensor]
    vocabulary: int


def _tokens(
    packed: Packed,
    by_index: Mapping[int, tuple[TrainRow, float]],
    hidden_D: Tensor,
    needs: Sequence[str],
    vocabulary: int,
) -> _Tokens:
    rows = [by_index[i] for i in packed.rows]
    counts = np.array([r.row.n_loss for r, _ in rows], dtype=np.int64)
    kind = np.float64 if hidden_D.dtype == torch.float64 else np.float32
    device = hidden_D.device

    def spread(values: Sequence[Any]) -> Tensor:
        if all(isinstance(v, (int, float)) for v in values):
            flat = np.repeat(np.array(values, dtype=np.float64), counts)
        else:
            flat = np.concatenate(
                [
                    np.broadcast_to(np.asarray(v, dtype=np.float64), (n,))
                    for v, n in zip(values, counts, strict=True)
                ]
            )
        return to_device(flat.astype(kind), device)

    def optional(name: str) -> Tensor | None:
        values = [getattr(r, name) for r, _ in rows]
        return None if any(v is None for v in values) else spread(values)

    return _Tokens(
        advantage_D=spread([r.advantage for r, _ in rows]),
        weight_D=spread([w for _, w in rows]),
        row_D=to_device(np.repeat(np.arange(len(rows)), counts), device),
        n_rows=len(rows),
        old_D=optional("old_logp"),
        ref_D=optional("ref_logp"),
        engine_D=optional("engine_logp") if "behaviour" in needs else None,
        group_R=to_device(np.array([r.group for r, _ in rows], dtype=np.int64), device),
        reward_R=to_device(np.array([r.reward for r, _ in rows], dtype=kind), device),
        shaping_D=spread([r.shaping for r, _ in rows]) if any(r.shaping for r, _ in rows) else None,
        columns={
            name: spread([r.columns.get(name, ABSENT.get(name, 0.0)) for r, _ in rows])
            for name in sorted({n for r, _ in rows for n in r.columns})
        },
        vocabulary=vocabulary,
    )


ABSENT = {"width": 1.0, "label": 1.0}
"""Value of a column on rows that do not have it; 0 for the others."""


def _token_batch(tokens: _Tokens, part: slice, logp: Tensor, entropy: Tensor | None) -> TokenBatch:
    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[part]

    old = cut(tokens.old_D)
    return TokenBatch(
        logp_D=logp,
        old_logp_D=logp.detach() if old is None else old,
        advantage_D=tokens.advantage_D[part],
        row_D=tokens.row_D[part],
        n_rows=tokens.n_rows,
        entropy_D=entropy,
        ref_logp_D=cut(tokens.ref_D),
        behaviour_logp_D=cut(tokens.engine_D),
        group_R=tokens.group_R,
        reward_R=tokens.reward_R,
        columns={name: value_D[part] for name, value_D in tokens.columns.items()},
        vocabulary=tokens.vocabulary,
    )


def _loss_D(
    tokens: _Tokens, settings: UpdateSettings, part: slice, logp: Tensor, entropy: Tensor | None
) -> Tensor:
    entry = lookup(LOSSES, "loss", settings.loss)
    batch = _token_batch(tokens, part, logp, entropy)
    loss_D: Tensor = entry.fn(batch, **settings.options)
    if tokens.shaping_D is not None:
        gamma_D = tokens.shaping_D[part]
        ratio_D = (logp - batch.old_logp_D).exp()
        shaped_D = ratio_D / (ratio_D + gamma_D)
        loss_D = torch.where(gamma_D > 0, -batch.advantage_D * shaped_D, loss_D)
    if settings.kl:
        assert batch.ref_logp_D is not None
        gap_D = batch.ref_logp_D - logp
        loss_D = loss_D + settings.kl * (gap_D.exp() - gap_D - 1)
    if settings.entropy:
        assert entropy is not None
        loss_D = loss_D - settings.entropy * entropy
    return loss_D


def _value(
    tokens: _Tokens, settings: UpdateSettings, part: slice, logp: Tensor, entropy: Tensor | None
) -> Tensor:
    with torch.no_grad():
        loss_D = _loss_D(tokens, settings, part, logp, entropy)
        return (loss_D * tokens.weight_D[part]).sum()


def _closure(tokens: _Tokens, settings: UpdateSettings) -> Closure:
    def closure(
        part: slice, logp: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.enable_grad():
            logp = logp.detach().requires_grad_()
            leaves = [logp]
            if entropy is not None:
                entropy = entropy.detach().requires_grad_()
                leaves.append(entropy)
            loss_D = _loss_D(tokens, settings, part, logp, entropy)
            total = (loss_D * tokens.weight_D[part]).sum()
            grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return total.detach(), grads[0], grads[1] if len(grads) > 1 else None

    return closure


def _note(
    result: UpdateResult,
    seen: Sequence[tuple[list[Row], Tensor, Tensor, Tensor | None, Mapping[str, Tensor]]],
) -> None:
    """Keep the figures of all micro-batches, read from the device in one go."""
    if not seen:
        return
    result.logp = by_row([(part, logp_D) for part, _, logp_D, _, _ in seen])
    result.trained_tokens = sum(map(len, result.logp.values()))
    result.loss = float(torch.stack([loss for _, loss, *_ in seen]).sum())
    entropies = [entropy_D.sum() for *_, entropy_D, _ in seen if entropy_D is not None]
    result.entropy_sum = float(torch.stack(entropies).sum()) if entropies else 0.0
    for part, *_, carried in seen:
        for name, value_R in carried.items():
            for row, value in zip(part, value_R.tolist(), strict=True):
                result.carried.setdefault(row.index, {})[name] = value


def score_rows(
    decoder: Decoder, rows: Sequence[Row], *, temperature: float, max_tokens: int, chunk: int = 2048
) -> dict[int, tuple[float, ...]]:
    """Return, per row index, log π of its loss-bearing tokens; no gradients."""
    found: list[tuple[list[Row], Tensor]] = []
    with torch.no_grad():
        for part in micro_batches(rows, max_tokens):
            packed = pack(part, device=decoder.embed.device)
            hidden_D = decoder(packed)[packed.head_D]
            scored = score_tokens(
                hidden_D, decoder.head_weight, packed.target_D, temperature=temperature, chunk=chunk
            )
            found.append((part, scored.logp_D))
    return by_row(found)
