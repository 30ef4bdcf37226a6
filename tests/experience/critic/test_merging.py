from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.experience.critic.merging import MergeOutcome, is_grounded, reconcile, settle
from tfgrpo.experience.edits import Edit, numbered, read_operations
from tfgrpo.experience.entry import Provenance
from tfgrpo.experience.guards import Guards

ENTRIES = {"E1": "Count the knots.", "E2": "Guess when unsure."}


def add(text: str, group: str = "g1", **changes: str) -> Edit:
    return Edit("add", text, provenance=Provenance((), (group,)), **changes)  # type: ignore[arg-type]


def accounted(proposals: tuple[Edit, ...], merged: MergeOutcome) -> bool:
    ids = [e.edit_id for e in merged.edits] + [o.edit.edit_id for o in merged.settled]
    own = [i for i in ids if i.startswith("C")]
    return sorted(own) == sorted(e.edit_id for e in proposals)


def test_a_delete_beats_updates_and_a_second_update_becomes_an_add() -> None:
    proposals = numbered(
        [
            Edit("update", "Count the knots twice.", "E1"),
            Edit("delete", target="E2"),
            Edit("update", "Guess only at the end.", "E2"),
            Edit("update", "Draw every knot on paper.", "E1"),
            Edit("delete", target="E2"),
        ]
    )
    merged = settle(proposals)
    assert [(e.op, e.target, e.text) for e in merged.edits] == [
        ("update", "E1", "Count the knots twice."),
        ("delete", "E2", ""),
        ("add", "", "Draw every knot on paper."),
    ]
    assert [(o.edit.edit_id, o.result) for o in merged.settled] == [
        ("C3", "rejected"),
        ("C5", "merged"),
    ]
    assert accounted(proposals, merged)


def test_near_equal_adds_become_the_first_with_both_lineages_and_the_lowest_trust() -> None:
    proposals = numbered(
        [
            add("Count all of the knots before cutting", "g1"),
            add("Count all of the knots before cutting it", "g2", trust="third_party"),
        ]
    )
    (edit,) = settle(proposals).edits
    assert edit.provenance.group_ids == ("g1", "g2")
    assert edit.trust == "third_party"


def test_an_operation_over_two_proposals_joins_their_lineage() -> None:
    proposals = numbered([add("Count the knots.", "g1"), add("Draw the knots.", "g2")])
    reply = read_operations(
        '[{"op": "add", "text": "Count and draw the knots.", "from": ["C1", "[c2]"]}]',
        {},
        proposals={"C1": "C1", "C2": "C2"},
    )
    merged = reconcile(proposals, reply, {}, Guards())
    (edit,) = merged.edits
    assert (edit.text, edit.provenance.group_ids) == ("Count and draw the knots.", ("g1", "g2"))
    assert accounted(proposals, merged)


def test_new_words_that_the_guards_refuse_leave_the_proposals_as_they_were() -> None:
    proposals = numbered([add("Ask the owner for the knots.")])
    text = "Ask the owner for the knots at owner@example.com."
    reply = read_operations(
        json.dumps([{"op": "add", "text": text, "from": ["C1"]}]), {}, proposals={"C1": "C1"}
    )
    merged = reconcile(proposals, reply, {}, Guards())
    assert [e.text for e in merged.edits] == ["Ask the owner for the knots."]
    assert merged.rejected[0].reason == "its new words: holds an e-mail address"


def test_a_delete_that_nobody_proposed_is_refused() -> None:
    proposals = numbered([add("Draw boats first.")])
    reply = read_operations('[{"op": "delete", "id": "E1"}]', {"E1": "E1"}, proposals={"C1": "C1"})
    merged = reconcile(proposals, reply, ENTRIES, Guards())
    assert [e.op for e in merged.edits] == ["add"]
    assert [r.reason for r in merged.rejected] == ["no proposal stands behind it"]


def test_a_text_is_grounded_when_half_of_its_content_words_are() -> None:
    assert is_grounded("Count every knot twice", ["count the knot twice"])
    assert not is_grounded("Buy cheaper tickets on Tuesday", ["count the knot twice"])


TEXTS = st.sampled_from(
    ["Count the knots.", "Draw boats first.", "count THE knots", "Tie two ropes.", "Buy tickets."]
)
PROPOSAL = st.builds(
    Edit, op=st.sampled_from(["add", "update", "delete"]), text=TEXTS,
    target=st.sampled_from(["E1", "E2"]),
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {"op": st.sampled_from(["add", "update", "delete", "keep", "drop", "merge"])},
    optional={
        "id": st.sampled_from(["E1", "E2", "E9", "C1", ["E1", "E2"], ["C1", "C2"]]),
        "text": TEXTS,
        "from": st.lists(st.sampled_from(["C1", "C2", "C3", "C9"]), max_size=3),
    },
)


@settings(max_examples=200)
@given(st.lists(PROPOSAL, min_size=1, max_size=5), st.lists(ROW, min_size=1, max_size=6))
def test_no_reply_loses_or_doubles_a_proposal(edits: list[Edit], rows: list[object]) -> None:
    proposals = numbered(edits)
    labels = {key: key for key in ENTRIES}
    named = {e.edit_id: e.edit_id for e in proposals}
    reply = read_operations(json.dumps(rows), labels, proposals=named)
    first = reconcile(proposals, reply, ENTRIES, Guards())
    assert accounted(proposals, first)
    second = settle(first.edits)
    assert accounted(
        proposals, MergeOutcome(second.edits, (*first.settled, *second.settled), first.rejected)
    )
    assert all(o.reason for o in (*first.settled, *second.settled))
