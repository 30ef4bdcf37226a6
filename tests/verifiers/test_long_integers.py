"""Integers of thousands of digits in references, answers, arguments, results and messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.messages import ToolCall
from tfgrpo.policies.tool_loop import run_call
from tfgrpo.policies.tools import tool
from tfgrpo.protocols import ToolSpec
from tfgrpo.runtime.canonical import canonical_json, digest, integer_of, repr_of, shown_as_json
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers import Exact, JsonSchema, Numeric, ToolCalls

LONG = 10**5000 + 7
DIGITS = "1" + "0" * 4999 + "7"
SPEC = ToolSpec("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("verifier", "answer", "reference"),
    [
        (Numeric(), DIGITS, LONG),
        (Exact(), DIGITS, LONG),
        (JsonSchema(), f'so {{"a": {DIGITS}}} it is', {"a": LONG}),
        (ToolCalls([SPEC]), f'Action: f {{"a": {DIGITS}}}',
         [{"name": "f", "arguments": {"a": LONG}}]),
    ],
    ids=["numeric", "exact", "json", "calls"],
)  # fmt: skip
def test_a_reference_of_thousands_of_digits_is_compared(
    verifier: Any, answer: str, reference: Any
) -> None:
    verifier.check_task(task(reference))
    right = asyncio.run(verifier.score(said(answer), task(reference)))
    wrong = asyncio.run(verifier.score(said(answer.replace(DIGITS, "5")), task(reference)))
    assert (right.reward, wrong.reward) == (1.0, 0.0) and wrong.feedback


def test_a_task_file_may_hold_one_and_its_task_has_an_identity(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"task_id": "a", "prompt": "q", "reference": {DIGITS}}}\n')
    (read,) = read_tasks(path)
    assert read.reference == LONG
    assert digest(read.to_dict()) == digest(read.to_dict()) != digest({"a": LONG + 1})


async def test_a_tool_may_return_one() -> None:
    def get() -> object:
        return {"n": LONG}

    text, has_run = await run_call(ToolCall("", "get", "{}"), {"get": tool(get)}, timeout_s=5)
    assert has_run and text == f'{{"n":"{DIGITS}"}}'


@given(st.integers(-(10**6000), 10**6000) | st.integers())
def test_every_integer_has_a_json_form_and_a_text_for_messages(value: int) -> None:
    shown = shown_as_json([value])
    assert canonical_json(shown) and repr_of({"a": value})
    assert integer_of(str(shown[0])) == value


class Odd:
    def to_dict(self) -> None:
        raise Exception("no form")

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_object_whose_own_methods_raise_is_shown_all_the_same() -> None:
    assert shown_as_json({"a": Odd()}) == {"a": "<Odd without a text: RuntimeError: no text>"}
    assert shown_as_json(range(3)) == [0, 1, 2]
