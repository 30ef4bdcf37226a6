"""Leak checks on tasks made for each way of leaking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rollout import Task
from tfgrpo.tasks.contamination import (
    find_leaks,
    leaks_in_library,
    normalised,
    refuse_contaminated,
)

LONG = "A baker sells {n} loaves on Monday and twice as many on each following day of the week"


def kinds(report) -> list[tuple[str, str, str]]:
    return [(leak.kind, leak.task_id, leak.source) for leak in report.leaks]


def test_equal_texts_under_other_case_spacing_and_unicode_form_are_exact_overlap() -> None:
    practice = [Task("p1", "How  many apples are LEFT?"), Task("p2", "Ｗｈｙ?")]
    held_out = [Task("h1", "how many apples are left"), Task("h2", "why"), Task("h3", "who")]
    assert kinds(find_leaks(practice, held_out)) == [("exact", "h1", "p1"), ("exact", "h2", "p2")]


def test_the_same_id_in_both_parts_is_a_leak_even_with_another_text() -> None:
    report = find_leaks([Task("a", "one")], [Task("a", "two")])
    assert kinds(report) == [("same_id", "a", "a")]


def test_a_text_with_a_few_words_changed_is_near_overlap() -> None:
    practice = [Task("p", LONG.format(n=40) + ". How many loaves does he sell in seven days?")]
    changed = LONG.format(n=40) + ". How many loaves does she sell in seven days?"
    report = find_leaks(practice, [Task("h", changed), Task("i", "Name the capital of France.")])
    (leak,) = report.leaks
    assert (leak.kind, leak.task_id, leak.source) == ("near", "h", "p")
    assert 0.8 < leak.similarity < 1
    assert "baker" in leak.evidence or "loaves" in leak.evidence


def test_a_practice_text_inside_a_longer_held_out_text_is_near_overlap() -> None:
    held = Task(
        "h", "Read the story. " + LONG.format(n=3) + ". Then explain what bread is made of."
    )
    assert kinds(find_leaks([Task("p", LONG.format(n=3))], [held])) == [("near", "h", "p")]


def test_an_instruction_that_all_tasks_share_is_no_overlap() -> None:
    frame = "Classify the customer's message into one of: refund, delivery, account, other. Text: "
    practice = [Task(f"p{i}", frame + word) for i, word in enumerate(["late", "lost", "broken"])]
    held_out = [Task(f"h{i}", frame + word) for i, word in enumerate(["blue", "red", "green"])]
    assert find_leaks(practice, held_out).leaks == ()


def test_chat_tasks_are_compared_by_all_their_turns() -> None:
    turns = (Message("system", "Be brief."), Message("user", LONG.format(n=9)))
    report = find_leaks([Task("p", turns)], [Task("h", turns)])
    assert kinds(report) == [("exact", "h", "p")]


def test_an_answer_inside_the_library_is_a_leak_and_a_label_is_not() -> None:
    held_out = [
        Task("num", "What is it?", reference=4711),
        Task("word", "Who?", reference={"answer": "Marie Curie"}),
        Task("l1", "Class of the first?", reference="refund"),
        Task("l2", "Class of the second?", reference="refund"),
        Task("yes", "Is it?", reference="true"),
        Task("small", "How many?", reference=12),
    ]
    library = {
        "e1": "The result is 4711 for such sums; 12 is rare.",
        "e2": "If money is asked back, say refund. True stories are no help.",
        "e3": "Remember marie  CURIE.",
        "e4": "47110 and 14711 are other numbers",
    }
    assert kinds(find_leaks([], held_out, library)) == [
        ("answer_in_library", "num", "e1"),
        ("answer_in_library", "word", "e3"),
    ]


def test_an_answer_that_the_questions_name_as_a_choice_is_a_label() -> None:
    question = "Which category: billing, delivery or returns?"
    practice = [Task(f"p{i}", f"{i} {question}", reference="billing") for i in range(3)]
    held_out = [Task("h", f"late parcel, send it. {question}", reference="delivery")]
    library = {"e": f"user: broken lamp, mend it. {question} assistant: returns"}
    assert find_leaks(practice, held_out, library).leaks == ()


def test_a_lesson_that_quotes_a_held_out_task_is_a_leak() -> None:
    held_out = [Task("h", LONG.format(n=5))]
    library = {"e": "When a baker sells 5 loaves on Monday and twice as many later, use a sum."}
    report = find_leaks([], held_out, library)
    assert kinds(report) == [("task_in_library", "h", "e")]


def test_the_leaks_of_a_library_alone_are_those_among_all() -> None:
    practice = [Task("p", LONG.format(n=7)), Task("q", LONG.format(n=5))]
    held_out = [Task("h", LONG.format(n=5), reference=4711)]
    library = {
        "e": "When a baker sells 5 loaves on Monday and twice as many later, it is 4711.",
        "f": "Add what was sold.",
    }
    both = find_leaks(practice, held_out, library).leaks
    found = leaks_in_library(practice, held_out, library)
    assert found == tuple(k for k in both if k.kind.endswith("_in_library")) != ()
    assert len(found) < len(both)


def test_an_empty_library_leaks_nothing_and_no_task_is_read_for_that() -> None:
    class Unread:
        def __iter__(self) -> Iterator[Task]:
            raise AssertionError("read")

    assert leaks_in_library(Unread(), Unread(), {}) == ()


def test_contaminated_tasks_leave_the_figures_and_all_of_them_are_a_refusal() -> None:
    practice = [Task("p", "same text")]
    report = find_leaks(practice, [Task("h1", "same text"), Task("h2", "other text")])
    assert report.contaminated == {"h1"}
    assert report.clean({"h1": [1.0], "h2": [0.0]}) == {"h2": [0.0]}
    refuse_contaminated(report)  # one clean task is left
    with pytest.raises(ConfigError, match="1 of 2 held-out tasks are contaminated, first 'h1'"):
        refuse_contaminated(report, share=0.5)
    with pytest.raises(ConfigError, match="Take other held-out tasks"):
        refuse_contaminated(find_leaks(practice, [Task("h1", "Same text!")]))


def test_no_leak_is_never_refused() -> None:
    refuse_contaminated(find_leaks([Task("p", "a")], [Task("h", "b")]), share=0.0)
    refuse_contaminated(find_leaks([], []))


def test_the_report_is_plain_json() -> None:
    row = find_leaks([Task("p", "x y")], [Task("h", "x y")], {"e": "z"}).to_dict()
    assert row["contaminated"] == ["h"]
    assert (row["practice"], row["held_out"], row["experiences"]) == (1, 1, 1)
    assert row["leaks"][0]["kind"] == "exact"


def test_decimal_numbers_stay_one_word() -> None:
    assert normalised("It costs 3.50, or 1,000.") == "it costs 3.50 or 1,000"
