"""One renderer: literal, ordered, byte-equal when empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart, render_messages
from tfgrpo.messages import Message
from tfgrpo.prompts import fields_of, fill, load, names, render

TASK = (Message("user", "What is 2+2?"),)


@given(st.text(), st.text())
def test_an_empty_context_leaves_the_prompt_byte_equal(system: str, text: str) -> None:
    task = (Message("user", text),)
    bare = render_messages(task, EMPTY_CONTEXT, system=system)
    assert bare == ((Message("system", system),) if system else ()) + task
    assert Context(()).context_hash == EMPTY_CONTEXT.context_hash == "empty"


@given(st.lists(st.text(min_size=1).filter(lambda t: "\n" not in t), min_size=1, max_size=5))
def test_every_lesson_stands_in_the_prompt_literally_and_once(lessons: list[str]) -> None:
    context = Context(tuple(ContextPart("lesson", t) for t in lessons))
    system = render_messages(TASK, context)[0].content
    block = "\n".join(f"[{i}] {t}" for i, t in enumerate(lessons, 1))
    assert system == render("lessons", lessons=block)


def test_exemplars_are_turns_before_the_task() -> None:
    turns = (Message("user", "1+1?"), Message("assistant", "2"))
    context = Context((ContextPart("exemplar", turns=turns), ContextPart("lesson", "Be short.")))
    prompt = render_messages(TASK, context, system="S")
    assert [m.role for m in prompt] == ["system", "user", "assistant", "user"]
    assert prompt[0].content.startswith("S\n\n")
    assert prompt[3] == TASK[0]


@pytest.mark.parametrize("placement", ["system", "user"])
def test_placement_moves_lessons_and_changes_the_hash(placement: str) -> None:
    context = Context((ContextPart("lesson", "Be short."),), placement)  # type: ignore[arg-type]
    prompt = render_messages(TASK, context)
    holder = "system" if placement == "system" else "user"
    assert [m.role for m in prompt if "Be short." in m.content] == [holder]
    other = "user" if placement == "system" else "system"
    assert Context(context.parts, other).context_hash != context.context_hash  # type: ignore[arg-type]


def test_hints_strategies_and_drafts_follow_the_task() -> None:
    context = Context(
        (ContextPart("draft", "D1"), ContextPart("hint", "H1"), ContextPart("strategy", "S1"))
    )
    text = render_messages(TASK, context)[-1].content
    assert text.index("2+2") < text.index("S1") < text.index("H1") < text.index("D1")


@given(
    st.lists(
        st.builds(
            ContextPart,
            st.sampled_from(["lesson", "hint", "strategy", "draft"]),
            st.text(max_size=20),
            source=st.text(max_size=5),
        ),
        max_size=4,
    )
)
def test_json_gives_a_context_back_with_its_hash(parts: list[ContextPart]) -> None:
    context = Context(tuple(parts))
    again = Context.from_dict(context.to_dict())
    assert again == context
    assert again.context_hash == context.context_hash


@given(st.text(), st.text())
def test_values_are_never_scanned_again(text: str, foo: str) -> None:
    template = 'Use {"name": "demo"} and $text, then $foo: 100% {braces} \\n'
    want = 'Use {"name": "demo"} and ' + text + ", then " + foo + ": 100% {braces} \\n"
    assert fill(template, text=text, foo=foo) == want


def test_a_missing_or_surplus_value_is_named() -> None:
    with pytest.raises(KeyError, match="missing \\['b'\\], unknown \\['c'\\]"):
        fill("$a $b", a="1", c="2")


@pytest.mark.parametrize("name", ["../prompts/lessons", "/etc/passwd", "7" * 5000, "a\0b", ""])
def test_a_name_that_is_no_prompt_is_no_path_either(name: str) -> None:
    with pytest.raises(KeyError, match="no prompt"):
        load(name)


@pytest.mark.parametrize("name", names())
def test_every_prompt_loads_and_renders(name: str) -> None:
    values = {field: f"<{field}>" for field in fields_of(name)}
    text = render(name, **values)
    assert load(name)
    assert all(value in text for value in values.values())
