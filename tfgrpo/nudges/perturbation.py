"""Perturbation: a failed task again behind meaningless text, another for each rollout.

Each rollout is a group of its own, since a group stands under one context; the critic is shown
those that succeeded together with the failed group, as the method regroups them.

Source: LoPE (arXiv 2605.05566; README of shrango/LoPE): words of Lorem Ipsum before the prompt of
tasks whose rollouts all fail, 100 to 300 tokens, a sentence that ends them, successes regrouped
with the failed rollouts. Lengths here are in words (two tokens a word, approximation), and there
is no importance correction, since nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import ContextPart
from tfgrpo.hints.second_tries.perturbed import lorem
from tfgrpo.nudges.method import Nudge, StepView
from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.canonical import derive_seed


class Perturb:
    """A `NudgeMethod` with one perturbed rollout a round.

    Args:
        config: how many, how long.
        group_size: how many where the settings do not say.
        seed: fixes the texts.
    """

    def __init__(self, config: NudgeConfig, group_size: int, seed: int = 0) -> None:
        self._config = config
        self._rounds = config.resamples or group_size
        self._seed = seed
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Nothing to get ready."""

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return another text for one rollout."""
        number, task = len(tried), tried[0].task
        if number > self._rounds:
            return None
        seed = derive_seed("perturb", self._seed, task.task_id, epoch, number)
        text = lorem(task, self._config.words, seed)
        if not text:
            return None
        return Nudge((ContextPart("perturbation", text, source=f"perturbation:{number}"),), 1)
