"""Bringing rules together: what they are about, and that no value is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.experience import Library
from tfgrpo.experience.claim import Claim
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.reflect.consolidate import crowded_topics, lost_values, read_rewrite
from tfgrpo.experience.reflect.reply import Rule


def entry(number: int, text: str, *support: str, topic: str = "hours") -> Experience:
    claim = Claim(topic, support or ("t1", "t2")).judged()
    return Experience(f"E{number}", text=text, claim=claim)


TABLE = [
    entry(1, "Priority 1 has 8 hours.", "t1", "t2"),
    entry(2, "Priority 2 has 4 hours.", "t3", "t4"),
    entry(3, "Code ZQ has 99 hours.", "t5"),
]


def test_a_rewrite_updates_the_first_entry_and_joins_what_it_rests_on() -> None:
    rule = Rule("hours by priority: 1 → 8; 2 → 4", "hours", replaces=("E1", "E2"))
    last = Rule("Code ZQ has 99 hours.", "hours", replaces=("E3",))
    edits, problem = read_rewrite([rule, last], TABLE, "hours")
    assert not problem
    assert [(e.op, e.target) for e in edits] == [
        ("update", "E1"), ("delete", "E2"), ("update", "E3"),
    ]  # fmt: skip
    assert edits[0].claim.support == ("t1", "t2", "t3", "t4")
    assert edits[0].claim.state == "confirmed"


def test_a_rewrite_that_loses_a_value_of_a_confirmed_entry_is_refused() -> None:
    rule = Rule("hours by priority: 1 → 8", "hours", replaces=("E1", "E2", "E3"))
    edits, problem = read_rewrite([rule], TABLE, "hours")
    assert edits == [] and "loses 2, 4 of E2" in problem


def test_only_an_entry_on_trial_may_go() -> None:
    rule = Rule("hours by priority: 1 → 8; 2 → 4", "hours", replaces=("E1", "E2", "E3"))
    edits, problem = read_rewrite([rule], TABLE, "hours")
    assert not problem and len(edits) == 3


def test_a_rewrite_names_every_entry_once_and_makes_the_topic_shorter() -> None:
    twice = [Rule("1 2 4 8 hours ZQ 99", replaces=("E1", "E1"))]
    assert read_rewrite(twice, TABLE, "hours")[1]
    missing = [Rule("1 2 4 8 hours ZQ 99", replaces=("E1", "E2"))]
    assert read_rewrite(missing, TABLE, "hours")[1]
    same = [Rule(e.text, replaces=(e.experience_id,)) for e in TABLE]
    assert "fewer" in read_rewrite(same, TABLE, "hours")[1]


@given(st.lists(st.sampled_from(["NET", "HW", "24", "7.5", "R2", "over", "the"]), max_size=6))
def test_nothing_is_lost_by_adding_words_and_each_missing_value_is_named(found: list[str]) -> None:
    text = " ".join(found)
    assert lost_values(text, f"{text} and more") == []
    values = {w for v in found if v[0].isdigit() or v.isupper() for w in v.casefold().split(".")}
    assert lost_values(text, "nothing") == sorted(values)


def test_a_topic_is_crowded_from_so_many_shown_lessons() -> None:
    edits = [Edit("add", f"Rule number {i} says {i * 7}.", claim=e.claim)
             for i, e in enumerate(TABLE)]  # fmt: skip
    library = Library().apply(edits).library
    ((topic, entries),) = crowded_topics(library, 3)
    assert topic == "hours" and len(entries) == 3
    assert crowded_topics(library, 4) == [] == crowded_topics(library, 0)
