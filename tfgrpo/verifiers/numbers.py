r"""Numbers in text that people and models wrote: the one reader of all verifiers.

| form | examples |
|---|---|
| decimal | `42`, `-1.50`, `.5`, `−7`, `４２` |
| groups of three, one mark a number | `1,234,567`, `1 234`, `1'234`, `9{,}500`, `12,34,567` |
| the other decimal mark, where it is plain | `1.234,56` |
| e-notation and powers of ten | `6.02e23`, `6.02 \times 10^{23}`, `6.02·10²³`, `10**5` |
| fractions | `3/4`, `3 / 4`, `\frac{3}{4}`, `\frac34`, `¾`, `3⁄4` |
| mixed numbers | `3 1/2`, `3\frac{1}{2}`, `3½` |
| powers, roots, pi | `2^{10}`, `\sqrt{16}`, `2\pi` |
| repeating decimals, hexadecimal | `0.\overline{3}`, `0x1F` |

Inside a box the whole text may be an expression of these with `+ - × /` and brackets: its value
counts, never its last number. Values are decimals: exact for whole and decimal numbers of any
length, 60 digits where a division or a root does not end.

Linear in the text. Does not know units, tolerances or variables. Source: own.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Context, Decimal, DecimalException

__all__ = ["CONTEXT", "number_of", "numbers_in", "plain_text", "whole_number"]

CONTEXT = Context(prec=60)
"""For what does not end: quotients, roots, products with pi."""
_LONG = Context(prec=5000)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
_MOST_CHARS = 100_000
_MOST_DEPTH = 20
_MOST_POWER = 20_000
"""Largest power, and most digits of one."""

_SPACES = "\u00a0\u2007\u2009\u202f"
_OTHER_DIGITS = re.compile(r"[^\x00-\x7f]")
_SIGNS = dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012", "-") | {"\u207b": "\u207b"}
_OTHER_SPACES = dict.fromkeys("\u2002\u2004\u2005\u2006\u2008\u200a\u205f\u3000", "\u2009")
_NO_WIDTH = dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")
_SAME = _SIGNS | {"\uff0b": "+", "\uff0e": ".", "\uff0c": ",", "\uff0f": "/", "\u2044": "/",
                  "\u066b": ".", "\u066c": ",", "\uff05": "%", "\u2215": "/", "\u2019": "'",
                  **_OTHER_SPACES, **_NO_WIDTH}  # fmt: skip
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")

_GROUPED = {
    # One mark through the whole number; an ordinary space counts, as in "2 602".
    mark: rf"\d{{1,3}}(?P<group>[{other}_' {_SPACES}])\d{{3}}(?!\d)(?:(?P=group)\d{{3}}(?!\d))*"
    for mark, other in ((".", ","), (",", "."))
}
_INDIAN = r"\d{1,2}(?:,\d{2}){1,8},\d{3}(?!\d)"
_CROSSED = {
    # Groups by this setting's decimal mark, then the other mark: nothing else can be meant.
    ".": r"\d{1,3}(?:\.\d{3}){2,40}(?![\d,]|\.\d)|"
    r"\d{1,3}(?:\.\d{3}){1,40},(?:\d{1,2}|\d{4,})(?!\d)|\d{1,3}(?:\.\d{3}){2,40},\d+(?!\d)"
    rf"|\d{{1,3}}(?:[ {_SPACES}]\d{{3}}){{1,40}},\d{{1,2}}(?!\d)",
    ",": r"\d{1,3}(?:,\d{3}){2,40}(?![\d.]|,\d)|"
    r"\d{1,3}(?:,\d{3}){1,40}\.(?:\d{1,2}|\d{4,})(?!\d)|\d{1,3}(?:,\d{3}){2,40}\.\d+(?!\d)",
}
_DECIMAL = {
    mark: re.compile(
        rf"(?P<hex>0[xX][0-9a-fA-F]+\b)|(?P<crossed>{_CROSSED[mark]})"
        + (rf"|(?P<indian>{_INDIAN}(?:\.\d+)?)" if mark == "." else "")
        + rf"|(?:(?P<grouped>{_GROUPED[mark]})|(?P<whole>\d+))(?P<part>[{mark}]\d+)?"
        rf"|(?P<bare>[{mark}]\d+)",
    )
    for mark in (".", ",")
}
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,4})(?![\w^])")
_REPEATING = re.compile(r"(?P<mark>[.,])?\\(?:overline|bar|dot)\s*(?:\{(\d{1,50})\}|(\d))")
_POWER = re.compile(
    r"\s?(?:\^|\*\*)\s?(?:\{\s*([+-]?\d{1,6})\s*\}|\(\s*([+-]?\d{1,6})\s*\)|([+-]?\d{1,6}))"
    r"|([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,6})"
)
_TIMES = r"(?:\\times|\\cdot|\\ast|[×·⋅∙*•]|(?<![A-Za-z])[xX](?![A-Za-z]))"
_TIMES_TEN = re.compile(rf"\s*{_TIMES}\s*\{{?(?=10\s?(?:\^|\*\*|[⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹]))")
_TIMES_ANY = re.compile(rf"\s*{_TIMES}\s*")
_SLASH = re.compile(r"/| / ")
_FRACTION = re.compile(r"\\[dtc]?frac\s*|\\(?:nice|s|x)frac\s*")
_ROOT = re.compile(r"\\sqrt\s*(?![\[\s])|√\s?")
_PI_MARK = re.compile(r"\s?\\?\*?\s?(?:\\pi(?![A-Za-z])|π)")
_MIXED_GAP = re.compile(r"(?: and | |\\[,;: ]|(?=\\[dtc]?frac|[¼-¾⅐-⅞]))")
_VULGAR = re.compile(r"[¼-¾⅐-⅞↉]")
_UNIT = re.compile(r"[ \u00a0]?([A-Za-zµμΩ°%€$£][A-Za-z0-9µμΩ°%²³/·^]*)?", re.ASCII)
_WHOLE_UNIT = re.compile(
    r"[ \u00a0]{0,4}([A-Za-zµμΩ°%€$£][A-Za-z0-9µμΩ°%²³/·^{}-]*)?\.?"  # blanks: ` \, \text{ m}`
)
_START = {
    mark: re.compile(
        rf"(?<![\w{mark}^\\])(?:(?<![\w)\]}}])(?P<sign>[-+\u2013]))?[$€£¥]?\s?"
        rf"(?P<value>(?=\d)|(?=[{mark}]\d)|(?=\\[dtc]?frac|\\nicefrac|\\sfrac|\\sqrt|√)|"
        r"(?=[¼-¾⅐-⅞↉]))"
    )
    for mark in (".", ",")
}
_SKIP = re.compile(r"[\w.,]+|\\[A-Za-z]+|.", re.DOTALL)

_LATEX = (
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|boldsymbol)"
                r"\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)(?:\\[,;:> ]|~|\\thinspace\s?|\{\\,\}|\{ \})(?=\d{3}(?!\d))"), "\u2009"),
    (re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle"), ""),
    (re.compile(r"\*\*(?!\s?[-+({]?\d)|(?<![\w)}\]])\*\*"), ""),  # bold, not a power
    (re.compile(r"(?<!\w)(__?)(?=[^\s_])([^_\n]{1,200})(?<!\s)\1(?!\w)"), r"\2"),
    (re.compile(r"\^\s*(?:\{\s*)?\\circ(?:\s*\})?|\\degree(?![a-z])"), "°"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"\\[,;:> ]|~|\\q?quad(?![a-z])"), " "),
    (re.compile(r"\\div(?![a-z])|÷"), "/"),
)  # fmt: skip


def plain_text(text: str) -> str:
    r"""Return a text with digits of all scripts as ASCII and without LaTeX that only sets type.

    >>> plain_text(r"\text{so } 9{,}500\% or ４２")
    'so  9,500% or 42'
    """
    if "\\" in text or "{,}" in text or "~" in text or "**" in text or "÷" in text or "_" in text:
        for pattern, by in _LATEX:
            text = pattern.sub(by, text)
    return _OTHER_DIGITS.sub(_as_ascii, text)


def _as_ascii(found: re.Match[str]) -> str:
    char = found[0]
    if char in _SAME:
        return _SAME[char]
    value = unicodedata.decimal(char, None)
    return char if value is None else str(value)


def numbers_in(text: str, *, decimal_mark: str = ".") -> list[tuple[Decimal, str]]:
    """Return each number of a text with the word that follows it directly, in order.

    >>> [(str(n), u) for n, u in numbers_in("from -1,234.50 km to 3/4 of 7e2, not v2")]
    [('-1234.50', 'km'), ('0.75', 'of'), ('7E+2', '')]
    >>> [str(n) for n, _ in numbers_in("2 602 of 3 1/2, 12 5")]
    ['2602', '3.5', '12', '5']
    """
    reader = _Reader(plain_text(text[-_MOST_CHARS:]), decimal_mark)
    found: list[tuple[Decimal, str]] = []
    at = 0
    while (start := reader.start.search(reader.text, at)) is not None:
        value, end = reader.compound(start.end())
        is_sign = bool(start["sign"]) and not reader.is_dash(start.start("sign"))
        if end <= start.end():
            skipped = _SKIP.match(reader.text, start.end())
            at = skipped.end() if skipped else start.end() + 1
            continue
        at = end
        if value is None:
            continue
        unit = _UNIT.match(reader.text, end)
        if unit is not None:
            at = max(at, unit.end(1))
        word = (unit[1] if unit else "") or ""
        found.append((-value if is_sign and start["sign"] != "+" else value, word))
    return found


def number_of(text: str, *, decimal_mark: str = ".") -> tuple[Decimal, str] | None:
    r"""Return the value of a text that is one number or expression, and the word after it.

    A name before an equals sign (`x = 5`) and dollars around the whole are left out.

    >>> [str(number_of(t)[0]) for t in (r"\frac{3}{4}", r"-\frac12", "3 1/2", r"x = 2 \times 10^3")]
    ['0.75', '-0.5', '3.5', '2E+3']
    >>> number_of("5 or 6"), number_of("x + 1")
    (None, None)
    """
    plain = plain_text(text[-_MOST_CHARS:]).strip()
    plain = re.sub(r"\A[A-Za-z]\w{0,20}\s?(?:=|\\approx|≈)\s*", "", plain.strip("$ "))
    plain = re.sub(r"\A([-+\u2013])\s+", r"\1", plain).strip("$ ")
    reader = _Reader(plain, decimal_mark)
    value, end = reader.expression(0, 0)
    if value is None:
        return None
    unit = _WHOLE_UNIT.fullmatch(plain[end:])
    return None if unit is None else (value, unit[1] or "")


def whole_number(text: str, *, decimal_mark: str = ".") -> Decimal | None:
    """Return the value of a text that is one number without a unit, or None.

    >>> whole_number("1 234"), whole_number("5 km")
    (Decimal('1234'), None)
    """
    found = number_of(text, decimal_mark=decimal_mark)
    return found[0] if found is not None and not found[1] else None


_Found = tuple[Decimal | None, int]
"""A value and where it ends; no value and the same place where there is none."""


class _Reader:
    """Reads numbers at places of one text; every method returns (value, end)."""

    def __init__(self, text: str, mark: str) -> None:
        self.text = text
        self.mark = mark
        self.start = _START[mark]

    def is_dash(self, at: int) -> bool:
        """Whether a dash stands between blanks after a number, as in `3 – 5`: no sign."""
        before = self.text[max(0, at - 2) : at]
        return (
            len(before) == 2
            and before[1].isspace()
            and (before[0].isalnum() or before[0] in "%°)]}")
            and self.text[at + 1 : at + 2].isspace()
        )

    def compound(self, at: int) -> _Found:
        """A number of any form but a sum; None with a moved end where it has no value."""
        value, end, is_whole = self._base(at, 0)
        if end == at or value is None:
            return value, end
        if is_whole:
            mixed, mixed_end = self._mixed(value, end)
            if mixed_end > end:
                return mixed, mixed_end
        value, end = self._raised(value, end)
        value, end = self._times_ten(value, end)
        slash = _SLASH.match(self.text, end)
        if slash is not None and value is not None and end == slash.start():
            below, below_end, _ = self._base(slash.end(), 0)
            if below_end > slash.end() and below is not None:
                return _quotient(value, below), below_end
        return self._times_pi(value, end)

    def _base(self, at: int, depth: int) -> tuple[Decimal | None, int, bool]:
        """A decimal, fraction or root; the flag tells a whole number without an exponent."""
        if at < len(self.text) and self.text[at] in "\\√":
            value, end = self._latex(at, depth)
            return value, end, False
        if vulgar := _VULGAR.match(self.text, at):
            return _vulgar(vulgar[0]), vulgar.end(), False
        found = _DECIMAL[self.mark].match(self.text, at)
        if found is None:
            return None, at, False
        end = found.end()
        if found["hex"]:
            return Decimal(int(found["hex"][2:], 16) if end - at < 4000 else 0), end, False
        if doubtful := self._doubtful(found):
            return None, doubtful, False
        digits = self._digits(found)
        repeating = _REPEATING.match(self.text, end)
        if repeating is not None and (repeating["mark"] or found["part"] or found["bare"]):
            return _repeated(digits, repeating[2] or repeating[3]), repeating.end(), False
        is_whole = "." not in digits
        if exponent := _EXPONENT.match(self.text, end):
            return Decimal(f"{digits}e{exponent[1]}"), exponent.end(), False
        return Decimal(digits), end, is_whole

    def _doubtful(self, found: re.Match[str]) -> int:
        """Where a text ends that is a mixed number as well as a fraction of a grouped one, as
        `131 180/699` is; 0 for others."""
        if found["group"] != " " or found[0].count(" ") != 1 or found["part"]:
            return 0
        below = re.compile(r"/(\d{1,50})").match(self.text, found.end())
        is_mixed = below is not None and 0 < int(found[0][-3:]) < int(below[1])
        return below.end() if below is not None and is_mixed else 0

    def _digits(self, found: re.Match[str]) -> str:
        mark = self.mark
        if found["crossed"]:
            mark = "," if mark == "." else "."
        whole = re.sub(rf"[_' {_SPACES}]", "", found[0])
        return whole.replace(",", "") if mark == "." else whole.replace(".", "").replace(",", ".")

    def _mixed(self, value: Decimal, at: int) -> _Found:
        """A whole number, then a proper fraction: `3 1/2`, `3½`."""
        gap = _MIXED_GAP.match(self.text, at)
        if gap is None:
            return None, at
        part, end, _ = self._base(gap.end(), 0)
        if part is None:
            return None, at
        if self.text[gap.end()] not in "\\√" and not _VULGAR.match(self.text, gap.end()):
            slash = _SLASH.match(self.text, end)
            if slash is None or slash[0] != "/":
                return None, at
            below, below_end, is_whole = self._base(slash.end(), 0)
            if below is None or not is_whole:
                return None, at
            part, end = _quotient(part, below), below_end
        if part is None or not 0 < part < 1:
            return None, at
        return _LONG.add(value, part), end

    def _raised(self, value: Decimal, at: int) -> _Found:
        power = _POWER.match(self.text, at)
        if power is None:
            return value, at
        digits = next(g for g in power.groups() if g is not None).translate(_SUPERSCRIPT)
        return _power(value, int(digits)), power.end()

    def _times_ten(self, value: Decimal | None, at: int) -> _Found:
        times = _TIMES_TEN.match(self.text, at)
        if times is None or value is None:
            return value, at
        raised, end = self._raised(Decimal(10), times.end() + 2)
        if raised is None:
            return None, end
        return _safe(_LONG, "multiply", value, raised), end

    def _times_pi(self, value: Decimal | None, at: int) -> _Found:
        pi = _PI_MARK.match(self.text, at)
        if pi is None or value is None:
            return value, at
        return _safe(CONTEXT, "multiply", value, _PI), pi.end()

    def _latex(self, at: int, depth: int) -> _Found:
        """`\\frac` of two expressions, or a square root of one."""
        if depth > _MOST_DEPTH:
            return None, at
        if fraction := _FRACTION.match(self.text, at):
            above, end = self._argument(fraction.end(), depth)
            if end == fraction.end():
                return None, end
            below, last = self._argument(end, depth)
            if last == end or above is None or below is None:
                return None, last
            return _quotient(above, below), last
        if root := _ROOT.match(self.text, at):
            value, end = self._argument(root.end(), depth)
            return (None if value is None else _safe(CONTEXT, "sqrt", value)), end
        return None, at

    def _argument(self, at: int, depth: int) -> _Found:
        """An argument of a LaTeX command: an expression in braces, or one digit."""
        while at < len(self.text) and self.text[at] == " ":
            at += 1
        if not self.text.startswith("{", at):
            digit = self.text[at : at + 1]
            return (Decimal(digit), at + 1) if digit.isascii() and digit.isdigit() else (None, at)
        value, end = self.expression(at + 1, depth + 1)
        end = self._blank(end)
        if value is None or not self.text.startswith("}", end):
            return None, end + 1  # moved on, without a value
        return value, end + 1

    def expression(self, at: int, depth: int) -> _Found:
        """A sum of products of numbers."""
        total, end = self._product(self._blank(at), depth)
        while total is not None:
            place = self._blank(end)
            sign = self.text[place : place + 1]
            if sign not in ("+", "-"):
                return total, end
            value, last = self._product(self._blank(place + 1), depth)
            if value is None:
                return None, last
            total, end = _safe(_LONG, "add", total, value if sign == "+" else -value), last
        return None, end

    def _product(self, at: int, depth: int) -> _Found:
        value, end = self._factor(at, depth)
        while value is not None:
            if times := _TIMES_ANY.match(self.text, end):
                other, last = self._factor(times.end(), depth)
                if other is None:
                    return None, last
                value, end = _safe(_LONG, "multiply", value, other), last
            elif self.text.startswith("/", place := self._blank(end)):
                other, last = self._factor(self._blank(place + 1), depth)
                if other is None:
                    return None, last
                value, end = _quotient(value, other), last
            else:
                return value, end
        return None, end

    def _factor(self, at: int, depth: int) -> _Found:
        text = self.text
        if depth > _MOST_DEPTH:
            return None, at
        if text[at : at + 1] in ("-", "+", "\u2013") and at < len(text):
            value, end = self._factor(self._blank(at + 1), depth + 1)
            return (value if value is None or text[at] == "+" else -value), end
        if text[at : at + 1] in ("$", "€", "£", "¥") and at < len(text):
            return self._factor(self._blank(at + 1), depth + 1)
        if text.startswith(("(", "{", "["), at):
            value, end = self.expression(at + 1, depth + 1)
            end = self._blank(end)
            closing = {"(": ")", "{": "}", "[": "]"}[text[at]]
            if value is None or not text.startswith(closing, end):
                return None, end
            value, end = self._raised(value, end + 1)
            return self._times_pi(value, end)
        if pi := re.compile(r"\\pi(?![A-Za-z])|π").match(text, at):
            return self._raised(_PI, pi.end())
        value, end, is_whole = self._base(at, depth)
        if value is None:
            return None, end
        if is_whole:
            mixed, mixed_end = self._mixed(value, end)
            if mixed_end > end:
                return mixed, mixed_end
        value, end = self._raised(value, end)
        if value is not None and text.startswith("\\sqrt", end):
            root, last, _ = self._base(end, depth)
            if root is None:
                return None, last
            value, end = _safe(CONTEXT, "multiply", value, root), last
        return self._times_pi(value, end)

    def _blank(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def _safe(context: Context, operation: str, *values: Decimal) -> Decimal | None:
    try:
        made: Decimal = getattr(context, operation)(*values)
    except DecimalException:
        return None
    return made if made.is_finite() else None


def _quotient(above: Decimal, below: Decimal) -> Decimal | None:
    return _safe(CONTEXT, "divide", above, below) if below else None


def _power(base: Decimal, power: int) -> Decimal | None:
    if base == 10:
        return Decimal((0, (1,), power))
    if abs(power) > _MOST_POWER or len(base.as_tuple().digits) * abs(power) > _MOST_POWER:
        return None
    raised = _safe(Context(prec=_MOST_POWER + 1), "power", base, Decimal(abs(power)))
    if raised is None or power >= 0:
        return raised
    return _quotient(Decimal(1), raised)


def _vulgar(char: str) -> Decimal | None:
    above, _, below = unicodedata.normalize("NFKD", char).partition("\u2044")
    return _quotient(Decimal(above), Decimal(below)) if below else None


def _repeated(digits: str, period: str) -> Decimal | None:
    """Return a decimal whose last digits go on for ever."""
    places = len(digits.partition(".")[2])
    tail = _quotient(Decimal(period), Decimal(10 ** len(period) - 1))
    return None if tail is None else CONTEXT.add(Decimal(digits), tail.scaleb(-places, CONTEXT))
