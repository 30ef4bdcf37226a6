"""`learn`: epochs of practice, contrast, gate; then the choice among all versions, and the proof.

A step rolls out a batch of practice tasks, lets the critic propose edits and exemplars, and rolls
the proposed libraries out on the gate split beside the current one, with the same tasks and sample
indices. At the end the winner among the empty library and all accepted versions is chosen on the
gate split, and only then the test split is touched, which neither practice nor gate ever saw.

A resume runs the same steps again: everything that was paid for is found in the journal under its
content key, so the state needs no file of its own.

Does not know: how rollouts are made, what makes a lesson, how the journal keeps things.
Source: Training-Free GRPO (arXiv 2510.08191) for the loop; splits, gate and proof are our own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.context import Context
from tfgrpo.errors import BudgetError
from tfgrpo.experience import (
    EMPTY_LIBRARY,
    ExperienceSettings,
    FinalChoice,
    LibraryProposal,
    Proposer,
    Value,
    stalled,
)
from tfgrpo.experience.entry_value import inclusion_plan, observations_of, value_entries
from tfgrpo.learning.gatekeeper import EMPTY, Gatekeeper, Look, Version
from tfgrpo.learning.progress import ProgressView
from tfgrpo.nudges import Nudger, Recheck, Rolled
from tfgrpo.protocols import Allocator
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.sampling import GroupSpec, Sampler
from tfgrpo.statistics import Interval, Scores, noise_floor, paired_difference
from tfgrpo.store import Journal
from tfgrpo.tasks import Splits


@dataclass(frozen=True, slots=True)
class TestComparison:
    """What the test split says; nothing that learned or chose ever saw it."""

    empty: Scores
    final: Scores
    difference: Interval | None
    """Final minus empty; None where the empty library won or nothing could be compared."""
    noise_floor: float | None
    """Difference that two runs of the same library can show by chance (95 %)."""


@dataclass(slots=True)
class LearnOutcome:
    """What a run came to."""

    version: Version
    choice: FinalChoice
    accepted: tuple[Version, ...]
    proof: TestComparison | None
    stopped_by: str = ""
    """Why it ended before its last step, if it did."""
    looks: tuple[Look, ...] = ()
    """Every comparison at the gate, in order."""
    notes: list[str] = field(default_factory=list)
    nudges: tuple[Mapping[str, Any], ...] = ()
    """One record a step of what help for failed tasks came to; empty without nudging."""


class Learner:
    """One learning run over given parts.

    Args:
        config: the resolved settings.
        splits: practice, gate and test tasks.
        sampler: runs rollouts; bound to the policy, the verifier and the journal.
        critic: proposes edits.
        settings: the experience settings the critic was made with.
        store: the journal.
        view: shows progress.
        allocate: how many rollouts each practice task of a batch gets; uniform by default.
        traces: saved groups that stand in for fresh practice rollouts.
        nudger: gives practice tasks on which everything failed another try; None does not.
    """

    def __init__(
        self,
        config: Config,
        splits: Splits,
        sampler: Sampler,
        critic: Proposer,
        settings: ExperienceSettings,
        store: Journal,
        view: ProgressView,
        *,
        allocate: Allocator | None = None,
        traces: Sequence[RolloutGroup] = (),
        nudger: Nudger | None = None,
    ) -> None:
        self._config = config
        self._splits = splits
        self._sampler = sampler
        self._critic = critic
        self._settings = settings
        self._store = store
        self._view = view
        self._allocate = allocate
        self._traces = traces
        self._nudger = nudger
        self._nudges: list[Mapping[str, Any]] = []
        self._current = Version(EMPTY_LIBRARY)
        self._accepted: dict[str, Version] = {}
        self._practised: list[RolloutGroup] = []
        self._proposals: list[LibraryProposal] = []
        self._gate = Gatekeeper(config, splits, sampler, settings, store, view)
        self._notes: list[str] = []

    async def run(self) -> LearnOutcome:
        """Practise, gate, choose and prove; raises like `Sampler.groups`, budgets excepted."""
        stopped_by = ""
        try:
            if self._gate.is_open:
                await self._gate.scores(self._current, 0, "empty")
            for step, batch in enumerate(self._batches(), 1):
                await self._step(step, batch)
                if reason := stalled(self._proposals):
                    stopped_by = reason
                    break
            if (chosen := await self._gate.selection(self._current)) is not None:
                self._accepted[chosen.version_id] = chosen
        except BudgetError as exc:
            stopped_by = f"budget: {exc}"
        self._note_on_lessons()
        choice = self._gate.choose(self._current, self._accepted)
        version = self._version_of(choice)
        self._store.record_decision("final", choice.to_dict(), key="final")
        proof = None
        if self._splits.test and not stopped_by.startswith("budget"):
            try:
                proof = await self._prove(version)
            except BudgetError as exc:
                stopped_by = f"budget: {exc}"
        accepted = tuple(self._accepted.values())
        looks = tuple(self._gate.looks)
        nudges = tuple(self._nudges)
        return LearnOutcome(
            version, choice, accepted, proof, stopped_by, looks, self._notes, nudges
        )

    def _note_on_lessons(self) -> None:
        """Say it when lessons were asked for and none was fit to be tried."""
        if not self._settings.lessons or not any(p.informative for p in self._proposals):
            return
        outcomes = [o for p in self._proposals for o in p.outcomes if o.edit.kind == "lesson"]
        if any(o.result != "rejected" for o in outcomes):
            return
        reasons = Counter(o.reason for o in outcomes)
        unread = sum(p.calls.get(k, 0) for p in self._proposals for k in ("unusable", "cut"))
        failed = sum(p.calls.get("failed", 0) for p in self._proposals)
        causes = [n.problem for p in self._proposals for n in p.notes if n.kind == "failed"]
        not_asked = sum(p.calls.get("not_asked", 0) for p in self._proposals)
        why = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(2))
        self._notes.append(
            f"no lesson was fit to be tried: the critic proposed {len(outcomes)}"
            + (f" ({why})" if why else "")
            + (f", and {unread} of its replies were cut or could not be read" if unread else "")
            + (f"; {failed} of its calls failed, the first with {causes[0]}" if causes else "")
            + (f"; it was not asked about {not_asked} further groups" if not_asked else "")
        )

    def _batches(self) -> Iterable[tuple[int, Sequence[Task] | Sequence[RolloutGroup]]]:
        """Yield (epoch, batch) in the seeded order; another seed gives other batches."""
        learn = self._config.learn
        source: Sequence[Any] = self._traces or self._splits.practice
        for epoch in range(learn.epochs):
            order = list(source)
            random.Random(derive_seed("batches", learn.seed, epoch)).shuffle(order)
            for start in range(0, len(order), learn.batch):
                yield epoch, order[start : start + learn.batch]

    async def _step(self, step: int, batch: tuple[int, Sequence[Any]]) -> None:
        self._sampler.raise_if_stopped()
        epoch, items = batch
        groups = list(items) if self._traces else await self._practise(step, epoch, items)
        self._practised.extend(groups)
        self._measure_entries()
        rolled = await self._nudge(step, epoch, groups)
        shown = groups if rolled is None else rolled.shown
        before = self._current
        proposal = await self._critic.propose(shown, before.library, step=step)
        self._proposals.append(proposal)
        self._record_step(step, epoch, groups, proposal)
        self._view.say(f"step {step}: {proposal.message}")
        await self._decide(step, proposal)
        if rolled is not None:
            await self._recheck(rolled, before)

    async def _decide(self, step: int, proposal: LibraryProposal) -> None:
        """Make what the gate accepts of a proposal the current library."""
        if not proposal.has_change:
            return
        if not self._gate.is_open:
            self._accept(Version(proposal.library), step)
        elif (version := await self._gate.best_of(step, self._current, proposal)) is not None:
            self._accept(version, step)

    async def _practise(self, step: int, epoch: int, tasks: Sequence[Task]) -> list[RolloutGroup]:
        learn = self._config.learn
        contexts, offered = self._practice_contexts(step, tasks)
        metadata: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "arm": "current",
            "library_version": self._current.version_id,
        }
        if offered:
            metadata |= {"offered": offered, "keep": learn.keep_share}
        sizes = None
        if self._allocate is not None:
            sizes = self._allocate(tasks, self._practised, len(tasks) * learn.group_size)
        draws = GroupSpec(
            group_size=learn.group_size,
            first_index=epoch * learn.group_size,
            seed=learn.seed,
            scope=f"epoch{epoch}",
            stage="practice",
            metadata=metadata,
        )
        return await self._sampler.groups(
            tasks, draws, lambda task: contexts[task.task_id], sizes=sizes
        )

    async def _nudge(self, step: int, epoch: int, groups: Sequence[RolloutGroup]) -> Rolled | None:
        """Roll failed tasks again under help, where that is asked for."""
        if self._nudger is None:
            return None
        rolled = await self._nudger.roll(
            groups, self._practised, step=step, epoch=epoch, version=self._current.version_id
        )
        if rolled.failed:
            self._view.say(
                f"step {step}: {len(rolled.failed)} groups failed throughout; of "
                f"{len(rolled.nudged)} rolled again with {rolled.kind}, {len(rolled.solved)} had a "
                "success"
            )
        return rolled

    async def _recheck(self, rolled: Rolled, before: Version) -> None:
        """Roll nudged tasks without help under the library that their step gave, and book it."""
        assert self._nudger is not None
        now = self._current
        found: Recheck | None = None
        try:
            if now.version_id != before.version_id:
                found = await self._nudger.recheck(
                    rolled,
                    (now.version_id, lambda t: self._gate.context(now, t, "evaluation")),
                    (before.version_id, lambda t: self._gate.context(before, t, "evaluation")),
                )
        except BudgetError:
            self._record_nudge(rolled, None)  # what was rolled is told all the same
            raise
        self._record_nudge(rolled, found)

    def _record_nudge(self, rolled: Rolled, found: Recheck | None) -> None:
        row = rolled.to_dict(found)
        self._nudges.append(row)
        self._store.record_decision("nudge", row, key=str(rolled.step))

    def _practice_contexts(
        self, step: int, tasks: Sequence[Task]
    ) -> tuple[dict[str, Context], list[str]]:
        """Return each task's context; entries are left out by chance where that is asked for."""
        learn, library = self._config.learn, self._current.library
        ids = [e.experience_id for e in library.shown]
        chance = not learn.preset.startswith("paper") and learn.keep_share < 1 and bool(ids)
        plan: list[frozenset[str]] = []
        if chance:
            seed = derive_seed("inclusion", learn.seed, step)
            plan = inclusion_plan(ids, len(tasks), keep=learn.keep_share, seed=seed)
        contexts: dict[str, Context] = {}
        for position, task in enumerate(tasks):
            context = self._gate.context(self._current, task, "practice", step)
            if chance:
                parts = tuple(p for p in context.parts if p.source in plan[position])
                context = Context(parts, context.placement, context.template)
            contexts[task.task_id] = context
        return contexts, ids if chance else []

    def _measure_entries(self) -> None:
        """Bring the measured values of the current library's entries up to date."""
        values = {
            v.experience_id: Value(
                v.effect.estimate, v.effect.low, v.effect.high, v.effect.n_tasks, v.effect.level
            )
            for v in value_entries(observations_of(self._practised))
        }
        known = {e.experience_id for e in self._current.library.entries}
        values = {key: value for key, value in values.items() if key in known}
        if values:
            library = self._current.library.measured(values)
            self._current = Version(library, self._current.selector)
            if self._current.version_id in self._accepted:
                self._accepted[self._current.version_id] = self._current

    def _record_step(
        self, step: int, epoch: int, groups: Sequence[RolloutGroup], proposal: LibraryProposal
    ) -> None:
        self._store.record_decision(
            "step",
            {
                "step": step,
                "epoch": epoch,
                "library_version": self._current.version_id,
                "group_ids": [g.group_id for g in groups],
                **proposal.to_dict(),
            },
            key=str(step),
        )
        for number, outcome in enumerate(proposal.outcomes):
            if outcome.edit.kind == "lesson":
                for group_id in outcome.edit.provenance.group_ids:
                    row = {"group_id": group_id, "text": outcome.edit.text, "step": step}
                    self._store.record_decision("contrast", row, key=f"{step}.{number}")
        rejected = [o for o in proposal.outcomes if o.result == "rejected"]
        for number, outcome in enumerate(rejected):
            self._store.record_decision(
                "rejected_edit",
                {"step": step, "edit": outcome.edit.to_dict(), "reason": outcome.reason},
                key=f"{step}.{number}",
            )

    def _accept(self, version: Version, step: int) -> None:
        self._current = version
        self._accepted[version.version_id] = version
        self._store.record_library(version.version_id, version.library.to_dict())
        self._view.say(
            f"step {step}: the library is now version {version.version_id} with "
            f"{len(version.library.shown)} entries"
        )

    def _version_of(self, choice: FinalChoice) -> Version:
        if choice.is_empty:
            return Version(EMPTY_LIBRARY)
        return self._accepted.get(choice.version_id, self._current)

    async def _prove(self, version: Version) -> TestComparison:
        size = self._config.gate.test_group_size
        tasks = self._splits.test
        empty = await self._gate.score(Version(EMPTY_LIBRARY), tasks, "test", size, "empty", 0)
        floor = _floor(empty)
        if version.version_id == EMPTY:
            return TestComparison(empty, empty, None, floor)
        final = await self._gate.score(version, tasks, "test", size, "final", 0)
        both = [t for t in empty if empty[t] and final.get(t)]
        difference = (
            paired_difference(empty, final, seed=self._config.learn.seed) if len(both) > 1 else None
        )
        row = {"noise_floor": floor, "draws": size, "tasks": len(both)}
        self._store.record_decision("aa", row, key="test")
        return TestComparison(empty, final, difference, floor)


def _floor(scores: Scores) -> float | None:
    if not any(len(rewards) > 1 for rewards in scores.values()):
        return None
    floor = noise_floor(scores).width
    return floor if math.isfinite(floor) else None
