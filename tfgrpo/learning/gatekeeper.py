"""Candidates at the gate: versions scored on held-out tasks, compared, accepted or not.

A version is a library and a way of injecting it. Each is rolled out once on the gate split, under
the same tasks and sample indices as every other, and every further look makes the test stricter,
so that the stated level holds for the whole run. Does not know practice or the critic's stages.
Source: own; the rules are in `experience.gate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.context import Context
from tfgrpo.experience import (
    Edit,
    FinalChoice,
    GateDecision,
    LibraryProposal,
    RejectedEdits,
    TopK,
    final_choice,
    gate_step,
    prompt_context,
    smaller_sets,
)
from tfgrpo.experience.select import embedder_of
from tfgrpo.learning.learn_run import LearnRun
from tfgrpo.learning.version import EMPTY, Version
from tfgrpo.rollout import Task
from tfgrpo.sampling import GroupSpec, Sampler
from tfgrpo.statistics import Scores, choice_level, gate_level

_NEAR_FULL = 0.01
"""A mean gate reward so close to full marks leaves nothing to gain."""


@dataclass(frozen=True, slots=True)
class Look:
    """One comparison at the gate."""

    step: int
    what: str
    """`lessons`, `exemplars`, `lessons and exemplars`, `one edit`, or a way of selection."""
    version_id: str
    decision: GateDecision


class Gatekeeper:
    """Scores versions on held-out tasks and decides between them.

    Args:
        run: whose gate tasks decide.
        sampler: runs rollouts.
    """

    def __init__(self, run: LearnRun, sampler: Sampler) -> None:
        self._config = run.config
        self._splits = run.splits
        self._sampler = sampler
        self._settings = run.settings
        self._store = run.store
        self._view = run.view
        self._scored: dict[str, Scores] = {}
        self.looks: list[Look] = []
        """Every comparison, in order."""

    @property
    def is_open(self) -> bool:
        """True when there is something to decide with: gate tasks, and a verifier to judge them."""
        has_tasks = self._config.gate.enabled and bool(self._splits.gate)
        return has_tasks and bool(self._sampler.verifier_id)

    def context(self, version: Version, task: Task, use: Any, step: int = 2) -> Context:
        """Return what a task is given under a version."""
        return prompt_context(
            version.library,
            self._settings,
            use=use,
            step=step,
            task=task,
            selector=version.selector,
        )

    async def accepted_of(
        self, step: int, base: Version, proposal: LibraryProposal
    ) -> list[Version]:
        """Try the proposal in arms, then single edits if need be; return what passes, best first.

        Arms are the lessons, the exemplars, both, and a rewrite of crowded topics. In the flow
        `reflect` a further arm costs rollouts only while the arms before leave something to gain.
        """
        tried: list[tuple[GateDecision, Version]] = []
        for edits in self._arms(proposal):
            if not self._is_settled(edits, tried):
                tried.append(await self._look(step, base, edits, proposal))
        good = [pair for pair in tried if pair[0].accepted]
        if good and proposal.rewrite is not None:
            rival = Version(proposal.rewrite, base.selector)
            pair = await self.compare(step, "rewritten topics", good[0][1], rival)
            good += [pair] if pair[0].accepted else []
        if not good:
            # Replays have sifted the rules one by one; alone, a rule pays at the first look only.
            is_later = self._settings.flow == "reflect" and bool(base.library.shown)
            retries = 0 if is_later else self._config.gate.retry_single_edits
            reworded = [e for e in proposal.applied if e.op != "mark"]
            for edits in smaller_sets(reworded, retries):
                pair = await self._look(step, base, edits, proposal)
                if pair[0].accepted:
                    good = [pair]
                    break
        good.sort(key=lambda pair: -_mean_score(self._scored[pair[1].version_id]))
        return [version for _, version in good]

    async def compare(
        self, step: int, what: str, base: Version, version: Version
    ) -> tuple[GateDecision, Version]:
        """Score two versions and decide between them; a look like any other."""
        self._store.record_library(version.version_id, version.library.to_dict())
        current = await self.scores(base, step, "current")
        proposed = await self.scores(version, step, "proposed")
        return self._decide(step, what, base, version, current, proposed), version

    def scores_of(self, version_id: str) -> Scores:
        """Return the gate scores of a version; empty where it was not scored."""
        return self._scored.get(version_id, {})

    def _arms(self, proposal: LibraryProposal) -> list[tuple[Edit, ...]]:
        edits = proposal.applied
        lessons = tuple(e for e in edits if e.kind == "lesson")
        exemplars = tuple(e for e in edits if e.kind == "exemplar")
        if exemplars and any(e.op != "mark" for e in lessons):
            if self._settings.flow == "reflect":
                return [lessons, edits, exemplars]
            return [edits, exemplars, lessons]
        return [edits]

    def _is_settled(
        self, edits: Sequence[Edit], tried: Sequence[tuple[GateDecision, Version]]
    ) -> bool:
        """True when an arm need not be tried: full marks are reached, or lessons are accepted and
        the arm would leave them out."""
        good = [version for decision, version in tried if decision.accepted]
        if self._settings.flow != "reflect" or not good:
            return False
        return any(self.is_full(v) for v in good) or all(e.kind == "exemplar" for e in edits)

    def is_full(self, version: Version) -> bool:
        """True when a version's gate scores leave nothing to gain, where full marks are known."""
        full = self._settings.exemplar_reward
        scores = self.scores_of(version.version_id)
        if full is None or not scores:
            return False
        return _mean_score(scores) >= full - _NEAR_FULL * max(1.0, abs(full))

    async def _look(
        self, step: int, base: Version, edits: tuple[Edit, ...], proposal: LibraryProposal
    ) -> tuple[GateDecision, Version]:
        library = proposal.library
        if edits != proposal.applied:
            bounded = self._settings.repairs.bounded_library
            library = base.library.apply(
                edits,
                step=step,
                caps=self._settings.caps if bounded else None,
                deduplicate=bounded,
            ).library
        version = Version(library, base.selector)
        decision, version = await self.compare(step, _what(edits), base, version)
        if not decision.accepted:
            rejected = RejectedEdits(step, edits, decision).to_dict()
            self._store.record_decision(
                "rejected_edit",
                rejected | {"reason": decision.reason},
                key=f"{step}.gate.{len(self.looks)}",
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
        gate, number = self._config.gate, len(self.looks) + 1
        decision = gate_step(
            current,
            proposed,
            min_difference=gate.min_difference,
            max_harm=gate.max_harm,
            level=gate_level(number, None, gate.level),
            seed=self._config.learn.seed,
            reward_range=self._sampler.reward_range,
        )
        self.looks.append(Look(step, what, version.version_id, decision))
        row = {
            "step": step,
            "look": number,
            "what": what,
            "current": base.version_id,
            "proposed": version.version_id,
            **decision.to_dict(),
        }
        self._store.record_decision("gate", row, key=f"{step or 'selection'}.{number}")
        self._view.say(f"gate, step {step}, {what}: {look_word(decision)}: {decision.reason}")
        return decision

    async def scores(self, version: Version, step: int, arm: str) -> Scores:
        """Return a version's rewards by gate task; rolled out once."""
        if version.version_id not in self._scored:
            self._scored[version.version_id] = await self.score(
                version, self._splits.gate, "gate", self._config.gate.group_size, arm, step
            )
        return self._scored[version.version_id]

    async def score(
        self, version: Version, tasks: Sequence[Task], stage: str, size: int, arm: str, step: int
    ) -> Scores:
        """Return a version's rewards by task on any held-out tasks."""
        draws = GroupSpec(
            group_size=size,
            seed=self._config.learn.seed,
            scope=stage,
            stage=stage,
            metadata={"step": step, "arm": arm, "library_version": version.version_id},
        )
        groups = await self._sampler.groups(
            tasks, draws, lambda task: self.context(version, task, "evaluation")
        )
        return {g.task.task_id: g.rewards_G for g in groups}

    async def selection(self, base: Version) -> Version | None:
        """Let the gate compare the nearest k entries a task with injecting all of them."""
        learn = self._config.learn
        if not (learn.top_k and self.is_open and len(base.library.shown) > learn.top_k):
            return None
        version = Version(base.library, TopK(learn.top_k, embedder_of(learn.embedder)))
        whole = await self.scores(base, 0, "current")
        chosen = await self.scores(version, 0, "proposed")
        what = f"the nearest {learn.top_k} entries a task instead of all"
        decision = self._decide(0, what, base, version, whole, chosen)
        return version if decision.accepted else None

    def choose(self, current: Version, accepted: Mapping[str, Version]) -> FinalChoice:
        """Choose among the empty library and the accepted versions, at 95 % over all looks."""
        if not self.is_open:
            reason = "no gate: the last version is taken as it is, unproven"
            return FinalChoice(current.version_id, reason, None, {})
        if not accepted:
            reason = f"the gate let none of {len(self.looks)} candidates pass"
            return FinalChoice(EMPTY, reason, None, {})
        scored = {EMPTY: self._scored.get(EMPTY, {})}
        for version_id in accepted:
            if version_id in self._scored:
                scored[version_id] = self._scored[version_id]
        return final_choice(
            scored,
            level=choice_level(len(self.looks)),
            seed=self._config.learn.seed,
            reward_range=self._sampler.reward_range,
        )


def look_word(decision: GateDecision) -> str:
    """Return one word for how a comparison ended: what passes is a candidate until the choice."""
    return "candidate" if decision.accepted else "rejected"


def _mean_score(scores: Scores) -> float:
    means = [sum(r) / len(r) for r in scores.values() if r]
    return sum(means) / len(means) if means else 0.0


def _what(edits: Sequence[Edit]) -> str:
    kinds = {e.kind for e in edits}
    if len(edits) == 1:
        return f"one {edits[0].kind}"
    if len(kinds) == 2:
        return "lessons and exemplars"
    return "exemplars" if kinds == {"exemplar"} else "lessons"
