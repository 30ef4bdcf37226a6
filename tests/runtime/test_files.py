"""Files for people hold no character that a terminal obeys; files for models are exact."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfgrpo.runtime.files import write_for_people, write_whole
from tfgrpo.runtime.terminal import printable

OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
texts = st.text(st.characters(codec=None) | st.sampled_from("\x1b\x07\u202e\u2066\x9b\r\n\t"))


@given(texts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_for_people_holds_nothing_that_is_obeyed(tmp_path: Path, text: str) -> None:
    write_for_people(tmp_path / "a.md", text)
    raw = (tmp_path / "a.md").read_bytes().decode("utf-8")
    assert OBEYED.search(raw) is None
    if OBEYED.search(text) is None and text.isprintable():
        assert raw == text


def test_the_reported_characters_are_visible_and_a_file_for_machines_is_exact(
    tmp_path: Path,
) -> None:
    text = "a\x1b]0;owned\x07b\u202ec"
    write_for_people(tmp_path / "people.md", text)
    write_whole(tmp_path / "machine.txt", text)
    assert (tmp_path / "people.md").read_text() == "a\\x1b]0;owned\\x07b\\u202ec"
    assert (tmp_path / "machine.txt").read_bytes().decode() == text
    assert printable(text) == (tmp_path / "people.md").read_text()
