"""From what a model wrote to JSON: strict, then extraction, then repair; nothing is guessed.

Handles thinking prefixes, code fences, prose around the JSON, several blocks, trailing commas,
single quotes, Python literals, raw newlines in strings. Does not know what the JSON means.
Idea: repair first, ask again with the error second (own).
"""

from __future__ import annotations

import json
import re
from typing import Any

from tfgrpo.runtime.json_text import json_in
from tfgrpo.runtime.texts.surrogates import without_surrogates
from tfgrpo.runtime.thinking import without_thinking

_BARE = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w\-]*")
_PLAIN = re.compile(r"[^\\\"'“”‘’]+")
"""Inside a text: neither an escape nor any quote."""
_MAX_DEPTH = 32


class ReplyError(ValueError):
    """A reply holds nothing usable; the message is sent back to the model."""

    end = 0
    """Where reading stopped, for a caller that bounds its work."""


def json_values(text: str) -> list[Any]:
    """Return every top-level JSON object or array found in a reply, in order.

    A whole reply that is valid JSON gives that value alone, also a string or number. Otherwise
    each `[` or `{` that opens a readable value gives one; what reads like a citation, a name, an
    index or a link's text gives none.

    Raises:
        ReplyError: there is none; the message says what was seen.

    >>> json_values("Sure! {'a': [1, 2,],} and\\n```json\\n[3]\\n```")
    [{'a': [1, 2]}, [3]]
    """
    stripped = without_thinking(text).strip()
    if not stripped:
        raise ReplyError("the reply is empty")
    found = json_in(stripped, read_lenient)
    values = [f.value for f in found if not f.is_reference]
    useful = [v for v in values if v not in ([], {})] or values
    if not useful:
        raise ReplyError("no JSON could be read from the reply")
    return useful


def read_lenient(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON or almost-JSON value that begins at a place, and where it ends.

    Raises:
        ValueError: there is none.
    """
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        return _Lenient(text, start).read()


class _Lenient:
    """A reader of almost-JSON: quotes of either kind, bare keys, trailing commas."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.at = start

    def read(self) -> tuple[Any, int]:
        return self._value(0), self.at

    def _fail(self, why: str) -> ReplyError:
        near = self.text[max(0, self.at - 20) : self.at + 20]
        failure = ReplyError(f"{why} at character {self.at}, near {near!r}")
        failure.end = self.at
        return failure

    def _skip(self) -> str:
        text, n = self.text, len(self.text)
        while self.at < n:
            if text[self.at].isspace():
                self.at += 1
            elif text.startswith("//", self.at):
                end = text.find("\n", self.at)
                self.at = n if end < 0 else end
            else:
                return text[self.at]
        raise self._fail("the JSON ends too early")

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self._fail("the JSON is nested too deeply")
        char = self._skip()
        if char == "{":
            return self._object(depth)
        if char == "[":
            return self._array(depth)
        if char in "\"'“‘":
            return self._string(char)
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            return (
                json.loads(number[0]) if not number[0].lstrip("-").startswith("00") else number[0]
            )
        word = _WORD.match(self.text, self.at)
        if word:
            self.at = word.end()
            return _BARE.get(word[0], word[0])
        raise self._fail(f"unexpected {char!r}")

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        row: dict[str, Any] = {}
        while True:
            if self._skip() == "}":
                self.at += 1
                return row
            key = self._value(depth + 1)
            if self._skip() not in ":=":
                raise self._fail(f"':' is missing after key {key!r}")
            self.at += 1
            row[str(key)] = self._value(depth + 1)
            if self._skip() == ",":
                self.at += 1

    def _array(self, depth: int) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while True:
            if self._skip() == "]":
                self.at += 1
                return items
            items.append(self._value(depth + 1))
            if self._skip() == ",":
                self.at += 1

    def _string(self, opening: str) -> str:
        closing = {"“": "”", "‘": "’"}.get(opening, opening)
        self.at += 1
        out: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self.at + 1 < len(self.text):
                out.append(self._escape())
            elif char == closing and self._ends_here():
                self.at += 1
                return str(without_surrogates("".join(out)))
            else:
                plain = _PLAIN.match(self.text, self.at + 1)
                end = plain.end() if plain else self.at + 1
                out.append(self.text[self.at : end])
                self.at = end
        raise self._fail("a string is not closed")

    def _escape(self) -> str:
        char = self.text[self.at + 1]
        hexits = self.text[self.at + 2 : self.at + 6]
        if char == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", hexits):
            self.at += 6
            return chr(int(hexits, 16))
        self.at += 2
        return {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}.get(char, char)

    def _ends_here(self) -> bool:
        """A quote inside a string (don't) is followed by neither , : ] } nor the end."""
        rest = self.text[self.at + 1 : self.at + 40].lstrip()
        return not rest or rest[0] in ",:]}"
