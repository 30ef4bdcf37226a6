"""Perturbation: a failed task again behind meaningless text, another for each rollout.

Successes take the place of failures, of which at least one stays. Does not know tokens.

Source: LoPE (arXiv 2605.05566; README of shrango/LoPE): words of Lorem Ipsum before the prompt of
tasks whose rollouts all fail, 100 to 300 tokens, 24 resamples for a group of 8, trained under the
clean prompt with the ratio to the perturbed one, and optionally that ratio as r/(r + 0.1) with
advantages over all rollouts. Lengths here are in words (two tokens a word, approximation).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tfgrpo.advantage import advantages_G
from tfgrpo.hint_plan import BARE, Condition, HintPlan, PlannedGroup
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.merge import replace_k, with_advantages
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed

_TEXT = """
lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore
et dolore magna aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip
ex ea commodo consequat duis aute irure in reprehenderit voluptate velit esse cillum eu fugiat nulla
pariatur excepteur sint occaecat cupidatat non proident sunt culpa qui officia deserunt mollit anim
id est laborum
"""
_LOREM = _TEXT.split()


def lorem(task: Task, words: tuple[int, int], seed: int) -> str:
    """Return sentences of so many to so many words that hold no answer of the task.

    >>> lorem(Task("a", "?"), (3, 3), 1) == lorem(Task("a", "?"), (3, 3), 1)
    True
    """
    rng = random.Random(seed)
    allowed = [w for w in _LOREM if not leaks(w, task)]
    left = rng.randint(*words)
    sentences = []
    while left > 0 and allowed:
        size = min(left, rng.randint(5, 12))
        sentences.append(" ".join(rng.choice(allowed) for _ in range(size)).capitalize() + ".")
        left -= size
    text = " ".join(sentences)
    return "" if leaks(text, task) else text


class Lope(RecordedScheduler):
    """A `HintScheduler` that rolls a failed task again behind other texts.

    Args:
        resamples: rollouts of the second round; None is three times the group size.
        words: fewest and most words of a text.
        text: `lorem`, or `none` for plain resamples (the control).
        condition: whose prompt log-probs stand under, see `hint_plan.Condition`.
        shaping: γ of the ratio r/(r + γ) on perturbed rollouts; 0 keeps the loss's own.
        whole_baseline: advantages over all rollouts of both rounds, as beside `shaping` in the
            release; False takes them within the accepted group.
        seed: fixes the texts.
        success_above: a rollout with a larger reward is a success.
    """

    name = "lope"

    def __init__(
        self,
        *,
        resamples: int | None = None,
        words: tuple[int, int] = (50, 150),
        text: Literal["lorem", "none"] = "lorem",
        condition: Condition = "corrected",
        shaping: float = 0.0,
        whole_baseline: bool = False,
        seed: int = 0,
        success_above: float = 0.0,
    ) -> None:
        self._resamples = resamples
        self._words = words
        self._text = text
        self._condition = condition
        self._shaping = shaping
        self._whole_baseline = whole_baseline
        self._seed = seed
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task."""
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the resamples where all failed."""
        first = made[0].group
        if len(made) > 1 or not self.record.has_failed(first):
            return ()
        n = self._resamples or 3 * len(first.rollouts)
        if self._text == "none":
            return [HintPlan(n=n)]
        visit = self.record.of(task.task_id).visits
        texts = [
            lorem(task, self._words, derive_seed("lope", self._seed, task.task_id, visit, i))
            for i in range(n)
        ]
        plan = HintPlan(
            kind="perturbation", n=1, level=1, condition=self._condition, shaping=self._shaping
        )
        return [replace(plan, text=text) for text in texts if text]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the bare group, failures replaced by successes of the second round."""
        bare = made[0].group
        again = [(one.plan.level, r) for one in made[1:] for r in one.group.rollouts]
        most = len(bare.graded) - 1
        group = replace_k(
            bare, again, k=most, success_above=self.record.success_above
        ) if most > 0 else bare  # fmt: skip
        plan = made[-1].plan if group is not bare else made[0].plan
        if group is not bare and self._whole_baseline:
            group = self._over_all(group, made)
        self.record.close(made, plan, group)
        return group

    def _over_all(self, group: RolloutGroup, made: Sequence[PlannedGroup]) -> RolloutGroup:
        everyone = [r for one in made for r in one.group.graded]
        values = advantages_G([r.score.reward for r in everyone if r.score])
        found = {r.rollout_id: a for r, a in zip(everyone, values, strict=True)}
        return with_advantages(group, [found[r.rollout_id] for r in group.graded])
