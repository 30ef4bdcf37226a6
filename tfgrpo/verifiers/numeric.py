r"""Verifier that compares numbers: separators, units, tolerance; the last number or the boxed one.

Numbers are decimals of any length, never binary floats, so that 0.1 + 0.2 is 0.3. The forms that
are read stand in `numbers`. Does not know algebra (see `math`). Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation, localcontext
from typing import Literal, get_args

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers.answer import (
    UnitVerifier,
    boxed,
    compiled,
    extracted,
    reference_text,
    short,
)
from tfgrpo.verifiers.numbers import CONTEXT, number_of, numbers_in, plain_text

__all__ = ["Numeric", "Source", "numbers_in"]

Source = Literal["auto", "last", "boxed", "whole"]
"""Where the answer stands: the last number; the last `\\boxed{}`; the whole text, which then must
be one number; `auto`: boxed where there is a box, else the last number."""

_NO_NUMBER = re.compile(
    r"[\w)}\]]\s*[+*^]|[+*^]\s*[\w(\\{]|(?<![A-Za-z])[A-Za-z]\s*-\s*\d|\d\s*-\s*[A-Za-z](?![A-Za-z])"
    r"|\\sqrt|\\[dt]?frac"
)
"""An expression with variables: its last number is not its value."""
_VARIABLES = frozenset("xyzei")
"""Letters after a number that are no unit unless the settings name them."""
_MATHEMATICS = re.compile(
    r"[<>≤≥≠|!_^±⌊⌋⌈⌉√∛]|\\(?:[lg]eq?|neq?|[lg]t|pm|mp|log|ln|lg|sin|cos|tan|cot|sec|csc|arc\w+|exp"
    r"|[dt]?binom|choose|[lr](?:floor|ceil|vert)|[bp]?mod|max|min|gcd|lcm|sum|prod|int|infty)"
    r"(?![A-Za-z])|\\\||\d\s*(?:[xyzei]|\\i?math)(?![A-Za-z])"
)
"""Marks and functions that change what a number beside them says."""


class Numeric(UnitVerifier):
    r"""1 where the number in the answer equals the reference within the tolerance, else 0.

    The reference is a number or a text with exactly one number (and a unit, where units are given).

    Args:
        tolerance: largest absolute difference that counts as equal.
        relative: largest difference as a share of the reference's size.
        source: where the answer stands.
        units: unit name to factor, such as `{"m": 1, "km": 1000}`; a number followed by one is
            multiplied. Any other word after a number is ignored.
        unit_required: an answer without one of the units is wrong.
        decimal_comma: read `1.234,5` as 1234.5.
        extract: pattern that cuts the part to look at; last match, its first group.
    """

    def __init__(
        self,
        *,
        tolerance: float = 0.0,
        relative: float = 0.0,
        source: Source = "auto",
        units: Mapping[str, float] | None = None,
        unit_required: bool = False,
        decimal_comma: bool = False,
        extract: str | None = None,
    ) -> None:
        if not (tolerance >= 0 and relative >= 0):
            raise ConfigError(
                f"Numeric: tolerance {tolerance} and relative {relative} must be 0 or more"
            )
        if source not in get_args(Source):
            raise ConfigError(f"Numeric: source is {source!r}; allowed are {get_args(Source)}")
        if unit_required and not units:
            raise ConfigError("Numeric: unit_required is set, but there are no units")
        self._tolerance = Decimal(str(tolerance))
        self._relative = Decimal(str(relative))
        self._source = source
        self._units = {u: Decimal(str(f)) for u, f in (units or {}).items()}
        self._unit_required = unit_required
        self._mark = "," if decimal_comma else "."
        self._extract = None if extract is None else compiled(extract, "Numeric: extract")
        settings = [tolerance, relative, source, dict(units or {}), unit_required, decimal_comma]
        super().__init__("numeric", [*settings, extract])

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for a reference that is not exactly one number."""
        self._reference(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare; asks nobody."""
        wanted = self._reference(task)
        text = await extracted(rollout.answer, self._extract)
        given = None if text is None else self._answer(text)
        if given is None:
            return Score(0.0, f"no number found in the answer, expected {wanted}")
        with localcontext(CONTEXT):
            allowed = max(self._tolerance, self._relative * abs(wanted))
            is_right = given == wanted or abs(given - wanted) <= allowed
        said = "equals the reference" if is_right else f"is {given}, expected {wanted}"
        return Score(float(is_right), f"the number {said}")

    def _answer(self, text: str) -> Decimal | None:
        inside: str | None = None
        if self._source in ("auto", "boxed"):
            inside = boxed(text)
            if inside is not None:
                text = inside
            elif self._source == "boxed":
                return None
        if inside is not None or self._source == "whole":
            one = self._value(text)
            if one is not None and (one[1] in self._units or one[1] not in _VARIABLES):
                return self._in_base_unit(*one)
            if inside is not None and not self._is_one(text):
                return None
        found = numbers_in(text, decimal_mark=self._mark)
        if not found or (self._source == "whole" and len(found) != 1):
            return None
        return self._in_base_unit(*found[-1])

    def _is_one(self, text: str) -> bool:
        """Whether a text that is no number by itself states one among words, and no mathematics."""
        plain = plain_text(text)
        return (
            len(numbers_in(text, decimal_mark=self._mark)) == 1
            and not _NO_NUMBER.search(text)
            and not _MATHEMATICS.search(plain)
        )

    def _value(self, text: str) -> tuple[Decimal, str] | None:
        """Return the one value that a text states, after its last equals sign."""
        whole = number_of(text, decimal_mark=self._mark)
        if whole is None and "=" in text:
            whole = number_of(text.rpartition("=")[2], decimal_mark=self._mark)
        return whole

    def _in_base_unit(self, value: Decimal, unit: str) -> Decimal | None:
        if unit in self._units:
            return CONTEXT.multiply(value, self._units[unit])
        return None if self._unit_required else value

    def _reference(self, task: Task) -> Decimal:
        given, where = task.reference, f"task {task.task_id!r}: the reference"
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            try:
                value = Decimal(reference_text(given))
            except InvalidOperation:
                value = Decimal("NaN")
            if value.is_finite():
                return value
        elif isinstance(given, str):
            text = boxed(given) or given
            one = self._value(text)
            found = numbers_in(text, decimal_mark=self._mark) if one is None else [one]
            if len(found) == 1 and (one is not None or not _NO_NUMBER.search(text)):
                base = self._in_base_unit(*found[0])
                if base is not None:
                    return base
                raise ConfigError(
                    f"{where} {short(given, 80)} has none of the units {[*self._units]}"
                )
        raise ConfigError(f"{where} is {short(given, 80)}; Numeric needs exactly one number there")
