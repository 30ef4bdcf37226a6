"""ICPO: part of each group is drawn with examples in context and trains the bare prompt.

An approximation throughout: only the abstract was read. Of the rollouts with examples those below
a bound leave the group; the others get a bonus on their reward that falls to 0, and a ratio to the
bare prompt shaped as r / (r + γ), which is LUFFY's shaping.

Does not know libraries or verifiers. Source: ICPO, "Think Outside the Policy: In-Context Steered
Policy Optimization", abstract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.rl.distillation.fresh_groups import (
    Drawn,
    FreshGroups,
    Wanted,
    reward_batch,
    reward_figures,
    update_settings,
)
from tfgrpo.rl.distillation.objectives import PassSettings
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import micro_batches, pack
from tfgrpo.rl.update.accumulate import TrainRow, accumulate, score_rows
from tfgrpo.rl.update.logprob import one_pass_loss


@dataclass(frozen=True, slots=True)
class IcpoSettings:
    """Our constants: the abstract names none."""

    group_size: int = 8
    expert: int = 4
    """Rollouts of a group that are drawn with examples in context."""
    bound: float = 1.0
    """Expert rollouts with a smaller reward leave the group."""
    bonus: float = 0.1
    """Added to the reward of accepted expert rollouts at the first step."""
    steps: int = 100
    """Steps over which the bonus falls to 0, linearly."""
    gamma: float = 0.1
    """Of the shaping r / (r + γ)."""


def expert_bonus(step: int, steps: int, start: float) -> float:
    """Return the bonus of a step (from 0): `start` at the first, 0 from the last on.

    >>> [expert_bonus(s, 3, 0.2) for s in range(4)]
    [0.2, 0.1, 0.0, 0.0]
    """
    return start * max(0.0, 1 - step / max(1, steps - 1))


def accepted(drawn: Sequence[Drawn], bound: float) -> list[Drawn]:
    """Return bare rollouts and those expert rollouts that reach the bound."""
    return [d for d in drawn if d.context < 0 or d.reward >= bound]


def shaped_ratio(logp_D: Tensor, behaviour_logp_D: Tensor, gamma: float) -> Tensor:
    """Return r / (r + γ), r being the token's probability over the behaviour's: D, in (0, 1)."""
    ratio_D = (logp_D - behaviour_logp_D).exp()
    return ratio_D / (ratio_D + gamma)


DEFAULTS = IcpoSettings()


class Icpo:
    """ICPO as an `Objective` (approximation).

    Args:
        source: tasks and rollouts; the first of a task's contexts is used, its examples.
        settings: constants.
    """

    def __init__(self, source: FreshGroups, settings: IcpoSettings = DEFAULTS) -> None:
        self._source = source
        self._settings = settings
        self.steps_per_epoch = source.steps_per_epoch

    @property
    def identity(self) -> str:
        """See `distill_objectives.Objective`."""
        return self._source.identity("icpo", self._settings)

    def wanted(self, step: int) -> list[Wanted]:
        """Return what is drawn in a step."""
        s, source = self._settings, self._source
        found: list[Wanted] = []
        for place, task in enumerate(source.tasks_of(step)):
            contexts = [c for c in source.contexts_of(task) if not c.is_empty][:1]
            expert = s.expert if contexts else 0
            mine = [Wanted(task, EMPTY_CONTEXT, s.group_size - expert, place, -1)]
            mine += [Wanted(task, context, expert, place, 0) for context in contexts]
            found += [one for one in mine if one.n]
        return found

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """See `distill_objectives.Objective`."""
        drawn = self._source.rows("icpo", step, self.wanted(step))
        figures = accumulate_icpo(decoder, drawn, self._settings, self._source.passes, step)
        return figures | reward_figures(drawn)


def accumulate_icpo(
    decoder: Decoder,
    drawn: Sequence[Drawn],
    settings: IcpoSettings,
    passes: PassSettings,
    step: int,
) -> dict[str, float]:
    """Add ICPO's gradients of one step (approximation); without expert rows this is GRPO.

    Every token of the kept rollouts weighs the same. Expert rollouts are scored under the bare
    prompt, against the likelihood that they had as they were rolled.
    """
    kept = accepted(drawn, settings.bound)
    if not kept:
        return {"loss": 0.0, "tokens": 0.0, "expert_kept": 0.0}
    extra = expert_bonus(step, settings.steps, settings.bonus)
    rewards = [d.reward + (extra if d.context >= 0 else 0.0) for d in kept]
    advantage_R = grpo(reward_batch(kept, rewards))
    token = 1.0 / sum(d.as_rolled.n_loss for d in kept)
    pairs = list(zip(kept, advantage_R, strict=True))
    own = [TrainRow(d.as_rolled, float(a), d.reward, d.task) for d, a in pairs if d.context < 0]
    expert = [(d, float(a)) for d, a in pairs if d.context >= 0 and a]
    loss, tokens = 0.0, 0
    if own:
        result = accumulate(
            decoder, own, update_settings(passes, "clip", "token_mean"), np.full(len(own), token)
        )
        loss, tokens = loss + result.loss, tokens + result.trained_tokens
    if expert:
        loss += _accumulate_expert(decoder, expert, settings.gamma, passes, token)
        tokens += sum(d.bare.n_loss for d, _ in expert)
    return {"loss": loss, "tokens": float(tokens), "expert_kept": float(len(expert))}


def _accumulate_expert(
    decoder: Decoder,
    expert: Sequence[tuple[Drawn, float]],
    gamma: float,
    passes: PassSettings,
    token_weight: float,
) -> float:
    """Add the gradient of −Σ weight · A · shaped ratio under the bare prompt; return the loss."""
    behaviour = score_rows(
        decoder,
        [d.as_rolled for d, _ in expert],
        temperature=passes.temperature,
        max_tokens=passes.micro_batch_tokens,
        chunk=passes.chunk,
    )
    advantage_of = {d.bare.index: a for d, a in expert}
    total = 0.0
    for part in micro_batches([d.bare for d, _ in expert], passes.micro_batch_tokens):
        packed = pack(part, device=decoder.embed.device)
        hidden_D = decoder(packed)[packed.head_D]
        wide = torch.float64 if hidden_D.dtype == torch.float64 else torch.float32
        old_D = torch.tensor([p for r in part for p in behaviour[r.index]], dtype=wide)
        advantage_D = torch.tensor(
            [advantage_of[r.index] for r in part for _ in range(r.n_loss)], dtype=wide
        )
        old_D, advantage_D = old_D.to(hidden_D.device), advantage_D.to(hidden_D.device)

        def closure(
            cut: slice,
            logp_D: Tensor,
            entropy_D: Tensor | None,
            old_D: Tensor = old_D,
            advantage_D: Tensor = advantage_D,
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            shaped_D = shaped_ratio(logp_D, old_D[cut], gamma)
            gain_D = -token_weight * advantage_D[cut]
            # d(r / (r + γ)) / d log r = s · (1 − s), s being the shaped ratio.
            return (gain_D * shaped_D).sum(), gain_D * shaped_D * (1 - shaped_D), None

        loss, _ = one_pass_loss(
            hidden_D,
            decoder.head_weight,
            packed.target_D,
            closure,
            temperature=passes.temperature,
            chunk=passes.chunk,
        )
        loss.backward()
        total += float(loss.detach())
    return total
