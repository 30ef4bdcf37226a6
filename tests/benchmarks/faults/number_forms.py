r"""100,000 numbers written in many forms and read back by the verifiers' one reader.

What is expected is the number that was drawn before it was written: a pair of whole numbers, never
what the reader makes of the text. A text that says nothing certain must give no number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from tests.benchmarks.record import record
from tfgrpo.verifiers.answer import boxed
from tfgrpo.verifiers.numbers import CONTEXT, number_of, numbers_in

TRIED = 100_000
SEED = 20_261_129

Drawn = tuple[int, int]
"""A whole number and how many of its last digits stand behind the decimal mark."""


def plain(drawn: Drawn) -> str:
    value, places = drawn
    digits = str(abs(value)).zfill(places + 1)
    text = digits[: len(digits) - places] + ("." + digits[len(digits) - places :] if places else "")
    return "-" * (value < 0) + text


def grouped(drawn: Drawn, mark: str, decimal: str = ".") -> str:
    whole, dot, part = plain((abs(drawn[0]), drawn[1])).partition(".")
    pieces = []
    while len(whole) > 3:
        whole, last = whole[:-3], whole[-3:]
        pieces.append(last)
    text = mark.join([whole, *reversed(pieces)])
    return "-" * (drawn[0] < 0) + text + (decimal + part if dot else "")


def fullwidth(text: str) -> str:
    return text.translate({ord(a): ord(a) - 0x30 + 0xFF10 for a in "0123456789"})


def scientific(drawn: Drawn, middle: str, end: str = "") -> str:
    digits = str(abs(drawn[0]))
    exponent = len(digits) - 1 - drawn[1]
    text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return "-" * (drawn[0] < 0) + f"{text}{middle}{exponent}{end}"


def superscript(drawn: Drawn) -> str:
    head, _, exponent = scientific(drawn, "e").partition("e")
    return f"{head}·10{exponent.translate(str.maketrans('0123456789-', '⁰¹²³⁴⁵⁶⁷⁸⁹⁻'))}"


def comma_sure(rng: random.Random) -> Drawn:
    """A number whose form with a decimal comma has one reading where that mark is set."""
    return rng.randint(-(10**7), 10**7), rng.choice((1, 2, 4))


def any_number(rng: random.Random) -> Drawn:
    size = 10 ** rng.randint(1, 12)
    return rng.randint(-size, size), rng.randint(0, 6)


def large(rng: random.Random) -> Drawn:
    return rng.choice((-1, 1)) * rng.randint(10**6, 10**12), rng.randint(0, 2)


def positive(rng: random.Random) -> Drawn:
    value, places = any_number(rng)
    return abs(value), places


Form = tuple[Callable[[random.Random], Drawn], Callable[[Drawn], str], str]
"""How the number is drawn, how it is written, and the decimal mark that the reader is told."""

FORMS: dict[str, Form] = {
    "plain": (any_number, plain, "."),
    "comma groups": (large, lambda d: grouped(d, ","), "."),
    "space groups": (large, lambda d: grouped(d, " "), "."),
    "thin-space groups": (large, lambda d: grouped(d, "\u2009"), "."),
    "narrow no-break groups": (large, lambda d: grouped(d, "\u202f"), "."),
    "apostrophe groups": (large, lambda d: grouped(d, "'"), "."),
    "curly apostrophe groups": (large, lambda d: grouped(d, "\u2019"), "."),
    "underscore groups": (large, lambda d: grouped(d, "_"), "."),
    "LaTeX comma groups": (large, lambda d: grouped(d, "{,}"), "."),
    "LaTeX thin-space groups": (large, lambda d: grouped(d, "\\,"), "."),
    "decimal comma": (comma_sure, lambda d: plain(d).replace(".", ","), ","),
    "decimal comma, dot groups": (comma_sure, lambda d: grouped(d, ".", ","), ","),
    "decimal comma, space groups": (comma_sure, lambda d: grouped(d, " ", ","), ","),
    "e-notation": (any_number, lambda d: scientific(d, "e"), "."),
    "E-notation": (any_number, lambda d: scientific(d, "E"), "."),
    "times ten, caret": (any_number, lambda d: scientific(d, " × 10^{", "}"), "."),
    "times ten, LaTeX": (any_number, lambda d: scientific(d, r" \times 10^{", "}"), "."),
    "times ten, superscript": (any_number, superscript, "."),
    "times ten, stars": (positive, lambda d: scientific(d, " * 10**"), "."),
    "boxed": (any_number, lambda d: rf"So it is \boxed{{{plain(d)}}}.", "."),
    "boxed and grouped": (large, lambda d: rf"\boxed{{{grouped(d, ',')}}}", "."),
    "percent": (any_number, lambda d: plain(d) + "%", "."),
    "LaTeX percent": (any_number, lambda d: plain(d) + r"\%", "."),
    "dollars": (positive, lambda d: "$" + plain(d), "."),
    "euros behind": (any_number, lambda d: plain(d) + " €", "."),
    "minus before dollars": (any_number, lambda d: plain(d).replace("-", "-$"), "."),
    "unicode minus": (any_number, lambda d: plain(d).replace("-", "\u2212"), "."),
    "leading plus": (positive, lambda d: "+" + plain(d), "."),
    "trailing zeros": (any_number, lambda d: plain((d[0] * 1000, d[1] + 3)), "."),
    "fullwidth digits": (any_number, lambda d: fullwidth(plain(d)), "."),
    "unit": (any_number, lambda d: plain(d) + " km", "."),
    "unit in a power": (any_number, lambda d: plain(d) + " m²", "."),
    "math dollars": (any_number, lambda d: f"${plain(d)}$", "."),
    "equation": (any_number, lambda d: f"x = {plain(d)}", "."),
    "bold": (any_number, lambda d: f"**{plain(d)}**", "."),
}

FRACTIONS: dict[str, Callable[[int, int, int], str]] = {
    "LaTeX fraction": lambda w, a, b: rf"\frac{{{a}}}{{{b}}}",
    "small LaTeX fraction": lambda w, a, b: rf"\dfrac{{{a}}}{{{b}}}",
    "slash fraction": lambda w, a, b: f"{a}/{b}",
    "spaced slash fraction": lambda w, a, b: f"{a} / {b}",
    "mixed number": lambda w, a, b: f"{w} {a}/{b}",
    "LaTeX mixed number": lambda w, a, b: rf"{w}\frac{{{a}}}{{{b}}}",
}
"""Written from a whole part and a proper fraction; only the mixed ones show the whole part."""

AMBIGUOUS: dict[str, Callable[[int, int], str]] = {
    "two numbers": lambda a, b: f"{a} or {b}",
    "a variable": lambda a, b: f"x + {a}",
    "a range": lambda a, b: f"{a} to {b}",
    "a list": lambda a, b: f"{a}; {b}",
    "a version": lambda a, b: f"{a % 100}.{b % 100}.{a % 10}",
    "a date": lambda a, b: f"2024-{1 + a % 12:02}-{1 + b % 28:02} at {a}",
    "a plain comparison": lambda a, b: f"< {a}",
}
"""No single value: the reader of one number must say so."""


def read(text: str, mark: str) -> Decimal | None:
    inside = boxed(text)
    found = number_of(text if inside is None else inside, decimal_mark=mark)
    return None if found is None else found[0]


def in_prose(text: str, mark: str) -> Decimal | None:
    found = numbers_in(f"The result is {text}", decimal_mark=mark)
    return found[-1][0] if found else None


def main() -> None:
    rng = random.Random(SEED)
    wrong: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    ambiguous, certain = 0, 0
    examples: dict[str, str] = {}
    forms = [*FORMS, *FRACTIONS]
    for i in range(TRIED):
        name = forms[i % len(forms)]
        if name in FORMS:
            draw, write, mark = FORMS[name]
            drawn = draw(rng)
            text = write(drawn)
            wanted = Fraction(drawn[0], 10 ** drawn[1])
        else:
            mark = "."
            below = rng.randint(2, 10 ** rng.randint(1, 4))
            above, whole = rng.randint(1, below - 1), rng.randint(1, 999)
            text = FRACTIONS[name](whole, above, below)
            if name == "mixed number" and 99 < above < 1000:
                ambiguous += 1  # as well a fraction whose numerator is grouped by a space
                for reader in (read, in_prose):
                    if reader(text, mark) is not None:
                        accepted["three digits before the slash"] += 1
                continue
            wanted = Fraction(above, below) + (whole if "mixed" in name else 0)
        certain += 1
        for reader in (read, in_prose):
            got = reader(text, mark)
            if got is None:
                refused[name] += 1
                examples.setdefault(name, f"{text!r} {reader.__name__} refused")
            elif not is_equal(got, wanted):
                wrong[name] += 1
                examples.setdefault(name, f"{text!r} {reader.__name__} gave {got}")
    for i in range(TRIED // 10):
        name = list(AMBIGUOUS)[i % len(AMBIGUOUS)]
        text = AMBIGUOUS[name](rng.randint(2, 9999), rng.randint(2, 9999))
        ambiguous += 1
        if number_of(text) is not None:
            accepted[name] += 1
            examples.setdefault(name, f"{text!r} accepted")
    record(
        "number_forms",
        {
            "forms": len(forms),
            "tried": TRIED,
            "readings": 2 * certain,
            "wrong": wrong.total(),
            "refused": refused.total(),
            "ambiguous": ambiguous,
            "ambiguous_accepted": accepted.total(),
            "by_form": dict(wrong + refused + accepted),
            "examples": examples,
            "seed": SEED,
        },
        "python -m tests.benchmarks.faults.number_forms",
    )


def is_equal(got: Decimal, wanted: Fraction) -> bool:
    """Whole and decimal numbers exactly; a quotient that does not end, to 60 digits."""
    if Fraction(got) == wanted:
        return True
    return got == CONTEXT.divide(Decimal(wanted.numerator), Decimal(wanted.denominator)) or (
        abs(Fraction(got) - wanted) <= wanted / 10**57
        and any(wanted.denominator % p == 0 for p in range(3, wanted.denominator + 1, 2))
    )


if __name__ == "__main__":
    main()
