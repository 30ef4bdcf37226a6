"""Replies to panels: what is a rule, what is none, whose ids count."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.experience.reflect.reply import PanelReply, read_reply
from tfgrpo.runtime.lenient_json import ReplyError

ROW = {
    "id": "E2", "topic": "Hours:\n[1]", "text": "1 → 8; 2 → 4 hours.",
    "support": ["T1", "t9"], "against": "t2, t3", "confidence": "high", "open_question": "Sunday?",
}  # fmt: skip


def read(value: object) -> PanelReply:
    return read_reply(json.dumps(value), ["t1", "t2", "t3"], ["E1", "E2"])


def test_every_field_is_read_and_only_shown_tasks_may_be_cited() -> None:
    (rule,) = read({"rules": [ROW], "entries": []}).rules
    assert (rule.entry_id, rule.topic, rule.confidence) == ("E2", "Hours 1", 0.9)
    assert (rule.support, rule.against, rule.question) == (("t1",), ("t2", "t3"), "Sunday?")


def test_verdicts_name_entries_that_are_there() -> None:
    rows = [
        {"id": "[E1]", "verdict": "Confirmed", "tasks": ["t1"]},
        {"id": "E7", "verdict": "refuted", "tasks": ["t1"]},
        {"id": "E2", "verdict": "splendid", "tasks": ["t1"]},
    ]
    (verdict,) = read({"rules": [], "entries": rows}).verdicts
    assert (verdict.entry_id, verdict.verdict, verdict.tasks) == ("E1", "confirmed", ("t1",))


@pytest.mark.parametrize("value", [{"rules": [], "entries": []}, {"rules": []}, []])
def test_an_empty_list_is_a_good_reply(value: object) -> None:
    assert read(value) == PanelReply()


@pytest.mark.parametrize(
    "text",
    [
        "I would say [1] is best and [see above] too.",
        "The set {a, b} and the list [x, y] are equal.",
        '["Use NET.", "Use HW."]',
        '{"answer": {"text": 3}}',
        "",
        "[[1, 2], [3]]",
    ],
)
def test_brackets_in_prose_and_bare_lists_are_no_rules(text: str) -> None:
    with pytest.raises(ReplyError):
        read_reply(text, ["t1"])


def test_a_row_without_a_sentence_is_passed_over_and_kept_with_its_reason() -> None:
    reply = read({"rules": [{"text": "NET"}, 7, {"text": "use NET for readers"}]})
    assert [r.text for r in reply.rules] == ["use NET for readers"]
    assert [r.reason for r in reply.rejected] == [
        "a rule without a sentence", "a rule is an object with a text",
    ]  # fmt: skip


@given(st.text(max_size=300))
def test_prose_never_becomes_a_rule(text: str) -> None:
    try:
        reply = read_reply(text.replace('"', "").replace("'", ""), ["t1"], ["E1"])
    except ReplyError:
        return
    assert not reply.rules


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["rules", "entries", "text", "id", "support", "topic", "verdict"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_any_json_is_read_or_refused_and_ids_are_known_ones(value: object) -> None:
    try:
        reply = read(value)
    except ReplyError:
        return
    for rule in reply.rules:
        assert {*rule.support, *rule.against} <= {"t1", "t2", "t3"}
        assert rule.entry_id in ("", "E1", "E2") and "\n" not in rule.topic
