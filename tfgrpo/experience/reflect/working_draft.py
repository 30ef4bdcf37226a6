"""The library under construction in one step of the flow `reflect`, with the books.

Rules of several panels come in one after the other: each is guarded, related to what stands there,
and applied to a working library that later panels are shown. `net_edits` are what leads from the
step's base to the result, so that any part of them can be tried alone. Does not know who is asked,
prompts or rollouts. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.experience.claim import Claim
from tfgrpo.experience.critic.proposal import redacted
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.edits import Edit, EditOutcome, RejectedRow
from tfgrpo.experience.entry import Experience, Provenance, Trust
from tfgrpo.experience.guards import Foreign, foreign_texts, has_third_party, hint_texts
from tfgrpo.experience.library import Library
from tfgrpo.experience.reflect.consolidate import lost_values, subject_of
from tfgrpo.experience.reflect.conventions import Conventions
from tfgrpo.experience.reflect.panels import Panel
from tfgrpo.experience.reflect.replay_check import ReplayCheck
from tfgrpo.experience.reflect.reply import EntryVerdict, Rule
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import RolloutGroup

_UNCONFIRMED = "on trial for a pass and never confirmed"


@dataclass(frozen=True, slots=True)
class Refused:
    """A rule that a check refused and that may go back to its author once."""

    rule: Rule
    reason: str


class WorkingDraft:
    """One step's library while rules come in.

    Args:
        base: the library the step starts from.
        settings: sizes and repairs.
        conventions: what may be said.
        count: tokens of a text.
        step: for histories.
    """

    def __init__(
        self,
        base: Library,
        settings: ExperienceSettings,
        conventions: Conventions,
        count: TokenCounter,
        step: int,
    ) -> None:
        self.base = base
        self.library = base
        self.settled: list[EditOutcome] = []
        self.rejected: list[RejectedRow] = []
        self.returnable: list[Refused] = []
        self._settings = settings
        self._conventions = conventions
        self._count = count
        self._step = step
        self._number = 0
        self._groups: dict[str, RolloutGroup] = {}
        self._replayed: dict[str, ReplayCheck] = {}

    @property
    def lesson_ids(self) -> list[str]:
        """Entries that a critic may name."""
        return [e.experience_id for e in self.library.shown if e.kind == "lesson"]

    def changed(self) -> list[Experience]:
        """Return the lessons that are new or reworded in this step."""
        before = {e.experience_id: e.text for e in self.base.entries}
        return [
            e
            for e in self.library.shown
            if e.kind == "lesson" and before.get(e.experience_id) != e.text
        ]

    def reject_rows(self, rows: Iterable[RejectedRow]) -> None:
        """Keep parts of a reply that were no rule."""
        self.rejected.extend(rows)

    def mark(self, edits: Iterable[Edit]) -> None:
        """Apply marks that an earlier step left over."""
        known = {e.experience_id for e in self.library.entries}
        usable = [e for e in edits if e.target in known]
        self.library = self.library.apply(usable, step=self._step).library

    def judge(self, verdicts: Sequence[EntryVerdict]) -> None:
        """Book what a panel says about entries; an `ignored` one rests on what it rested on."""
        marks = []
        for verdict in verdicts:
            if not verdict.tasks or verdict.verdict == "ignored":
                continue
            text = self.library.get(verdict.entry_id).text
            if verdict.verdict == "confirmed":
                claim = Claim(support=self._conventions.support_of(text, verdict.tasks))
            else:
                claim = Claim(against=verdict.tasks)
            marks.append(Edit("mark", target=verdict.entry_id, claim=claim))
        self.library = self.library.apply(marks, step=self._step).library

    def take(self, rule: Rule, panel: Panel | None, *, is_final: bool = False) -> None:
        """Guard a rule and bring it into the library; a final one does not go back again."""
        for group in panel.groups if panel is not None else ():
            self._groups[group.task.task_id] = group
        self._number += 1
        edit = self._edit(rule)
        reason, hold = self._problem(rule, edit)
        if reason and not hold:
            self.settled.append(EditOutcome(redacted(edit), "rejected", reason))
            if not is_final:
                self.returnable.append(Refused(rule, reason))
            return
        if hold:
            edit = replace(edit, quarantine=reason, trust="third_party", op="add", target="")
        self._apply(edit)

    def withdraw(self, experience_id: str, reason: str) -> None:
        """Take a rule of this step back; an entry of the base gets its words back."""
        before = next((e for e in self.base.entries if e.experience_id == experience_id), None)
        now = self.library.get(experience_id)
        rows = [e for e in self.library.entries if e.experience_id != experience_id]
        rows += [before] if before is not None else []
        entries = tuple(sorted(rows, key=lambda e: int(e.experience_id[1:])))
        self.library = replace(self.library, entries=entries)
        edit = Edit("add", now.text, provenance=now.provenance, claim=now.claim)
        self.settled.append(EditOutcome(edit, "rejected", reason, experience_id))

    def drop_unconfirmed(self, is_old: Callable[[int], bool]) -> None:
        """Take out entries on trial that an earlier pass made and no task has confirmed since.

        Only beside another change: a look at the gate is not spent on this alone.

        Args:
            is_old: True for steps of earlier passes.
        """
        if not self.changed():
            return
        kept = {e.experience_id for e in self.changed()}
        old = [
            e
            for e in self.library.shown
            if e.kind == "lesson" and e.status == "active" and e.claim.state == "provisional"
            and e.experience_id not in kept and is_old(e.created_step)
        ]  # fmt: skip
        edits = [Edit("delete", target=e.experience_id, reason=_UNCONFIRMED) for e in old]
        self.library = self.library.apply(edits, step=self._step).library

    def record_replays(self, checks: Sequence[ReplayCheck]) -> None:
        """Keep what replays say, for the entries that stay."""
        self._replayed = {c.experience_id: c for c in checks}

    def net_edits(self) -> list[Edit]:
        """Return the edits that lead from the base to the working library."""
        before = {e.experience_id: e for e in self.base.entries}
        now = {e.experience_id for e in self.library.entries}
        edits = [Edit("delete", target=k, reason=_UNCONFIRMED) for k in before if k not in now]
        for entry in self.library.entries:
            old = before.get(entry.experience_id)
            self._number += 1
            common = {
                "text": entry.text,
                "provenance": entry.provenance,
                "trust": entry.trust,
                "claim": entry.claim,
                "edit_id": f"C{self._number}",
                "reason": entry.history[-1].reason if entry.history else "",
            }
            if old is None:
                edits.append(Edit("add", quarantine=entry.status_reason, **common))  # type: ignore[arg-type]
            elif old.text != entry.text:
                edits.append(Edit("update", target=entry.experience_id, **common))  # type: ignore[arg-type]
            elif old.claim != entry.claim:
                edits.append(Edit("mark", target=entry.experience_id, claim=entry.claim))
        return edits

    def pending_marks(self) -> tuple[Edit, ...]:
        """Return what the panels said about entries of the base."""
        known = {e.experience_id for e in self.base.entries}
        return tuple(e for e in self.net_edits() if e.op == "mark" and e.target in known)

    def with_replays(self, library: Library) -> Library:
        """Return the proposed library with the early values of its entries."""
        by_text = {
            self.library.get(key).text: check.value
            for key, check in self._replayed.items()
            if key in {e.experience_id for e in self.library.entries}
        }
        entries = tuple(
            replace(e, replayed=by_text[e.text]) if by_text.get(e.text) else e
            for e in library.entries
        )
        return replace(library, entries=entries)

    def _edit(self, rule: Rule) -> Edit:
        against = tuple(t for t in rule.against)
        cited = [t for t in rule.support if t not in against]
        support = self._conventions.support_of(rule.text, cited)
        claim = Claim(rule.topic, support, against, rule.confidence, question=rule.question)
        groups = [self._groups[t] for t in support if t in self._groups]
        provenance = Provenance(
            tuple(r.rollout_id for g in groups for r in g.rollouts),
            tuple(g.group_id for g in groups),
            support,
        )
        third = any(has_third_party(g.rollouts) for g in groups)
        trust: Trust = "third_party" if third else "model"
        target = rule.entry_id if rule.entry_id in self.lesson_ids else self._same_subject(rule)
        return Edit(
            "update" if target else "add",
            rule.text,
            target=target,
            provenance=provenance,
            trust=trust,
            claim=claim.judged(),
            edit_id=f"P{self._number}",
        )

    def _same_subject(self, rule: Rule) -> str:
        """Return the entry on the same situation and part, which a rule without an id rewrites."""
        subject = subject_of(rule.text)
        for entry in self.library.shown:
            same_topic = entry.claim.topic.casefold() == rule.topic.casefold()
            if entry.kind == "lesson" and same_topic and subject_of(entry.text) == subject:
                return entry.experience_id if not lost_values(entry.text, rule.text) else ""
        return ""

    def _problem(self, rule: Rule, edit: Edit) -> tuple[str, bool]:
        """Return why a rule may not stand as it is, and whether it is held back for a person."""
        tokens = self._count(rule.text)
        if tokens > self._settings.reflect.entry_tokens:
            return (
                f"{tokens} tokens; at most {self._settings.reflect.entry_tokens} are allowed",
                False,
            )
        if edit.claim.state == "refuted":
            return "as many of its own tasks speak against it as for it", False
        if self._settings.repairs.fenced_data:
            groups = [self._groups[t] for t in rule.support if t in self._groups]
            finding = self._conventions.check(
                rule.text, edit.claim.support, foreign=_foreign(groups)
            )
            if finding.verdict != "pass":
                return finding.reason, finding.verdict == "quarantine"
        if edit.op == "update":
            old = self.library.get(edit.target)
            lost = lost_values(old.text, rule.text)
            if (
                old.claim.state == "confirmed"
                and lost
                and not (edit.claim.against or old.claim.against)
            ):
                return f"the rewrite of {edit.target} loses {', '.join(lost[:5])}", False
        return "", False

    def _apply(self, edit: Edit) -> None:
        known = {e.experience_id for e in self.base.entries}
        before = self.library
        applied = before.apply([edit], step=self._step, count=self._count)
        (outcome,) = applied.outcomes
        self.library = applied.library
        if outcome.result != "applied":
            self.settled.append(outcome)
        elif edit.op == "update":
            was = before.get(edit.target)
            is_first = edit.target in known and was.text == self.base.get(edit.target).text
            if not is_first:
                reason = f"taken into {edit.target} of the same step"
                self.settled.append(EditOutcome(edit, "merged", reason, edit.target))


def _foreign(groups: Sequence[RolloutGroup]) -> Foreign:
    """Index what outsiders wrote: tool and page text whole, of tasks only orders to remember."""
    tools = [t for g in groups for t in list(foreign_texts(g.task, g.rollouts))[1:]]
    hints = [t for g in groups for t in hint_texts(g.context)]
    whole = Foreign.of([*tools, *hints])
    orders = Foreign.of(g.task.text for g in groups).orders
    return Foreign(whole.grams, (*whole.orders, *orders))
