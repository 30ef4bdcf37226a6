r"""Marks of thinking: one table, one reader, for every text that a model wrote.

Models set their thinking apart in many ways: tags (`<think>`, `<seed:think>`), brackets
(`[THINK]`), special tokens (`<|begin_of_thought|>`, `<|START_THINKING|>`), channels (harmony). The
opening mark may be missing, since chat templates put it into the prompt; the closing one is missing
where a reply was cut. Marks inside code, or in quotes or backticks, are talk about marks.

Linear in the text: one pass of one pattern. Does not know providers or rewards. Source: the chat
templates of published models; own rules.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["has_open_thinking", "split_thinking", "without_thinking"]

_NAMES = (
    "think|thinking|thought|thoughts|reason|reasoning|reasoning_content|reflection|scratchpad|cot"
    "|chain_of_thought|inner_monologue|internal_monologue|monologue|thinking_process"
    "|thought_process|antthinking|assistant_thinking|deepthink|rethink"
)
"""Words that a tag of thinking is made of, with or without a vendor's prefix (`seed:think`)."""
_MORE = r"(?:[_-](?:content|process|mode|text|block|trace|steps|scratchpad))?"
_SOFT = "analysis|rationale|planning|deliberation|brainstorm|brainstorming|introspection|reflect"
"""Words that may as well name a part of an answer: thinking only where a reply begins with the
whole block and goes on after it."""

_TABLE: tuple[tuple[str, str, str], ...] = (
    # key of the pair, opening, closing; `key` names the group whose text must agree, where it does
    (
        "tag",
        rf"<[ \t]*(?:\w{{1,20}}[:_-])?(?P<tag>{_NAMES}){_MORE}(?:[ \t][^<>\n]{{0,200}})?(?<!/)>",
        rf"<[ \t]*\\?/[ \t]*(?:\w{{1,20}}[:_-])?(?P<tag_end>{_NAMES}){_MORE}[ \t]*>",
    ),
    ("bracket", rf"\[(?P<bracket>{_NAMES})\]", rf"\[/(?P<bracket_end>{_NAMES})\]"),
    (
        "token",
        rf"<\|(?:begin_of_|start_of_|begin_|start_)?(?:{_NAMES})(?:_begin|_start)?\|>",
        rf"<\|(?:/|end_of_|end_)(?:{_NAMES})\|>|<\|(?:{_NAMES})_end\|>",
    ),
    ("soft", rf"<(?P<soft>{_SOFT})>", rf"</(?P<soft_end>{_SOFT})>"),
    ("square", rf"\[(?P<square>{_SOFT})\]", rf"\[/(?P<square_end>{_SOFT})\]"),
    ("escaped", rf"&lt;(?P<escaped>{_NAMES})&gt;", rf"&lt;/(?P<escaped_end>{_NAMES})&gt;"),
    ("inner", r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    ("details", r"<details[ \t][^<>\n]{0,200}type=[\"']?reasoning\b[^<>\n]{0,200}>", r"</details>"),
    (
        "turn",
        r"<\|im_start\|>[ \t]*think(?:ing)?[ \t]*\n",
        r"(?:<\|im_end\|>\n?)?<\|im_start\|>[ \t]*(?:answer|assistant)[ \t]*\n",
    ),
    ("triangle", r"◁think▷", r"◁/think▷"),
    ("unused", r"<unused94>(?:thought\n)?", r"<unused95>"),
    (
        "channel",
        r"(?:<\|start\|>assistant[ \t]*)?<\|channel\|>[ \t]*(?:analysis|commentary)[^<\n]{0,80}"
        r"<\|message\|>",
        r"<\|end\|>",
    ),
    ("pipe", r"<\|channel>[ \t]*(?:thought|analysis)\b", r"<channel\|>"),
)
_ANSWER_MARKS = re.compile(
    r"(?:<\|start\|>assistant[ \t]*)?<\|channel\|>[ \t]*final[^<\n]{0,80}<\|message\|>|<\|return\|>"
    r"|<\|(?:begin|end)_of_(?:solution|answer)\|>|<\|(?:START|END)_RESPONSE\|>",
    re.IGNORECASE,
)
"""What some of these models put around the answer itself: dropped together with thinking."""

_ANY = re.compile(
    "|".join(f"(?P<{key}_o>{opening})|(?P<{key}_c>{closing})" for key, opening, closing in _TABLE)
    + rf"|(?P<empty_o><[ \t]*(?:\w{{1,20}}[:_-])?(?:{_NAMES})[ \t]*/>)"
    + r"|(?P<fence>^[ \t]*(?:```+|~~~+))|(?P<code>`[^`\n]+`)",
    re.IGNORECASE | re.MULTILINE,
)
_NOTHING = " \t\r\n\f\v\u00a0\ufeff\u200b\u200c\u200d\u2060"
"""White space and characters without width, which may stand before a mark."""
_HINT = re.compile(
    r"think|thought|reason|reflect|scratchpad|cot\b|chain_of|monologue|<unused9|<\|channel|<\|inner_"
    rf"|[<\[](?:{_SOFT})[>\]]",
    re.IGNORECASE,
)
_SOFT_KINDS = ("soft:", "square:")
_PAIRS_ONLY = (*_SOFT_KINDS, "details", "turn")
"""Kinds whose closing mark alone says nothing."""
_BLOCK = re.compile(
    r"\A\s*(?P<mark>`{3,}|~{3,})(?:think|thinking|thoughts?|reasoning)[ \t]*\n"
    r"(?P<body>(?:.*\n)*?)(?P=mark)[ \t]*(?:\n|\Z)",
    re.IGNORECASE,
)
"""A reply that begins with a fenced block of thinking."""
_STRIPPED_CHANNELS = re.compile(r"\A\s*analysis(?=\W|[A-Z])(.*?)assistantfinal", re.DOTALL)
"""A harmony reply whose special tokens were dropped while decoding."""


@dataclass(frozen=True, slots=True)
class _Mark:
    kind: str
    """Of the pair: opening and closing marks of one kind belong together."""
    is_open: bool
    start: int
    end: int


@dataclass(slots=True)
class _Reading:
    """A reply while it is read: what is visible, what is thought."""

    visible: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    is_cut: bool = False

    def think(self, text: str) -> None:
        if text.strip():
            self.thoughts.append(text.strip())


def split_thinking(text: str) -> tuple[str, str]:
    """Return (answer, thinking) of a reply; the answer is the text itself where nothing is marked.

    An opening mark counts at the start of the reply or of a line, or after other thinking; in the
    middle of a sentence it is text. A closing mark alone ends thinking that began in the prompt.
    An opening mark that is never closed means that the reply was cut: no answer follows.

    >>> split_thinking("<think>2+2</think>\\n\\n4")
    ('4', '2+2')
    >>> split_thinking("[THINK]maybe 5[/THINK]<thought>no</thought>4")
    ('4', 'maybe 5\\nno')
    >>> split_thinking("it is 2+2</think>4"), split_thinking("<think>2+2 is")
    (('4', 'it is 2+2'), ('', '2+2 is'))
    """
    reading = _read(text)
    if reading is None:
        return text, ""
    return "".join(reading.visible), "\n".join(reading.thoughts)


def without_thinking(text: str) -> str:
    """Return what a reply says after its thinking.

    >>> without_thinking("<seed:think>hm</seed:think> [1]")
    '[1]'
    """
    return split_thinking(text)[0]


def has_open_thinking(text: str) -> bool:
    """Return whether a reply was cut inside its thinking.

    >>> has_open_thinking("<think>2+2 is"), has_open_thinking("<think>4</think>4")
    (True, False)
    """
    reading = _read(text)
    return reading is not None and reading.is_cut


def _read(text: str) -> _Reading | None:
    """Return the reading of a marked text; None where nothing in it is thinking."""
    if stripped := _STRIPPED_CHANNELS.match(text):
        return _Reading([text[stripped.end() :]], [stripped[1].strip()])
    if not _HINT.search(text):
        return None
    if (block := _BLOCK.match(text)) and (rest := text[block.end() :].lstrip()):
        reading = _Reading([rest]) if (inner := _read_marks(rest)) is None else inner
        reading.thoughts.insert(0, block["body"].strip())
        return reading
    return _read_marks(text)


def _read_marks(text: str) -> _Reading | None:
    marks, code = _marks(text)
    if not marks:
        return None
    reading = _walk(text, marks, code)
    if not reading.thoughts and not reading.is_cut and "".join(reading.visible) == text:
        return None
    reading.visible = [_ANSWER_MARKS.sub("", "".join(reading.visible))]
    return reading


def _walk(text: str, marks: list[_Mark], code: list[tuple[int, int]]) -> _Reading:
    reading, closings = _Reading(), _closings(marks, code)
    first, last = len(text) - len(text.lstrip(_NOTHING)), len(text.rstrip(_NOTHING))
    at, number, has_thought = 0, -1, False
    plain: set[int] = set()  # closing marks that belong to an opening mark which is text
    while (number := number + 1) < len(marks):
        mark = marks[number]
        if mark.start < at or number in plain or _is_talk(text, mark, code):
            continue
        if not mark.is_open:
            if has_thought and mark.end >= last:
                reading.visible.append(text[at : mark.start])  # once more, behind the answer
                at = len(text)
                break
            # Whatever stands before a closing mark alone was thought; the prompt opened it.
            reading.think("".join(reading.visible) + text[at : mark.start])
            reading.visible.clear()
            has_thought, at = True, _after(text, mark.end)
            continue
        partner = _partner(mark, number, closings)
        if mark.kind.startswith(_SOFT_KINDS):
            is_real = partner is not None and (has_thought or mark.start <= first)
            is_real = is_real and marks[partner or 0].end < last
        else:
            is_real = has_thought or _begins_line(text, mark.start)
        if not is_real:
            plain.update([] if partner is None else [partner])
            continue
        reading.visible.append(text[at : mark.start])
        has_thought = True
        if mark.kind == "empty":
            at = _after(text, mark.end)
        elif partner is None:
            reading.think(text[mark.end :])
            reading.is_cut = True
            # What stood before is no answer either: the reply ended before it came.
            reading.visible = [] if not "".join(reading.visible).strip() else reading.visible
            return reading
        else:
            reading.think(text[mark.end : marks[partner].start])
            at, number = _after(text, marks[partner].end), partner
    reading.visible.append(text[at:])
    if has_thought and not "".join(reading.visible).strip():
        reading.visible.clear()
    elif has_thought and reading.visible and not reading.visible[0].strip(_NOTHING):
        reading.visible[0] = ""  # white space before the first block
    return reading


def _closings(marks: list[_Mark], code: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Return the numbers of closing marks by kind, and of all under the empty name; those in code
    apart, with a question mark: a code fence may itself have been left open while thinking."""
    closings: dict[str, list[int]] = {}
    for number, mark in enumerate(marks):
        if not mark.is_open:
            doubt = "?" if _is_inside(mark, code) else ""
            closings.setdefault(mark.kind + doubt, []).append(number)
            if not mark.kind.startswith(_PAIRS_ONLY):
                closings.setdefault(doubt, []).append(number)
    return closings


def _partner(mark: _Mark, number: int, closings: dict[str, list[int]]) -> int | None:
    """Return the closing mark of an opening one: of its kind, or of any where that is missing."""
    if mark.kind == "empty":
        return None
    order: tuple[str, ...] = (mark.kind, "", mark.kind + "?", "?")
    if mark.kind.startswith(_SOFT_KINDS):
        order = order[:1]
    later = (_next(closings.get(key, []), number) for key in order)
    return next((found for found in later if found is not None), None)


def _is_talk(text: str, mark: _Mark, code: list[tuple[int, int]]) -> bool:
    if _is_inside(mark, code):
        return True
    if mark.is_open:
        return False
    is_turn_end = mark.kind == "channel" and not text.startswith("<|", mark.end)
    return is_turn_end or mark.kind.startswith(_PAIRS_ONLY)


def _marks(text: str) -> tuple[list[_Mark], list[tuple[int, int]]]:
    """Return every mark in order, and the spans of code in which marks are talk."""
    marks: list[_Mark] = []
    code: list[tuple[int, int]] = []
    fence = -1
    for found in _ANY.finditer(text):
        name = str(found.lastgroup)
        if name == "fence":
            if fence >= 0:
                code.append((fence, found.end()))
                fence = -1
            else:
                fence = found.start()
        elif name == "code":
            code.append(found.span())
        elif not _is_quoted(text, found.start(), found.end()):
            kind, is_open = name.rpartition("_")[0], name.endswith("_o")
            if kind in ("tag", "bracket", "soft", "square", "escaped"):
                kind += ":" + _word(found, kind, is_open)
            marks.append(_Mark(kind, is_open, found.start(), found.end()))
    return marks, code


def _word(found: re.Match[str], kind: str, is_open: bool) -> str:
    return str(found[kind if is_open else f"{kind}_end"]).lower()


def _next(numbers: list[int], after: int) -> int | None:
    place = bisect_left(numbers, after)
    return numbers[place] if place < len(numbers) else None


def _is_inside(mark: _Mark, spans: list[tuple[int, int]]) -> bool:
    place = bisect_left(spans, (mark.start + 1,))
    return place > 0 and spans[place - 1][1] > mark.start


def _is_quoted(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 1) : start], text[end : end + 1]
    return before == after != "" and before in "\"'`"


def _begins_line(text: str, start: int) -> bool:
    line = text.rfind("\n", max(0, start - 200), start)
    if line < 0 and start > 200:
        return False
    return not text[line + 1 : start].strip(_NOTHING)


def _after(text: str, end: int) -> int:
    while end < len(text) and text[end].isspace():
        end += 1
    return end
