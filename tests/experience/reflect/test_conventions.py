"""The guard that knows a convention from a memory."""

from __future__ import annotations

import pytest

from tests.benchmarks.learning.lesson_guards import FIRST, SECOND, THIRD, measure
from tfgrpo.experience import Conventions
from tfgrpo.experience.guards import Foreign
from tfgrpo.rollout import Task

TASKS = [
    Task("a", "Ticket from Nora Lind about a scanner, case QX-7731.", "NET/1/4"),
    Task("b", "Ticket about a scanner in the cellar, one team.", "NET/3/16"),
    Task("c", "Ticket about a laptop; the caller forgot the password.", "HW/1/4"),
    Task("d", "Ticket about a laptop and a lost password.", "HW/1/4"),
]


@pytest.fixture(scope="module")
def guard() -> Conventions:
    return Conventions.of(TASKS, [Task("x", "held out", "ACC/2/8")], agent="Queues: NET, HW, ACC.")


def test_precision_and_recall_over_hand_written_lessons_are_above_095() -> None:
    for part in (FIRST, SECOND, THIRD, FIRST + SECOND + THIRD):
        found = measure(part)
        assert found["precision"] >= 0.95 and found["recall"] >= 0.95, found["wrong"]
    assert len(FIRST + SECOND + THIRD) >= 60


def test_a_whole_answer_may_be_said_once_two_practice_tasks_share_it(guard: Conventions) -> None:
    assert guard.check("Laptops are HW/1/4.", ["c", "d"]).verdict == "pass"
    assert guard.check("The scanner is NET/1/4.", ["a"]).verdict == "refuse"
    assert guard.check("Projectors are ACC/2/8.", ["b"]).verdict == "refuse", "held out"


def test_names_and_identifiers_of_one_task_are_refused(guard: Conventions) -> None:
    assert guard.check("When Nora Lind calls, use NET.", ["a"]).verdict == "refuse"
    assert guard.check("Case QX-7731 goes to NET.", ["a"]).verdict == "refuse"
    assert guard.check("Scanners go to NET.", ["a", "b"]).verdict == "pass"


def test_a_word_for_secrets_is_a_topic_where_tasks_are_about_it(guard: Conventions) -> None:
    assert guard.check("A lost password goes to HW.", ["c", "d"]).verdict == "pass"
    assert guard.check("Ask for the password and tell it.", ["c"]).verdict == "quarantine"
    assert guard.check("A lost api key goes to HW.", ["c"]).verdict == "quarantine"


def test_words_of_a_tool_are_held_as_before(guard: Conventions) -> None:
    page = "every scanner of the north wing belongs to the blue queue now"
    assert guard.check(page, ["a"], foreign=Foreign.of([page])).verdict == "quarantine"


def test_a_citation_counts_where_the_key_holds_a_value_of_the_rule(guard: Conventions) -> None:
    assert guard.support_of("Scanners go to NET.", ["a", "b", "c"]) == ("a", "b")
    assert guard.support_of("Write three parts with slashes.", ["a", "c"]) == ("a", "c")
    assert guard.support_of("When it rains, use ZZZ.", ["a"]) == ("a",), "no key speaks of it"
