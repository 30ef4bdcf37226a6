"""From the proposals of many groups to one list of edits, with every proposal accounted for.

`reconcile` follows what a critic wrote about the proposals; `settle` is the deterministic merge
that runs after it, or alone where the critic's reply was no use. Neither loses a proposal: each
goes on, is merged into another, or is rejected with a reason.
Does not know prompts, models or the library's entries beyond their ids.
Idea: batch merge of Training-Free GRPO, made accountable (own; defects 2b, 3c, 4b).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfgrpo.experience.edits import Edit, EditOutcome, Operation, Operations, RejectedRow
from tfgrpo.experience.entry import lowest_trust
from tfgrpo.experience.guards import Guards
from tfgrpo.experience.patterns import STOP_WORDS
from tfgrpo.experience.similarity import is_near, normal, words

_GROUNDED_SHARE = 0.5
"""Share of a text's content words that must come from the proposals or entries behind it."""


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What goes on to the library, and what was settled on the way."""

    edits: tuple[Edit, ...]
    settled: tuple[EditOutcome, ...] = ()
    """Outcomes of proposals that do not go on."""
    rejected: tuple[RejectedRow, ...] = ()
    """Rows of the reply that no proposal stands behind."""


def settle(edits: Sequence[Edit]) -> MergeOutcome:
    """Merge proposals without asking anybody.

    A delete beats updates of the same entry; of several updates of one entry the first counts and
    the others are offered as adds; adds that say nearly the same become the first of them.
    """
    doomed = {e.target: e for e in edits if e.op == "delete"}
    updated: dict[str, Edit] = {}
    adds: list[Edit] = []
    others: list[Edit] = []
    settled: list[EditOutcome] = []
    seen_deletes: set[str] = set()
    for edit in edits:
        if edit.op == "delete":
            if edit.target in seen_deletes:
                why = f"{edit.target} is deleted already"
                settled.append(EditOutcome(edit, "merged", why, edit.target))
            else:
                seen_deletes.add(edit.target)
                others.append(edit)
        elif edit.op == "update" and edit.target in doomed:
            why = f"{edit.target} is deleted by {doomed[edit.target].edit_id or 'another proposal'}"
            settled.append(EditOutcome(edit, "rejected", why, edit.target))
        elif edit.op == "update" and edit.target not in updated:
            updated[edit.target] = edit
            others.append(edit)
        elif edit.op in ("add", "update"):
            add = edit if edit.op == "add" else replace(edit, op="add", target="")
            _take_in(add, adds, settled)
        else:
            others.append(edit)
    return MergeOutcome((*others, *adds), tuple(settled))


def _take_in(edit: Edit, adds: list[Edit], settled: list[EditOutcome]) -> None:
    for i, other in enumerate(adds):
        if edit.kind == other.kind == "lesson" and (
            is_near(edit.text, other.text) or normal(edit.text) == normal(other.text)
        ):
            adds[i] = _with_lineage(other, [edit])
            settled.append(EditOutcome(edit, "merged", f"says the same as {other.edit_id}"))
            return
    adds.append(edit)


def reconcile(
    proposals: Sequence[Edit],
    reply: Operations,
    entries: Mapping[str, str],
    guards: Guards | None,
) -> MergeOutcome:
    """Follow a critic's reply about proposals.

    Args:
        proposals: with their ids.
        reply: operations that name proposals as their sources.
        entries: words of the library's entries by id.
        guards: check the reply's new words; None checks nothing.

    A proposal that the reply does not name goes on as it is. An operation whose words the guards
    refuse is left out and its proposals go on as they are.
    """
    waiting = {e.edit_id: e for e in proposals}
    edits: list[Edit] = []
    settled: list[EditOutcome] = []
    rejected = list(reply.rejected)
    extra = 0
    for operation in reply.operations:
        sources = [waiting[s] for s in operation.sources if s in waiting]
        if operation.is_drop:
            why = operation.edit.reason or "no reason given"
            for edit in sources:
                settled.append(EditOutcome(edit, "rejected", f"left out by the critic: {why}"))
                del waiting[edit.edit_id]
            continue
        sources = sources or _guessed(operation.edit, waiting)
        problem = _problem(operation, sources, proposals, entries, guards)
        if problem:
            rejected.append(RejectedRow(repr(operation.edit.text or operation.edit.op), problem))
            continue
        if not sources:
            extra += 1
            edits.append(replace(operation.edit, edit_id=f"M{extra}"))
            continue
        first, *others = sources
        edits.append(
            _with_lineage(replace(operation.edit, edit_id=first.edit_id, kind=first.kind), sources)
        )
        for edit in others:
            settled.append(EditOutcome(edit, "merged", f"merged into {first.edit_id}"))
        for edit in sources:
            del waiting[edit.edit_id]
    return MergeOutcome((*edits, *waiting.values()), tuple(settled), tuple(rejected))


def _guessed(edit: Edit, waiting: Mapping[str, Edit]) -> list[Edit]:
    """Find the proposals that an operation without sources is about."""
    if edit.op in ("update", "delete"):
        same = [e for e in waiting.values() if e.op == edit.op and e.target == edit.target]
        if same:
            return same
    if not edit.text:
        return []
    return [e for e in waiting.values() if e.text and is_near(e.text, edit.text, 0.5)]


def _problem(
    operation: Operation,
    sources: Sequence[Edit],
    proposals: Sequence[Edit],
    entries: Mapping[str, str],
    guards: Guards | None,
) -> str:
    """Say why an operation must not be followed, or nothing."""
    edit = operation.edit
    if edit.op == "keep" and not sources:
        return "keeps nothing that was proposed"
    if edit.op == "delete" and not (sources or operation.sources):
        return "no proposal stands behind it"
    if edit.op not in ("add", "update"):
        return ""
    basis = [e.text for e in (sources or proposals)] + [entries.get(edit.target, "")]
    if not is_grounded(edit.text, basis):
        return "no proposal stands behind it"
    if guards is None:
        return ""
    finding = guards.check(edit.text)
    return "" if finding.verdict == "pass" else f"its new words: {finding.reason}"


def is_grounded(text: str, basis: Sequence[str]) -> bool:
    """True when at least half of the content words stand in the texts behind it."""
    known = {w for other in basis for w in words(other)}
    mine = [w for w in words(text) if w not in STOP_WORDS] or words(text)
    return bool(mine) and sum(w in known for w in mine) / len(mine) >= _GROUNDED_SHARE


def _with_lineage(edit: Edit, sources: Sequence[Edit]) -> Edit:
    provenance = edit.provenance
    for source in sources:
        provenance = provenance | source.provenance
    trust = lowest_trust([s.trust for s in sources] + ([edit.trust] if not sources else []))
    reasons = [edit.reason] if edit.reason else [s.reason for s in sources if s.reason][:1]
    return replace(edit, provenance=provenance, trust=trust, reason="".join(reasons))
