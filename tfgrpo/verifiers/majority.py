"""A reward without a reference: the answer that most of a group gave counts as right.

Does not know training. Source: TTRL (arXiv 2504.16084), majority voting as the label, here over the
trained group itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers.answer import UnitVerifier, compiled
from tfgrpo.verifiers.final_answer import answer_class

__all__ = ["Majority"]


class Majority(UnitVerifier):
    """1 for the answer that most of the group gave, else 0.

    Args:
        extract: pattern that finds the answer; else the last box, the last number, or the reply.
        least: share of the group that the answer must have for anything to be 1; ties between
            answers go to none.
    """

    def __init__(self, extract: str | None = None, least: float = 0.0) -> None:
        if not 0 <= least <= 1:
            raise ConfigError(f"Majority: least is {least}; it must be a share, 0 to 1")
        if extract is not None:
            compiled(extract, "Majority: extract")
        self._extract = extract or ""
        self._least = least
        super().__init__("majority", [self._extract, least])

    def check_task(self, task: Task) -> None:
        """Every task will do: no reference is read."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return 1: an answer alone is the majority."""
        return (await self.score_group([rollout], task))[0]

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        """Return 1 for each rollout with the most frequent answer, with its share as a part."""
        answers = [answer_class(r.answer, self._extract, "Majority: extract") for r in rollouts]
        counts = Counter(a for a in answers if a)
        best = counts.most_common(2)
        wins = ""
        if best and best[0][1] >= self._least * len(rollouts):
            is_tie = len(best) > 1 and best[0][1] == best[1][1]
            wins = "" if is_tie else best[0][0]
        shares = [counts[a] / len(rollouts) for a in answers]
        return [
            Score(float(bool(wins) and a == wins), parts={"share": share})
            for a, share in zip(answers, shares, strict=True)
        ]
