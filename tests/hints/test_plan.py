"""Hint plans, the leak check, and texts cut from solutions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hints.groups import SOLUTION, hinted_task, task
from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import HintPlan, level_of
from tfgrpo.hints.answer_leaks import answers_of, cut_before_leak, leaks
from tfgrpo.hints.metadata import MetadataHints, share_of
from tfgrpo.rollout import Task


def with_answer(reference: object) -> Task:
    return Task("t", "?", reference=reference)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "so it is 42."),
        ("42", "so it is (42)"),
        (42, "42"),
        ("42", "x=42"),
        ("42", "it is 42.0 apples"),
        ("1,200", "you get 1200"),
        (1200, "you get 1,200."),
        (0.5, "a chance of 0.50"),
        ("-3", "that leaves -3"),
        ("New York", "it is new\n york, of course"),
        (["7", "seven"], "seven of them"),
        ("long talk #### 9", "gives 9"),
        (r"\boxed{\pi}", r"so \pi remains"),
        (r"Thus \boxed{\frac{1}{2}}.", r"which is \frac{1}{2}"),
        ({"answer": "blue", "tests": ["x"]}, "a Blue one"),
    ],
)
def test_an_answer_in_a_hint_is_found(reference: object, text: str) -> None:
    assert leaks(text, with_answer(reference))


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "add 420 and 142"),
        ("42", "3.42 or 42.5"),
        ("42", "variable x42 and 42nd"),
        (42, "1,42x"),
        ("200", "1,200 people"),
        ("1", "1,000"),
        ("blue", "bluebells"),
        (True, "True"),
        (None, "anything"),
        ({"tests": ["x"]}, "x"),
        ("42", ""),
    ],
)
def test_what_only_looks_like_the_answer_is_no_leak(reference: object, text: str) -> None:
    assert not leaks(text, with_answer(reference))


@given(
    answer=st.integers(0, 10**6),
    before=st.text(alphabet="ab .,\n", max_size=12),
    after=st.text(alphabet="ab \n", max_size=12),
)
@settings(max_examples=60)
def test_what_is_cut_before_a_leak_never_leaks(answer: int, before: str, after: str) -> None:
    one = with_answer(answer)
    text = f"{before} {answer} {after}"
    assert leaks(text, one)
    kept = cut_before_leak(text, one)
    assert not leaks(kept, one)
    assert text.startswith(kept)


def test_answers_are_read_from_every_form_of_reference() -> None:
    assert answers_of([1, ["a", None]]) == ("1", "a")
    assert answers_of({"answers": ["x"], "target": 2}) == ("x", "2")
    assert answers_of("  ") == ()


def test_a_plan_becomes_a_context_part_and_its_level_is_read_back() -> None:
    part = HintPlan(text="think", level=2, source="teacher").part()
    assert part == ContextPart("hint", "think", source="hint:teacher:2")
    assert level_of(part) == 2
    assert HintPlan().part() is None
    assert HintPlan().is_bare


def test_a_response_prefix_stays_in_the_plan() -> None:
    plan = HintPlan(response_prefix="So", level=1, source="oracle")
    assert plan.part() is None
    assert not plan.is_bare
    assert plan.label == "prefix:oracle:1"


def test_a_foreign_part_has_no_level() -> None:
    with pytest.raises(ConfigError, match="hint:WRITER:LEVEL"):
        level_of(ContextPart("hint", "x", source="mine"))


@pytest.mark.parametrize("wrong", [{"level": -1}, {"weight": -0.5}, {"n": 0}])
def test_a_plan_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="hint plan"):
        HintPlan(**wrong)  # type: ignore[arg-type]


@given(text=st.text(alphabet="ab \n", max_size=40), a=st.floats(0, 1), b=st.floats(0, 1))
@settings(max_examples=80)
def test_a_larger_share_never_shows_less(text: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert share_of(text, high).startswith(share_of(text, low))
    assert share_of(text, 1.0) == text.rstrip()


def test_a_share_ends_at_a_word() -> None:
    assert share_of("alpha beta gamma", 0.5) == "alpha"
    assert share_of("unbroken", 0.5) == ""


def test_a_cut_solution_gives_rising_quarters_that_end_before_the_answer() -> None:
    plans = MetadataHints()(task(solution=SOLUTION))
    assert [p.level for p in plans] == [1, 2, 3]
    assert [p.source for p in plans] == ["reference"] * 3
    for k, plan in enumerate(plans, 1):
        assert SOLUTION.startswith(plan.text)
        assert len(plan.text) <= round(len(SOLUTION) * k / 4)
    assert len({p.text for p in plans}) == 3

    early = MetadataHints()(task(solution="Clearly it is 42 because " + SOLUTION))
    assert [p.text for p in early] == ["Clearly it is"]


def test_written_hints_come_before_the_solution_and_leaking_ones_are_dropped() -> None:
    one = task(hints=["add", "it is 42", "carry"], hints_source="teacher", solution=SOLUTION)
    plans = MetadataHints()(one)
    assert [(p.text, p.level, p.source) for p in plans] == [
        ("add", 1, "teacher"),
        ("carry", 2, "teacher"),
    ]
    assert [p.source for p in MetadataHints(levels=2)(hinted_task())] == ["given"] * 2


def test_a_task_without_help_is_an_error_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"metadata\.solution"):
        MetadataHints()(task())
    assert MetadataHints(missing="plain")(task()) == ()
    with pytest.raises(ConfigError, match="list of texts"):
        MetadataHints()(task(hints="just one"))
    with pytest.raises(ConfigError, match="must be a text"):
        MetadataHints()(task(solution=3))
