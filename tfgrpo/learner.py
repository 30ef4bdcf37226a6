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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.canonical import derive_seed
from tfgrpo.config import Config
from tfgrpo.context import Context
from tfgrpo.entry_value import inclusion_plan, observations_of, value_entries
from tfgrpo.errors import BudgetError
from tfgrpo.experience import (
    EMPTY_LIBRARY,
    Critic,
    Edit,
    ExperienceSettings,
    FinalChoice,
    GateDecision,
    HashedNgrams,
    Library,
    Proposal,
    RejectedEdits,
    SentenceEmbedder,
    Splits,
    TopK,
    Value,
    final_choice,
    gate_step,
    prompt_context,
    smaller_sets,
    stalled,
)
from tfgrpo.progress import ProgressView
from tfgrpo.protocols import Allocator
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import Draws, Sampler
from tfgrpo.statistics import Interval, Scores, gate_level, noise_floor, paired_difference
from tfgrpo.store import RunStore

EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Version:
    """What can be shipped: a library, injected whole or as the nearest k entries a task."""

    library: Library
    selector: TopK | None = None

    @property
    def version_id(self) -> str:
        """`empty`, the library's version, or that with `/top-k`."""
        if not self.library.shown:
            return EMPTY
        suffix = f"/top-{self.selector.k}" if self.selector else ""
        return self.library.version_id + suffix


@dataclass(frozen=True, slots=True)
class Proof:
    """What the test split says; nothing that learned or chose ever saw it."""

    empty: Scores
    final: Scores
    difference: Interval | None
    """Final minus empty; None where the empty library won or nothing could be compared."""
    noise_floor: float | None
    """Difference that two runs of the same library can show by chance (95 %)."""


@dataclass(frozen=True, slots=True)
class Look:
    """One comparison at the gate."""

    step: int
    what: str
    """`lessons`, `exemplars`, `lessons and exemplars`, `one edit`, or a way of selection."""
    version_id: str
    decision: GateDecision


@dataclass(slots=True)
class Learned:
    """What a run came to."""

    version: Version
    choice: FinalChoice
    accepted: tuple[Version, ...]
    proof: Proof | None
    stopped_by: str = ""
    """Why it ended before its last step, if it did."""
    looks: tuple[Look, ...] = ()
    """Every comparison at the gate, in order."""
    notes: list[str] = field(default_factory=list)


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
    """

    def __init__(
        self,
        config: Config,
        splits: Splits,
        sampler: Sampler,
        critic: Critic,
        settings: ExperienceSettings,
        store: RunStore,
        view: ProgressView,
        *,
        allocate: Allocator | None = None,
        traces: Sequence[RolloutGroup] = (),
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
        self._current = Version(EMPTY_LIBRARY)
        self._accepted: dict[str, Version] = {}
        self._gate_scores: dict[str, Scores] = {}
        self._practised: list[RolloutGroup] = []
        self._proposals: list[Proposal] = []
        self._looks: list[Look] = []
        self._notes: list[str] = []

    async def run(self) -> Learned:
        """Practise, gate, choose and prove; raises like `Sampler.groups`, budgets excepted."""
        stopped_by = ""
        try:
            if self._gated:
                await self._scores_on_gate(self._current, 0, "empty")
            for step, batch in enumerate(self._batches(), 1):
                await self._step(step, batch)
                if reason := stalled(self._proposals):
                    stopped_by = reason
                    break
            await self._try_selection()
        except BudgetError as exc:
            stopped_by = f"budget: {exc}"
        choice = self._choose()
        version = self._version_of(choice)
        self._store.record_decision("final", choice.to_dict(), key="final")
        proof = None
        if self._splits.test and not stopped_by.startswith("budget"):
            try:
                proof = await self._prove(version)
            except BudgetError as exc:
                stopped_by = f"budget: {exc}"
        accepted = tuple(self._accepted.values())
        looks = tuple(self._looks)
        return Learned(version, choice, accepted, proof, stopped_by, looks, self._notes)

    @property
    def _gated(self) -> bool:
        return self._config.gate.enabled and bool(self._splits.gate)

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
        proposal = await self._critic.propose(groups, self._current.library, step=step)
        self._proposals.append(proposal)
        self._record_step(step, epoch, groups, proposal)
        self._view.say(f"step {step}: {proposal.message}")
        if not proposal.has_change:
            return
        if not self._gated:
            self._accept(Version(proposal.library), step)
            return
        await self._gate(step, proposal)

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
        draws = Draws(
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

    def _practice_contexts(
        self, step: int, tasks: Sequence[Task]
    ) -> tuple[dict[str, Context], list[str]]:
        """Return each task's context; entries are left out by chance where that is asked for."""
        learn, library = self._config.learn, self._current.library
        ids = [e.experience_id for e in library.shown]
        chance = learn.preset == "default" and learn.keep_share < 1 and bool(ids)
        plan: list[frozenset[str]] = []
        if chance:
            seed = derive_seed("inclusion", learn.seed, step)
            plan = inclusion_plan(ids, len(tasks), keep=learn.keep_share, seed=seed)
        contexts: dict[str, Context] = {}
        for position, task in enumerate(tasks):
            context = self._context(self._current, task, "practice", step)
            if chance:
                parts = tuple(p for p in context.parts if p.source in plan[position])
                context = Context(parts, context.placement, context.template)
            contexts[task.task_id] = context
        return contexts, ids if chance else []

    def _context(self, version: Version, task: Task, use: Any, step: int = 2) -> Context:
        return prompt_context(
            version.library,
            self._settings,
            use=use,
            step=step,
            task=task,
            selector=version.selector,
        )

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
        self, step: int, epoch: int, groups: Sequence[RolloutGroup], proposal: Proposal
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

    async def _gate(self, step: int, proposal: Proposal) -> None:
        """Try the proposal, its lessons and its exemplars alone; then single edits if need be."""
        base = self._current
        tried: list[tuple[GateDecision, Version]] = []
        for edits in self._arms(proposal):
            tried.append(await self._look(step, base, edits, proposal))
        good = [pair for pair in tried if pair[0].accepted]
        if not good:
            for edits in smaller_sets(proposal.applied, self._config.gate.retry_single_edits):
                pair = await self._look(step, base, edits, proposal)
                if pair[0].accepted:
                    good = [pair]
                    break
        if good:
            _, version = max(
                good, key=lambda pair: pair[0].difference.estimate if pair[0].difference else 0.0
            )
            self._accept(version, step)

    def _arms(self, proposal: Proposal) -> list[tuple[Edit, ...]]:
        edits = proposal.applied
        lessons = tuple(e for e in edits if e.kind == "lesson")
        exemplars = tuple(e for e in edits if e.kind == "exemplar")
        if lessons and exemplars:
            return [edits, exemplars, lessons]
        return [edits]

    async def _look(
        self, step: int, base: Version, edits: tuple[Edit, ...], proposal: Proposal
    ) -> tuple[GateDecision, Version]:
        library = proposal.library
        if edits != proposal.applied:
            library = base.library.apply(
                edits,
                step=step,
                caps=self._settings.caps if self._settings.repairs.bounded_library else None,
                deduplicate=self._settings.repairs.bounded_library,
            ).library
        version = Version(library, base.selector)
        self._store.record_library(version.version_id, library.to_dict())
        current = await self._scores_on_gate(base, step, "current")
        proposed = await self._scores_on_gate(version, step, "proposed")
        decision = self._decide(step, _what(edits), base, version, current, proposed)
        if not decision.accepted:
            rejected = RejectedEdits(step, edits, decision).to_dict()
            self._store.record_decision(
                "rejected_edit",
                rejected | {"reason": decision.reason},
                key=f"{step}.gate.{len(self._looks)}",
            )
        return decision, version

    def _decide(
        self,
        step: int,
        what: str,
        base: Version,
        version: Version,
        current: Scores,
        proposed: Scores,
    ) -> GateDecision:
        """Compare two versions; every look makes the next one stricter."""
        gate, number = self._config.gate, len(self._looks) + 1
        decision = gate_step(
            current,
            proposed,
            min_difference=gate.min_difference,
            max_harm=gate.max_harm,
            level=gate_level(number, None, gate.level),
            seed=self._config.learn.seed,
        )
        self._looks.append(Look(step, what, version.version_id, decision))
        row = {
            "step": step,
            "look": number,
            "what": what,
            "current": base.version_id,
            "proposed": version.version_id,
            **decision.to_dict(),
        }
        self._store.record_decision("gate", row, key=f"{step}.{number}")
        verdict = "accepted" if decision.accepted else "rejected"
        self._view.say(f"gate, step {step}, {what}: {verdict}: {decision.reason}")
        return decision

    def _accept(self, version: Version, step: int) -> None:
        self._current = version
        self._accepted[version.version_id] = version
        self._store.record_library(version.version_id, version.library.to_dict())
        self._view.say(
            f"step {step}: the library is now version {version.version_id} with "
            f"{len(version.library.shown)} entries"
        )

    async def _scores_on_gate(self, version: Version, step: int, arm: str) -> Scores:
        if version.version_id not in self._gate_scores:
            self._gate_scores[version.version_id] = await self._score(
                version, self._splits.gate, "gate", self._config.gate.group_size, arm, step
            )
        return self._gate_scores[version.version_id]

    async def _score(
        self, version: Version, tasks: Sequence[Task], stage: str, size: int, arm: str, step: int
    ) -> Scores:
        draws = Draws(
            group_size=size,
            seed=self._config.learn.seed,
            scope=stage,
            stage=stage,
            metadata={"step": step, "arm": arm, "library_version": version.version_id},
        )
        groups = await self._sampler.groups(
            tasks, draws, lambda task: self._context(version, task, "evaluation")
        )
        return {g.task.task_id: g.rewards_G for g in groups}

    async def _try_selection(self) -> None:
        """Let the gate compare the nearest k entries a task with injecting all of them."""
        learn = self._config.learn
        if not (learn.top_k and self._gated and len(self._current.library.shown) > learn.top_k):
            return
        embedder = (
            HashedNgrams() if learn.embedder == "hashed" else SentenceEmbedder(learn.embedder)
        )
        version = Version(self._current.library, TopK(learn.top_k, embedder))
        whole = await self._scores_on_gate(self._current, 0, "current")
        chosen = await self._scores_on_gate(version, 0, "proposed")
        what = f"the nearest {learn.top_k} entries a task instead of all"
        decision = self._decide(0, what, self._current, version, whole, chosen)
        if decision.accepted:
            self._accepted[version.version_id] = version

    def _choose(self) -> FinalChoice:
        if not self._gated:
            reason = "no gate: the last version is taken as it is, unproven"
            return FinalChoice(self._current.version_id, reason, None, {})
        if not self._accepted:
            reason = f"the gate accepted none of {len(self._looks)} proposed versions"
            return FinalChoice(EMPTY, reason, None, {})
        scored = {EMPTY: self._gate_scores.get(EMPTY, {})}
        for version_id in self._accepted:
            if version_id in self._gate_scores:
                scored[version_id] = self._gate_scores[version_id]
        return final_choice(scored, seed=self._config.learn.seed)

    def _version_of(self, choice: FinalChoice) -> Version:
        if choice.is_empty:
            return Version(EMPTY_LIBRARY)
        return self._accepted.get(choice.version_id, self._current)

    async def _prove(self, version: Version) -> Proof:
        size = self._config.gate.test_group_size
        tasks = self._splits.test
        empty = await self._score(Version(EMPTY_LIBRARY), tasks, "test", size, "empty", 0)
        floor = _floor(empty)
        if version.version_id == EMPTY:
            return Proof(empty, empty, None, floor)
        final = await self._score(version, tasks, "test", size, "final", 0)
        both = [t for t in empty if empty[t] and final.get(t)]
        difference = (
            paired_difference(empty, final, seed=self._config.learn.seed) if len(both) > 1 else None
        )
        row = {"noise_floor": floor, "draws": size, "tasks": len(both)}
        self._store.record_decision("aa", row, key="test")
        return Proof(empty, final, difference, floor)


def _what(edits: Sequence[Edit]) -> str:
    kinds = {e.kind for e in edits}
    if len(edits) == 1:
        return f"one {edits[0].kind}"
    if len(kinds) == 2:
        return "lessons and exemplars"
    return "exemplars" if kinds == {"exemplar"} else "lessons"


def _floor(scores: Scores) -> float | None:
    if not any(len(rewards) > 1 for rewards in scores.values()):
        return None
    floor = noise_floor(scores).width
    return floor if math.isfinite(floor) else None
