"""Reading how an answer is written: its parts, their order and form, the values that exist.

Read from sentences such as "The answer has the parts queue, priority and hours, written on one
line as queue/priority/hours" and "queue is one of NET, HW". Where a prompt does not hold them, the
parts are those that a feedback names, and the form is what fits the answer. Does not know tasks of
any family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PARTS = re.compile(r"\banswer has the parts ([\w ,\-]+?)(?:, (?:written|each)|[.;:\n])")
_OPTIONS = r"\b{part} is one of ([^.\n\\]+)"
SEPARATORS = (" | ", "/", "; ", ", ")


@dataclass(frozen=True, slots=True)
class Shape:
    """How an answer is written."""

    parts: tuple[str, ...]
    form: str = "line"
    """`line`, `lines` or `calls`."""
    separator: str = " | "
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    arguments: tuple[str, ...] = ()
    """Of calls: the parts that are arguments of the middle call."""

    def split(self, answer: str) -> dict[str, str]:
        """Return the parts of an answer; empty where it is not of this shape."""
        text = answer.strip()
        if self.form == "calls":
            return _split_calls(text, self.parts)
        sep = "\n" if self.form == "lines" else self.separator.strip()
        pieces = [p.strip() for p in text.split(sep) if self.form != "lines" or p.strip()]
        if len(pieces) != len(self.parts):
            return {}
        return {p: self.value(p, v) for p, v in zip(self.parts, pieces, strict=True)}

    def value(self, part: str, text: str) -> str:
        """Return the known value that a text holds, else the text."""
        bare = text.strip(" ,.;") if self.form == "lines" else text.strip()
        return known_value(text, self.options.get(part, ())) or bare

    def join(self, values: Mapping[str, str], record: Mapping[str, str]) -> str:
        """Write an answer."""
        if self.form == "calls":
            return _join_calls({p: values[p] for p in self.parts}, record, self.arguments)
        if self.form == "lines":
            return "\n".join(values[p] for p in self.parts)
        return self.separator.join(values[p] for p in self.parts)


def known_value(text: str, options: Sequence[str]) -> str | None:
    """Return the longest option that stands in a text as words."""
    low = text.casefold()
    found = [o for o in options if re.search(rf"(?<![\w]){re.escape(o.casefold())}(?![\w])", low)]
    return max(found, key=len) if found else None


def read_shape(text: str) -> Shape | None:
    """Return the shape that a prompt describes, None where it describes none."""
    m = _PARTS.search(text)
    if not m:
        return None
    parts = tuple(p.strip() for p in re.split(r",| and ", m[1]) if p.strip())
    options = {}
    for part in parts:
        found = re.search(_OPTIONS.format(part=re.escape(part)), text)
        if found:
            options[part] = tuple(v.strip() for v in found[1].split(",") if v.strip())
    after = text[m.start() : m.end() + 400]
    if re.search(r"JSON list of \w+ calls", after):
        named = re.search(r"(\w+(?:, \w+)*(?: and \w+)?) are further arguments", after)
        arguments = named[1].split() if named else []
        return Shape(parts, "calls", "", options, tuple(p for p in parts if p in arguments))
    if re.search(r"each on a line of its own", after):
        return Shape(parts, "lines", "\n", options)
    joined = re.search(re.escape(parts[0]) + r"(\W+?)" + re.escape(parts[1]), text[m.end() - 8 :])
    return Shape(parts, "line", joined[1] if joined else " | ", options)


def guess_shape(parts: Sequence[str], answer: str) -> Shape | None:
    """Return the shape under which an answer has these parts, None where none fits."""
    candidates = [Shape(tuple(parts), "calls", "")]
    candidates += [Shape(tuple(parts), "line", s) for s in SEPARATORS]
    candidates.append(Shape(tuple(parts), "lines", "\n"))
    return next((s for s in candidates if s.split(answer)), None)


def _split_calls(text: str, parts: Sequence[str]) -> dict[str, str]:
    calls = read_json(text)
    if not isinstance(calls, list) or len(calls) < 2 or len(parts) < 2:
        return {}
    if not all(isinstance(c, dict) and "tool" in c for c in calls):
        return {}
    tools = [str(c["tool"]) for c in calls]
    args: dict[str, str] = {}
    for call in calls:
        args |= {k: str(v) for k, v in dict(call.get("args") or {}).items()}
    named = [p for p in parts if p not in args]
    if len(named) != len(tools):
        return {}
    return dict(zip(named, tools, strict=True)) | {p: args[p] for p in parts if p in args}


def _join_calls(
    values: Mapping[str, str], record: Mapping[str, str], arguments: Sequence[str]
) -> str:
    own = {"order": record["order"]} if "order" in record else {}
    further = {p: v for p, v in values.items() if p in arguments}
    tools = [v for p, v in values.items() if p not in further]
    calls: list[dict[str, Any]] = [{"tool": t, "args": dict(own)} for t in tools]
    calls[len(calls) // 2]["args"] |= further
    return json.dumps(calls)


def read_json(text: str) -> Any:
    """Return the first JSON value that begins in a text, None where there is none."""
    for m in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text[m.start() :])[0]
        except ValueError:
            continue
    return None
