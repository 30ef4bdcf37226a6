"""Builds training rows from graded groups: features, reshaped rewards, advantages.

The groups of all processes are seen together, so that an estimator over the batch means the same
on one process and on several. Does not know how groups are made or how weights move. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.advantages.tokens import confidence
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.requirements import FormulaChoice, chosen, columns_of, filled, needs_of
from tfgrpo.rl.hint_notes import by_baseline, hint_note
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow, score_rows
from tfgrpo.rl.update.formula_state import FormulaState
from tfgrpo.rl.update.given_rows import IS_GIVEN, References
from tfgrpo.rl.update.hint_shaping import distilled, shaped
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rl.update.row_features import (
    FeatureSources,
    Graded,
    RowFeatures,
    batch_of,
    collect,
)
from tfgrpo.rl.update.token_marks import TextOf
from tfgrpo.rl.update.token_stats import Measured, Tokens, measure_rows
from tfgrpo.rollout import RolloutGroup

_MEASURED = {
    "logp",
    "logp_tokens",
    "entropy_tokens",
    "extra:ratio_R",
    "extra:score_norm_R",
    "extra:sum_square_D",
    "extra:tempered_logp_D",
    "extra:think_entropy_R",
    "extra:answer_entropy_R",
}
"""Needs that cost a pass over the step's rows."""


def graded_of(groups: Sequence[RolloutGroup]) -> list[Graded]:
    """Lay out the graded rollouts that have sampled tokens, group by group."""
    found = [
        (i, g, r)
        for i, g in enumerate(groups)
        for r in g.graded
        if any(s.token_ids for s in r.steps)
    ]
    return [Graded(i, r, row_of(r, index=n), g) for n, (i, g, r) in enumerate(found)]


class RowMaker:
    """Turns a step's groups into rows.

    Args:
        config: all settings.
        decoder: the weights that sampled, for log-probs and entropies where an entry needs them.
        text_of: token ids to text.
        state: of the formulas; None starts one.
        references: what adds each task's reference as a row; None adds none.
    """

    def __init__(
        self,
        config: TrainConfig,
        decoder: Decoder,
        text_of: TextOf,
        state: FormulaState | None = None,
        references: References | None = None,
    ) -> None:
        self._state = state or FormulaState()
        self._references = references
        self._config = config
        self._decoder = decoder
        self._text_of = text_of
        self.needs = frozenset(needs_of(config.formulas))

    def rows(
        self,
        groups: Sequence[RolloutGroup],
        step: int,
        *,
        baselines: Mapping[str, float] | None = None,
        replayed: Collection[str] = (),
    ) -> tuple[list[TrainRow], frozenset[int]]:
        """Return the rows that bear a loss, and the indices of those of which the sampler's
        log-probs are log π_old: replayed ones, and those trained under another prompt.

        Args:
            groups: this process's groups; group ids need not be unique.
            step: from 0, for entries that change over training.
            baselines: reward of a greedy rollout by task id, where an entry needs it.
            replayed: ids of rollouts that older weights sampled.
        """
        groups = by_baseline(groups)
        if self._references is not None:
            groups = self._references.added(groups)
        graded = graded_of(groups)
        facts = collect(graded, self._sources(graded, baselines or {}))
        everyone = distributed.gather_objects((facts, len(groups)))
        start = sum(len(rows) for rows, _ in everyone[: distributed.world()[0]])
        is_tree = self._config.rollout.strategy in ("tree", "arpo", "turn_tree")
        whole = replace(batch_of(everyone), is_tree=is_tree)
        batch, advantage = estimate(whole, self._config.formulas, step, self._state)
        advantages = per_row(advantage, batch.length_R.tolist())[start : start + len(graded)]
        rewards = batch.reward_R[start : start + len(graded)].tolist()
        columns = self._columns(batch, step)[start : start + len(graded)]
        rows = [
            TrainRow(
                g.row, a, reward=reward, group=g.group, engine_logp=g.engine_logp, columns=column
            )
            for g, a, reward, column in zip(graded, advantages, rewards, columns, strict=True)
            if g.row.n_loss
        ]
        rollouts = {g.row.index: g.rollout for g in graded}
        rows = [
            replace(r, columns={**r.columns, "given": (1.0,) * r.row.n_loss})
            if IS_GIVEN in rollouts[r.row.index].metadata
            else r
            for r in rows
        ]
        rows = shaped(rows, rollouts, self._entropy)
        rows += distilled(rows, rollouts)
        stale = frozenset(
            g.row.index
            for g in graded
            if g.rollout.rollout_id in replayed or hint_note(g.rollout).get("corrected")
        )
        return rows, stale

    def _columns(self, batch: RewardBatch, step: int) -> list[dict[str, tuple[float, ...]]]:
        """Return what the loss is given besides advantages, a mapping a row."""
        cuts = np.cumsum([0, *batch.length_R.tolist()])
        found = columns_of(batch, self._config.formulas, step)
        return [
            {name: tuple(value_D[a:b].tolist()) for name, value_D in found.items()}
            for a, b in pairwise(cuts)
        ]

    def _sources(self, graded: Sequence[Graded], baselines: Mapping[str, float]) -> FeatureSources:
        config, needs = self._config, self.needs
        measured = self._measured(graded) if needs & _MEASURED else Measured()
        tempered: Tokens = {}
        if "extra:tempered_logp_D" in needs:
            tempered = self._tempered(graded, measured)
        by_tree = config.credit.name in ("spo_tree", "portool", "branch_grpo")
        return FeatureSources(
            needs,
            config.features,
            measured,
            tempered,
            baselines,
            self._text_of,
            config.loss.answer_pattern,
            (config.credit.state or ("history" if by_tree else "observation")) == "history",
            config.credit.phrases,
            config.credit.separator,
            self._prompt_confidence(graded) if "extra:prompt_confidence_R" in needs else {},
        )

    def _measured(self, graded: Sequence[Graded]) -> Measured:
        return self._measure([g.row for g in graded])

    def _entropy(self, rows: Sequence[Row]) -> Tokens:
        return self._measure(rows).entropy

    def _measure(self, rows: Sequence[Row]) -> Measured:
        return measure_rows(
            self._decoder,
            rows,
            temperature=self._config.rollout.temperature,
            max_tokens=self._config.optimiser.micro_batch_tokens,
            chunk=self._config.optimiser.vocabulary_chunk,
        )

    def _prompt_confidence(self, graded: Sequence[Graded]) -> dict[tuple[int, ...], float]:
        """How sure the policy is of each prompt's least likely tokens."""
        share = float(self._config.loss.advantage_options.get("share", 0.2))
        prompts = list(dict.fromkeys(g.row.prompt_ids for g in graded if len(g.row.prompt_ids) > 1))
        found = score_rows(
            self._decoder,
            [Row(i, prompt[:1], prompt[1:]) for i, prompt in enumerate(prompts)],
            temperature=self._config.rollout.temperature,
            max_tokens=self._config.optimiser.micro_batch_tokens,
            chunk=self._config.optimiser.vocabulary_chunk,
        )
        return {p: confidence(np.array(found[i]), share) for i, p in enumerate(prompts)}

    def _tempered(self, graded: Sequence[Graded], measured: Measured) -> Tokens:
        """Log-probs at 1.2 times the temperature where the batch is surer than wanted, else 0.8."""
        mine = [h for row in measured.entropy.values() for h in row]
        parts = distributed.gather_objects((math.fsum(mine), len(mine)))
        mean = sum(s for s, _ in parts) / max(1, sum(n for _, n in parts))
        target = self._config.credit.options.get("target", 0.5)
        return score_rows(
            self._decoder,
            [g.row for g in graded],
            temperature=self._config.rollout.temperature * (1.2 if mean <= target else 0.8),
            max_tokens=self._config.optimiser.micro_batch_tokens,
            chunk=self._config.optimiser.vocabulary_chunk,
        )


def estimate(
    batch: RewardBatch, choice: FormulaChoice, step: int, state: FormulaState | None = None
) -> tuple[RewardBatch, Floats]:
    """Reshape the rewards and take the advantages; return both, and move the formulas' state.

    Raises:
        ConfigError: an entry gave a number that is not finite.
    """
    if not len(batch.reward_R):
        return batch, np.zeros(0)
    state = state or FormulaState()
    for kind, entry, options in chosen(choice):
        own = state.options(entry)
        found: Floats = entry.fn(batch, **filled(entry, options, choice, step) | own)
        state.advance(entry, batch, options)
        if not np.isfinite(found).all():
            raise ConfigError(
                f"step {step + 1}: {kind} {entry.name!r} gave {found[~np.isfinite(found)][0]}; "
                "look at its options and at the rewards"
            )
        if kind == "reward":
            batch = replace(batch, reward_R=np.asarray(found, dtype=np.float64))
    return batch, found


def per_row(advantage: Floats, lengths: Sequence[int]) -> list[float | tuple[float, ...]]:
    """One advantage a row, or one a token cut into rows, by the estimator's own axis."""
    if len(advantage) == len(lengths):
        return [float(a) for a in advantage]
    if len(advantage) != sum(lengths):
        raise ConfigError(
            f"the estimator returned {len(advantage)} advantages for {len(lengths)} rollouts of "
            f"{sum(lengths)} tokens"
        )
    cuts = np.cumsum([0, *lengths])
    return [tuple(advantage[a:b].tolist()) for a, b in pairwise(cuts)]


__all__ = ["Graded", "RowFeatures", "RowMaker", "estimate", "graded_of", "per_row"]
