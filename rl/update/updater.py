"""Runs optimiser updates over a batch of rows: score passes, log-prob check, optimiser batches.

The trained decoder is the one that samples; with `model.shard` on several processes the trained one
is sharded, and a whole copy is refreshed after each update. Does not know tasks or rewards. Source:
own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Generator
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.inputs import RatioFacts
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import lookup
from tfgrpo.rl.formulas.requirements import aggregation_of, filled
from tfgrpo.rl.model.decoder import Decoder, hf_views
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW, learning_rate
from tfgrpo.rl.optim.lora import TARGETS, LoraWeights
from tfgrpo.rl.optim.master_weights import FullWeights, Weights
from tfgrpo.rl.update.accumulate import (
    TrainRow,
    UpdateResult,
    UpdateSettings,
    accumulate,
    score_rows,
    token_weights,
)
from tfgrpo.rl.update.between_passes import Gaps, Kept, carried_on, with_half_gap
from tfgrpo.rl.update.formula_state import FormulaState
from tfgrpo.rl.update.logprob_mismatch import (
    Mismatch,
    MismatchLimits,
    check_mismatch,
    measure_mismatch,
)
from tfgrpo.rl.update.token_stats import Tokens, measure_rows


@dataclass(slots=True)
class UpdateReport:
    """Figures of one step's optimiser batches."""

    results: list[UpdateResult] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """The gradient's norm of each optimiser step that was taken."""
    mismatch: Mismatch | None = None
    score_seconds: float = 0.0
    """Of passes that only measure: the reference, log π_old, the gate at another temperature."""


class Updater:
    """Owns what is trained.

    Args:
        config: all settings.
        decoder: the weights that sample; trained in place unless they are sharded.
        engine: another maker of tokens, told the new weights after each update.
        state: of the formulas; None starts one.
    """

    def __init__(
        self,
        config: TrainConfig,
        decoder: Decoder,
        engine: Generator | None,
        state: FormulaState | None = None,
    ) -> None:
        self._state = state or FormulaState()
        self._config = config
        self._decoder = decoder
        self._engine = engine
        self._rank, self._world = distributed.world()
        self._score_seconds = 0.0
        self._kl = config.loss.kl
        self._number = 0
        self.model = self._trained_model()
        self.weights = self._make_weights()
        o = config.optimiser
        self.optimiser = AdamW(
            self.weights,
            AdamSettings(
                o.lr,
                o.beta1,
                o.beta2,
                weight_decay=o.weight_decay,
                max_norm=o.max_norm,
                moments=getattr(torch, o.moments),
            ),
        )
        self._loss = lookup(LOSSES, "loss", config.loss.name)
        self._loss_needs = frozenset(self._loss.needs)
        loss = config.loss
        keeps_reference = loss.kl or loss.kl_end or "reference" in self._loss_needs
        self._reference = frozen_copy(self.model) if keeps_reference else None

    def update(
        self, rows: Sequence[TrainRow], number: int, stale: frozenset[int] = frozenset()
    ) -> UpdateReport:
        """Use a batch as often as set.

        Args:
            rows: of the whole step.
            number: the step, from 0.
            stale: indices of rows that older weights sampled; their ratio is taken to what their
                sampler reported, and the gate leaves them out.

        Raises:
            ConfigError: the engine's log-probs differ, or the gradient is not finite.
        """
        self._kl, self._number = self._kl_at(number), number
        o, settings = self._config.optimiser, self.settings
        self._score_seconds = 0.0
        self.weights.clear()  # a sampler may have used the memory
        reuses = o.epochs_per_batch * o.updates_per_epoch > 1
        rows = self._with_scores(list(rows), reuses, stale)
        done = UpdateReport()
        if settings.temperature != 1.0:
            # the engine tells log-probs at temperature 1, so the gate needs a pass of its own
            done.mismatch = self.gate(rows, self.score(rows[:64], temperature=1.0), number)
        parts = _split(rows, o.updates_per_epoch)
        gaps = Gaps(self.mean_logp, rows) if "next_gap" in self._loss_needs else None
        lr = learning_rate(number, peak=o.lr, warmup=o.warmup, total=o.steps, schedule=o.schedule)
        lr *= self._state.lr_scale
        for turn in range(o.epochs_per_batch * len(parts)):
            part = parts[turn % len(parts)]
            if turn == 0 and not stale:  # π is π_old: rounding between two passes is no ratio
                part = [replace(r, old_logp=None) for r in part]
            if gaps is not None:
                part = gaps.added(part)
            if "half_step" in self._loss_needs:
                part = self._against_half_step(part, lr, number)
            settings = self.settings
            result = accumulate(self.model, part, settings, self._token_weights(part, settings))
            if self._loss.after_step is not None:
                self._state.advance(self._loss, ratio_facts(part, result), settings.options)
            if turn == 0 and settings.temperature == 1.0:
                fresh = [r for r in part if r.row.index not in stale]
                done.mismatch = self.gate(fresh, result.logp, number)
            if result.carried:
                parts[turn % len(parts)] = carried_on(parts[turn % len(parts)], result)
            done.results.append(result)
            self._note_entropy(result)
            if distributed.most_over_ranks(result.trained_tokens):
                done.norms.append(self._move(lr, number))
            # else nothing to learn from: not even momentum moves the weights
        done.score_seconds = self._score_seconds
        return done

    def _with_scores(
        self, rows: list[TrainRow], reuses: bool, stale: frozenset[int]
    ) -> list[TrainRow]:
        """Add the reference's log-probs and, where the ratio is not 1 throughout, log π_old."""
        if self._reference is not None and (self._kl or "reference" in self._loss_needs):
            reference = self.score(rows, self._reference)
            rows = [replace(r, ref_logp=reference[r.row.index]) for r in rows]
        if not reuses and not distributed.most_over_ranks(len(stale)):
            return rows
        # a decoupled loss has its own place for the sampler's log-probs
        apart = "behaviour" in self._loss_needs
        is_ahead = self._config.engine.max_staleness > 0
        all_stale = is_ahead and all(r.row.index in stale for r in rows)
        if all_stale and apart and not reuses:
            return rows  # log π_old is what the pass over the batch finds
        old = {} if all_stale and not apart else self.score(rows)

        def at_start(r: TrainRow) -> tuple[float, ...]:
            if r.row.index not in stale or apart:
                return old[r.row.index]
            if r.engine_logp is None:
                raise ConfigError(
                    "a rollout of older weights has no log-probs of its sampler (its engine told "
                    "none, or its hint trains it under another prompt); set curriculum.replay = 0 "
                    "and engine.max_staleness = 0"
                )
            return r.engine_logp

        return [replace(r, old_logp=at_start(r)) for r in rows]

    def _kl_at(self, number: int) -> float:
        """The weight of the KL term in step `number`, from 0."""
        loss, last = self._config.loss, max(1, self._config.optimiser.steps)
        if loss.kl_end is None:
            return loss.kl
        return loss.kl + (loss.kl_end - loss.kl) * min(1.0, number / last)

    @property
    def _wants_entropy(self) -> bool:
        """False while the mean entropy of a token is not below the target."""
        target = self._config.loss.entropy_target
        return target is None or self._state.mean_entropy < target

    def _note_entropy(self, result: UpdateResult) -> None:
        if self._config.loss.entropy_target is None:
            return
        both = distributed.gather_objects((result.entropy_sum, result.trained_tokens))
        tokens = sum(n for _, n in both)
        if tokens:
            self._state.mean_entropy = sum(h for h, _ in both) / tokens

    def _against_half_step(
        self, part: Sequence[TrainRow], lr: float, number: int
    ) -> list[TrainRow]:
        """Return the rows with what a step on them does to their log-probs; it is taken back."""
        kept, settings = Kept(self.optimiser), self.settings
        half = accumulate(self.model, part, settings, self._token_weights(part, settings))
        if distributed.most_over_ranks(half.trained_tokens):
            self._step(lr, number)
        after = self.score(part)
        kept.restore()
        return with_half_gap(part, half.logp, after)

    def _move(self, lr: float, number: int) -> float:
        norm = self._step(lr, number)
        if not self._config.engine.max_staleness:  # else it still samples the next step
            self.sync()
        return norm

    def _step(self, lr: float, number: int) -> float:
        if not self.weights.is_sharded:
            self.weights.average()
        norm = self.optimiser.step(lr)
        if not norm < float("inf"):
            raise ConfigError(
                f"step {number + 1}: the gradient's norm is {norm}; the weights are unchanged. "
                "Look for extreme rewards or advantages, or lower optimiser.lr; resume from "
                "the last checkpoint"
            )
        if self.model is not self._decoder:
            distributed.refresh(self._decoder, self.model)
        return norm

    def sync(self) -> None:
        """Give another maker of tokens the weights."""
        if self._engine is not None:
            self._engine.sync(hf_views(self._decoder))

    @property
    def settings(self) -> UpdateSettings:
        """What an optimiser batch minimises."""
        loss, o, choice = self._config.loss, self._config.optimiser, self._config.formulas
        own = filled(self._loss, loss.options, choice, self._number)
        carried = {"next_gap_D": 0.0} if "next_gap" in self._loss_needs else {}  # see Gaps
        return UpdateSettings(
            loss=loss.name,
            options={**own, **self._state.options(self._loss), **carried},
            aggregation=aggregation_of(choice),
            kl=self._kl,
            entropy=loss.entropy if self._wants_entropy else 0.0,
            log_entropy=loss.log_entropy or loss.entropy_target is not None,
            skip_zero_advantage=loss.skip_zero_advantage,
            temperature=self._config.rollout.temperature,
            max_tokens=self._config.rollout.max_tokens,
            micro_batch_tokens=o.micro_batch_tokens,
            chunk=o.vocabulary_chunk,
        )

    def score(
        self,
        rows: Sequence[TrainRow],
        decoder: Decoder | None = None,
        *,
        temperature: float | None = None,
    ) -> dict[int, tuple[float, ...]]:
        """Return log-probs by row index; under the trained weights and the rollout's temperature
        unless told."""
        if decoder is None:
            # sharded weights need all processes in step, so the whole copy scores
            decoder = self.model if self._world == 1 else self._decoder
        if temperature is None:
            temperature = self._config.rollout.temperature
        with self._scoring():
            return score_rows(
                decoder,
                [r.row for r in rows],
                temperature=temperature,
                max_tokens=self._config.optimiser.micro_batch_tokens,
                chunk=self._config.optimiser.vocabulary_chunk,
            )

    def mean_logp(self, rows: Sequence[TrainRow]) -> Tokens:
        """Return, per row index, the mean over the vocabulary of log π at each sampled token."""
        with self._scoring():
            found = measure_rows(
                self.model if self._world == 1 else self._decoder,
                [r.row for r in rows],
                temperature=self._config.rollout.temperature,
                max_tokens=self._config.optimiser.micro_batch_tokens,
                chunk=self._config.optimiser.vocabulary_chunk,
            )
        return found.mean_logp

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Count a pass's time; its values are read from the device, so it has ended by then."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._score_seconds += time.monotonic() - started

    def gate(
        self, rows: Sequence[TrainRow], logps: Mapping[int, tuple[float, ...]], number: int
    ) -> Mismatch | None:
        """Compare what the sampler reported with the trainer's scores; stop when they differ."""
        both = [
            (r.engine_logp, logps[r.row.index])
            for r in rows
            if r.engine_logp is not None and r.row.index in logps
        ]
        if not both:
            return None
        found = measure_mismatch([a for a, _ in both], [b for _, b in both])
        rollout = self._config.rollout
        limits = MismatchLimits(rollout.mismatch_mean, rollout.mismatch_row)
        check_mismatch(found, max(len(a) for a, _ in both), limits, f"step {number + 1}")
        return found

    def _token_weights(self, part: Sequence[TrainRow], settings: UpdateSettings) -> Any:
        """Weights from the lengths of all processes' rows together, times the number of processes,
        since gradients are averaged over them."""
        if self._world == 1:
            return token_weights(part, settings)
        stubs = distributed.gather_objects([replace(r, engine_logp=None) for r in part])
        at = sum(len(s) for s in stubs[: self._rank])
        everyone = token_weights([r for s in stubs for r in s], settings)
        return everyone[at : at + len(part)] * self._world

    def _trained_model(self) -> Decoder:
        decoder, m = self._decoder, self._config.model
        if self._world == 1 or not m.shard:
            decoder.requires_grad_(True)
            decoder.checkpoint_blocks = m.checkpoint_activations
            return decoder
        if m.lora_rank:
            raise ConfigError(
                "model.lora_rank with model.shard: adapters are trained through whole weights; set "
                "model.shard = false"
            )
        trained = like(decoder, torch.float32)
        trained.load_state_dict(decoder.state_dict())
        trained.checkpoint_blocks = m.checkpoint_activations
        decoder.requires_grad_(False)
        return distributed.shard(trained)

    def _make_weights(self) -> Weights:
        m = self._config.model
        if not m.lora_rank:
            return FullWeights(self.model)
        return LoraWeights(
            self.model,
            rank=m.lora_rank,
            alpha=m.lora_alpha,
            targets=m.lora_targets or TARGETS,
            seed=self._config.run.seed,
        )


def ratio_facts(part: Sequence[TrainRow], result: UpdateResult) -> RatioFacts:
    """Return the statistics of π/π_old over all processes' tokens of an optimiser batch."""
    gaps = [
        np.subtract(result.logp[r.row.index], r.old_logp)
        for r in part
        if r.old_logp is not None and r.row.index in result.logp
    ]
    ratio_D = np.exp(np.concatenate(gaps)) if gaps else np.zeros(0)
    mine = float(((ratio_D - 1) ** 2).sum()), result.trained_tokens
    both = distributed.gather_objects(mine)
    tokens = sum(n for _, n in both)
    return RatioFacts(sum(s for s, _ in both) / max(1, tokens), tokens)


def like(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """Return a decoder of the same shape and device with weights that are not set yet."""
    return Decoder(
        decoder.shape,
        decoder.inv_freq,
        dtype=dtype,
        device=decoder.embed.device,
        rope_scale=decoder.rope_scale,
    )


def frozen_copy(decoder: Decoder) -> Decoder:
    """Return a copy of the weights as they are now, for KL."""
    copy = like(decoder, decoder.embed.dtype)
    own = dict(copy.named_parameters())
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            own[name].copy_(distributed.whole(parameter.detach()))
    copy.requires_grad_(False)
    return copy


def _split(rows: Sequence[TrainRow], n: int) -> list[list[TrainRow]]:
    """Cut the groups of all processes into n optimiser batches, nearly equal in groups, and return
    this process's rows of each: maybe none, since updates are made by all together."""
    rank = distributed.world()[0]
    held = distributed.gather_objects({r.group for r in rows})
    groups = sorted((group, i) for i, own in enumerate(held) for group in own)  # as dealt out
    found = []
    for places in np.array_split(np.arange(len(groups)), n):
        mine = {groups[k][0] for k in places if groups[k][1] == rank}
        if len(places):
            found.append([r for r in rows if r.group in mine])
    return found
