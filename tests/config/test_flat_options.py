"""Flat options into the records that a function takes together."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from tfgrpo.config.flat_options import flat_parameters, gathered


@dataclass(frozen=True)
class Limits:
    seconds: Annotated[float, "of one call"] = 1.0
    calls: int = 5


NONE = Limits()


def run(text: str, *, limits: Limits = NONE, loud: bool = False) -> Any:
    return text, limits, loud


class Made:
    def __init__(self, text: str, limits: Limits = NONE) -> None:
        self.given = text, limits


def test_fields_stand_in_place_of_their_record() -> None:
    found = flat_parameters(run)
    assert list(found) == ["text", "seconds", "calls", "loud"]
    assert found["seconds"].annotation == Annotated[float, "of one call"]
    assert found["loud"].annotation is bool
    assert (found["calls"].default, found["text"].default) == (5, inspect.Parameter.empty)
    assert list(flat_parameters(Made)) == ["text", "seconds", "calls"]


@pytest.mark.parametrize("options", [{}, {"loud": True}])
def test_a_record_of_which_nothing_is_given_keeps_its_default(options: dict[str, Any]) -> None:
    assert gathered(run, options) == options


def test_given_fields_replace_those_of_the_default() -> None:
    assert run(**gathered(run, {"text": "a", "calls": 2})) == ("a", Limits(1.0, 2), False)
    assert Made(**gathered(Made, {"text": "a", "seconds": 3.0})).given == ("a", Limits(3.0, 5))


def test_unknown_names_stay_for_the_function_to_refuse() -> None:
    with pytest.raises(TypeError, match="callz"):
        run(**gathered(run, {"text": "a", "callz": 2}))
