from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Task
from tfgrpo.tasks.splits import SPLITS, Splits, _masked_number, overlaps, split_tasks, template


def tasks(n: int) -> list[Task]:
    return [Task(f"task-{i}", f"text {i}", metadata={"kind": "ab"[i % 2]}) for i in range(n)]


@given(st.integers(1, 60), st.integers(0, 9))
def test_every_task_is_in_exactly_one_split_whatever_the_order(n: int, seed: int) -> None:
    rows = tasks(n)
    splits = split_tasks(rows, seed=seed)
    ids = [t.task_id for name in SPLITS for t in getattr(splits, name)]
    assert sorted(ids) == sorted(t.task_id for t in rows)
    sizes = [len(getattr(splits, name)) for name in SPLITS]
    assert max(sizes) - min(sizes) <= 1
    random.Random(seed).shuffle(rows)
    assert split_tasks(rows, seed=seed) == splits


def test_another_seed_gives_other_splits() -> None:
    assert split_tasks(tasks(60), seed=1) != split_tasks(tasks(60), seed=2)


def test_sizes_are_honoured_and_the_rest_is_shared() -> None:
    splits = split_tasks(tasks(50), practice=10)
    assert [len(getattr(splits, name)) for name in SPLITS] == [10, 20, 20]
    splits = split_tasks(tasks(50), practice=10, gate=10, test=10)
    assert [len(getattr(splits, name)) for name in SPLITS] == [10, 10, 10]


def test_a_split_named_in_the_metadata_is_honoured() -> None:
    rows = [*tasks(9), Task("mine", "x", metadata={"split": "test"})]
    splits = split_tasks(rows)
    assert splits.of("mine") == "test"
    assert [len(getattr(splits, name)) for name in SPLITS] == [4, 3, 3]


def test_strata_are_spread_evenly() -> None:
    splits = split_tasks(tasks(60), stratify="kind")
    for name in SPLITS:
        kinds = [t.metadata["kind"] for t in getattr(splits, name)]
        assert len(kinds) == 20 and abs(kinds.count("a") - 10) <= 1


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        ([], {}, "there are no tasks"),
        ([Task("a", "x"), Task("a", "y")], {}, "1 task ids occur more than once, first 'a'"),
        ([Task("a", "x", metadata={"split": "train"})], {}, "allowed: practice, gate, test"),
        ([Task("a", "x")], {"practice": 5}, "ask for 5 tasks and 1 are free"),
    ],
)
def test_bad_input_is_named(rows: list[Task], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_tasks(rows, **sizes)


def test_equal_near_and_template_overlaps_between_splits_are_found() -> None:
    long = "The harbour master writes down each ship that enters the port before noon today"
    splits = Splits(
        practice=(
            Task("p1", "Where is my order A-12 from 3 May?"),
            Task("p2", long),
            Task("p3", "What is the capital of France?"),
        ),
        gate=(Task("g1", "What is  the capital of FRANCE"),),
        test=(
            Task("x1", "Where is my order B-977 from 11 May?"),
            Task("x2", long.replace("noon", "dusk")),
            Task("x3", "A text that shares nothing with the others at all."),
        ),
    )
    found = {(o.first, o.second, o.kind) for o in overlaps(splits, near=0.6)}
    assert found == {("p3", "g1", "exact"), ("p2", "x2", "near"), ("p1", "x1", "template")}


def test_alike_tasks_inside_one_split_are_no_overlap() -> None:
    twins = (Task("a", "same text here"), Task("b", "same text here"))
    assert overlaps(Splits(twins, (), ())) == []


def test_a_text_without_a_number_or_quotation_has_no_template() -> None:
    assert template("Which of the two ships is longer?") == ""
    assert template('Sort "b a" into order please') == template('Sort "z y x" into order please')


def test_an_instruction_that_all_tasks_share_makes_no_overlap() -> None:
    words = ["anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour"]
    rows = [
        Task(f"{a}-{b}", f"Tell in one word of lower case letters what the text is about: {a} {b}")
        for a in words
        for b in words
        if a != b
    ]
    assert overlaps(split_tasks(rows)) == []


def test_many_fillings_of_one_form_are_each_named_without_naming_every_pair() -> None:
    rows = [Task(f"t{i}", f"How much is {i} plus {i * 3} in total?") for i in range(90)]
    found = overlaps(split_tasks(rows))
    assert {o.kind for o in found} == {"template"}
    assert {key for o in found for key in (o.first, o.second)} == {t.task_id for t in rows}
    assert len(found) < 3 * len(rows)


@given(st.text("aZ1²١-/.:, _é\n", max_size=30))
def test_a_run_with_a_digit_is_a_number_as_a_pattern_with_backtracking_finds_it(text: str) -> None:
    wanted = re.sub(r"(?:\w[\w\-/.:,]*)?\d[\w\-/.:,]*", " numbertext ", text)
    assert re.sub(r"\w[\w\-/.:,]*", _masked_number, text) == wanted
