"""Reading a situation: "the day is Friday and the amount is over 100", "laptops or phones".

A condition is alternatives of atoms. An atom compares a field of the record or an earlier part of
the answer with a value or a number; a phrase that names no field holds where the record's values
cover its content words. Does not know what follows from a situation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.learning.house_rules.language.records import number

_N = r"[$€]?(-?\d+(?:\.\d+)?)"
_COMPARE = (
    (rf"between {_N} and {_N}", "between"),
    (rf"(?:at most|<=|≤|up to|no more than|not more than|not over|not above) ?{_N}", "<="),
    (rf"{_N} (?:\w+ )?(?:or less|or fewer|or below|or lower|or under|and below)", "<="),
    (rf"(?:at least|>=|≥|no less than|not less than|not under) ?{_N}", ">="),
    (rf"{_N} (?:\w+ )?(?:or more|or above|or over|or higher|and above|and more)", ">="),
    (
        rf"(?:(?:more|greater|higher|larger|longer|older|bigger) than|over|above|beyond|"
        rf"exceed(?:s|ing)?|>) ?{_N}",
        ">",
    ),
    (rf"(?:(?:less|fewer|lower|smaller|younger|shorter) than|under|below|<) ?{_N}", "<"),
)
STOP = frozenset(
    re.findall(
        r"\w+",
        "a an the any all every each is are was be being it its this that these those there of for "
        "from with in on at by to as and or if when whenever where whose which who has have having "
        "case cases ticket request task entry item letter record situation value equals equal type "
        "kind they come comes concern concerns about only then also both affected affect affects "
        "anything everything thing use set give gives make put route send assign answer write "
        "choose handle handled routed sent processed should must will get gets go goes always them "
        "keep customer us we our greet offer offered close closed ",
    )
)
_DEFAULT = re.compile(
    r"^(?:(?:for |in )?(?:any|all|every)(?:thing|body|one)? ?(?:the )?(?:other|else)\b.*|"
    r"otherwise|else|"
    r"others?|the rest|rest|default|by default|any other.*|in all other.*|remaining.*)$"
)


def stem(word: str) -> str:
    """Return a word without case, possessive and plural."""
    w = word.lower().removesuffix("'s").removesuffix("’s").strip("'’")
    if len(w) > 4 and w.endswith("ies"):
        return w[:-3] + "y"
    return w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w


def stems(text: str) -> list[str]:
    """Return the stems of a text's words in order."""
    return [stem(w) for w in re.findall(r"[\w.+'’-]*\w", text)]


def content(text: str) -> list[str]:
    """Return the stems that carry meaning."""
    return [s for s in stems(text) if s not in STOP]


@dataclass(frozen=True, slots=True)
class Atom:
    """One comparison."""

    subject: str
    """A field's or part's name in lower case; empty for a phrase about the record as a whole."""
    op: str
    """`is`, `>`, `>=`, `<`, `<=`, `between`."""
    value: str
    negated: bool = False
    phrase: str = ""
    """The words as they stand: the subject may have been spoken of before, or be misread."""

    def holds(self, record: Mapping[str, str], parts: Mapping[str, str]) -> bool:
        """True when a record, with the parts answered so far, is in this situation."""
        return self._holds(record, parts) is not self.negated

    def _holds(self, record: Mapping[str, str], parts: Mapping[str, str]) -> bool:
        if not self.subject:
            return _is_covered(self.value, record)
        if self._is_so(record, parts):
            return True
        is_numeric = any(w.isdigit() for w in stems(self.phrase))
        return bool(self.phrase) and not is_numeric and _is_covered(self.phrase, record)

    def _is_so(self, record: Mapping[str, str], parts: Mapping[str, str]) -> bool:
        actual = parts.get(self.subject, record.get(self.subject))
        if actual is None:
            return False
        if self.op == "is":
            mine, his = number(self.value), number(actual)
            if mine is not None and his is not None:
                return mine == his
            wanted, found = _bare(self.value), _bare(actual)
            if self.subject in parts and found:
                # A part may have been quoted with the words around it.
                n = len(found)
                return any(wanted[i : i + n] == found for i in range(len(wanted) - n + 1))
            return wanted == found
        value = number(actual)
        if value is None:
            return False
        return _compare(value, self.op, self.value)


def _is_covered(phrase: str, record: Mapping[str, str]) -> bool:
    """True when the record's values hold every word of a phrase that carries meaning."""
    known = {s for v in record.values() for s in stems(v.replace("-", " "))}
    names = {s for k in record for s in stems(k.replace("_", " "))}
    wanted = [w for w in content(phrase.replace("-", " ")) if w not in names or w in known]
    return bool(wanted) and all(w in known for w in wanted)


def _bare(text: str) -> list[str]:
    found = stems(text)
    return [s for s in found if s not in ("a", "an", "the")] or found


def _compare(value: float, op: str, limit: str) -> bool:
    if op == "between":
        low, high = (float(x) for x in limit.split("~"))
        return low <= value <= high
    bound = float(limit)
    return {">": value > bound, ">=": value >= bound, "<": value < bound, "<=": value <= bound}[op]


@dataclass(frozen=True, slots=True)
class Condition:
    """Alternatives of atoms; no alternative at all is "in any case"."""

    alternatives: tuple[tuple[Atom, ...], ...] = ()
    is_default: bool = False

    def holds(self, record: Mapping[str, str], parts: Mapping[str, str]) -> bool:
        """True when one alternative holds."""
        if not self.alternatives:
            return True
        return any(all(a.holds(record, parts) for a in alt) for alt in self.alternatives)

    @property
    def size(self) -> int:
        """Number of atoms of the shortest alternative."""
        return min((len(alt) for alt in self.alternatives), default=0)

    @property
    def subject(self) -> str:
        """The last subject named."""
        named = [a.subject for alt in self.alternatives for a in alt if a.subject]
        return named[-1] if named else ""


def read_condition(
    text: str, names: Sequence[str], *, subject: str = "", and_is_or: bool = False
) -> Condition:
    """Return the condition that a text states.

    Args:
        text: words such as "the caller is a contractor".
        names: fields and parts, in lower case.
        subject: what a bare value is about, where the sentence has said it before.
        and_is_or: a list "laptops and phones" in the subject's place.
    """
    low = " ".join(text.lower().replace('"', " ").replace("`", " ").split()).strip(" .,:;")
    low = re.sub(r"^(?:if|when|whenever|where|for|on|in case of|in|with|at)\b ?", "", low)
    if _DEFAULT.match(low):
        return Condition(is_default=True)
    for pattern, op in _COMPARE:
        low = _marked(pattern, op, low)
    alternatives: list[tuple[Atom, ...]] = []
    for piece in re.split(
        r"\s*\bor\b\s*|\s*/\s*|\s*,\s*(?!and\b)" if _is_list(low) else r"\s+or\s+", low
    ):
        if not piece.strip():
            continue
        bits = [b for b in re.split(r",?\s+and\s+|\s+&\s+|,\s+", piece) if b.strip()]
        atoms = []
        for bit in bits:
            atom = _atom(bit, names, subject)
            if atom:
                atoms.append(atom)
                subject = atom.subject or subject
        if and_is_or and len(atoms) > 1:
            alternatives += [(a,) for a in atoms]
        elif atoms:
            alternatives.append(tuple(atoms))
    return Condition(tuple(alternatives))


def _marked(pattern: str, op: str, text: str) -> str:
    """Write comparisons with numbers as marks that no later cut goes through."""
    return re.sub(pattern, lambda m: f"§{op}{'~'.join(m.groups())}§", text)


def _is_list(low: str) -> bool:
    """True when commas stand between alternatives."""
    return (
        " or " in low
        or bool(re.search(r"\w ?/ ?\w", low))
        or ("," in low and " and " not in low and " is " not in low and "§" not in low)
    )


def _atom(bit: str, names: Sequence[str], subject: str) -> Atom | None:
    negated = bool(re.search(r"\bnot\b|n't\b|\bother than\b|\bexcept\b", bit))
    bit = re.sub(r"\b(?:is|are|do|does)n't\b|\bnot\b|\bother than\b|\bexcept\b", " ", bit)
    named = [n for n in names if re.search(rf"\b{re.escape(n)}s?\b", bit)]
    named.sort(key=lambda n: (-len(n), bit.find(n)))
    compared = re.search(r"§(between|<=|>=|<|>)([^§]+)§", bit)
    if compared:
        about = named[0] if named else subject
        return Atom(about or "?", compared[1], compared[2], negated)
    if named:
        for name in sorted(named, key=bit.find):
            rest = re.sub(rf"\b{re.escape(name)}s?\b", " ", bit, count=1)
            words = [w for w in rest.split() if stem(w) not in STOP or w.isdigit()]
            if words:
                return Atom(name, "is", " ".join(words).strip("=: "), negated, bit)
        return None
    if not content(bit):
        return None
    if subject:
        words = [
            w for w in bit.split() if w not in ("it", "is", "a", "an", "the", "for", "on", "=")
        ]
        return Atom(subject, "is", " ".join(words), negated, bit)
    return Atom("", "is", bit, negated)


def inherit(condition: Condition, other: Condition) -> Condition:
    """Return both conditions at once."""
    if not other.alternatives:
        return condition
    if not condition.alternatives:
        return replace(other)
    return Condition(tuple(a + b for a in condition.alternatives for b in other.alternatives))
