"""Collects the groups of one training step: sampling, dynamic resampling, strategies, replay.

With `curriculum.max_resample_rounds` above 1 further tasks are rolled until the step is full of
groups whose rewards differ (dynamic sampling, DAPO, arXiv 2503.14476); surplus and flat groups are
dropped and counted. All processes see all outcomes, so each decides alike.

Does not know losses or weights. Source: as named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.hint_notes import is_hinted
from tfgrpo.rl.rollouts.curriculum import Curriculum, Draw
from tfgrpo.rl.rollouts.factory import train_sampling
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.replay_buffer import Replay, refilled
from tfgrpo.rl.rollouts.step_parts import GroupsInFlight, RolloutMaker, StepParts
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import derive_seed

PROFILE_TASKS = 256
"""Tasks rolled at once in a profiling pass."""


@dataclass(slots=True)
class StepGroups:
    """What a step trains on."""

    groups: list[RolloutGroup]
    """This process's, fresh ones first."""
    made: list[RolloutGroup]
    """All that were rolled for the step, those left out too."""
    replayed: frozenset[str] = frozenset()
    """Ids of rollouts that older weights sampled."""
    is_graded: bool = True
    """False where no process has a graded rollout: nothing can be trained."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Reward of a greedy rollout, by task id."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one group, known to every process."""

    task_id: str
    rewards: tuple[float, ...]
    unaided: tuple[float, ...]
    """Rewards of the rollouts that had no hint: how hard the task is by itself."""
    is_informative: bool


@dataclass(slots=True)
class _Tally:
    """The rounds of one step so far."""

    kept: list[RolloutGroup] = field(default_factory=list)
    beside: list[RolloutGroup] = field(default_factory=list)
    """Further groups of the kept ones' tasks."""
    made: list[RolloutGroup] = field(default_factory=list)
    taken: dict[str, bool] = field(default_factory=dict)
    """Task id to whether its group's rewards differ, of all processes."""
    spent: RolloutFigures = field(default_factory=RolloutFigures)
    rounds: int = 0
    full: int = 0
    """Informative groups kept, of all processes."""
    asked: int = 0
    """Rollouts drawn, of all processes."""
    is_graded: bool = False

    def add(
        self,
        groups: Sequence[RolloutGroup],
        outcomes: Sequence[_Outcome],
        *,
        room: int,
        keeps_all: bool,
    ) -> None:
        """Take a round: all of it, or its first informative groups while there is room."""
        chosen = [o.task_id for o in outcomes if o.is_informative][:room]
        self.kept += [g for g in groups if keeps_all or g.task.task_id in set(chosen)]
        self.made += groups
        self.full += len(chosen)
        self.rounds += 1
        self.taken |= {o.task_id: o.is_informative for o in outcomes}
        self.is_graded |= any(o.rewards for o in outcomes)

    def figures(self) -> dict[str, int]:
        """What dynamic sampling cost."""
        return {
            "rounds": self.rounds,
            "groups_rolled": len(self.taken),
            "groups_dropped": len(self.taken) - self.full,
        }


class StepSampler:
    """Makes the groups of each step.

    Args:
        config: all settings.
        maker: tasks to groups.
        curriculum: which tasks.
        parts: what the groups pass through.
    """

    def __init__(
        self,
        config: TrainConfig,
        maker: RolloutMaker,
        curriculum: Curriculum,
        parts: StepParts,
    ) -> None:
        self._config = config
        self._maker = maker
        self._curriculum = curriculum
        self._parts = parts
        self._rank, self._world = distributed.world()
        self._weights: int | None = None
        """Number of the weights that sample; None leaves rollouts unmarked."""

    def profile(self) -> dict[str, float]:
        """Roll every training task under the starting weights; return figures."""
        draws, tasks = self._curriculum.config.profile, list(self._curriculum.tasks)
        seed = derive_seed(self._config.run.seed, "profile")
        mine = tasks[self._rank :: self._world]
        seen: dict[str, list[float]] = {}
        for at in range(0, len(mine), PROFILE_TASKS):
            groups = self._maker.make(mine[at : at + PROFILE_TASKS], draws, seed=seed)
            seen |= {g.task.task_id: list(g.rewards_G) for g in groups}
        everyone = {t: r for part in distributed.gather_objects(seen) for t, r in part.items()}
        return self._curriculum.profiled((t.task_id, everyone[t.task_id]) for t in tasks)

    def roll(self, step: int, weights: int | None = None) -> StepGroups:
        """Return the groups of a step, counted from 0, and end the epoch where they end it.

        With `weights`, rollouts say in their metadata which weights sampled them.

        Raises:
            VerifierError: too many of the rollouts could not be graded.
            ConfigError: the allocator gave nothing.
        """
        seed = derive_seed(self._config.run.seed, "step", step)
        parts, epoch = self._parts, self._curriculum.epoch
        first = {} if self._curriculum.is_profiled else self.profile()
        self._weights = weights
        if parts.partial is None:
            rolled = self._rounds(step, seed)
        else:
            rolled = self._whole(parts.partial, step, seed)
        if parts.recompose is not None:
            made = parts.recompose.select(rolled.groups, step)
            rolled.groups, rolled.replayed = made.groups, made.replayed | rolled.replayed
            rolled.figures |= made.figures
        if parts.replay is not None:
            self._add_past(parts.replay, rolled, step)
        if parts.greedy:
            rolled.baselines = self._baselines(rolled.groups, seed)
        rolled.figures |= first
        if parts.hints is not None and self._curriculum.epoch > epoch:
            parts.hints.epoch_end()
        return rolled

    def _rounds(self, step: int, seed: int) -> StepGroups:
        wanted, most = self._curriculum.tasks_per_step, self._config.curriculum.max_resample_rounds
        tally = _Tally()
        while tally.rounds < most and tally.full < wanted:
            rolled = tally.asked / self._config.rollout.group_size
            size = _next_size(wanted, tally.full, rolled)
            draws = self._curriculum.draw(size, tally.taken)
            if not draws:
                break
            groups, outcomes, beside = self._rolled(draws, seed, step, tally)
            groups, beside = self._marked(self._told(groups)), self._marked(beside)
            tally.add(groups, outcomes, room=wanted - tally.full, keeps_all=most == 1)
            kept = {g.task.task_id for g in tally.kept}
            tally.beside += [g for g in beside if g.task.task_id in kept]
            self._curriculum.note((o.task_id, o.unaided) for o in outcomes)
        unscored = self._check(step, tally)
        self._maker.figures = tally.spent
        figures = {"unscored_share": unscored} | (tally.figures() if most > 1 else {})
        groups = tally.kept + tally.beside
        return StepGroups(groups, tally.made, is_graded=tally.is_graded, figures=figures)

    def _whole(self, partial: GroupsInFlight, step: int, seed: int) -> StepGroups:
        """Return the groups that became whole in this step; others stay in flight."""
        curriculum = self._curriculum
        found = partial.step(curriculum.tasks_per_step, curriculum.draw, seed=seed, step=step)
        groups = self._told(found.groups)
        outcomes = self._share([Draw(g.task, len(g.rollouts)) for g in groups], groups)
        tally = _Tally()
        tally.add(groups, outcomes, room=len(outcomes), keeps_all=True)
        curriculum.note((o.task_id, o.unaided) for o in outcomes)
        figures = {"unscored_share": self._check(step, tally)} | dict(found.figures)
        self._maker.figures = partial.figures
        graded = tally.is_graded
        return StepGroups(groups, groups, found.resumed, is_graded=graded, figures=figures)

    def _rolled(
        self, draws: Sequence[Draw], seed: int, step: int, tally: _Tally
    ) -> tuple[list[RolloutGroup], list[_Outcome], list[RolloutGroup]]:
        """Roll out a draw, then what an allocator that grows groups wants more of it; the third
        part are groups beside those of the tasks, such as of rewritten ones.

        A group grows where it was begun; new ones are dealt out among the processes.
        """
        everyone = list(draws)
        tally.asked += sum(d.size for d in draws)
        mine = self._make(everyone[self._rank :: self._world], seed, step)
        beside = self._noted(tally)
        outcomes = self._share(everyone, mine)
        turn = 0
        while self._parts.make_groups is None and (
            more := self._curriculum.more((o.task_id, o.unaided) for o in outcomes)
        ):
            turn += 1
            tally.asked += sum(d.size for d in more)
            known = {d.task.task_id for d in everyone}
            new = [d for d in more if d.task.task_id not in known]
            held = {g.task.task_id for g in mine}
            own = [d for d in more if d.task.task_id in held] + new[self._rank :: self._world]
            grown = self._make(own, derive_seed(seed, "grow", turn), step)
            beside += self._noted(tally)
            mine = _joined(mine, grown)
            everyone += new
            outcomes = self._share(everyone, mine)
        return mine, outcomes, beside

    def _told(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Write what was known of each task before its group into the group."""
        if not self._parts.knows:
            return groups
        known = self._curriculum.known([g.task for g in groups])
        return [
            replace(g, metadata={**g.metadata, **facts})
            for g, facts in zip(groups, known, strict=True)
        ]

    def _marked(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Write into each rollout which weights sampled it, where that is asked for."""
        if self._weights is None:
            return groups
        mark = {"weights": self._weights}
        return [
            replace(
                g,
                rollouts=tuple(replace(r, metadata={**r.metadata, **mark}) for r in g.rollouts),
            )
            for g in groups
        ]

    def _noted(self, tally: _Tally) -> list[RolloutGroup]:
        """Count what was just made, and return what was made beside it."""
        parts = self._parts
        tally.spent.add(self._maker.figures if parts.grower is None else parts.grower.figures)
        is_own = parts.make_groups is None and parts.grower is None
        further = self._maker.beside if is_own else {}
        return [group for groups in further.values() for group in groups]

    def _check(self, step: int, tally: _Tally) -> float:
        """Return the share of rollouts without a score, cut ones apart; refuse one that is too
        large."""
        if not tally.taken:
            raise ConfigError(
                f"step {step + 1}: the curriculum gave no task a rollout; look at "
                "curriculum.allocate and its options"
            )
        rollouts = [r for g in tally.made for r in g.rollouts]
        failed = [r for r in rollouts if r.outcome not in ("graded", "truncated")]
        first = failed[0].error if failed else ""
        everyone = distributed.gather_objects((len(failed), len(rollouts), first))
        total = sum(n for _, n, _ in everyone)
        share: float = sum(n for n, _, _ in everyone) / max(1, total)
        limit = self._config.rollout.max_unscored_share
        if share > limit or not total:
            cause = next((text for *_, text in everyone if text), "no rollouts")
            what = "none" if share == 1 or not total else f"only {1 - share:.0%}"
            raise VerifierError(
                f"step {step + 1}: {what} of the rollouts could be graded; the first cause: {cause}"
                + ("" if share == 1 else f" (rollout.max_unscored_share is {limit:g})")
            )
        return share

    def _make(self, draws: Sequence[Draw], seed: int, step: int) -> list[RolloutGroup]:
        tasks, sizes, parts = [d.task for d in draws], [d.size for d in draws], self._parts
        if parts.make_groups is not None:
            return parts.make_groups(tasks, seed)
        if parts.grower is not None:
            return parts.grower.make(tasks, sizes, seed=seed, step=step)
        return self._maker.make(tasks, sizes, seed=seed, hints=parts.hints)

    def _share(self, draws: Sequence[Draw], groups: Sequence[RolloutGroup]) -> list[_Outcome]:
        """What became of every process's groups, in the order of draws."""
        mine = {g.task.task_id: (g.rewards_G, _unaided(g), g.is_informative()) for g in groups}
        everyone = {t: x for part in distributed.gather_objects(mine) for t, x in part.items()}
        return [_Outcome(d.task.task_id, *everyone[d.task.task_id]) for d in draws]

    def _baselines(self, groups: Sequence[RolloutGroup], seed: int) -> dict[str, float]:
        """Reward of a greedy rollout of each task; where it was not graded, the group's mean."""
        kept = self._maker.figures
        made = self._maker.make(
            [g.task for g in groups],
            1,
            seed=derive_seed(seed, "greedy"),
            sampling=replace(train_sampling(self._config), temperature=0.0),
        )
        kept.add(self._maker.figures)
        self._maker.figures = kept
        return {
            g.task.task_id: (b.rewards_G or (g.mean_reward or 0.0,))[0]
            for g, b in zip(groups, made, strict=True)
        }

    def _add_past(self, replay: Replay, rolled: StepGroups, step: int) -> None:
        c = self._config.curriculum
        past = replay.pick(c.replay, step, {g.task.task_id for g in rolled.groups})
        fresh, used = list(rolled.groups), list[Rollout]()
        if c.refill:
            for i, group in enumerate(rolled.groups):
                known = replay.of_task(group.task.task_id, step)
                fresh[i], old = refilled(group, known, c.refill, c.success_above)
                used += old
            rolled.figures["rollouts_refilled"] = len(used)
        replay.add(rolled.groups, step)
        rolled.replayed |= {r.rollout_id for r in (*used, *(r for g in past for r in g.rollouts))}
        rolled.groups = [*fresh, *past]
        rolled.figures["groups_replayed"] = len(past)


def _joined(groups: Sequence[RolloutGroup], more: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Groups with further rollouts of their tasks, numbered on; new tasks' groups come last."""
    added = {g.task.task_id: g for g in more}
    found = []
    for group in groups:
        extra = added.pop(group.task.task_id, None)
        rollouts = group.rollouts
        for rollout in () if extra is None else extra.rollouts:
            i = len(rollouts)
            rollouts += (replace(rollout, rollout_id=f"{group.group_id}-{i}", sample_index=i),)
        found.append(replace(group, rollouts=rollouts))
    return [*found, *added.values()]


def _unaided(group: RolloutGroup) -> tuple[float, ...]:
    return tuple(r.score.reward for r in group.graded if r.score and not is_hinted(r))


def _next_size(wanted: int, full: int, rolled: float) -> int:
    """Tasks of the next round: what is missing, over the share of mixed groups seen so far.

    `rolled` is in rollouts of a whole group: groups that were stopped early count as their part.
    """
    if not rolled:
        return wanted
    return min(wanted, math.ceil((wanted - full) / max(full / rolled, 0.25)))
