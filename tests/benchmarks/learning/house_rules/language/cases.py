"""Finding worked examples in a prompt: a record with its answer, as chat turns or in running text.

Does not know which library wrote the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.benchmarks.learning.house_rules.language.answers import Shape
from tests.benchmarks.learning.house_rules.language.records import Record, find_records

Message = tuple[str, str]
"""Role and content."""
_LABEL = re.compile(
    r"(?:^|[\n.;,\]])\s*(?:[-*#>]+\s*)?\**(?:the )?"
    r"(?:right |correct |expected |reference |wanted )?"
    r"(?:answer|key|reply|output|response|label|reference|ground truth|expected)\**"
    r"(?: (?:is|was))?\s*(?::|→|->|=|\n)\s*",
    re.I,
)
_ARROW = re.compile(r"^\W{0,3}\s*(?:→|->|=>|⇒)\s*")


@dataclass(frozen=True, slots=True)
class Example:
    """A record and the parts of its answer."""

    record: Record
    parts: dict[str, str]


def turn_examples(messages: Sequence[Message], shape: Shape) -> list[Example]:
    """Return the examples that stand as a user's turn followed by an assistant's."""
    found = []
    for (role, text), (next_role, reply) in pairwise(messages):
        records = find_records(text) if role == "user" and next_role == "assistant" else []
        parts = shape.split(reply) if records else {}
        if parts:
            found.append(Example(records[-1].record, parts))
    return found


def text_examples(text: str, shape: Shape) -> tuple[list[Example], str]:
    """Return the examples in a text, and the text without them."""
    found: list[Example] = []
    rest, position = [], 0
    records = find_records(text)
    for i, here in enumerate(records):
        stop = records[i + 1].start if i + 1 < len(records) else len(text)
        parts, used = _answer_after(text[here.end : stop], shape)
        line = text.rfind("\n", position, here.start) + 1 or position
        rest.append(text[position:line])
        position = here.end + used
        if parts:
            found.append(Example(here.record, parts))
    rest.append(text[position:])
    return found, "".join(rest)


def _answer_after(text: str, shape: Shape) -> tuple[dict[str, str], int]:
    """Return the parts of an answer soon after a record, and where it ends."""
    m = _ARROW.search(text) or _LABEL.search(text[:400])
    if not m or m.start() > 300:
        return {}, 0
    rows = len(shape.parts) if shape.form == "lines" else 1
    lines = text[m.end() :].lstrip("\n").split("\n")
    lines[0] = re.sub(r"\s*\([^()]*\)\s*$", "", lines[0])
    raw = "\n".join(lines[:rows])
    if shape.form == "lines" and len(lines[0].split(" / ")) == len(shape.parts):
        parts = shape.split(lines[0].replace(" / ", "\n"))
        raw = lines[0]
    else:
        parts = shape.split(raw.strip(" `*\"'"))
    stop = text.find("\n", text.find(raw, m.end()) + len(raw) - 1)
    return parts, (stop if stop > 0 else len(text)) if parts else 0
