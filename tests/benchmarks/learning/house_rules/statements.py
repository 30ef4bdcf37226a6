"""Rules in words: what a critic says once it has induced them, and how two sayings become one.

Plain sentences, such as "When caller is contractor, queue is always HW." and "hours by priority:
1 → 8; 2 → 4." Does not know prompts or their output formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.learning.house_rules.induction import Account, Exception_, Test
from tests.benchmarks.learning.house_rules.language.formats import AS
from tests.benchmarks.learning.house_rules.language.records import find_records

AGREED = 0.6
_ROW = re.compile(r"\s*(.+?)\s*→\s*(.+?)\s*$")


@dataclass(frozen=True, slots=True)
class Statement:
    """One rule in words with its evidence."""

    text: str
    part: str
    situation: str = ""
    do: str = ""
    support: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


def statements(part: str, account: Account, against: Sequence[str] = ()) -> list[Statement]:
    """Return the rules of a part as sentences, the base first."""
    base = account.base
    support = account.supports[0] if account.supports else ()
    found = []
    if not base.name:
        text = f"{part} {_says(base.table[''])}"
        found.append(Statement(f"{text}.", part, "in any case", text, support))
    elif base.limits:
        cut = f"{base.limits[0]:g}"
        high, low = base.table["1"], base.table["0"]
        situation = f"{base.name} is over {cut}"
        do = f"{part} {_says(high)}; otherwise {part} {_says(low)}"
        found.append(Statement(f"When {situation}, {do}.", part, situation, do, support))
    elif len(base.table) == 1:
        ((value, says),) = base.table.items()
        situation, do = f"{base.name} is {value}", f"{part} {_says(says)}"
        found.append(Statement(f"When {situation}, {do}.", part, situation, do, support))
    else:
        rows = "; ".join(f"{k} → {v.removeprefix(AS)}" for k, v in base.table.items())
        head = f"{part} by {base.name}"
        found.append(Statement(f"{head}: {rows}.", part, f"by {base.name}", rows, support))
    for i, exception in enumerate(account.exceptions, 1):
        situation, do = _test(exception.test), f"{part} {_does(exception)}"
        backing = account.supports[i] if len(account.supports) > i else ()
        found.append(
            Statement(f"When {situation}, {do}.", part, situation, do, backing, tuple(against))
        )
    return found


def _says(value: str) -> str:
    return f"is written as {value.removeprefix(AS)}" if value.startswith(AS) else f"is {value}"


def _does(exception: Exception_) -> str:
    if exception.kind == "value":
        return _says(exception.value).replace("is ", "is always ", 1)
    if exception.kind == "times":
        words = {"2": "doubled", "3": "tripled", "0.5": "halved"}
        return f"is {words.get(exception.value, 'multiplied by ' + exception.value)}"
    return f"is {'lowered' if exception.kind == 'minus' else 'raised'} by {exception.value}"


def _test(test: Test) -> str:
    words = {"is": "is", ">": "is over", "<": "is under"}
    return f"{test.name} {words[test.op]} {test.value}"


def head(text: str) -> str:
    """Return what a saying is about: the heading of a table, or the situation."""
    body = re.sub(r"^(?:house rule|rule): ", "", text.strip(), flags=re.I)
    if find_records(body):
        return body.lower()
    if "→" in body and ":" in body:
        return body.split(":")[0].strip().lower()
    m = re.match(r"when (.+?), ", body, re.I)
    if m:
        return "when " + m[1].strip().lower()
    return body.split(" is ")[0].strip().lower()


def merged(sayings: Sequence[str]) -> str:
    """Return one saying for several with the same head; empty where nothing is left.

    All rows of tables and all parts of sentences, each with the value that most of them give; a
    value that fewer than `AGREED` of those who speak of it give is left out.
    """
    last = sayings[-1]
    if "otherwise" in last or len(set(sayings)) == 1:
        return last
    is_table = "→" in last
    votes: dict[str, Counter[str]] = {}
    for text in sayings:
        for name, value in (_rows(text) if is_table else _clauses(text)).items():
            votes.setdefault(name, Counter())[value] += 1
    kept = {}
    for name, counts in votes.items():
        value, n = counts.most_common(1)[0]
        if n >= AGREED * counts.total():
            kept[name] = value
    if is_table:
        rows = "; ".join(f"{k} → {v}" for k, v in kept.items())
        return f"{last.split(':')[0]}: {rows}." if kept else ""
    if not votes:
        return last
    return (
        f"{last.split(', ')[0]}, {', '.join(f'{k} is {v}' for k, v in kept.items())}."
        if kept
        else ""
    )


def _rows(text: str) -> dict[str, str]:
    found = (_ROW.match(row) for row in text.split(":", 1)[-1].rstrip(". ").split(";"))
    return {m[1]: m[2] for m in found if m}


def _clauses(text: str) -> dict[str, str]:
    found = (re.match(r"(.+?) is (.+)", c) for c in text.rstrip(". ").split(", ")[1:])
    return {m[1]: m[2] for m in found if m}


def parts_of(text: str) -> list[str]:
    """Return the parts of the answer that a saying is about; none for a worked case."""
    body = re.sub(r"^(?:house rule|rule): ", "", text.strip(), flags=re.I).lower()
    if find_records(body):
        return []
    m = re.match(r"([\w -]+?) by [\w -]+: ", body)
    if m:
        return [m[1]]
    said = re.sub(r"^when .+?, ", "", body)
    return [
        m[1]
        for c in re.split(r"[,;] (?:otherwise )?", said)
        if (m := re.match(r"([\w -]+?) is ", c))
    ]


def is_base(text: str) -> bool:
    """True for a saying that settles a part in general, not in one situation alone."""
    return not text.lower().startswith("when ") or "otherwise" in text
