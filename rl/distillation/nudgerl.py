"""NudgeRL: rollouts under several contexts, and a term that pulls them into the bare prompt.

Clipped GRPO under (x, context) with the advantage `nudge`, plus c times minus the mean of
A · length-normalised log π(y | x). In the paper a model writes the strategies; that parts of a
library stand in for them is our approximation.

Does not know libraries or verifiers. Source: NudgeRL, released code tally0818/NudgeRL (trainer
defaults), read at second hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
from tfgrpo.rl.formulas.advantages.weighted import nudge
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.update.accumulate import TrainRow, accumulate
from tfgrpo.runtime.canonical import derive_seed


@dataclass(frozen=True, slots=True)
class NudgeSettings:
    """The method's constants; defaults are those of the released trainer."""

    per_context: int = 4
    """Rollouts a context, some of which drop it."""
    dropout: float = 0.25
    """Chance that a rollout drops its context."""
    lam: float = 0.1
    """Share of the between-context deviation in the advantage."""
    distil: float = 0.01
    """Weight c of the term on the bare prompt."""


DEFAULTS = NudgeSettings()


class NudgeRL:
    """NudgeRL as an `Objective`.

    Args:
        source: tasks and rollouts; a task's contexts are the strategies.
        settings: the method's constants.
    """

    def __init__(self, source: FreshGroups, settings: NudgeSettings = DEFAULTS) -> None:
        self._source = source
        self._settings = settings
        self.steps_per_epoch = source.steps_per_epoch

    @property
    def identity(self) -> str:
        """See `distill_objectives.Objective`."""
        return self._source.identity("nudge", self._settings)

    def wanted(self, step: int) -> list[Wanted]:
        """Return what is drawn in a step."""
        s, source = self._settings, self._source
        found: list[Wanted] = []
        for place, task in enumerate(source.tasks_of(step)):
            chance = np.random.default_rng(derive_seed(source.seed, "drop", step, task.task_id))
            bare = 0
            for number, context in enumerate(source.contexts_of(task)):
                dropped = int(chance.binomial(s.per_context, s.dropout))
                bare += dropped
                if dropped < s.per_context:
                    left = s.per_context - dropped
                    found.append(Wanted(task, context, left, place, number))
            if bare:
                found.append(Wanted(task, EMPTY_CONTEXT, bare, place, -1))
        return found

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """See `distill_objectives.Objective`."""
        drawn = self._source.rows("nudge", step, self.wanted(step))
        figures = accumulate_nudge(decoder, drawn, self._settings, self._source.passes)
        return figures | reward_figures(drawn)


def accumulate_nudge(
    decoder: Decoder, drawn: Sequence[Drawn], settings: NudgeSettings, passes: PassSettings
) -> dict[str, float]:
    """Add NudgeRL's gradients of one step: the policy term as rolled, the distillation term bare.

    The mean of the distillation term runs over all rollouts of the step, those that dropped their
    context included (our reading).
    """
    if not drawn:
        return {"loss": 0.0, "tokens": 0.0}
    batch = reward_batch(drawn, [d.reward for d in drawn])
    batch = replace(batch, extra={"context_R": np.array([float(d.context) for d in drawn])})
    advantage_R = nudge(batch, lam=settings.lam)
    policy = accumulate(
        decoder,
        [
            TrainRow(d.as_rolled, float(a), d.reward, d.task)
            for d, a in zip(drawn, advantage_R, strict=True)
        ],
        update_settings(passes, "clip", "token_mean"),
    )
    loss = policy.loss
    if settings.distil:
        ordered = sorted(zip(drawn, advantage_R, strict=True), key=lambda pair: pair[0].task)
        bare = [TrainRow(d.bare, float(a), weight=settings.distil) for d, a in ordered]
        loss += accumulate(decoder, bare, update_settings(passes, "reinforce", "row_mean")).loss
    return {"loss": loss, "tokens": float(policy.trained_tokens)}
