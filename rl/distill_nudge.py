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

from tfgrpo.canonical import derive_seed
from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.rl.advantages_weighted import nudge
from tfgrpo.rl.distill_draws import (
    ContextsOf,
    Draw,
    Drawn,
    Ids,
    Wanted,
    drawn_rows,
    identity_of,
    reward_batch,
    reward_figures,
    update_settings,
)
from tfgrpo.rl.distill_objectives import DEFAULT_PASSES, PassSettings, batch_of, steps_per_epoch
from tfgrpo.rl.model import Decoder
from tfgrpo.rl.update import TrainRow, accumulate
from tfgrpo.rollout import Task


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


class Nudge:
    """NudgeRL as an `Objective`.

    Args:
        draw: makes groups from the current weights.
        tasks: to train on.
        contexts_of: a task's contexts; they are the strategies.
        bare_ids: a task's bare prompt.
        settings: the method's constants.
        tasks_per_step: of one update.
        seed: of order, dropout and draws.
        passes: how rows are cut; its temperature must be the draws'.
    """

    def __init__(
        self,
        draw: Draw,
        tasks: Sequence[Task],
        contexts_of: ContextsOf,
        bare_ids: Ids,
        settings: NudgeSettings = DEFAULTS,
        *,
        tasks_per_step: int = 8,
        seed: int = 0,
        passes: PassSettings = DEFAULT_PASSES,
    ) -> None:
        self._draw = draw
        self._tasks = list(tasks)
        self._contexts_of = contexts_of
        self._bare_ids = bare_ids
        self._settings = settings
        self._size = tasks_per_step
        self._seed = seed
        self._passes = passes
        self.steps_per_epoch = steps_per_epoch(len(self._tasks), tasks_per_step)

    @property
    def identity(self) -> str:
        """See `distill_objectives.Objective`."""
        return identity_of(
            "nudge", self._tasks, self._contexts_of, self._size, self._seed, self._settings,
            self._passes,
        )  # fmt: skip

    def wanted(self, step: int) -> tuple[list[Wanted], list[int], list[int]]:
        """Return what is drawn in a step, with each entry's task and context number."""
        s = self._settings
        wanted: list[Wanted] = []
        owners: list[int] = []
        numbers: list[int] = []
        for i, task in enumerate(batch_of(self._tasks, step, self._size, self._seed)):
            chance = np.random.default_rng(derive_seed(self._seed, "drop", step, task.task_id))
            bare = 0
            for c, context in enumerate(self._contexts_of(task)):
                dropped = int(chance.binomial(s.per_context, s.dropout))
                bare += dropped
                if dropped < s.per_context:
                    wanted.append((task, context, s.per_context - dropped))
                    owners.append(i)
                    numbers.append(c)
            if bare:
                wanted.append((task, EMPTY_CONTEXT, bare))
                owners.append(i)
                numbers.append(-1)
        return wanted, owners, numbers

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """See `distill_objectives.Objective`."""
        wanted, owners, numbers = self.wanted(step)
        groups = self._draw(wanted, derive_seed(self._seed, "nudge", step))
        drawn = drawn_rows(groups, owners, numbers, self._bare_ids)
        figures = accumulate_nudge(decoder, drawn, self._settings, self._passes)
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
