"""Drafts: the best own attempt stands in the prompt of the attempts that are trained.

Stage one draws drafts, which bear no loss; the one of the highest reward, right or wrong, goes into
the prompt of stage two. With `only_failed` the first stage is an ordinary group, and the second
follows only where all of it failed. Does not know tokens.

Source: iGRPO (arXiv 2602.09000; abstract and secondary summary, no code): ties by chance, sizes and
the prompt's wording are ours (approximation). `only_failed` is the reflection pass of R3 (abstract:
failures in context for a second attempt; approximation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfgrpo.hint_plan import HintPlan, PlannedGroup
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed


def best_draft(tried: Sequence[RolloutGroup], seed: int = 0) -> Rollout | None:
    """Return the graded rollout of the highest reward; of equal ones a later round's, then chance.

    None where no graded rollout says anything.
    """
    found = [
        (rollout.reward or 0.0, number, derive_seed("draft", seed, rollout.rollout_id), rollout)
        for number, group in enumerate(tried)
        for rollout in group.graded
        if rollout.steps and rollout.answer.strip()
    ]
    return max(found, key=lambda row: row[:3])[3] if found else None


def told(rollout: Rollout) -> str:
    """Return an attempt as text: its answer, or all turns where there are several."""
    if len(rollout.steps) == 1:
        return rollout.answer.strip()
    return "\n".join(m.content for m in rollout.messages)


@dataclass(slots=True)
class Gain:
    """Mean of what a second try adds to the first, over visits."""

    visits: int = 0
    first: float = 0.0
    """Sum of the first tries' mean rewards."""
    second: float = 0.0
    square: float = 0.0
    """Sum of the squared differences."""

    def add(self, first: float, second: float) -> None:
        """Count a visit."""
        self.visits += 1
        self.first += first
        self.second += second
        self.square += (second - first) ** 2

    def figures(self) -> dict[str, float]:
        """Return the means and the gain with a 95 % interval (normal, over visits)."""
        n = self.visits
        if not n:
            return {}
        gain = (self.second - self.first) / n
        made = {"first_mean": self.first / n, "second_mean": self.second / n, "gain": gain}
        if n > 1:
            half = 1.96 * math.sqrt(max(0.0, self.square / n - gain**2) / (n - 1))
            made |= {"gain_low": gain - half, "gain_high": gain + half}
        return made


class IGrpo(RecordedScheduler):
    """A `HintScheduler` of two stages.

    Args:
        drafts: rollouts of stage one; 0 is plain GRPO.
        refinements: rollouts of stage two; None is the group size.
        only_failed: stage one is a group like any other and is trained, unless all of it failed;
            `drafts` plays no part.
        seed: decides between drafts of equal reward.
        success_above: a rollout with a larger reward is a success.
    """

    name = "igrpo"

    def __init__(
        self,
        *,
        drafts: int = 4,
        refinements: int | None = None,
        only_failed: bool = False,
        seed: int = 0,
        success_above: float = 0.0,
    ) -> None:
        self._drafts = drafts
        self._refinements = refinements
        self._only_failed = only_failed
        self._seed = seed
        self.record = Record(success_above)
        self.gain = Gain()

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the drafts, or the bare task where there are none."""
        if self._only_failed:
            return [HintPlan()]
        if not self._drafts:
            return [HintPlan(n=self._refinements)]
        return [HintPlan(n=self._drafts, train_on="none")]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the refinements of the best draft."""
        if len(made) > 1 or not (self._only_failed or self._drafts):
            return ()
        first = made[0].group
        if self._only_failed and not self.record.has_failed(first):
            return ()
        draft = best_draft([first], self._seed)
        text = "" if draft is None else told(draft)
        if not text:  # nothing was graded or said: the second stage is bare
            return () if self._only_failed else [HintPlan(n=self._refinements)]
        return [HintPlan(text=text, kind="draft", n=self._refinements, level=1, source="self")]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the last stage's group."""
        last = made[-1]
        if len(made) > 1 and made[0].group.rewards_G and last.group.rewards_G:
            self.gain.add(made[0].group.mean_reward or 0.0, last.group.mean_reward or 0.0)
        self.record.close(made, last.plan, last.group)
        return last.group

    def figures(self) -> dict[str, float]:
        """Return the record's figures, and what the second stage adds."""
        return super().figures() | self.gain.figures()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return super().state_dict() | {"gain": asdict(self.gain)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self.gain = Gain(**state["gain"])
