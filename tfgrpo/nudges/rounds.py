"""Rounds of nudged groups for the failed tasks of a step, and the check without help afterwards.

Each round rolls every open task once more, all at the same time, under its practice context and one
nudge. The rollouts of a step stay under a cap that is fixed before the first; what checking a task
will take is set aside when the task enters. Everything goes through the run's sampler, so journal,
budget and stop are those of any rollout.

Does not know methods, the critic, the gate. Source: own; which groups are kept is SAGE's rule, the
pooling of contexts LoPE's regrouping (see `perturb`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import Context
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.nudges.method import Nudge, NudgeMethod, StepView, has_failed, has_success
from tfgrpo.nudges.record import Recheck, Rolled
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.sampling import GroupSpec, Sampler

STAGE = "nudge"
RECHECK = "recheck"
Job = tuple[Task, Context, int]
"""What a task is given in a round, and its rollouts."""


class Nudger:
    """Gives failed tasks another try.

    Args:
        config: limits, what a success is.
        method: which help comes next.
        sampler: runs rollouts.
        group_size: rollouts of a nudged group.
        seed: the run's seed.
    """

    def __init__(
        self, config: NudgeConfig, method: NudgeMethod, sampler: Sampler, group_size: int, seed: int
    ) -> None:
        self._config = config
        self._method = method
        self._sampler = sampler
        self._group_size = group_size
        self._seed = seed

    async def roll(
        self,
        groups: Sequence[RolloutGroup],
        practised: Sequence[RolloutGroup],
        *,
        step: int,
        epoch: int,
        version: str,
    ) -> Rolled:
        """Roll the step's failed tasks again under help.

        Args:
            groups: the step's practice groups.
            practised: all of the run's so far.
            step, epoch, version: kept with each group; `version` is the library's.

        Raises like `Sampler.groups`.
        """
        above = self._config.success_above
        failed = tuple(g for g in groups if has_failed(g, above))
        rounds = _Rounds(self._config, self._group_size, sum(len(g.rollouts) for g in groups))
        open_groups = failed
        if self._config.asks_lm:  # a text for which no rollout is left is not paid for
            open_groups = rounds.fits(failed)
        leaks_before = self._method.books["leaks"]
        await self._method.prepare(StepView(epoch, tuple(groups), open_groups, tuple(practised)))
        rounds.capped.update(g.task.task_id for g in failed[len(open_groups) :])
        metadata = {"step": step, "epoch": epoch, "arm": "nudged", "library_version": version}
        while jobs := rounds.jobs(open_groups, lambda tried: self._method.next(tried, epoch)):
            rounds.take(await self._round(jobs, rounds.number, epoch, metadata))
        shown, taught = [], []
        for group in groups:
            task_id = group.task.task_id
            kept, has_news = worth_showing(
                group, rounds.nudged.get(task_id, ()), between=self._config.between, above=above
            )
            shown.extend(kept)
            if has_news:
                taught.append(task_id)
        return Rolled(
            step=step,
            epoch=epoch,
            kind=self._config.kind,
            failed=failed,
            nudged={t: tuple(g) for t, g in rounds.nudged.items()},
            shown=tuple(shown),
            taught=tuple(taught),
            without=tuple(rounds.without),
            capped=tuple(sorted(rounds.capped)),
            leaks=self._method.books["leaks"] - leaks_before + rounds.leaks,
            above=above,
        )

    async def _round(
        self, jobs: Sequence[Job], number: int, epoch: int, metadata: Mapping[str, Any]
    ) -> list[RolloutGroup]:
        contexts = {task.task_id: context for task, context, _ in jobs}
        draws = GroupSpec(
            group_size=self._group_size,
            first_index=epoch * self._group_size,
            # By round, so that a context that comes back is drawn anew and not found in the cache.
            seed=derive_seed(STAGE, self._seed, number),
            scope=f"{STAGE}{number} epoch{epoch}",
            stage=STAGE,
            metadata={**metadata, "round": number, "nudge": self._config.kind},
        )
        return await self._sampler.groups(
            [task for task, _, _ in jobs],
            draws,
            lambda task: contexts[task.task_id],
            sizes=[n for _, _, n in jobs],
        )

    async def recheck(
        self,
        rolled: Rolled,
        now: tuple[str, Callable[[Task], Context]],
        before: tuple[str, Callable[[Task], Context]],
    ) -> Recheck | None:
        """Roll the nudged tasks without help under the new library, and under the old as control.

        Args:
            rolled: the step's rounds.
            now, before: version id and contexts of the library after and before the step.

        Returns None where nothing was nudged or `recheck` is 0. Raises like `Sampler.groups`.
        """
        tasks = [g.task for g in rolled.failed if g.task.task_id in rolled.nudged]
        if not tasks or not self._config.recheck:
            return None
        arms = [("kept", now), ("control", before)][: 2 if self._config.control else 1]
        found = []
        for arm, (version, context) in arms:
            draws = GroupSpec(
                group_size=self._config.recheck,
                first_index=rolled.epoch * self._config.recheck,
                # A seed of its own: under an equal prompt the practice draws would come back.
                seed=derive_seed(RECHECK, self._seed),
                scope=f"{RECHECK} epoch{rolled.epoch}",
                stage=RECHECK,
                metadata={
                    "step": rolled.step,
                    "epoch": rolled.epoch,
                    "arm": arm,
                    "library_version": version,
                },
            )
            found.append(await self._sampler.groups(tasks, draws, context))
        return Recheck.of(
            found[0],
            found[1] if len(found) > 1 else None,
            (now[0], before[0]),
            draws=self._config.recheck,
            above=self._config.success_above,
        )


class _Rounds:
    """The books of one step's rounds: who is open, what is spent of the cap."""

    def __init__(self, config: NudgeConfig, group_size: int, practice_rollouts: int) -> None:
        self._config = config
        self._group_size = group_size
        self._left = config.cap(practice_rollouts)
        self._closed: set[str] = set()
        self.number = 0
        """Rounds begun."""
        self.nudged: dict[str, list[RolloutGroup]] = {}
        self.without: list[str] = []
        self.capped: set[str] = set()
        self.leaks = 0

    def fits(self, failed: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """Return the first failed groups whose first round and check fit under the cap."""
        first = self._config.share(self._group_size) + self._config.recheck_rollouts
        return tuple(failed[: self._left // first])

    def jobs(
        self,
        failed: Sequence[RolloutGroup],
        ask: Callable[[Sequence[RolloutGroup]], Nudge | None],
    ) -> list[Job]:
        """Begin a round: return what each open task is given, within what is left of the cap."""
        self.number += 1
        made: list[Job] = []
        for bare in failed:
            task = bare.task
            if task.task_id in self._closed:
                continue
            tried = [bare, *self.nudged.get(task.task_id, ())]
            nudge = ask(tried)
            if nudge is None or self._gives_away(nudge, task):
                self._closed.add(task.task_id)
                if len(tried) == 1:
                    self.without.append(task.task_id)
                continue
            n = nudge.n or self._group_size
            cost = n + (self._config.recheck_rollouts if len(tried) == 1 else 0)
            if cost > self._left:
                self._closed.add(task.task_id)
                self.capped.add(task.task_id)
                continue
            self._left -= cost
            made.append((task, bare.context.with_parts(*nudge.parts), n))
        return made

    def _gives_away(self, nudge: Nudge, task: Task) -> bool:
        """The last line against a text with the answer, whoever planned it.

        A draft is the policy's own and an example another task's: neither was made from this
        task's reference, so an answer in it is chance.
        """
        found = sum(leaks(p.text, task) for p in nudge.parts if p.kind in _FROM_REFERENCE)
        self.leaks += found
        return found > 0

    def take(self, groups: Sequence[RolloutGroup]) -> None:
        """Add a round's groups."""
        for group in groups:
            self.nudged.setdefault(group.task.task_id, []).append(group)


_FROM_REFERENCE = ("hint", "strategy", "perturbation")


def worth_showing(
    bare: RolloutGroup, nudged: Sequence[RolloutGroup], *, between: bool, above: float
) -> tuple[list[RolloutGroup], bool]:
    """Return what the critic gets of a task, and whether help gave it something to compare.

    Groups that differ in themselves come as they are. Where none does but a rollout under help
    succeeded, it comes together with the failed group (`between`), or alone, for worked examples.
    """
    informative = [g for g in nudged if g.is_informative()]
    if informative:
        return [*([bare] if bare.is_informative() else []), *informative], True
    good = [g for g in nudged if has_success(g, above)]
    if not good:
        return [bare], False
    return ([pooled(bare, nudged)], True) if between else (good[:1], False)


def pooled(bare: RolloutGroup, nudged: Sequence[RolloutGroup]) -> RolloutGroup:
    """Return the rollouts of a task under several contexts as one group for a comparison in words.

    It has the id of the nudged group with the highest mean, so that what is learnt points to
    rollouts that exist; it is never recorded. Its context holds all parts that were given.
    """
    best = max(nudged, key=lambda g: g.mean_reward if g.mean_reward is not None else float("-inf"))
    given = [p for g in nudged for p in g.context.parts if p not in bare.context.parts]
    metadata: Mapping[str, Any] = {
        "stage": STAGE,
        "pooled": [bare.group_id, *(g.group_id for g in nudged)],
    }
    return RolloutGroup(
        group_id=best.group_id,
        task=bare.task,
        rollouts=tuple(r for g in (bare, *nudged) for r in g.rollouts),
        context=bare.context.with_parts(*dict.fromkeys(given)),
        policy_id=bare.policy_id,
        metadata=metadata,
    )
