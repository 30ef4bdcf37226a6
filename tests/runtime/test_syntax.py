"""Parsing Python while the garbage collector runs."""

import ast
import gc
from collections.abc import Iterator

import pytest

from tfgrpo.runtime.syntax import syntax_tree

LONG = "x = [" + ", ".join("(a + b) * c[1].d(e, f)" for _ in range(900)) + "]"


class Parsing:
    """Garbage that parses when it is collected, as a formatted traceback does."""

    def __init__(self) -> None:
        self.circle = self

    def __del__(self) -> None:
        ast.parse("y = (1 + 2) * 3")  # noqa: TID251


@pytest.fixture
def eager() -> Iterator[None]:
    """Collect garbage after every few allocations."""
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_a_text_is_parsed_whatever_the_collector_runs_meanwhile(pieces: int) -> None:
    for _ in range(5):
        for _ in range(pieces):
            Parsing()
        assign = syntax_tree(LONG).body[0]
        assert isinstance(assign, ast.Assign)
        assert isinstance(assign.value, ast.List)
        assert len(assign.value.elts) == 900


@pytest.mark.parametrize(
    ("text", "raised"), [("x = (", SyntaxError), ("x = 1\0", (SyntaxError, ValueError))]
)
def test_what_is_no_python_is_told_at_once(
    text: str, raised: type[Exception] | tuple[type[Exception], ...]
) -> None:
    with pytest.raises(raised):
        syntax_tree(text)
