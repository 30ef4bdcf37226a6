"""Reading rules out of prose, bullets and tables: situation, part of the answer, value.

What is understood: "when/if/for SITUATION, the PART is VALUE", "PART is VALUE for SITUATION,
VALUE for SITUATION and VALUE otherwise", "SITUATION goes to VALUE", "SITUATION → VALUE",
"PART by FIELD: VALUE → VALUE; …", a heading with bullets, Markdown tables, "doubled", "lowered by
15", and words such as "always" or "regardless" that make an exception strong. A sentence that
names no value that exists states no rule ("choose a moderate priority"). Nothing here is a format
of a library: it is ordinary English around names that the prompt itself gives. Does not know any
house's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.benchmarks.learning.house_rules.language.conditions import (
    Condition,
    inherit,
    read_condition,
    stems,
)
from tests.benchmarks.learning.house_rules.language.effects import (
    Rule,
    Words,
    effects_of,
    left_over,
    mentions,
    names_of,
    pattern_of,
    value_of,
)

_ARROW = r"\s*(?:→|->|=>|⇒|⟶)\s*"
_STRONG = re.compile(
    r"\b(?:always|regardless|whatever|no matter|exceptions?|override[sn]?|overriding|instead|"
    r"in any case|even (?:if|when|for)|takes? precedence|first of all|but)\b", re.I
)  # fmt: skip
_ASIDE = re.compile(
    r",?\s*\b(?:whatever|regardless(?: of)?|no matter|irrespective of|instead of)\b[^,.;:]*"
    r"(?=[,.;:]|$)|\bexceptions?:\s*|\b(?:always|then|please|simply|exactly|instead|but|"
    r"in any case|"
    r"also|overrides? (?:everything|all|that|this|the \w+(?: rule)?))\b,?", re.I,
)  # fmt: skip
_LEAD = r"(?:if|when|whenever|where|for|on|in case of|in|with|at)"
_VERB = (
    r"(?:use|set|choose|pick|give|route|send|assign|answer|put|write|make|double|halve|multiply|"
    r"add|subtract|lower|raise|reduce|increase|it (?:is|should|must|goes)"
    r"|they (?:are|should|must|go)|is|are)"
)
_NO_RULE = re.compile(r"\bis one of\b|\bare one of\b|\bhas the parts\b|: (?:right|wrong)\b", re.I)
_NOTE = re.compile(
    r"\s*[(\[](?:[^()\[\]]*\b(?:provisional|confirmed|support\w*|tasks?|seen|helpful|harmful|"
    r"evidence|sure|confidence|cases?|of \d+)\b[^()\[\]]*)[)\]]", re.I,
)  # fmt: skip
_UNLESS = re.compile(
    r"(.+?),?\s+(?:unless|except (?:if|when|where))\s+(.+?),\s+(?:in which case|then|when)\s+(.+)$",
    re.I,
)
_LABELLED = re.compile(
    r"(?:situation|when|if|condition)\s*:\s*(.+?)[;,.|]?\s*"
    r"\b(?:do|then|action|rule|what)\s*:\s*(.+)$",
    re.I,
)


_OTHERWISE = re.compile(
    r"(?:and )?(?:otherwise|else|in all other cases|anything else|everything else|all others?|"
    r"any other \w+|the rest|by default)\b(.*)$", re.I,
)  # fmt: skip
_GOES = re.compile(
    r"(.+?)\s+(?:(?:always )?(?:go|goes|belongs?|are routed|is routed|gets?|takes?|needs?|"
    r"receives?|means?|requires?|has|have|carry|carries)(?:\s+(?:to|in|into|with))?|to|with)\s+(.+)$",
    re.I,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Around:
    """What a heading or an earlier item has said."""

    part: str = ""
    subject: str = ""
    condition: Condition = field(default_factory=Condition)
    is_strong: bool = False


def read_rules(text: str, words: Words) -> list[Rule]:
    """Return the rules that a text states, in order."""
    text = _tokens(text, words)
    rules: list[Rule] = []
    around = _Around()
    table: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip().startswith("|"):
            table.append(line)
            continue
        if table:
            rules += _read_table(table, words)
            table = []
        is_bullet = bool(re.match(r"\s*(?:[-*•]|\d+[.)])\s", line))
        body = _clean(line)
        if not body:
            around = around if is_bullet else _Around()
            continue
        if (body.endswith(":") or line.lstrip().startswith("#")) and len(body) < 120:
            around = _heading(body.rstrip(":"), words)
            continue
        if not is_bullet:
            around = _Around()
        part = around.part
        for sentence in _sentences(body):
            # "Subtract 15 for the shop." is about the part of the sentence before.
            is_own = bool(mentions(sentence, words.parts))
            spoken = around if is_own else replace(around, part=part)
            found = _read_sentence(sentence, words, spoken)
            rules += found
            part = found[-1].part if found else part
    return rules


def _tokens(text: str, words: Words) -> str:
    """Write names of several words as one word, here and in the record that is compared."""
    for name in sorted((*words.fields, *words.parts), key=len, reverse=True):
        if " " in name:
            text = re.sub(rf"\b{re.escape(name)}\b", name.replace(" ", "_"), text, flags=re.I)
    return text


def joined(record: Mapping[str, str]) -> dict[str, str]:
    """Return a record whose names are lower case and one word each."""
    return {k.lower().replace(" ", "_"): v for k, v in record.items()}


def _clean(line: str) -> str:
    line = re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", line)
    line = re.sub(r"^\s*#+\s*", "", line)
    line = re.sub(r"^\[[\w-]{1,16}\][.:]?\s*", "", line.strip())
    line = line.replace("**", "").replace("`", "")
    return _NOTE.sub("", line).strip()


def _sentences(body: str) -> list[str]:
    return [s for s in re.split(r"(?<=[\w)\"'][.!])\s+(?=[A-Z\"'(])", body) if s.strip()]


def _heading(head: str, words: Words) -> _Around:
    part, subject = _head_names(head, words)
    if part:
        return _Around(part, subject, is_strong=bool(_STRONG.search(head)))
    condition = (
        read_condition(head, names_of(words)) if re.match(_LEAD + r"\b", head, re.I) else None
    )
    return _Around(condition=condition or Condition(), is_strong=bool(_STRONG.search(head)))


def _head_names(head: str, words: Words) -> tuple[str, str]:
    """Return the part that a heading is about and the name it depends on."""
    parts = mentions(head, words.parts)
    by = re.search(
        r"\b(?:by|per|from|depends on|according to|for each|follows)\s+(?:the\s+)?(\w+)", head
    )
    names = names_of(words)
    subject = ""
    if by:
        subject = next((n for n in names if stems(n) == stems(by[1])), "")
    named = [p for p in parts if p != subject]
    return (named[0] if named else ""), subject


def _read_table(lines: Sequence[str], words: Words) -> list[Rule]:
    rows = [[c.strip() for c in line.strip().strip("|").split("|")] for line in lines]
    rows = [r for r in rows if not all(re.fullmatch(r":?-*:?", c) for c in r)]
    if len(rows) < 2:
        return []
    heads = [next(iter(mentions(h, words.parts)), "") for h in rows[0]]
    names = names_of(words)
    fields = [next((n for n in names if stems(n) == stems(h.lower())), "") for h in rows[0]]
    rules = []
    for row in rows[1:]:
        condition = Condition()
        outs: list[tuple[str, str]] = []
        for i, cell in enumerate(row[: len(heads)]):
            is_input = i == 0 or (fields[i] and not heads[i])
            if is_input:
                if cell.lower() not in ("", "any", "-", "*"):
                    one = read_condition(cell, names, subject=fields[i])
                    condition = inherit(condition, one)
            elif heads[i]:
                outs.append((heads[i], cell))
        for part, cell in outs:
            rules += [replace(r, condition=condition) for r in effects_of(cell, part, words)]
    return rules


def _read_sentence(sentence: str, words: Words, around: _Around) -> list[Rule]:
    if _NO_RULE.search(sentence):
        return []
    m = _UNLESS.match(sentence)
    if m:
        first = _read_sentence(m[1], words, around)
        part = first[0].part if first else around.part
        then = f"if {m[2]}, always {m[3]}"
        return first + _read_sentence(then, words, replace(around, part=part))
    m = _LABELLED.match(sentence)
    if m:
        sentence = f"When {m[1]}, {m[2]}"
    text = _plain(sentence)
    text = re.sub(
        r"^(?:hence|so|remember that|note that|the rule is that|in general),?\s+",
        "",
        text,
        flags=re.I,
    )
    found = _read_text(text, words, around)
    marked = re.sub(r"\s*[(,]\s*but\s+", "; but ", sentence)
    pieces = [(_plain(p), bool(_STRONG.search(p))) for p in marked.split(";")]

    def is_strong(rule: Rule) -> bool:
        return around.is_strong or any(
            strong and (rule.source in piece or len(pieces) == 1) for piece, strong in pieces
        )

    return [replace(r, is_strong=is_strong(r) and not r.condition.is_default) for r in found]


def _plain(sentence: str) -> str:
    """Return a sentence without the words that only say how strongly it holds."""
    text = re.sub(r"\s*[(,]\s*but\s+([^()]+?)\)?(?=$|[.;])", r"; \1", sentence)
    text = re.sub(r"\((?:this |which |it )?(?:takes|has|overrid|wins|no matter)[^)]*\)", " ", text)
    return " ".join(_ASIDE.sub(" ", text).split()).strip(" .,")


def _read_text(text: str, words: Words, around: _Around) -> list[Rule]:
    head, colon, rest = text.partition(": ")
    if colon and not re.search(_ARROW, head):
        part, subject = _head_names(head, words)
        is_lead = bool(re.match(_LEAD + r"\b", head, re.I))
        bare = re.sub(pattern_of(part.replace(" ", "_")), " ", head, flags=re.I) if part else ""
        if part and not is_lead and not (words.options.get(part) and value_of(bare, part, words)):
            return _read_items(rest, words, replace(around, part=part, subject=subject))
        if is_lead or not around.part:
            inner = _read_text(rest, words, around)
            if inner and (not is_lead) and any(r.condition.alternatives for r in inner):
                return inner
            condition = read_condition(head, names_of(words), subject=around.subject)
            if is_lead or (inner and condition.alternatives and len(head.split()) < 9):
                return [replace(r, condition=inherit(condition, r.condition)) for r in inner]
            return inner
    return _read_items(text, words, around)


def _read_items(text: str, words: Words, around: _Around) -> list[Rule]:
    """Read a list of items that share what was said before them."""
    rules: list[Rule] = []
    values = words.options.get(around.part, ())
    for item in _items(text, _ending(values)):
        found = [replace(r, source=item) for r in _read_item(item, words, around)]
        for rule in found:
            if rule.condition.subject:
                around = replace(around, subject=around.subject or rule.condition.subject)
            around = replace(around, part=around.part or rule.part)
        rules += found
    return rules


def _ending(values: Sequence[str]) -> str:
    """Return a pattern of an item that ends with a value, such as "toys R7"."""
    return rf"\S\s+(?:{'|'.join(map(re.escape, values))})$" if values else r"$^"


def _items(text: str, ending: str) -> list[str]:
    """Cut a sentence where a new pair of situation and value begins."""
    if ";" in text:
        return [i for part in text.split(";") for i in _items(part.strip(), ending) if i]
    pieces = [p for p in re.split(r",\s*(?:and\s+)?|\s+and\s+", text) if p]
    if len(pieces) > 1 and all(re.search(ending, p, re.I) for p in pieces):
        return pieces
    if re.search(_ARROW, text):
        return _grow(text, _ARROW, forward=True)
    if re.match(_LEAD + r"\b", text, re.I):
        pieces = re.split(
            rf"[,]\s*(?:and\s+)?(?={_LEAD}\b)|,?\s*(?=\b(?:otherwise|else)\b)", text, flags=re.I
        )
        return [p for p in pieces if p and p.strip()]
    if re.search(r"\b(?:for|if|when)\b", text):
        return _grow(
            text,
            r"^(?:otherwise|else|anything else)\b|\S.*\b(?:for|if|when|on|in)\b\s+\S",
            forward=False,
        )
    if re.search(r"\w\s*[:=]\s*\w", text):
        return _grow(text, r"\w\s*[:=]\s*\w", forward=True)
    if re.search(r"\b(?:to|with)\b", text):
        return _grow(text, r"\b(?:to|with)\s+\S", forward=True)
    return [text]


def _grow(text: str, complete: str, *, forward: bool) -> list[str]:
    """Join the pieces between commas and "and" into items, each with one match of `complete`."""
    pieces = re.split(r"(,\s*(?:and\s+)?|\s+and\s+)", text)
    items: list[str] = []
    held = ""
    for i in range(0, len(pieces), 2):
        sep = pieces[i - 1] if i else ""
        piece = pieces[i]
        if forward:
            held = f"{held}{sep}{piece}" if held else piece
            if re.search(complete, piece):
                items.append(held)
                held = ""
        elif not items or (re.search(complete, piece) and re.search(complete, items[-1])):
            items.append(piece)
        else:
            items[-1] += sep + piece
    return items + ([held] if held else [])


def _read_item(item: str, words: Words, around: _Around) -> Iterator[Rule]:
    item = item.strip(" .,")
    names = names_of(words)
    other = _OTHERWISE.match(item)
    if other:
        rest = re.sub(_ARROW, " ", other[1])
        for rule in effects_of(rest, around.part, words):
            yield replace(rule, condition=inherit(Condition(is_default=True), around.condition))
        return
    situation, said, lists = _cut(item, words, around)
    if not said:
        return
    condition = Condition()
    if situation:
        subject = around.subject
        condition = read_condition(situation, names, subject=subject, and_is_or=lists)
        if not condition.alternatives and not condition.is_default:
            return
    found = effects_of(said, around.part, words)
    for rule in found:
        if not situation:
            left = left_over(said, found, words)
            condition = read_condition(left, names) if left else Condition()
        yield replace(rule, condition=inherit(condition, around.condition))


def _cut(item: str, words: Words, around: _Around) -> tuple[str, str, bool]:
    """Return the situation and the saying of an item, and whether "and" joins a list in it."""
    values = words.options.get(around.part, ())
    arrow = re.split(_ARROW, item, maxsplit=1)
    if len(arrow) == 2:
        left = arrow[0]
        parts = mentions(left, words.parts)
        if parts and not re.search(
            rf"{pattern_of(parts[0].replace(' ', '_'))}\s*(?:is|=|:)?\s*\w", left, re.I
        ):
            return (
                re.sub(pattern_of(parts[0]), " ", left, flags=re.I),
                f"{parts[0]} {arrow[1]}",
                True,
            )
        return left, arrow[1], True
    if re.match(_LEAD + r"\b", item, re.I):
        situation, said = _cut_lead(item, words)
        if said and (effects_of(said, around.part, words) or not around.part):
            return situation, said, False
    m = re.match(rf"(.+?)\s+({'|'.join(map(re.escape, values))})$", item, re.I) if values else None
    if (
        m
        and not mentions(m[1], words.parts)
        and not re.search(r"\b(?:is|are|to|with)$|[:=]$", m[1])
    ):
        return m[1], m[2], True
    m = re.search(r"\b(?:if|when|whenever|where|in case of)\b|\bfor\b", item, re.I)
    if m and effects_of(item[: m.start()], around.part, words):
        return item[m.start() :], item[: m.start()], m[0].lower() == "for"
    m = re.search(r"\b(?:on|in|with|at)\b", item, re.I)
    if (
        m
        and effects_of(item[: m.start()], around.part, words)
        and not _is_open(item, around, words)
    ):
        return item[m.start() :], item[: m.start()], True
    m = re.match(
        r"(?:route|send|assign|put|give|forward)\s+(.+?)\s+(?:in|into|to)\s+(.+)$", item, re.I
    )
    if m:
        return m[1], m[2], True
    if around.part and around.subject:
        m = re.match(
            r"(.+?)\s*(?:[:=]|\bis\b|\bare\b|\bgets?\b|\bmeans\b|\bto\b)\s*(.+)$", item, re.I
        )
        if m:
            return m[1], m[2], True
    m = re.match(r"(.+?)\s*[:=]\s*(.+)$", item)
    if m and around.part:
        named = mentions(m[1], words.parts)
        if named and around.part not in named and effects_of(m[1], "", words):
            return m[1], m[2], False
    m = _GOES.match(item)
    if m and not mentions(m[1], words.parts):
        return m[1], m[2], True
    m = re.match(r"(.+?)\s*(?::|=|\bis\b|\bare\b)\s*(.+)$", item, re.I)
    if m and around.part and not mentions(m[1], words.parts):
        return m[1], m[2], True
    return "", item, False


def _is_open(item: str, around: _Around, words: Words) -> bool:
    """True when the item's part takes any words as its value, so that "in cents" belongs to it."""
    part = next(iter(mentions(item, words.parts)), around.part)
    return not words.options.get(part)


def _cut_lead(item: str, words: Words) -> tuple[str, str]:
    """Cut "when SITUATION, the PART is VALUE" in two."""
    parts = "|".join(pattern_of(p.replace(" ", "_")) for p in words.parts)
    start = re.compile(
        rf"(?:,\s*|\s+)(?:the |its |their )?"
        rf"(?:(?:{parts})\s+(?:is|are|must|should|becomes?|gets?|=|to)\b"
        rf"|(?:{parts})\s*[:=]|{_VERB}\s+(?!in\b))", re.I,
    )  # fmt: skip
    best = ("", "")
    for m in start.finditer(item):
        situation, said = item[: m.start()], item[m.start() :].strip(" ,")
        is_plain = bool(re.match(r"(?:is|are)\b", said, re.I))
        if (
            is_plain
            or not re.sub(rf"^{_LEAD}\b\s*(?:the|an?)?\s*", "", situation, flags=re.I).strip()
        ):
            continue
        if effects_of(said, "", words) or re.match(_VERB, said, re.I):
            best = (situation, said)
            break
    if best[0]:
        return best
    cut = re.split(r"[,:]\s+", item, maxsplit=1)
    return (cut[0], cut[1]) if len(cut) == 2 else ("", "")
