"""The books of a learning run: what each step proposed, for the journal and for people.

Does not know how proposals are made or judged. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.experience import LibraryProposal
from tfgrpo.rollout import RolloutGroup
from tfgrpo.store import Journal

__all__ = ["note_on_lessons", "record_step"]


def note_on_lessons(proposals: Sequence[LibraryProposal]) -> str:
    """Return why no lesson was fit to be tried; empty where one was, or none could be taught."""
    if not any(p.informative for p in proposals):
        return ""
    outcomes = [o for p in proposals for o in p.outcomes if o.edit.kind == "lesson"]
    if any(o.result != "rejected" for o in outcomes):
        return ""
    reasons = Counter(o.reason for o in outcomes)
    unread = sum(p.calls.get(k, 0) for p in proposals for k in ("unusable", "cut"))
    failed = sum(p.calls.get("failed", 0) for p in proposals)
    causes = [n.problem for p in proposals for n in p.notes if n.kind == "failed"]
    not_asked = sum(p.calls.get("not_asked", 0) for p in proposals)
    why = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(2))
    return (
        f"no lesson was fit to be tried: the critic proposed {len(outcomes)}"
        + (f" ({why})" if why else "")
        + (f", and {unread} of its replies were cut or could not be read" if unread else "")
        + (f"; {failed} of its calls failed, the first with {causes[0]}" if causes else "")
        + (f"; it was not asked about {not_asked} further groups" if not_asked else "")
    )


def record_step(
    store: Journal,
    step: int,
    epoch: int,
    version_id: str,
    groups: Sequence[RolloutGroup],
    proposal: LibraryProposal,
) -> None:
    """Record a step's proposal, the contrasts behind its lessons and what was rejected."""
    row = {
        "step": step,
        "epoch": epoch,
        "library_version": version_id,
        "group_ids": [g.group_id for g in groups],
        **proposal.to_dict(),
    }
    store.record_decision("step", row, key=str(step))
    for number, outcome in enumerate(proposal.outcomes):
        if outcome.edit.kind == "lesson":
            for group_id in outcome.edit.provenance.group_ids:
                row = {"group_id": group_id, "text": outcome.edit.text, "step": step}
                store.record_decision("contrast", row, key=f"{step}.{number}")
    rejected = [o for o in proposal.outcomes if o.result == "rejected"]
    for number, outcome in enumerate(rejected):
        row = {"step": step, "edit": outcome.edit.to_dict(), "reason": outcome.reason}
        store.record_decision("rejected_edit", row, key=f"{step}.{number}")
