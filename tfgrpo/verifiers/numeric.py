r"""Verifier that compares numbers: separators, units, tolerance; the last number or the boxed one.

Numbers are decimals of any length, never binary floats, so that 0.1 + 0.2 is 0.3.
Does not know algebra (see `math`). Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Context, Decimal, InvalidOperation, localcontext
from typing import Literal, get_args

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.verifiers.answer import MOST_CHARS, boxed, compiled, extracted, verifier_name

__all__ = ["Numeric", "Source", "numbers_in"]

Source = Literal["auto", "last", "boxed", "whole"]
"""Where the answer stands: the last number; the last `\\boxed{}`; the whole text, which then must
be one number; `auto`: boxed where there is a box, else the last number."""

# A point is a decimal sign or a comma groups thousands; the other way round for decimal commas.
_DIGITS = {
    ".": r"\d{1,3}(?:[,_'\u00a0\u2009\u202f]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+",
    ",": r"\d{1,3}(?:[._'\u00a0\u2009\u202f]\d{3})+(?:,\d+)?|\d+(?:,\d+)?|,\d+",
}
_UNIT = r"[ \u00a0]?(?P<unit>[A-Za-zµμΩ°%€$£][A-Za-z0-9µμΩ°%²³/·^]*)?"


def _pattern(mark: str) -> re.Pattern[str]:
    digits = _DIGITS[mark]
    return re.compile(
        rf"(?<![\w{mark}])(?:(?<![\w)\]}}])(?P<sign>[-+\u2212]))?[$€£]?"
        rf"(?P<value>{digits})(?![\d])(?P<exp>[eE][+-]?\d{{1,3}}(?!\d))?"
        rf"(?:/(?P<denominator>\d+(?![\d.,]\d)))?{_UNIT}",
        re.ASCII,
    )


_PATTERNS = {mark: _pattern(mark) for mark in _DIGITS}
_CONTEXT = Context(prec=60)


def numbers_in(text: str, *, decimal_mark: str = ".") -> list[tuple[Decimal, str]]:
    """Return each number of a text with the word that follows it directly, in order.

    >>> [(str(n), u) for n, u in numbers_in("from -1,234.50 km to 3/4 of 7e2, not v2")]
    [('-1234.50', 'km'), ('0.75', 'of'), ('7E+2', '')]
    """
    found = []
    for match in _PATTERNS[decimal_mark].finditer(text[-MOST_CHARS:]):
        digits = re.sub(r"[_'\u00a0\u2009\u202f]", "", match["value"])
        digits = digits.replace(",", "") if decimal_mark == "." else digits.replace(".", "")
        value = Decimal(digits.replace(",", ".") + (match["exp"] or ""))
        if match["sign"] in ("-", "\u2212"):
            value = -value
        if match["denominator"] is not None:
            below = Decimal(match["denominator"])
            if below == 0:
                continue
            value = _CONTEXT.divide(value, below)
        found.append((value, match["unit"] or ""))
    return found


class Numeric:
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
        self._verifier_id = verifier_name("numeric", [*settings, extract])

    @property
    def verifier_id(self) -> str:
        """Fixed by the options."""
        return self._verifier_id

    @property
    def reward_range(self) -> tuple[float, float]:
        """0 to 1."""
        return 0.0, 1.0

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` for a reference that is not exactly one number."""
        self._reference(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare; asks nobody."""
        wanted = self._reference(task)
        text = extracted(rollout.answer, self._extract)
        given = None if text is None else self._answer(text)
        if given is None:
            return Score(0.0, f"no number found in the answer, expected {wanted}")
        with localcontext(_CONTEXT):
            allowed = max(self._tolerance, self._relative * abs(wanted))
            is_right = given == wanted or abs(given - wanted) <= allowed
        said = "equals the reference" if is_right else f"is {given}, expected {wanted}"
        return Score(float(is_right), f"the number {said}")

    def _answer(self, text: str) -> Decimal | None:
        if self._source in ("auto", "boxed"):
            inside = boxed(text)
            if inside is not None:
                text = inside
            elif self._source == "boxed":
                return None
        # LaTeX spacing and currency inside boxes would hide separators and units.
        text = text.replace("{,}", ",").replace("\\,", "\u2009").replace("\\%", "%")
        text = text.replace("\\$", "$").replace("**", "")
        found = numbers_in(text, decimal_mark=self._mark)
        if not found or (self._source == "whole" and len(found) != 1):
            return None
        return self._in_base_unit(*found[-1])

    def _in_base_unit(self, value: Decimal, unit: str) -> Decimal | None:
        if unit in self._units:
            return _CONTEXT.multiply(value, self._units[unit])
        return None if self._unit_required else value

    def _reference(self, task: Task) -> Decimal:
        given, where = task.reference, f"task {task.task_id!r}: the reference"
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            try:
                value = Decimal(str(given))
            except InvalidOperation:
                value = Decimal("NaN")
            if value.is_finite():
                return value
        elif isinstance(given, str):
            text = boxed(given) or given
            found = numbers_in(text, decimal_mark=self._mark)
            if len(found) == 1:
                base = self._in_base_unit(*found[0])
                if base is not None:
                    return base
                raise ConfigError(f"{where} {given!r:.80} has none of the units {[*self._units]}")
        raise ConfigError(f"{where} is {given!r:.80}; Numeric needs exactly one number there")
