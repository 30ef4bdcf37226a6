# ruff: noqa: E501
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgrpo.experience.edits import Edit, read_lessons, read_operations, resolve
from tfgrpo.experience.replies import visible
from tfgrpo.protocols import Completion
from tfgrpo.runtime.lenient_json import ReplyError, json_values

LABELS = {"E1": "E1", "E2": "E2", "E3": "E3"}
ADD = Edit("add", "Read twice.")
UPDATE = Edit("update", "Convert first.", "E2")
DELETE = Edit("delete", target="E3")

CHATTY = {
    "plain": '[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]',
    "prose around": 'Sure! Here it is:\n[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]\nOK?',
    "fence": '```json\n[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]\n```',
    "single quotes": "[{'op': 'add', 'text': 'Read twice.'}, {'op': 'delete', 'id': 'E3'}]",
    "trailing commas": '[{"op":"add","text":"Read twice.",},{"op":"delete","id":"E3",},]',
    "wrapper object": '{"operations":[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]}',
    "nested wrappers": '{"result":{"edits":[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]}}',
    "grouped by operation": '{"add": ["Read twice."], "delete": ["E3"]}',
    "upper case": '[{"op":"ADD","text":"Read twice."},{"op":"DELETE","id":"[E3]."}]',
    "synonyms": '[{"action":"Append","content":"Read twice."},{"type":"remove","target":3}]',
    "missing op": '[{"text":"Read twice."},{"op":"delete","id":"e3"}]',
    "two blocks": '```json\n[{"op":"add","text":"Read twice."}]\n```\nand\n```json\n[{"op":"delete","id":"E3"}]\n```',
    "think prefix": '<think>[{"op":"add","text":"draft"}]</think>[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]',
    "closing think alone": 'draft [1]</think>\n[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"}]',
    "python literals": "[{'op': 'add', 'id': None, 'text': 'Read twice.', 'ok': True}, {'op': 'delete', 'id': 'E3'}]",
    "bare keys": "[{op: 'add', text: 'Read twice.'}, {op: 'delete', id: E3}]",
    "one per line": '{"op":"add","text":"Read twice."}\n{"op":"delete","id":"E3"}',
    "repeated": '[{"op":"add","text":"Read twice."},{"op":"delete","id":"E3"},{"op":"add","text":"Read twice."}]',
}  # fmt: skip


@pytest.mark.parametrize("text", CHATTY.values(), ids=CHATTY.keys())
def test_chatty_replies_give_the_same_two_edits(text: str) -> None:
    assert read_operations(text, LABELS).edits == (ADD, DELETE)


@pytest.mark.parametrize(
    "raw", ["G0", "[G0]", "g0", 0, "0", "[G0].", " `G0` ", "(g0)", 0.0, "E0", "id 0", "#0", "G00"]
)
def test_every_spelling_of_an_id_is_that_id(raw: object) -> None:
    assert resolve(raw, {"G0": "E4", "G1": "E5"}) == "E4"


@pytest.mark.parametrize(
    "raw", ["G7", "C0", "S0", True, None, [], {}, "", "zero", 0.5, -1, "G0 G1"]
)
def test_what_fits_no_id_is_no_id(raw: object) -> None:
    assert resolve(raw, {"G0": "E4", "G1": "E5"}) is None


def test_unknown_ids_names_and_empty_texts_are_rejected_one_by_one() -> None:
    found = read_operations(
        json.dumps(
            [
                {"op": "update", "id": "E2", "text": "Convert first."},
                {"op": "update", "id": "E17", "text": "ghost"},
                {"op": "explode", "id": "E1"},
                {"op": "add", "text": "None"},
                {"op": "delete"},
                "a string",
            ]
        ),
        LABELS,
    )
    assert found.edits == (UPDATE,)
    assert [r.reason for r in found.rejected[:4]] == [
        "update of unknown id 'E17'; ids: E1, E2, E3",
        "unknown operation 'explode'; allowed: add, update, delete, keep",
        "add without text",
        "delete without an id",
    ]
    assert "is no operation" in found.rejected[4].reason


def test_strings_are_adds_only_where_lessons_were_asked_for() -> None:
    assert read_operations('["Read twice."]', LABELS, strings_are_adds=True).edits == (ADD,)
    with pytest.raises(ReplyError, match="write an object with op, id and text"):
        read_operations('["Read twice."]', LABELS)


def test_a_merge_of_several_ids_is_one_update_and_deletes_and_tells_of_missing_ids() -> None:
    text = '[{"op":"merge","ids":["E1","E2","S4"],"text":"Both."}]'
    found = read_operations(text, LABELS)
    assert [(e.op, e.target) for e in found.edits] == [("update", "E1"), ("delete", "E2")]
    assert [r.row for r in found.rejected] == ["'S4'"]


@pytest.mark.parametrize("text", ["", "   ", "no json here", "<think>only</think>", "[1, 2", "{"])
def test_a_reply_without_json_says_so_for_a_second_asking(text: str) -> None:
    with pytest.raises(ReplyError):
        read_operations(text, LABELS)


def test_an_apostrophe_inside_a_single_quoted_string_does_not_end_it() -> None:
    assert json_values("{'text': 'don't add the user's tax'}") == [
        {"text": "don't add the user's tax"}
    ]


@pytest.mark.parametrize(
    ("completion", "cut"),
    [
        (Completion('{"lessons": ["half', finish="length"), "length"),
        (Completion("<think>going on and on"), "thinking"),
        (Completion("", reasoning="all of it in the other field"), "thinking"),
        (Completion("<think>x</think>"), "thinking"),
        (Completion("sorry", finish="content_filter"), "filter"),
        (Completion("fine"), ""),
    ],
)
def test_cut_and_thinking_replies_are_known_as_such(completion: Completion, cut: str) -> None:
    assert visible(completion).cut == cut


def test_lessons_are_read_from_strings_objects_and_wrappers() -> None:
    for text in (
        '{"lessons": [{"lesson": "Read twice.", "attempts": ["Attempt 1"]}]}',
        '[{"text": "Read twice.", "attempts": 1}]',
        '{"lesson": "Read twice.", "attempts": [1]}',
    ):
        (lesson,) = read_lessons(text)
        assert (lesson.text, lesson.attempts) == ("Read twice.", (1,))
    assert [x.text for x in read_lessons('["a b", "c d", "a b", "none", ""]')] == ["a b", "c d"]
    assert read_lessons("[]") == read_lessons('{"lessons": []}') == ()


@pytest.mark.parametrize(
    ("reply", "lessons"),
    [
        ('As [RFC 2119] says, see a[i][j].\n["Quote the header."]', ["Quote the header."]),
        ('Of ["A", "B", "C"] one holds: ["Read every option."]', ["Read every option."]),
        ('["Sum first."] and {"lessons": [{"lesson": "Sum last."}]}', ["Sum last."]),
        ('选项 ["甲", "乙"]，经验：["先检查所有的单位。"]', ["先检查所有的单位。"]),
    ],
)
def test_brackets_beside_the_lessons_are_none(reply: str, lessons: list[str]) -> None:
    assert [lesson.text for lesson in read_lessons(reply)] == lessons


@pytest.mark.parametrize(
    "reply",
    [
        "Index a[0], then a[i][j].",
        "[Smith et al., 2020] and [Jones, 1999]",
        'See ["Attention Is All You Need"](https://arxiv.org).',
        "No lessons. [N/A]",
    ],
)
def test_brackets_alone_are_no_lessons_and_are_asked_about_again(reply: str) -> None:
    with pytest.raises(ReplyError):
        read_lessons(reply)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["add", "UPDATE", "remove", "keep", "merge", "drop", "?", 3, None]),
        "id": st.sampled_from(["E1", "[e2]", 3, "E9", None, ["E1", "E2"], {"a": 1}]),
        "text": st.sampled_from(["Do this.", "", None, 5, ["a", "b"], {"text": "x"}]),
        "from": st.sampled_from(["C1", ["C1", "C2"], "C9", 4]),
        "extra": JSON,
    },
)


@settings(max_examples=200)
@given(
    st.text() | JSON.map(json.dumps) | st.lists(ROW | JSON, max_size=5).map(json.dumps), st.text()
)
def test_any_reply_is_read_or_refused_and_nothing_else_is_raised(text: str, noise: str) -> None:
    for reply in (text, noise + text, text[: len(text) // 2], noise + text + noise):
        try:
            found = read_operations(reply, LABELS, proposals={"C1": "C1", "C2": "C2"})
        except ReplyError as exc:
            assert str(exc)
        else:
            assert all(r.reason for r in found.rejected)
            assert all(e.op in ("add", "update", "delete", "keep") for e in found.edits)
            assert all(e.target in LABELS for e in found.edits if e.op in ("update", "delete"))


SAFE = st.text(st.characters(codec="utf-8", exclude_characters="\\\"'{}[]“”‘’`<>", exclude_categories=["C", "Z"]), min_size=5, max_size=12)  # fmt: skip


@settings(max_examples=100)
@given(
    st.lists(SAFE, min_size=1, max_size=4, unique=True),
    st.sampled_from(["plain", "fence", "py", "wrap"]),
)
def test_valid_operations_survive_any_of_the_usual_wrappings(texts: list[str], how: str) -> None:
    rows: list[dict[str, Any]] = [{"op": "add", "text": f"lesson {t}"} for t in texts]
    reply = {
        "plain": json.dumps(rows),
        "fence": f"I think this is it.\n```json\n{json.dumps(rows, ensure_ascii=False)}\n```\nDone.",
        "py": repr(rows),
        "wrap": json.dumps({"thoughts": "none", "operations": rows}),
    }[how]
    assert [e.text for e in read_operations(reply, LABELS).edits] == [r["text"] for r in rows]
