"""Model text shown in a terminal sends no control character and is read as no markup."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tfgrpo.runtime.terminal import markup, one_line, printable

ANY_TEXT = st.text(st.characters(), max_size=60)  # surrogates and controls included


@pytest.mark.parametrize(
    "attack",
    [
        "\x1b]0;new title\x07",
        "\x1b]52;c;ZXZpbA==\x07",
        "\x1b[2J\x1b[H$ ",
        "\x9b31m",
        "done\rfailed",
        "a\x08\x08b",
        "\u202egnp.exe",
        "\u2066x\u2069",
        "\u200f\u061c",
        "\x00\x7f",
        "\U000e0041",
        "\ud800",
    ],
)
def test_known_attacks_reach_the_terminal_as_plain_text(attack: str) -> None:
    shown = printable(attack)
    assert "\\x" in shown or "\\u" in shown or "\\U" in shown
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in shown)
    shown.encode("utf-8")


@given(ANY_TEXT)
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert all(c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in shown)
    assert not set(shown) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"
    )
    assert printable(shown) == shown


def test_ordinary_text_of_any_script_is_unchanged() -> None:
    text = "Grüße, שלום, مرحبا, 你好, 👩‍🔬 a\tb\nc \\ [x]"
    assert printable(text) == text


@given(ANY_TEXT | st.text(alphabet="\\\\[]ab/#@ ", max_size=12))
@example("\\")
@example("a[\\")
@example("[b]\\")
def test_markup_is_read_back_as_the_same_text(text: str) -> None:
    assert Text.from_markup(markup(text), emoji=False).plain == printable(text)


def test_markup_in_model_text_is_shown_and_not_obeyed() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system="truecolor")
    console.print(markup("[link=http://evil]click[/link] [/] [bold red]x"), highlight=False)
    assert out.getvalue() == "[link=http://evil]click[/link] [/] [bold red]x\n"


@given(ANY_TEXT, st.integers(1, 50))
def test_one_line_is_one_line_of_the_length_asked_for(text: str, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most and line.splitlines() in ([line], [])
