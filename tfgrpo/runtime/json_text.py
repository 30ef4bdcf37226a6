"""JSON inside prose: which of the values in a reply is the one that was asked for.

Replies hold citations (`[1]`, `[Smith 2020]`), links (`[text](address)`), sets (`{about travel}`)
and examples beside their answer. Every value that can be read is a candidate; the best match in
shape wins, never the first, and never by being right: `fits` looks at kinds and names alone.

Linear in the text. Does not repair broken JSON (a caller may pass a reader that
does). Source: own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.runtime.canonical import integer_of
from tfgrpo.runtime.json_schema import load_json

__all__ = ["FoundJson", "best_json", "fenced_blocks", "json_in", "shape_match", "shown"]

Reader = Callable[[str, int], tuple[Any, int]]
"""Reads the value that begins at a place and tells where it ends; raises ValueError."""

_OPENING = re.compile(r"[\[{]")
_PLAUSIBLE = re.compile(r"\[\s*[\]\[{\"\d\-tfn]|\{\s*[\"}]")
"""How strict JSON goes on after its first bracket; most brackets of prose do not."""
_FENCE_LINE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*")
_MOST_FAILURES = 300
"""Brackets that open no readable value, before the search ends."""
_MOST_FAILED_CHARS = 1_000_000
"""Characters read for nothing, before the search ends, or four times the text where that is more:
with `_MOST_FAILURES` the bound of its time, since a text left open is read to the end each time."""


@dataclass(frozen=True, slots=True)
class FoundJson:
    """One JSON value in a text."""

    value: Any
    start: int
    end: int
    is_fenced: bool = False
    """Stands alone in a fenced block."""
    is_reference: bool = False
    """Reads like a citation, a name or the text of a link: one bare value, or bare words, in
    brackets, or `[...](...)`."""


def fenced_blocks(text: str) -> list[tuple[str, str, int]]:
    r"""Return (language, content, start) of each fenced block; one left open runs to the end.

    A fence ends at a line of the same mark, at least as long and not indented by four more, as in
    Markdown.

    >>> fenced_blocks("a\n```json\n[1]\n```\nb")
    [('json', '[1]\n', 10)]
    """
    blocks: list[tuple[str, str, int]] = []
    mark, language, indent, start, at = "", "", 0, 0, 0
    for line in text.split("\n"):
        size = len(line) + 1
        found = _FENCE_LINE.match(line)
        if found and not mark:
            mark, language, start = found[1], found[2].lower(), at + size
            indent = found.start(1)
            inner = line[found.end(1) :]
            if mark in inner:  # opened and closed in one line
                blocks.append(("", inner.partition(mark)[0].strip(), at + found.end(1)))
                mark = ""
        elif (
            mark
            and found
            and not found[2]
            and found[1].startswith(mark)
            and found.start(1) <= indent + 3
        ):
            blocks.append((language, text[start:at], start))
            mark = ""
        elif mark and not found and line.rstrip().endswith(mark) and mark[0] == "`":
            end = at + len(line.rstrip()) - len(mark)
            blocks.append((language, text[start:end], start))
            mark = ""
        at += size
    if mark:
        blocks.append((language, text[start:], start))
    return blocks


def json_in(text: str, read: Reader | None = None) -> list[FoundJson]:
    """Return the outermost JSON values of a text in order, those of fenced blocks marked.

    A text that is one JSON value gives that value alone. Values inside a value are no candidates.

    Args:
        text: a reply.
        read: reads the value at a place; strict JSON without one.

    >>> [f.value for f in json_in('See [1]: {"a": [2]} {about} ["b"]')]
    [[1], {'a': [2]}, ['b']]
    """
    reader = read or _strict
    stripped = text.strip()
    try:
        # What is read leniently is told again in words, which a very long integer has not.
        return [FoundJson(load_json(stripped, has_long_integers=read is None), 0, len(text))]
    except ValueError:
        pass
    blocks = {start: len(body) for _, body, start in fenced_blocks(text) if body.strip()}
    found: list[FoundJson] = []
    opening_of = _PLAUSIBLE if read is None else _OPENING
    at, failures, allowed = 0, 0, max(_MOST_FAILED_CHARS, 4 * len(text))
    while (
        failures < _MOST_FAILURES
        and allowed > 0
        and (opening := opening_of.search(text, at)) is not None
    ):
        start = opening.start()
        try:
            value, end = reader(text, start)
        except (ValueError, RecursionError) as exc:
            failures += 1
            allowed -= max(0, getattr(exc, "end", start) - start)
            at = start + 1
            continue
        at = end
        if value is not _BROKEN:
            is_fenced = _fills_block(text, start, end, blocks)
            is_reference = not is_fenced and _is_reference(text, value, start, end)
            found.append(FoundJson(value, start, end, is_fenced, is_reference))
    return found


_QUOTE = re.compile("[\"'\u2018\u2019\u201c\u201d`]")
_BROKEN = object()
"""JSON in form that says nothing certain, such as one key given twice."""


def _strict(text: str, start: int) -> tuple[Any, int]:
    _, end = _DECODER.raw_decode(text, start)
    try:
        return load_json(text[start:end]), end
    except ValueError:
        return _BROKEN, end


_DECODER = json.JSONDecoder(parse_int=integer_of)


def _fills_block(text: str, start: int, end: int, blocks: Mapping[int, int]) -> bool:
    line = start
    while line not in blocks:
        if line == 0 or not text[line - 1].isspace():
            return False
        line -= 1
    return not text[end : line + blocks[line]].strip()


def _is_reference(text: str, value: Any, start: int, end: int) -> bool:
    if text.startswith("(", end):
        return True
    if not (isinstance(value, list) and value):
        return False
    if len(value) == 1 and isinstance(value[0], (int, float)):
        return True
    # Bare words, which only a lenient reader takes for texts: `[Note]`, `[RFC 2119]`, `a[i]`.
    has_words = any(isinstance(item, str) for item in value)
    is_flat = all(isinstance(item, (str, int, float)) for item in value)
    return has_words and is_flat and not _QUOTE.search(text, start, end)


def best_json(
    text: str, fits: Callable[[Any], float], read: Reader | None = None
) -> FoundJson | None:
    """Return the value of a text that fits best; None where none fits (`fits` gives 0 or less).

    Among equally good ones: what does not read like a citation, what stands in a fenced block,
    the last.

    >>> wanted = lambda v: float(isinstance(v, list) and all(isinstance(t, str) for t in v))
    >>> best_json('As [1] says: ["a", "b"] ([2])', wanted).value
    ['a', 'b']
    """
    found = [(fits(f.value), f) for f in json_in(text, read)]
    good = [(score, f) for score, f in found if score > 0]
    if not good:
        return None
    return max(good, key=lambda g: (g[0], not g[1].is_reference, g[1].is_fenced, g[1].start))[1]


def shape_match(value: Any, like: Any) -> float:
    """Return how far two JSON values have one shape, from 0 to 2; what they say does not count.

    1 for the same kind (object, array, text, number, truth value, null), and up to 1 more for the
    names of an object or the kinds of an array's items.

    >>> shape_match({"a": 1}, {"a": 5}), shape_match([1], ["a"]), shape_match([], {})
    (2.0, 1.0, 0.0)
    """
    if _kind(value) != _kind(like):
        return 0.0
    if isinstance(value, Mapping):
        return 1.0 + _overlap(set(value), set(like))
    if isinstance(value, (list, tuple)):
        return 1.0 + _overlap(_item_kinds(value), _item_kinds(like))
    return 2.0


def _item_kinds(items: Sequence[Any]) -> set[str]:
    names = {f".{key}" for i in items if isinstance(i, Mapping) for key in i}
    return {_kind(i) for i in items} | names


def _overlap(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, (list, tuple)) else type(value).__name__


def shown(value: object, limit: int = 80) -> str:
    """Return a foreign value for a message, cut to `limit` characters; never fails.

    >>> shown("a"), shown(10**5000)
    ("'a'", 'a value of type int that is too long to show')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"
