"""Strategies: the rollouts of a failed task are shared out over several short strategies.

One group a strategy, since a group stands under one context; the bare group that failed is the
part without context. The texts are given, or an LM writes five for a task.

Source: NudgeRL (tally0818/NudgeRL, released code): five texts a task of which two are used a visit,
numbered lines; the group there also has bare rollouts (context dropout), which here are the failed
group. Its advantage, within plus lambda times between contexts, has the sign that the critic's
comparison shows (within a group, or between groups where each is uniform); lambda itself has no
place in a comparison in words (approximation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import ContextPart
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.nudges.method import Nudge, StepView
from tfgrpo.nudges.writing import TextWriter
from tfgrpo.rollout import RolloutGroup

WRITTEN = 5
"""Strategies that an LM is asked for."""


class Strategies:
    """A `NudgeMethod` with one group a strategy.

    Args:
        config: the texts, how many a visit.
        group_size: rollouts shared out over the strategies of a visit.
        writer: asked where no texts are given.
    """

    def __init__(
        self, config: NudgeConfig, group_size: int, writer: TextWriter | None = None
    ) -> None:
        self._config = config
        self._n = config.share(group_size)
        self._writer = writer
        self._texts: dict[str, tuple[str, ...]] = {}
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Find the strategies of failed tasks."""
        new = [g.task for g in seen.failed if g.task.task_id not in self._texts]
        written: dict[str, tuple[str, ...]] = {}
        if self._writer is not None and new:
            count = max(WRITTEN, self._config.contexts)
            written = await self._writer.strategies(new, count)
        for task in new:
            texts = self._config.strategies or written.get(task.task_id, ())
            self.books["leaks"] += sum(leaks(t, task) for t in texts)
            self._texts[task.task_id] = tuple(t for t in texts if t.strip() and not leaks(t, task))

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the next strategy of this visit; later epochs go on where earlier ones ended."""
        texts = self._texts.get(tried[0].task.task_id, ())
        number, count = len(tried) - 1, min(self._config.contexts, len(texts))
        if number >= count:
            return None
        at = (epoch * count + number) % len(texts)
        part = ContextPart("strategy", texts[at], source=f"strategy:{at + 1}")
        return Nudge((part,), self._n)
