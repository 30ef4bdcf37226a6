"""`learn`: epochs of practice, contrast, gate; then the choice among all versions, and the proof.

A step starts from a version of the pool, rolls out a batch of practice tasks, lets the critic (any
flow) propose edits and exemplars, and rolls the proposed libraries out on the gate split beside the
current one, with the same tasks and sample indices. At the end the winner among the empty library
and all accepted versions is chosen on the gate split, and only then the test split is touched,
which neither practice nor gate ever saw.

A resume runs the same steps again: everything that was paid for is found in the journal under its
content key, so the state needs no file of its own.

Does not know: how rollouts are made, what makes a lesson, how the journal keeps things.
Source: Training-Free GRPO (arXiv 2510.08191) for the loop; splits, gate and proof are our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfgrpo.errors import BudgetError
from tfgrpo.experience import (
    EMPTY_LIBRARY,
    FinalChoice,
    LibraryProposal,
    Proposer,
    stalled,
)
from tfgrpo.learning.books import note_on_lessons, record_step
from tfgrpo.learning.gatekeeper import Gatekeeper, Look
from tfgrpo.learning.learn_run import LearnRun
from tfgrpo.learning.pool import Pool, united
from tfgrpo.learning.practice import Batch
from tfgrpo.learning.practising import PracticeSampler
from tfgrpo.learning.unverified import UNVERIFIED
from tfgrpo.learning.version import EMPTY, Version
from tfgrpo.nudges import Nudger, Recheck, Rolled
from tfgrpo.rollout import RolloutGroup
from tfgrpo.sampling import Sampler
from tfgrpo.statistics import Interval, Scores, noise_floor, paired_difference


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
        run: settings, tasks, journal and view.
        sampler: runs rollouts at the gate and on the test split; bound to the policy, the verifier
            and the journal.
        critic: proposes edits.
        practice: draws practice tasks and rolls them out.
        nudger: gives practice tasks on which everything failed another try; None does not.
    """

    def __init__(
        self,
        run: LearnRun,
        sampler: Sampler,
        critic: Proposer,
        practice: PracticeSampler,
        *,
        nudger: Nudger | None = None,
    ) -> None:
        self._config = run.config
        self._splits = run.splits
        self._sampler = sampler
        self._critic = critic
        self._settings = run.settings
        self._store = run.store
        self._view = run.view
        self._nudger = nudger
        self._practice = practice
        self._nudges: list[Mapping[str, Any]] = []
        self._current = Version(EMPTY_LIBRARY)
        self._accepted: dict[str, Version] = {}
        self._proposals: list[LibraryProposal] = []
        self._gate = Gatekeeper(run, sampler)
        self._pool = Pool(run.config.learn.pool, self._gate.scores_of)
        self._next = 1
        self._notes: list[str] = []

    async def run(self) -> LearnOutcome:
        """Practise, gate, choose and prove; raises like `Sampler.groups`, budgets excepted."""
        stopped_by = ""
        try:
            if self._gate.is_open:
                await self._gate.scores(self._current, 0, "empty")
            for step, batch in enumerate(self._practice.batches(lambda: self._current.library), 1):
                await self._step(step, batch)
                if reason := self._why_stop():
                    stopped_by = reason
                    break
            if (chosen := await self._gate.selection(self._current)) is not None:
                self._accepted[chosen.version_id] = chosen
        except BudgetError as exc:
            stopped_by = f"budget: {exc}"
        if self._settings.lessons and (note := note_on_lessons(self._proposals)):
            self._notes.append(note)
        choice = self._gate.choose(self._current, self._accepted)
        version = self._version_of(choice)
        row = choice.to_dict() | {"stopped_by": stopped_by}
        self._store.record_decision("final", row, key="final")
        proof = None
        has_proof = bool(self._splits.test and self._sampler.verifier_id)
        if not self._sampler.verifier_id:
            self._notes.append(UNVERIFIED)
        if has_proof and not stopped_by.startswith("budget"):
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

    def _why_stop(self) -> str:
        """Return why no further step is worth its cost; empty where one is."""
        if self._settings.flow == "reflect" and self._gate.is_full(self._current):
            self._notes.append("practice ended early: the gate leaves nothing to gain")
            return "nothing left to gain at the gate"
        return stalled(self._proposals)

    async def _step(self, step: int, batch: Batch) -> None:
        self._sampler.raise_if_stopped()
        self._current = self._pool.parent(step, self._config.learn.seed) or self._current
        groups = await self._practice.roll(step, batch, self._current)
        self._measure_entries()
        rolled = await self._nudge(step, batch.epoch, groups)
        shown = groups if rolled is None else rolled.shown
        before = self._current
        library = replace(before.library, next_number=max(self._next, before.library.next_number))
        proposal = await self._critic.propose(shown, library, step=step)
        self._next = max(self._next, proposal.library.next_number)
        self._practice.take_replays(proposal.replayed)
        self._proposals.append(proposal)
        record_step(self._store, step, batch.epoch, before.version_id, groups, proposal)
        self._view.say(f"step {step}: {proposal.message}")
        await self._decide(step, proposal)
        if rolled is not None:
            await self._recheck(rolled, before)

    async def _decide(self, step: int, proposal: LibraryProposal) -> None:
        """Take what the gate accepts of a proposal into the pool; the best becomes current."""
        if not proposal.has_change:
            return
        if proposal.is_in_vain and self._accepted:
            self._view.say(f"step {step}: no replay turned a task; the gate is spared")
            return
        if not self._gate.is_open:
            self._accept(Version(proposal.library), step, [self._current])
            return
        base = self._current
        for version in reversed(await self._gate.accepted_of(step, base, proposal)):
            self._accept(version, step, [base])
        await self._merge(step)

    async def _merge(self, step: int) -> None:
        """Unite two tips of the pool that are each best on some gate tasks, once each pair."""
        if self._gate.is_full(self._current) or (pair := self._pool.pair()) is None:
            return
        first, second = pair
        version = Version(united(first.library, second.library), first.selector)
        if version.version_id in (first.version_id, second.version_id):
            return
        self._next = max(self._next, version.library.next_number)
        decision, _ = await self._gate.compare(step, "two versions united", first, version)
        if decision.accepted:
            self._accept(version, step, [first, second])

    async def _nudge(self, step: int, epoch: int, groups: Sequence[RolloutGroup]) -> Rolled | None:
        """Roll failed tasks again under help, where that is asked for."""
        if self._nudger is None:
            return None
        rolled = await self._nudger.roll(
            groups, self._practice.groups, step=step, epoch=epoch, version=self._current.version_id
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

    def _measure_entries(self) -> None:
        """Bring the measured values of the current library's entries up to date."""
        measured = self._practice.measured(self._current)
        if measured is not None:
            self._current = measured
            self._pool.renew(measured)
            if measured.version_id in self._accepted:
                self._accepted[measured.version_id] = measured

    def _accept(self, version: Version, step: int, parents: Sequence[Version]) -> None:
        self._current = version
        self._accepted[version.version_id] = version
        self._pool.add(version, [p.version_id for p in parents])
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
        difference = None
        if len(both) > 1:
            # The bootstrap's own seed, as in verdict and report: one number has one interval.
            difference = paired_difference(empty, final)
            if (known := self._sampler.reward_range) is not None:
                difference = difference.within(known, of_difference=True)
        row = {"noise_floor": floor, "draws": size, "tasks": len(both)}
        self._store.record_decision("aa", row, key="test")
        return TestComparison(empty, final, difference, floor)


def _floor(scores: Scores) -> float | None:
    if not any(len(rewards) > 1 for rewards in scores.values()):
        return None
    floor = noise_floor(scores).width
    return floor if math.isfinite(floor) else None
