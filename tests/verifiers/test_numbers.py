"""One number reader: a number written in any form is read back, and nothing else is paid."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.verifiers import Numeric
from tfgrpo.verifiers.numbers import number_of, numbers_in, plain_text, whole_number


def reward(answer, reference, **options):
    return asyncio.run(Numeric(**options).score(said(answer), task(reference))).reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 602", "2602"),
        ("1 234 567", "1234567"),
        ("10 200 300", "10200300"),
        ("1\u202f234,5".replace(",", "."), "1234.5"),
        ("1'234'567", "1234567"),
        ("12,34,567", "1234567"),
        (r"9{,}500", "9500"),
        (r"1\,234\,567", "1234567"),
        ("1.234,56", "1234.56"),
        ("6.02e23", "602000000000000000000000"),
        (r"6.02 \times 10^{23}", "602000000000000000000000"),
        ("6.02·10²³", "602000000000000000000000"),
        ("10**5", "100000"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", "-0.5"),
        (r"\dfrac34", "0.75"),
        (r"3\frac{1}{2}", "3.5"),
        ("3 1/2", "3.5"),
        ("-3 1/2", "-3.5"),
        ("3½", "3.5"),
        ("3 / 4", "0.75"),
        ("3⁄4", "0.75"),
        ("４２", "42"),
        ("٤٢", "42"),
        ("0x1F", "31"),
        (r"2^{10}", "1024"),
        (r"\sqrt{16}", "4"),
        (r"0.1\overline{6}", "0.1" + 58 * "6" + "7"),
    ],
)  # fmt: skip
def test_a_form_of_the_table_is_one_number(text, value):
    assert number_of(text)[0] == Decimal(value)
    assert [n for n, _ in numbers_in(f"It is {text} now")] == [Decimal(value)]
    assert reward(rf"so \boxed{{{text}}}", value) == 1.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("12 5", [12, 5]),
        ("in 2020 300 people", [2020, 300]),
        ("1,2345", [1, 2345]),
        ("3 4/2", [3, 2]),
        ("4 2", [4, 2]),
        ("x^2 and v2", []),
        ("5-3", [5, 3]),
    ],
)
def test_numbers_side_by_side_stay_apart(text, values):
    assert [n for n, _ in numbers_in(text)] == values


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\boxed{\frac{3}{4}}", 4),
        (r"\boxed{3\frac{1}{2}}", 2),
        (r"\boxed{2\pi}", 2),
        (r"\boxed{2^{10}}", 10),
        (r"\boxed{\sqrt[3]{5}}", 5),
        (r"\boxed{x+5}", 5),
        (r"\boxed{2+3}", 3),
        (r"\boxed{\frac{x}{4}}", 4),
        (r"\boxed{- 5}", 5),
        ("2 602", 602),
        ("3 / 4", 4),
        (r"x = -\frac{1}{2}", 2),
    ],
)
def test_a_part_of_a_number_is_not_paid(answer, reference):
    assert reward(answer, reference) == 0.0


@pytest.mark.parametrize(
    "unit", [r" \text{ m}^2", r" \, \text{m}^{2}", r"\; \mathrm{m/s^2}", r"\quad\text{ m}"]
)
def test_a_unit_set_off_by_several_blanks_is_no_part_of_the_number(unit):
    assert reward(rf"\boxed{{12{unit}}}", 12) == 1.0
    assert reward(rf"\boxed{{12{unit}}}", 2) == 0.0
    assert reward(r"\boxed{12 \, x^2}", 12) == 0.0


def test_a_decimal_comma_groups_with_spaces_and_points():
    assert reward("1 234,56", 1234.56, decimal_comma=True) == 1.0
    assert reward("1.234.567,5", "1234567,5", decimal_comma=True) == 1.0
    assert reward("1 234,56", 1234.56) == 1.0


whole = st.integers(0, 10**15)
grouped = st.sampled_from([",", " ", "\u00a0", "\u202f", "'", "_", "{,}", r"\,"])
signs = st.sampled_from([("", 1), ("-", -1), ("\u2212", -1), ("+", 1)])


def with_groups(value, mark):
    return f"{value:,}".replace(",", mark)


FORMS = {
    "plain": lambda n, d, m: (str(n), Decimal(n)),
    "groups": lambda n, d, m: (with_groups(n, m), Decimal(n)),
    "decimals": lambda n, d, m: (f"{with_groups(n, m)}.{d:03}", Decimal(f"{n}.{d:03}")),
    "e": lambda n, d, m: (f"{n % 100}.{d:03}e{d % 20}", Decimal(f"{n % 100}.{d:03}e{d % 20}")),
    "power of ten": lambda n, d, m: (
        rf"{n % 100}.{d:03} \times 10^{{{d % 20}}}",
        Decimal(f"{n % 100}.{d:03}e{d % 20}"),
    ),
    "fraction": lambda n, d, m: (f"{n % 999}/8", Decimal(n % 999) / 8),
    "latex fraction": lambda n, d, m: (rf"\frac{{{n % 999}}}{{16}}", Decimal(n % 999) / 16),
    "mixed": lambda n, d, m: (f"{d} {1 + n % 7}/8", d + Decimal(1 + n % 7) / 8),
    "latex mixed": lambda n, d, m: (rf"{d}\frac{{{1 + n % 7}}}{{8}}", d + Decimal(1 + n % 7) / 8),
}  # fmt: skip


@given(st.sampled_from(sorted(FORMS)), whole, st.integers(0, 999), grouped, signs)
def test_a_number_written_in_any_form_is_read_back(form, n, d, mark, sign):
    text, value = FORMS[form](n, d, mark)
    written, factor = sign
    assert number_of(written + text) == (factor * value, "")
    # A word between: an ordinary space before would join two groups of digits.
    assert numbers_in(f"so {written}{text} km") == [(factor * value, "km")]
    assert reward(rf"\boxed{{{written}{text}}}", str(factor * value)) == 1.0
    assert reward(rf"\boxed{{{written}{text}}}", str(factor * value + 1)) == 0.0


@given(st.text(alphabet=r"0123456789.,' \frac{}()^*/-+eEx×π½√$sqrt", max_size=40))
def test_any_text_of_number_signs_is_read_without_an_error(text):
    assert all(n.is_finite() for n, _ in numbers_in(text))
    found = number_of(text)
    assert found is None or found[0].is_finite()
    whole_number(text, decimal_mark=",")


@pytest.mark.parametrize("unit", ["1 ", "1,", "\\frac{", "3 1/", "12,34,", "((", "1.000", "2\\pi"])
def test_reading_numbers_takes_steps_in_proportion_to_the_text(unit, steps_of):
    few, many = (steps_of(lambda t: (numbers_in(t), number_of(t)), unit * n) for n in (300, 600))
    assert many <= 2.5 * few


def test_type_setting_is_left_out():
    assert plain_text(r"\text{so } \$9{,}500\%") == "so  $9,500%"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.234.567", "1234567"),
        ("1\u2019234.50", "1234.50"),
        ("__42__", "42"),
        ("_42_", "42"),
        ("\u20115", "-5"),
        ("\u20105", "-5"),
        *[(f"1{space}234", "1234") for space in "\u2006\u2008\u200a\u205f\u3000\u200b\u2060"],
    ],
)
def test_typographers_marks_change_no_number(text, value):
    assert [n for n, _ in numbers_in(f"It is {text} now")] == [Decimal(value)]
    assert reward(text, value) == 1.0


def test_a_dash_between_numbers_is_no_sign():
    for dash in "-\u2013\u2212":
        assert [int(n) for n, _ in numbers_in(f"between 3 {dash} 5")] == [3, 5]
    assert [int(n) for n, _ in numbers_in("x = - 5, f(-5), is -5")] == [-5, -5, -5]


@given(
    st.integers(2, 99),
    st.sampled_from(
        [
            "(3,@)", "3;@", "[3,@]", r"\{3,@\}", r"3\text{ or }@", r"\ln @", r"\log_{2} @", "@!",
            r"\sin @", r"\binom{@}{2}", "|-@|", "x_{@}", "@x", "@i", "@e", "@y", "x<@", r"x\le @",
            r"\ge @", ">@", r"\ne @", "@_2", r"\lfloor @\rfloor", r"7\bmod @", r"3\pm @",
            r"\max(@,1)",
        ]
    ),
)  # fmt: skip
def test_a_number_inside_boxed_mathematics_is_not_its_value(number, form):
    text = form.replace("@", str(number))
    assert reward(rf"so \boxed{{{text}}}", number) == 0.0
    assert reward(rf"so \boxed{{{text}}}", -number) == 0.0


@pytest.mark.parametrize(
    "text", [r"42\text{ km}", r"42 \text{ square meters}", "42 apples", "a = 42"]
)
def test_words_around_a_boxed_number_leave_it_the_value(text):
    assert reward(rf"\boxed{{{text}}}", 42) == 1.0
