"""A critic that knows nothing but its prompt: a pure function of the request's messages.

What it reads. Cases wherever they stand (`language.evidence`): records with answers, feedback and
keys; rules that stand in a library, a playbook or an instruction; proposals to be reconciled. What
it does with them: per part of the answer the simplest rules that the visible cases support
(`induction`), said in plain sentences (`statements`). It answers in the form that the prompt asks
for: a new instruction between backticks, a JSON object or list after the prompt's own skeleton,
lines inside a tag, DSPy's marked fields, or an account of an attempt. It keeps to "at most N
lessons" and "at most N words". Where a prompt forbids values, names or numbers it says vague
things. Where a prompt wants an instruction, advice or insights and does not forbid it, the cases
seen are written down too, and are read again where they stand in a later prompt; lessons in the
form "when X, do Y" hold none.

What it cannot do. It remembers nothing between calls, knows no field's meaning (of a single case
it holds the field named first responsible), and sees only what the text shows: a prompt with one
case gets a narrow rule. It may import nothing from `families`; a test says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tests.benchmarks.learning.house_rules.critic_outputs import (
    account_of_attempt,
    instruction,
    marked_fields,
    operations,
    skeleton_reply,
    tagged,
)
from tests.benchmarks.learning.house_rules.induction import Seen, induce
from tests.benchmarks.learning.house_rules.language.answers import Shape
from tests.benchmarks.learning.house_rules.language.cases import Message
from tests.benchmarks.learning.house_rules.language.evidence import CaseSeen, plain, read_cases
from tests.benchmarks.learning.house_rules.language.formats import targets
from tests.benchmarks.learning.house_rules.statements import Statement, statements

_FORBIDS = re.compile(
    r"(?:quotes?|names?|mentions?|contains?|holds?|with|use)\s+no\s+"
    r"(?:\w+,? (?:no )?)*?(?:name|number|value|answer)"
    r"|(?:do not|don't|never|without) (?:\w+ )?(?:quot|nam|mention|stat|includ)\w*[^.\n]{0,40}"
    r"(?:values?|names|numbers?|answers?)\b", re.I,
)  # fmt: skip


def reply(messages: Sequence[Message], seed: int = 0) -> str:
    """Return the critic's answer to a request; the seed changes nothing."""
    return _reply(tuple(messages))


@lru_cache(maxsize=256)
def _reply(messages: tuple[Message, ...]) -> str:
    asked = "\n\n".join(content for _, content in messages)
    text = plain(asked)
    cases, shape = read_cases(text)
    if re.search(r"new instructions?\b", text, re.I) and "```" in text and "```json" not in text:
        return instruction(text, said(cases, shape), cases, shape)
    if "[[ ## " in text:
        return marked_fields(text, said(cases, shape), cases, shape)
    proposed = operations(text)
    if proposed is not None:
        return proposed
    if re.search(r"<Experiences>", text):
        return tagged(text, "Experiences", _limited(text, cases, shape))
    if re.search(r"(?:reply|return|answer|respond|output)[^.\n]{0,60}json", text, re.I):
        found = _vague(shape, cases) if _FORBIDS.search(text) else _limited(text, cases, shape)
        return skeleton_reply(text, found, cases, shape)
    return account_of_attempt(cases, shape)


def said(cases: Sequence[CaseSeen], shape: Shape | None) -> list[Statement]:
    """Return the rules that the cases support, part by part."""
    if shape is None:
        return []
    found: list[Statement] = []
    for i, part in enumerate(shape.parts):
        seen = []
        for case in cases:
            value = case.right(part)
            earlier = {p: case.right(p) for p in shape.parts[:i] if case.right(p)}
            right = targets(part, value, case.record) if value else ()
            wrong = frozenset(t for w in case.wrong(part) for t in targets(part, w, case.record))
            if value or wrong:
                seen.append(Seen(case.name, {**case.record, **earlier}, right, wrong))
        account = induce(seen)
        if account is not None:
            against = [s.case for s in seen if s.fits(account.value(s.facts)) is False]
            found += statements(part, account, against)
    return found


def _limited(text: str, cases: Sequence[CaseSeen], shape: Shape | None) -> list[Statement]:
    """Return the statements that the prompt has room for, those that would have helped first."""
    found = said(cases, shape)
    if len(cases) == 1:
        found = _joined(found)
    words = min((int(n) for n in re.findall(r"at most (\d+) words", text)), default=10_000)
    found = [s for whole in found for s in _short(whole, words)]
    counts = re.findall(
        r"at most (\d+) (?:\w+ )?(?:lessons|experiences|rules|entries|insights)", text
    )
    limit = min((int(n) for n in counts), default=len(found))
    failed = {p: sum(c.failures[p] for c in cases) for p in (shape.parts if shape else ())}
    ranked = sorted(found, key=lambda s: -failed.get(s.part, 0)) if limit < len(found) else found
    return ranked[:limit]


def _joined(found: Sequence[Statement]) -> list[Statement]:
    """Say what one case shows in one sentence for each situation."""
    by: dict[str, list[Statement]] = {}
    for s in found:
        by.setdefault(s.situation, []).append(s)
    out = []
    for situation, group in by.items():
        do = ", ".join(s.do for s in group)
        text = f"When {situation}, {do}." if situation != "in any case" else f"{do}."
        out.append(Statement(text, group[0].part, situation, do, group[0].support))
    return out


def _short(statement: Statement, words: int) -> list[Statement]:
    """Cut a table that is too long for one sentence into several."""
    if len(statement.text.split()) <= words or "→" not in statement.text:
        return [statement]
    head, rows = statement.text.rstrip(".").split(": ", 1)
    pieces = rows.split("; ")
    half = max(1, len(pieces) // 2)
    if half == len(pieces):
        return [statement]
    out: list[Statement] = []
    for some in (pieces[:half], pieces[half:]):
        text = f"{head}: {'; '.join(some)}."
        one = Statement(text, statement.part, statement.situation, "; ".join(some),
                        statement.support, statement.against)  # fmt: skip
        out += _short(one, words)
    return out


def _vague(shape: Shape | None, cases: Sequence[CaseSeen]) -> list[Statement]:
    """Return what can be said without a value: where to be careful."""
    parts = [p for p in (shape.parts if shape else ()) if any(c.failures[p] for c in cases)]
    names = ", ".join(parts[:3]) or "each part"
    text = f"Before answering, consider the situation carefully and choose the fitting {names}."
    return [Statement(text, parts[0] if parts else "", "before answering", text,
                      tuple(c.name for c in cases))]  # fmt: skip
