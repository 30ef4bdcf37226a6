"""The two published flows, faithful, each repair switchable.

`paper-main`: per informative group one summary a rollout, one contrast (lessons inside a tag, the
library not shown), one update call (a JSON array of decisions); per batch one merge call.
`paper-preview`: per group one summary a rollout and one critique that sees the library and gives
one operation; per batch one merge over candidates, without deletes. Entries are shown under
positions `G0`, `G1`, …, which is what renumbering after every step amounts to; ids stay stable
inside. Wording of the prompts is our own.
Does not know how its edits are applied. Source: Training-Free GRPO, youtu-agent `main` and branch
`training_free_GRPO`; what tries a malformed reply gets outside the merge is our reading
(approximation: three everywhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfgrpo.experience.critic.asker import Asker, Where, together
from tfgrpo.experience.critic.evidence import cut, data_block, fits, fitted_trajectory
from tfgrpo.experience.critic.merging import MergeOutcome, is_grounded
from tfgrpo.experience.critic.paper_operations import operations_from
from tfgrpo.experience.edits import Edit, EditOutcome, Operations, RejectedRow
from tfgrpo.experience.entry import Provenance, Trust
from tfgrpo.experience.guards import Foreign, Guards, foreign_texts, has_third_party, repeats_prompt
from tfgrpo.experience.informative import usable
from tfgrpo.experience.library import Library
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.prompts import render
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import canonical_json

_HIDDEN = "[REDACTED]"
_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Found:
    """What one group proposes."""

    edits: tuple[Edit, ...]
    rejected: tuple[RejectedRow, ...] = ()


async def paper_step(
    asker: Asker,
    settings: ExperienceSettings,
    guards: Guards,
    groups: Sequence[RolloutGroup],
    library: Library,
    step: int,
) -> MergeOutcome:
    """Run a published flow over the informative groups of a step."""
    del step
    flow = _Flow(asker, settings, guards, library)
    group_of = flow.preview_group if settings.flow == "paper-preview" else flow.main_group
    found = await together(group_of(g) for g in groups)
    edits = [
        replace(edit, edit_id=f"C{i}") for i, edit in enumerate(e for f in found for e in f.edits)
    ]
    early = tuple(r for f in found for r in f.rejected)
    if not edits and (settings.repairs.grounded_merge or not groups):
        return MergeOutcome((), (), early)
    merged = await flow.batch(edits)
    return MergeOutcome(merged.edits, merged.settled, (*early, *merged.rejected))


class _Flow:
    """The stages of both flows over one library."""

    def __init__(
        self, asker: Asker, settings: ExperienceSettings, guards: Guards, library: Library
    ) -> None:
        self.asker = asker
        self.settings = settings
        self.guards = guards if settings.repairs.fenced_data else None
        self.entries = [e for e in library.shown if e.kind == "lesson"]
        self.labels = {f"G{i}": e.experience_id for i, e in enumerate(self.entries)}
        self.label_of = {key: label for label, key in self.labels.items()}

    async def main_group(self, group: RolloutGroup) -> _Found:
        """Summaries, contrast, update."""
        attempts = await self._attempts(group)
        told = await self.asker.ask(
            Where("contrast", group.task.task_id),
            self._sized(
                "paper_contrast",
                task=group.task.text,
                reference=self._truth(group),
                attempts=attempts,
                count=str(self.settings.lessons_per_group),
                objective=self.settings.objective,
                learning_objective=self.settings.learning_objective,
            ),
            lambda text: text,
        )
        lessons = _lessons_in(told or "")
        reply = await self.asker.ask(
            Where("update", group.task.task_id),
            self._sized(
                "paper_update",
                library=self._listed(),
                proposals=self._data(lessons) if lessons else "",
                learning_objective=self.settings.learning_objective,
            ),
            self._operations,
            tries=_TRIES,
        )
        return self._taken(group, reply)

    async def preview_group(self, group: RolloutGroup) -> _Found:
        """Summaries, then one operation."""
        attempts = await self._attempts(group)
        reply = await self.asker.ask(
            Where("contrast", group.task.task_id),
            self._sized(
                "paper_preview_critique",
                task=group.task.text,
                reference=self._truth(group),
                attempts=attempts,
                library=self._listed(),
                words=str(self.settings.max_words),
            ),
            self._operations,
            tries=_TRIES,
        )
        found = self._taken(group, reply)
        allowed = tuple(e for e in found.edits if e.op in ("add", "update"))[:1]
        return _Found(allowed, found.rejected)

    async def batch(self, edits: Sequence[Edit]) -> MergeOutcome:
        """Reconcile all groups' operations in one call; main loses them where it fails."""
        is_preview = self.settings.flow == "paper-preview"
        proposals = {e.edit_id: e.edit_id for e in edits}
        labels = self.labels | proposals if is_preview else self.labels
        named = [e for e in edits if e.target]
        rows = []
        for label, key in self.labels.items():
            about = "; ".join(self._line(e) for e in named if e.target == key)
            text = next(e.text for e in self.entries if e.experience_id == key)
            rows.append(f"[{label}]. {text}" + (f"  <- {about}" if about else ""))
        others = edits if is_preview else [e for e in edits if not e.target]
        fields = {
            "library": self._data("\n".join(rows)) if rows else "None",
            "proposals": self._data("\n".join(self._line(e) for e in others)) if others else "None",
        }
        if is_preview:
            fields["words"] = str(self.settings.max_words)
        else:
            fields["learning_objective"] = self.settings.learning_objective
        reply = await self.asker.ask(
            Where("merge"),
            self._sized("paper_preview_merge" if is_preview else "paper_merge", **fields),
            lambda text: operations_from(text, labels, self.settings.repairs),
            tries=_TRIES,
        )
        if reply is None:
            return self._failed(edits)
        return self._preview(edits, reply) if is_preview else self._final(edits, reply)

    def _failed(self, edits: Sequence[Edit]) -> MergeOutcome:
        if self.settings.repairs.lenient_operations or self.settings.flow == "paper-preview":
            return MergeOutcome(tuple(edits))
        reason = "the batch reply was unusable three times"
        return MergeOutcome((), tuple(EditOutcome(e, "rejected", reason) for e in edits))

    def _final(self, edits: Sequence[Edit], reply: Operations) -> MergeOutcome:
        """The merge's operations replace the proposals, which are merged into them."""
        rejected = list(reply.rejected)
        final: list[Edit] = []
        basis = [e.text for e in edits] + [e.text for e in self.entries]
        lineage = Provenance()
        for edit in edits:
            lineage = lineage | edit.provenance
        trust: Trust = "third_party" if any(e.trust == "third_party" for e in edits) else "model"
        for edit in reply.edits:
            if edit.op == "keep":
                continue
            problem = self._refusal(edit, basis)
            if problem:
                rejected.append(RejectedRow(repr(edit.text)[:160], problem))
                continue
            i = len(final)
            final.append(replace(edit, provenance=lineage, trust=trust, edit_id=f"M{i}"))
        settled = tuple(EditOutcome(e, "merged", "went into the batch's operations") for e in edits)
        return MergeOutcome(tuple(final), settled, tuple(rejected))

    def _preview(self, edits: Sequence[Edit], reply: Operations) -> MergeOutcome:
        """MODIFY and MERGE over candidates and entries; what is not named stays."""
        waiting = {e.edit_id: e for e in edits}
        settled: list[EditOutcome] = []
        final: list[Edit] = []
        for edit in reply.edits:
            target = waiting.get(edit.target)
            if edit.op == "update" and target is not None:
                waiting[edit.target] = replace(target, text=edit.text)
            elif edit.op == "delete" and target is not None and edit.reason.startswith("merged"):
                settled.append(EditOutcome(waiting.pop(edit.target), "merged", edit.reason))
            elif edit.op == "update" or (edit.op == "delete" and edit.reason.startswith("merged")):
                final.append(replace(edit, edit_id=f"M{len(final)}"))
        return MergeOutcome((*waiting.values(), *final), tuple(settled), reply.rejected)

    def _refusal(self, edit: Edit, basis: Sequence[str]) -> str:
        if edit.op == "delete" or not edit.text:
            return ""
        if self.settings.repairs.grounded_merge:
            if repeats_prompt(edit.text):
                return "repeats wording of the package's own prompts"
            if not is_grounded(edit.text, basis):
                return "no proposal stands behind it"
        if self.guards is not None:
            finding = self.guards.check(edit.text)
            if finding.verdict != "pass":
                return finding.reason
        return ""

    def _taken(self, group: RolloutGroup, reply: Operations | None) -> _Found:
        if reply is None:
            return _Found(())
        rollouts = usable(group, self.settings)
        foreign = Foreign.of(foreign_texts(group.task, rollouts))
        ids = tuple(r.rollout_id for r in rollouts)
        provenance = Provenance(ids, (group.group_id,), (group.task.task_id,))
        trust: Trust = "third_party" if has_third_party(rollouts) else "model"
        edits: list[Edit] = []
        rejected = list(reply.rejected)
        for edit in reply.edits:
            if edit.op == "keep":
                continue
            finding = self.guards.check(edit.text, foreign=foreign) if self.guards else None
            if finding is not None and finding.verdict != "pass" and edit.op != "delete":
                rejected.append(RejectedRow("(words withheld)", finding.reason))
                continue
            edits.append(replace(edit, provenance=provenance, trust=trust))
        return _Found(tuple(edits), tuple(rejected))

    def _operations(self, text: str) -> Operations:
        return operations_from(text, self.labels, self.settings.repairs)

    async def _attempts(self, group: RolloutGroup) -> str:
        rollouts = usable(group, self.settings)

        async def one(rollout: Rollout) -> str:
            told = await self.asker.ask(
                Where("summarise", group.task.task_id, rollout.rollout_id),
                self._summary_prompt(group, rollout),
                lambda text: text,
            )
            return told or ""

        summaries = await together(one(r) for r in rollouts)
        blocks = []
        for i, (rollout, summary) in enumerate(zip(rollouts, summaries, strict=True), 1):
            hidden = not self.settings.ground_truth or rollout.reward is None
            reward = _HIDDEN if hidden else f"{rollout.reward:g}"
            blocks.append(f"Attempt {i} (reward {reward}):\n{self._data(summary, str(i))}")
        return "\n\n".join(blocks)

    def _summary_prompt(self, group: RolloutGroup, rollout: Rollout) -> Callable[[int], str]:
        feedback = rollout.score.feedback if rollout.score and self.settings.ground_truth else ""

        def build(limit: int) -> str:
            def sized(share: int) -> str:
                attempt = fitted_trajectory(rollout, share, self.asker.count)
                return render(
                    "paper_summarise",
                    objective=self.settings.objective,
                    learning_objective=self.settings.learning_objective,
                    task=self._data(cut(group.task.text, share, self.asker.count)),
                    reference=self._truth(group),
                    feedback=feedback,
                    attempt=self._data(attempt),
                )

            return fits(sized, limit, self.asker.count, limit)

        return build

    def _sized(self, name: str, **values: str) -> Callable[[int], str]:
        longest = max(values, key=lambda key: len(values[key]))

        def build(limit: int) -> str:
            def sized(share: int) -> str:
                return render(
                    name, **values | {longest: cut(values[longest], share, self.asker.count)}
                )

            return fits(sized, limit, self.asker.count, limit)

        return build

    def _truth(self, group: RolloutGroup) -> str:
        if not self.settings.ground_truth:
            return _HIDDEN
        reference = group.task.reference
        return reference if isinstance(reference, str) else canonical_json(reference)

    def _listed(self) -> str:
        rows = [f"[{label}]. {e.text}" for label, e in zip(self.labels, self.entries, strict=True)]
        return self._data("\n".join(rows)) if rows else "None"

    def _line(self, edit: Edit) -> str:
        label = self.label_of.get(edit.target, edit.target)
        return f"[{edit.edit_id}] {edit.op.upper()} {label} {edit.text}".replace("  ", " ")

    def _data(self, text: str, label: str = "") -> str:
        return data_block(text, self.settings, label)


def _lessons_in(reply: str) -> str:
    """Return what stands in the first pair of tags, or an empty text."""
    _, _, rest = reply.partition("<Experiences>")
    lessons, closing, _ = rest.partition("</Experiences>")
    return lessons.strip() if closing else ""
