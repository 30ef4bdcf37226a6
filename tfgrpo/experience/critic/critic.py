"""The critic: from the groups of one step to a proposed library, with the books.

Default flow: summarise each attempt (short ones are read as they are), contrast the attempts of
each informative group (the semantic advantage, with the numeric ones shown), relate the lessons to
the library, merge what several groups propose, apply. Groups run concurrently. Without an
informative group nothing is asked. The result is a proposal: the gate decides.
Does not know rollouts' making, gates, files. Source: Training-Free GRPO; accountability, guards
and quarantine are our own. The published flows are in `paper`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.experience.critic.asker import Asker, CallNote, Refusals, Where, together
from tfgrpo.experience.critic.evidence import trajectory
from tfgrpo.experience.critic.merging import Merged, reconcile, settle
from tfgrpo.experience.critic.paper_flow import paper_step
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.critic.stage_prompts import StagePrompts
from tfgrpo.experience.draft import TokenCounter, estimate_tokens
from tfgrpo.experience.edits import (
    Edit,
    EditCounts,
    EditOutcome,
    Lesson,
    RejectedRow,
    numbered,
    read_lessons,
)
from tfgrpo.experience.entry import Experience, Provenance, Trust
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


@dataclass(frozen=True, slots=True)
class LibraryProposal:
    """What one step proposes and how it came about."""

    before: Library
    library: Library
    """The proposed version; equal to `before` where nothing can be learnt."""
    outcomes: tuple[EditOutcome, ...] = ()
    """One a proposal; see `counts`."""
    rejected: tuple[RejectedRow, ...] = ()
    """Parts of replies that never were a proposal."""
    evicted: tuple[Experience, ...] = ()
    notes: tuple[CallNote, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    """How often: `calls`, `calls:STAGE`, `cut`, `reasked`, `shortened`, `failed`, `unusable`,
    `not_asked` (groups that were given up)."""
    groups: int = 0
    informative: int = 0
    message: str = ""
    """One line for people."""

    @property
    def counts(self) -> EditCounts:
        """The books: proposed = applied + merged + rejected."""
        return EditCounts.of(self.outcomes)

    @property
    def has_change(self) -> bool:
        """True when a prompt would differ."""
        return not self.before.diff(self.library).is_empty

    @property
    def applied(self) -> tuple[Edit, ...]:
        """The edits that changed the library, for trying them in smaller sets."""
        return tuple(o.edit for o in self.outcomes if o.result == "applied" and o.edit.op != "keep")

    @property
    def is_unusable(self) -> bool:
        """True when something was proposed or asked in vain: an honest empty list is neither."""
        tried = bool(self.outcomes or self.rejected or self.notes)
        return tried and not any(o.result != "rejected" for o in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for a journal; libraries by version only."""
        return {
            "before": self.before.version_id,
            "proposed": self.library.version_id,
            "outcomes": [o.to_dict() for o in self.outcomes],
            "rejected": [{"row": r.row, "reason": r.reason} for r in self.rejected],
            "evicted": [e.experience_id for e in self.evicted],
            "notes": [n.to_dict() for n in self.notes],
            "calls": dict(self.calls),
            "groups": self.groups,
            "informative": self.informative,
            "message": self.message,
        }


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
            if settings.flow == "default":
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

    def take(self, merged: Merged) -> None:
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
                self.settled.append(EditOutcome(_redacted(edit), "rejected", verdict))
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

    async def _merged(self, related: Sequence[Edit]) -> Merged:
        groups = {g for e in related for g in e.provenance.group_ids}
        plain = settle(related)
        if self.settings.merge != "auto" or len(plain.edits) < 2 or len(groups) < 2:
            return plain
        asked = await self._ask_about("merge", plain.edits)
        last = settle(asked.edits)
        return Merged(last.edits, (*plain.settled, *asked.settled, *last.settled), asked.rejected)

    async def _ask_about(self, stage: Any, edits: Sequence[Edit]) -> Merged:
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
            return Merged(tuple(edits))
        return reconcile(edits, reply, entries, self.guards)

    def exemplars(self, teaching: Teaching) -> None:
        """Offer worked examples of the step's groups."""
        self.edits.extend(exemplar_edits(teaching, self.library, self.settings))

    def finish(self, teaching: Teaching, step: int) -> LibraryProposal:
        """Apply what is left and close the books."""
        repairs = self.settings.repairs
        applied = self.library.apply(
            self.edits,
            step=step,
            caps=self.settings.caps if repairs.bounded_library else None,
            count=self.count,
            deduplicate=repairs.bounded_library,
        )
        outcomes = (*self.settled, *applied.outcomes)
        calls = dict(self.asker.books.counts) if self.asker else {}
        notes = tuple(self.asker.books.notes) if self.asker else ()
        counts = EditCounts.of(outcomes)
        assert counts.proposed == counts.applied + counts.merged + counts.rejected
        has_news = any(o.result != "rejected" for o in applied.outcomes)
        return LibraryProposal(
            before=self.library,
            library=applied.library if has_news else self.library,
            outcomes=outcomes,
            rejected=tuple(self.rejected),
            evicted=applied.evicted if has_news else (),
            notes=notes,
            calls=calls,
            groups=teaching.total,
            informative=len(teaching.informative),
            message=_message(teaching, counts),
        )

    def _asker(self) -> Asker:
        assert self.asker is not None
        return self.asker


def _proposed(lesson: Lesson, group: RolloutGroup, shown: Sequence[Rollout], trust: Trust) -> Edit:
    named = [shown[i - 1].rollout_id for i in lesson.attempts if 0 < i <= len(shown)]
    ids = named or [r.rollout_id for r in shown]
    provenance = Provenance(tuple(ids), (group.group_id,), (group.task.task_id,))
    return Edit("add", lesson.text, provenance=provenance, trust=trust)


def _redacted(edit: Edit) -> Edit:
    """Return a refused edit without its words, which may be what must not be kept."""
    return replace(edit, text=f"({len(edit.text)} characters withheld)")


def _message(teaching: Teaching, counts: EditCounts) -> str:
    if not counts.proposed:
        return f"nothing to learn: {teaching.message}"
    return (
        f"{teaching.message}; {counts.proposed} proposals: {counts.applied} applied, "
        f"{counts.merged} merged, {counts.rejected} rejected"
    )


def stalled(steps: Sequence[LibraryProposal], limit: int = 3) -> str:
    """Return why to stop when the last `limit` steps all came to nothing usable, or nothing.

    Steps without an informative group say nothing about the critic and do not count.
    """
    asked = [s for s in steps if s.informative > 0]
    if len(asked) < limit or not all(s.is_unusable for s in asked[-limit:]):
        return ""
    causes: Counter[str] = Counter()
    for step in asked[-limit:]:
        causes.update(n.problem for n in step.notes)
        causes.update(o.reason for o in step.outcomes if o.result == "rejected")
        causes.update(r.reason for r in step.rejected)
    likely = "; ".join(f"{n} times {cause!r}" for cause, n in causes.most_common(3))
    return (
        f"the last {limit} steps gave no usable edit (likely cause: {likely or 'empty replies'}): "
        "try another critic model, a larger reply limit, or experience.lessons = false"
    )
