"""The critic of one group at a time: from the groups of a step to a proposed library.

Flow `contrast`: summarise each attempt (short ones are read as they are), contrast the attempts of
each informative group (the semantic advantage, with the numeric ones shown), relate the lessons to
the library, merge what several groups propose, apply. Groups run concurrently. Without an
informative group nothing is asked. The result is a proposal: the gate decides.
Does not know rollouts' making, gates, files. Source: Training-Free GRPO; accountability, guards
and quarantine are our own. The published flows are in `paper_flow`, the flow `reflect` is in
`experience.reflect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.experience.critic.asker import Asker, Refusals, Where, together
from tfgrpo.experience.critic.evidence import trajectory
from tfgrpo.experience.critic.merging import MergeOutcome, reconcile, settle
from tfgrpo.experience.critic.paper_flow import paper_step
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.critic.proposal import LibraryProposal, Settled, close_books, redacted
from tfgrpo.experience.critic.stage_prompts import StagePrompts
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.edits import (
    Edit,
    EditOutcome,
    Lesson,
    RejectedRow,
    numbered,
    read_lessons,
)
from tfgrpo.experience.entry import Provenance, Trust
from tfgrpo.experience.exemplars import exemplar_edits
from tfgrpo.experience.guards import (
    Foreign,
    Guards,
    foreign_texts,
    has_third_party,
    hint_texts,
)
from tfgrpo.experience.informative import Teaching, teaching_groups, usable
from tfgrpo.experience.library import Library
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.protocols import LM
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.token_estimates import estimate_tokens


class Critic:
    """Turns groups into a proposed library.

    Args:
        lm: what is asked; None where the settings want no lessons.
        settings: flow, repairs, caps, sizes.
        guards: what must not become a lesson; built from a step's own tasks where None.
        count: tokens of a text for the critic's and the policy's model.
    """

    def __init__(
        self,
        lm: LM | None,
        settings: ExperienceSettings | None = None,
        *,
        guards: Guards | None = None,
        count: TokenCounter = estimate_tokens,
    ) -> None:
        self.settings = settings or ExperienceSettings()
        if lm is not None and self.settings.flow == "reflect":
            raise ConfigError(
                "the settings ask for the flow 'reflect': make it with make_critic, or give "
                "Critic settings of another flow"
            )
        if lm is None and self.settings.lessons:
            raise ConfigError(
                "the critic has no LM: give one, or set experience.lessons = false for exemplars"
            )
        self._lm = lm
        self._guards = guards
        self._count = count
        self._refusals = Refusals()

    async def propose(
        self, groups: Sequence[RolloutGroup], library: Library, *, step: int | None = None
    ) -> LibraryProposal:
        """Return the library that these groups speak for.

        Raises:
            ProviderError: no further call can succeed, or the first few all failed alike.
            BudgetError: a cap was reached.
        """
        settings = self.settings
        step = library.step + 1 if step is None else step
        teaching = teaching_groups(groups, settings)
        guards = self._guards or Guards.of(
            (g.task for g in groups), max_words=2 * settings.max_words
        )
        run = _Step(self._lm, settings, guards, self._count, library, self._refusals)
        if self._lm is not None and settings.lessons:
            if settings.flow == "contrast":
                await run.lessons(teaching.informative)
            else:
                assert run.asker is not None
                merged = await paper_step(
                    run.asker, settings, guards, teaching.informative, library, step
                )
                run.take(merged)
        run.exemplars(teaching)
        return run.finish(teaching, step)


class _Step:
    """The books of one step while it runs."""

    def __init__(
        self,
        lm: LM | None,
        settings: ExperienceSettings,
        guards: Guards,
        count: TokenCounter,
        library: Library,
        refusals: Refusals,
    ) -> None:
        self.settings = settings
        self.guards = guards if settings.repairs.fenced_data else None
        self.count = count
        self.library = library
        self.asker = None if lm is None else Asker(lm, settings, count, refusals)
        self.prompts = StagePrompts(settings, count)
        self.edits: list[Edit] = []
        self.settled: list[EditOutcome] = []
        self.rejected: list[RejectedRow] = []

    def take(self, merged: MergeOutcome) -> None:
        """Add a merge's results to the books."""
        self.edits.extend(merged.edits)
        self.settled.extend(merged.settled)
        self.rejected.extend(merged.rejected)

    async def lessons(self, groups: Sequence[RolloutGroup]) -> None:
        """Ask for lessons of every group and bring them together."""
        found = await self._asked(groups)
        checked = [self._checked(edit, foreign) for edits, foreign in found for edit in edits]
        proposals = numbered(edit for edit, _ in checked)
        verdicts = [verdict for _, verdict in checked]
        held: list[Edit] = []
        live: list[Edit] = []
        for edit, verdict in zip(proposals, verdicts, strict=True):
            if verdict:
                self.settled.append(EditOutcome(redacted(edit), "rejected", verdict))
            else:
                (held if edit.quarantine else live).append(edit)
        related = await self._related(live)
        self.edits.extend(held)
        self.take(await self._merged(related))

    async def _asked(self, groups: Sequence[RolloutGroup]) -> list[tuple[list[Edit], Foreign]]:
        """Ask about every group; about no more than the first `give_up_after` where not one of
        their replies can be read."""
        first = self.settings.give_up_after or len(groups)
        found = await together(self._group(g) for g in groups[:first])
        left, books = groups[first:], self._asker().books
        if left and books.unread("contrast") == first:
            books.counts["not_asked"] += len(left)
            return found
        return found + await together(self._group(g) for g in left)

    async def _group(self, group: RolloutGroup) -> tuple[list[Edit], Foreign]:
        rollouts = usable(group, self.settings)
        foreign = Foreign.of((*foreign_texts(group.task, rollouts), *hint_texts(group.context)))
        summaries = await self._summaries(group, rollouts)
        asker = self._asker()
        limit = asker.input_tokens(asker.reply_tokens)
        lessons = await asker.ask(
            Where("contrast", group.task.task_id),
            lambda room: self.prompts.contrast(group, summaries, room),
            read_lessons,
        )
        shown = self.prompts.shown_attempts(group, limit)
        trust: Trust = "third_party" if has_third_party(rollouts) else "model"
        wanted = (lessons or ())[: self.settings.lessons_per_group]
        for lesson in (lessons or ())[self.settings.lessons_per_group :]:
            reason = f"more than {self.settings.lessons_per_group} lessons of one group"
            self.rejected.append(RejectedRow(repr(lesson.text)[:160], reason))
        return [_proposed(lesson, group, shown, trust) for lesson in wanted], foreign

    async def _summaries(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> dict[str, str]:
        long = [r for r in rollouts if self._wants_summary(r)]
        asker = self._asker()

        async def one(rollout: Rollout) -> str | None:
            return await asker.ask(
                Where("summarise", group.task.task_id, rollout.rollout_id),
                lambda room: self.prompts.summarise(group, rollout, room),
                lambda text: text,
            )

        texts = await together(one(r) for r in long)
        return {r.rollout_id: t for r, t in zip(long, texts, strict=True) if t}

    def _wants_summary(self, rollout: Rollout) -> bool:
        if self.settings.summarise != "auto":
            return self.settings.summarise == "always"
        is_single = len(rollout.steps) < 2 and not rollout.steps[0].observations
        return not (
            is_single and self.count(trajectory(rollout)) <= self.settings.summarise_over_tokens
        )

    def _checked(self, edit: Edit, foreign: Foreign) -> tuple[Edit, str]:
        """Return the edit, marked where it must wait, and why it is refused, if it is."""
        if self.guards is None:
            return edit, ""
        finding = self.guards.check(edit.text, foreign=foreign)
        if finding.verdict == "refuse":
            return edit, finding.reason
        if finding.verdict == "quarantine":
            return replace(edit, quarantine=finding.reason, trust="third_party"), ""
        return edit, ""

    async def _related(self, live: Sequence[Edit]) -> list[Edit]:
        """Ask, group by group, how lessons relate to a library that has entries."""
        has_lessons = any(e.kind == "lesson" for e in self.library.shown)
        if not live or not has_lessons or self.settings.update == "direct":
            return list(live)
        by_group: dict[str, list[Edit]] = {}
        for edit in live:
            by_group.setdefault(edit.provenance.group_ids[0], []).append(edit)
        results = await together(self._ask_about("update", edits) for edits in by_group.values())
        related: list[Edit] = []
        for merged in results:
            related.extend(merged.edits)
            self.settled.extend(merged.settled)
            self.rejected.extend(merged.rejected)
        return related

    async def _merged(self, related: Sequence[Edit]) -> MergeOutcome:
        groups = {g for e in related for g in e.provenance.group_ids}
        plain = settle(related)
        if self.settings.merge != "auto" or len(plain.edits) < 2 or len(groups) < 2:
            return plain
        asked = await self._ask_about("merge", plain.edits)
        last = settle(asked.edits)
        return MergeOutcome(
            last.edits, (*plain.settled, *asked.settled, *last.settled), asked.rejected
        )

    async def _ask_about(self, stage: Any, edits: Sequence[Edit]) -> MergeOutcome:
        """Ask about proposals; without a usable reply they go on as they are."""
        library = self.library
        entries = {e.experience_id: e.text for e in library.shown if e.kind == "lesson"}
        labels = {key: key for key in entries}
        named = {e.edit_id: e.edit_id for e in edits}
        build = self.prompts.update if stage == "update" else self.prompts.merge
        task_ids = {t for e in edits for t in e.provenance.task_ids}
        reply = await self._asker().ask(
            Where(stage, next(iter(task_ids)) if len(task_ids) == 1 else ""),
            lambda room: build(edits, library, room),
            lambda text: operations_from(text, labels, self.settings.repairs, proposals=named),
            tries=2 if self.settings.repairs.lenient_operations else 3,
        )
        if reply is None:
            return MergeOutcome(tuple(edits))
        return reconcile(edits, reply, entries, self.guards)

    def exemplars(self, teaching: Teaching) -> None:
        """Offer worked examples of the step's groups."""
        self.edits.extend(exemplar_edits(teaching, self.library, self.settings))

    def finish(self, teaching: Teaching, step: int) -> LibraryProposal:
        """Apply what is left and close the books."""
        books = self.asker.books if self.asker else None
        return close_books(
            self.library,
            self.edits,
            Settled(tuple(self.settled), tuple(self.rejected), books),
            teaching,
            self.settings,
            step=step,
            count=self.count,
        )

    def _asker(self) -> Asker:
        assert self.asker is not None
        return self.asker


def _proposed(lesson: Lesson, group: RolloutGroup, shown: Sequence[Rollout], trust: Trust) -> Edit:
    named = [shown[i - 1].rollout_id for i in lesson.attempts if 0 < i <= len(shown)]
    ids = named or [r.rollout_id for r in shown]
    provenance = Provenance(tuple(ids), (group.group_id,), (group.task.task_id,))
    return Edit("add", lesson.text, provenance=provenance, trust=trust)
