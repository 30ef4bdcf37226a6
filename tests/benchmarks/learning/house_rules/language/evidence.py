"""Finding cases in a critic's prompt: tasks with answers, feedback and keys, wherever they stand.

A case begins at a record in square brackets. What follows it, up to the next record, is searched
for answers (texts of the answer's shape), for feedback ("priority: wrong, wanted '2'") and for a
key: an answer under words such as "reference", "ground truth", "right answer", "oracle", or after
an arrow. Escaped text (JSON, Python) is read as what it stands for. No prompt's layout is known.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.benchmarks.learning.house_rules.language.answers import Shape, guess_shape, read_shape
from tests.benchmarks.learning.house_rules.language.records import Record, find_records, key_of

_KEY = re.compile(
    r"reference|ground.?truth|(?:right|correct|expected|wanted|gold|true) (?:answer|output|reply)|"
    r"\boracle|\bexpected\b|\bsolution\b|\bkey\b", re.I,
)  # fmt: skip
_SAID = re.compile(
    r"attempt|generated|\bgenerator answer|answered|\bagent\b|response|trajectory|outputs?\b|"
    r"assistant|prediction|rollout", re.I,
)  # fmt: skip
_FEEDBACK = re.compile(
    r"\b([a-z][\w ]{0,24}?)(?: is| was)?: (right|wrong|correct|incorrect)\b"
    r"(?![^;.\n]{0,6}\bin \d)"
    r"(?:[^;.\n'\"]*?(?:wanted|expected|should be)\s+"
    r"(?:'([^']*)'|\"([^\"]*)\"|([^;,.\n]+)))?", re.I,
)  # fmt: skip
_PREFIX = re.compile(
    r"^.*?(?:answer(?:ed)?|outputs?|agent|reply|response|truth|reference|expected|wanted|content|"
    r"attempt(?: \d+)?|right answer is)\W*[:=→]\s*", re.I,
)  # fmt: skip
_COUNT = re.compile(r"\s*(?:[×x]\s?\d+|\([^()]*\))\s*$")
_NAME = re.compile(
    r"(?:task|example|case|group)\s+(?:id\s*)?[:#]?\s*[\[(`'\"]?([A-Za-z]*[-_]?\d[\w-]*)", re.I
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer with what its feedback says of its parts."""

    parts: dict[str, str]
    verdicts: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaseSeen:
    """A task as a prompt shows it."""

    name: str
    record: Record
    key: dict[str, str] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    answer: str = ""
    """The key as it is written."""

    def right(self, part: str) -> str:
        """Return the right value of a part; empty where the prompt does not show it."""
        if part in self.key:
            return self.key[part]
        return next(
            (a.parts[part] for a in self.attempts if a.verdicts.get(part) and part in a.parts), ""
        )

    def wrong(self, part: str) -> frozenset[str]:
        """Return the values of a part that are known to be wrong."""
        return frozenset(
            a.parts[part]
            for a in self.attempts
            if a.verdicts.get(part) is False and part in a.parts
        )

    @property
    def failures(self) -> Counter[str]:
        """How often each part was wrong."""
        return Counter(p for a in self.attempts for p, ok in a.verdicts.items() if not ok)


def plain(text: str) -> str:
    """Return a text without the escapes of JSON and Python strings."""
    return text.replace('\\\\"', '"').replace('\\"', '"').replace("\\n", "\n").replace("\\'", "'")


def read_cases(text: str) -> tuple[list[CaseSeen], Shape | None]:
    """Return the cases of a prompt, one a record, and the shape of their answers."""
    records = find_records(text)
    stops = [*(r.start for r in records[1:]), len(text)]
    segments = [text[r.end : stop] for r, stop in zip(records, stops, strict=False)]
    shape = read_shape(text)
    names = _named_parts(text)
    if shape is None and names:
        # The case in hand comes last and is written out; earlier ones may be short notes.
        guessed = (_shape_of(segment, names) for segment in reversed(segments))
        shape = next((s for s in guessed if s is not None), None)
    merged: dict[tuple[tuple[str, str], ...], CaseSeen] = {}
    for i, (here, segment) in enumerate(zip(records, segments, strict=True)):
        name = _name_before(text[max(0, here.start - 160) : here.start]) or f"{i + 1}"
        case = _read_case(name, here.record, segment, shape)
        known = merged.get(key_of(here.record))
        merged[key_of(here.record)] = case if known is None else _both(known, case)
    return list(merged.values()), shape


def _named_parts(text: str) -> tuple[str, ...]:
    """Return the parts that feedback names, in its order."""
    found: dict[str, None] = {}
    for m in _FEEDBACK.finditer(text):
        found.setdefault(m[1].strip().lower().split("\n")[-1], None)
    return tuple(found)


def _shape_of(segment: str, names: Sequence[str]) -> Shape | None:
    lines = [_PREFIX.sub("", line).strip(" `\"'") for line in segment.splitlines()]
    lines = [_COUNT.sub("", line) for line in lines if line and not _FEEDBACK.search(line)]
    for line in lines:
        shape = guess_shape(names, line)
        if shape and shape.form == "calls":
            return shape
        if shape and all(len(v.split()) <= 5 and ":" not in v for v in shape.split(line).values()):
            return shape
    return Shape(tuple(names), "lines", "\n") if len(lines) >= len(names) else None


def _name_before(text: str) -> str:
    found = _NAME.findall(text)
    return str(found[-1]) if found else ""


def _both(a: CaseSeen, b: CaseSeen) -> CaseSeen:
    name = b.name if a.name.isdigit() and not b.name.isdigit() else a.name
    return replace(
        a,
        name=name,
        key=b.key or a.key,
        answer=b.answer or a.answer,
        attempts=(*a.attempts, *b.attempts),
    )


def _read_case(name: str, record: Record, segment: str, shape: Shape | None) -> CaseSeen:
    if shape is None:
        return CaseSeen(name, record)
    feedback = [(m.start(), m) for m in _FEEDBACK.finditer(segment)]
    found = list(_answers(segment, shape))
    key: dict[str, str] = {}
    written = ""
    attempts: list[Attempt] = []
    for i, (start, end, parts) in enumerate(found):
        if _is_key(segment[:start]):
            key, written = parts, segment[start:end].strip()
            continue
        stop = min(
            (s for s, _, _ in found[i + 1 :] if not _is_key(segment[:s])), default=len(segment)
        )
        verdicts: dict[str, bool] = {}
        for at, m in feedback:
            part = m[1].strip().lower().split("\n")[-1]
            if end <= at + 1 and at < stop and part in shape.parts:
                verdicts[part] = m[2].lower() in ("right", "correct")
        attempts.append(Attempt(parts, verdicts))
    if len(attempts) == 1 and not attempts[0].verdicts:
        all_said = {m[1].strip().lower().split("\n")[-1]: m[2].lower() for _, m in feedback}
        verdicts = {p: v in ("right", "correct") for p, v in all_said.items() if p in shape.parts}
        attempts = [Attempt(attempts[0].parts, verdicts)]
    wanted: dict[str, str] = {}
    for _, m in feedback:
        value = next((g for g in m.groups()[2:] if g), "")
        part = m[1].strip().lower().split("\n")[-1]
        if value and part in shape.parts:
            wanted[part] = shape.value(part, value.strip())
    key = key or wanted
    if wanted and len(key) < len(shape.parts):
        for attempt in attempts:
            key |= {
                p: v for p, v in attempt.parts.items() if attempt.verdicts.get(p) and p not in key
            }
    return CaseSeen(name, record, key, tuple(attempts), written)


def _is_key(before: str) -> bool:
    """True when the words before an answer call it the right one."""
    if re.fullmatch(r"[\s`*\"')]*(?:→|->|=>|⇒)\s*[`\"']*", before):
        return True
    near = before[-220:]
    keys = [m.start() for m in _KEY.finditer(near)]
    said = [m.start() for m in _SAID.finditer(near)]
    return bool(keys) and (not said or keys[-1] > said[-1])


def _answers(segment: str, shape: Shape) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield each text of the answer's shape with its place."""
    if shape.form == "calls":
        yield from _call_answers(segment, shape)
        return
    lines, position = [], 0
    for line in segment.splitlines(keepends=True):
        lines.append((position, line))
        position += len(line)
    if shape.form == "lines":
        yield from _line_answers(lines, shape)
        return
    for start, line in lines:
        if "wanted" in line and _FEEDBACK.search(line):
            continue
        body = line.rstrip("\n")
        m = _PREFIX.match(body) or re.match(r"[\s\-*>→]*", body)
        shift = m.end() if m else 0
        raw = _COUNT.sub("", body[shift:].strip(" `\"',}]\\"))
        raw = raw.removesuffix(".") if shape.split(raw.removesuffix(".")) else raw
        parts = shape.split(raw)
        if parts and _is_sane(parts, shape):
            at = start + body.find(raw, shift)
            yield at, at + len(raw), parts


def _is_sane(parts: dict[str, str], shape: Shape) -> bool:
    for part, value in parts.items():
        options = shape.options.get(part, ())
        if options and value not in options:
            return False
        if not value or len(value.split()) > 6:
            return False
    return True


def _line_answers(
    lines: Sequence[tuple[int, str]], shape: Shape
) -> Iterator[tuple[int, int, dict[str, str]]]:
    n = len(shape.parts)
    for start, line in lines:
        joined = _COUNT.sub("", re.sub(r"^[\s\-*>→]*", "", line).strip())
        if joined.count(" / ") == n - 1:
            parts = shape.split(joined.replace(" / ", "\n"))
            if parts and _is_sane_text(parts, shape):
                at = start + line.find(joined)
                yield at, at + len(joined), parts
    i = 0
    while i + n <= len(lines):
        window = [text for _, text in lines[i : i + n]]
        first = _PREFIX.sub("", window[0].rstrip("\n"))
        text = "\n".join([first.strip(" \"'`"), *(w.strip(" \"'`,\n") for w in window[1:])])
        parts = shape.split(text) if all(w.strip() for w in window) else {}
        if parts and not any(_FEEDBACK.search(w) for w in window) and _is_sane_text(parts, shape):
            start = lines[i][0] + len(window[0].rstrip("\n")) - len(first)
            yield start, lines[i + n - 1][0] + len(window[-1].rstrip("\n")), parts
            i += n
        else:
            i += 1


def _is_sane_text(parts: dict[str, str], shape: Shape) -> bool:
    if shape.options:
        return all(v in shape.options.get(p, (v,)) for p, v in parts.items())
    return all(0 < len(v.split()) <= 9 and not re.search(r"[:<\[#]", v) for v in parts.values())


def _call_answers(segment: str, shape: Shape) -> Iterator[tuple[int, int, dict[str, str]]]:
    end = 0
    for m in re.finditer(r"\[\s*\{", segment):
        if m.start() < end:
            continue
        try:
            _, length = json.JSONDecoder().raw_decode(segment[m.start() :])
        except ValueError:
            continue
        parts = shape.split(segment[m.start() : m.start() + length])
        if parts:
            end = m.start() + length
            yield m.start(), end, parts
