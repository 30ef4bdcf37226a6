"""SAGE: climb from the bare task until something succeeds; SAGE-light: move a level an epoch.

SAGE rolls a failed task again, whole, under a stronger hint until a rollout succeeds or the levels
are used up; the accepted group stands under one context. With a `Rewriter` the policy writes the
hints anew at each visit that failed. SAGE-light rolls each task once, at a level kept for it, and
moves the level by one after an epoch.

Source: Self-Hinting Language Models Enhance Reinforcement Learning (arXiv 2602.03143) and its
released code (BaohaoLiao/SAGE). The paper's equation 13 climbs from the stored level, its
algorithm 1 and the code from the bare task at each visit (`restart`). SAGE-light's thresholds
differ too: the paper only raises, below 0.35; the released code raises at or below a low threshold
and lowers above 0.35. With hints cut from a solution into three levels SAGE's climb is GHPO's
(25, 50, 75 % of the characters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, Ask, HintPlan, PlannedGroup
from tfgrpo.hints.metadata import MetadataHints, PlansOf
from tfgrpo.hints.rewriting import Rewriter
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task


class Sage(RecordedScheduler):
    """A `HintScheduler` that climbs within a visit.

    Args:
        plans_of: a task's plans, weakest first.
        max_level: strongest level tried, at least 1.
        restart: each visit starts at the bare task; False starts at the last accepted level, with
            `ahead` or without.
        ahead: roll the levels up to the one that is expected to be accepted at once: the task's
            last one, moved as the run's last groups have moved; for a new task their mean. The
            accepted group is the same as without, since each level's draws are its own; a visit
            takes one round instead of several, and pays with the rollouts of levels that turn out
            not to be needed. Own.
        rewriter: has the policy write a task's hints once its first level has failed; None takes
            those of `plans_of`.
        success_above: a rollout with a larger reward is a success.

    Raises:
        ConfigError: `ahead` with a rewriter, whose hints are not there yet.
    """

    name = "sage"

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        max_level: int = 3,
        restart: bool = True,
        ahead: bool = False,
        rewriter: Rewriter | None = None,
        success_above: float = 0.0,
    ) -> None:
        if ahead and rewriter is not None:
            raise ConfigError(
                "hints.ahead rolls levels before any has failed, and with hints.rewrite = 'visit' "
                "their hints are written only then: leave one of them out"
            )
        self._plans_of = plans_of if plans_of is not None else MetadataHints(levels=max_level)
        self._rewriter = rewriter
        self._max_level = max_level
        self._restart = restart
        self._ahead = ahead
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the first level's plan, and with `ahead` those that are expected to be needed."""
        plans = [BARE, *(p for p in self._plans(task, ()) if p.level <= self._max_level)]
        if not self._restart:  # one round already, where the stored level still succeeds
            stored = self.record.of(task.task_id).level
            return [p for p in plans if p.level == stored] or [BARE]
        return plans[: self._expected(task) + 1] if self._ahead else plans[:1]

    def _expected(self, task: Task) -> int:
        """The level to roll up to with `ahead`."""
        state, recent = self.record.of(task.task_id), self.record.level_ema
        if recent is None:
            return state.level
        if not state.visits:
            return round(recent)
        # seen an epoch ago; the run's last groups tell how far the policy has come since
        return max(0, round(state.level + self.record.drift_ema))

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[Ask]:
        """Return the next stronger hint where all failed, or the request to write the hints."""
        if not all(self.record.has_failed(one.group) for one in made):
            return ()
        tried = max(one.plan.level for one in made)
        ask = None if self._rewriter is None else self._rewriter.ask(task, made)
        if ask is not None and tried < self._max_level:
            return [ask]
        return [p for p in self._plans(task, made) if tried < p.level <= self._max_level][:1]

    def _plans(self, task: Task, made: Sequence[PlannedGroup]) -> tuple[HintPlan, ...]:
        return self._plans_of(task) if self._rewriter is None else self._rewriter.plans(task, made)

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the weakest level's group that did not fail, else the strongest one's."""
        chosen = next((one for one in made if not self.record.has_failed(one.group)), made[-1])
        self.record.close(made, chosen.plan, chosen.group).level = chosen.plan.level
        if self._rewriter is not None:
            self._rewriter.close(task, made)
        return chosen.group

    def figures(self) -> dict[str, float]:
        """Return the record's figures, and those of rewriting."""
        return super().figures() | ({} if self._rewriter is None else self._rewriter.figures())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        own = {} if self._rewriter is None else {"rewriting": self._rewriter.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, the written hints included."""
        super().load_state_dict(state)
        if self._rewriter is not None:
            self._rewriter.load_state_dict(state["rewriting"])


class SageLight(RecordedScheduler):
    """A `HintScheduler` that rolls once a visit and moves a task's level after each epoch.

    Args:
        plans_of: a task's plans, weakest first.
        max_level: strongest level, at least 1.
        raise_at: an accuracy of at most this, in [0, 1], goes one level up. The paper's rule is
            "below 0.35", which is `raise_at` just under it with `lower_above` None.
        lower_above: an accuracy above this goes one level down; None never goes down.
        success_above: a rollout with a larger reward is a success.

    Raises:
        ConfigError: `lower_above` is below `raise_at`.
    """

    name = "sage_light"

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        max_level: int = 3,
        raise_at: float = 0.0,
        lower_above: float | None = 0.35,
        success_above: float = 0.0,
    ) -> None:
        if lower_above is not None and lower_above < raise_at:
            raise ConfigError(
                f"hints.lower_above {lower_above} is below hints.raise_at {raise_at}: an accuracy "
                "between them would go both ways; make lower_above the larger one"
            )
        self._plans_of = plans_of if plans_of is not None else MetadataHints(levels=max_level)
        self._max_level = max_level
        self._raise_at = raise_at
        self._lower_above = lower_above
        self.record = Record(success_above)
        self._top: dict[str, int] = {}
        """Tasks graded in this epoch, and the strongest level there is for each."""

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the hint of the task's level."""
        level = self.record.of(task.task_id).level
        return [p for p in self._plans_of(task) if p.level == level] or [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return nothing: one group a visit."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the group and remember how it went."""
        only = made[-1]
        self.record.close(made, only.plan, only.group)
        if only.group.rewards_G:
            strongest = max((p.level for p in self._plans_of(task)), default=0)
            self._top[task.task_id] = min(strongest, self._max_level)
        return only.group

    def epoch_end(self) -> None:
        """Move the levels of the tasks that were graded in this epoch."""
        for task_id, top in self._top.items():
            state = self.record.of(task_id)
            assert state.accuracy is not None  # `after` enters graded groups alone
            if state.accuracy <= self._raise_at:
                state.level = min(state.level + 1, top)
            elif self._lower_above is not None and state.accuracy > self._lower_above:
                state.level = max(state.level - 1, 0)
        self._top = {}
        self.record.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return super().state_dict() | {"this_epoch": dict(self._top)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, the tasks of this epoch included."""
        super().load_state_dict(state)
        self._top = dict(state["this_epoch"])
