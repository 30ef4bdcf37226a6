"""The simplest rules that a few cases support, by minimal description length.

For one part of the answer: a base (one value, a table by one field, one or two thresholds of a
number) and up to three exceptions on top of it ("where the caller is a contractor: HW", "doubled
on Fridays"). Each choice costs bits, and so does each case that the rules get wrong; the cheapest
account wins, so that an exception needs more than one case and a wrong key stays an outlier. What
a case shows may be a value that is right, or values that are known to be wrong (where no key is
given). Ties go to the field that the record names first. Does not know prompts or any house.
Source: MDL rule induction (Rissanen 1978; Quinlan and Rivest 1989, two-part codes).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.benchmarks.learning.house_rules.language.records import number

VALUE_BITS = 2.0
FIELD_BITS = 3.0
ATOM_BITS = 5.0
MAX_EXCEPTIONS = 3
MOST_WRONG = 0.4
"""An account that gets a larger share of the cases wrong is not said."""
BASES, CANDIDATES = 6, 20
"""Of bases and of exceptions as many are tried, the most promising first."""
FEW = 4
"""With fewer cases a table by the first field is preferred to one value for everything."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one case shows about a part."""

    case: str
    facts: Mapping[str, str]
    """Fields of the record and the right values of earlier parts."""
    right: tuple[str, ...] = ()
    """What may be meant by the right value, the most general first; empty where it is not known."""
    wrong: frozenset[str] = frozenset()

    def fits(self, value: str | None) -> bool | None:
        """True or False where this case says so of a value, None where it does not."""
        if value is None:
            return False if self.right else None
        if self.right:
            return value in self.right
        return False if value in self.wrong else None


@dataclass(frozen=True, slots=True)
class Test:
    """A situation: a name compared with a value."""

    name: str
    op: str
    """`is`, `>` or `<`."""
    value: str

    def holds(self, facts: Mapping[str, str]) -> bool:
        """True when the facts are in this situation."""
        actual = facts.get(self.name)
        if actual is None:
            return False
        if self.op == "is":
            return actual == self.value
        x = number(actual)
        return x is not None and (
            x > float(self.value) if self.op == ">" else x < float(self.value)
        )


@dataclass(frozen=True, slots=True)
class Base:
    """What holds unless an exception does."""

    name: str = ""
    table: Mapping[str, str] = field(default_factory=dict)
    """Value by the field's value; with `limits`, by the index of the interval."""
    limits: tuple[float, ...] = ()
    bits: float = 0.0

    def value(self, facts: Mapping[str, str]) -> str | None:
        """Return the value for these facts, None where nothing is known."""
        if not self.name:
            return self.table.get("")
        if not self.limits:
            return self.table.get(facts.get(self.name, ""))
        x = number(facts.get(self.name, ""))
        return None if x is None else self.table.get(str(sum(x > cut for cut in self.limits)))


@dataclass(frozen=True, slots=True)
class Exception_:
    """In a situation another value, or the base's value changed."""

    test: Test
    kind: str
    """`value`, `times`, `minus`, `plus`."""
    value: str


@dataclass(frozen=True, slots=True)
class Account:
    """The rules of one part with the cases for and against each."""

    base: Base
    exceptions: tuple[Exception_, ...]
    bits: float
    supports: tuple[tuple[str, ...], ...] = ()
    """Cases that the base and each exception explain."""

    def value(self, facts: Mapping[str, str]) -> str | None:
        """Return what the rules say."""
        return _apply(self.base, self.exceptions, facts)


def induce(seen: Sequence[Seen]) -> Account | None:
    """Return the cheapest account of a part, None where none explains enough of the cases."""
    known = [s for s in seen if s.right]
    if not known:
        return None
    best = _Search(seen).best()
    wrong = sum(s.fits(best.value(s.facts)) is False for s in seen)
    return best if wrong <= MOST_WRONG * len(known) else None


def _apply(base: Base, exceptions: Sequence[Exception_], facts: Mapping[str, str]) -> str | None:
    value = base.value(facts)
    for exception in exceptions:
        if exception.test.holds(facts):
            value = _changed(value, exception)
    return value


def _changed(value: str | None, exception: Exception_) -> str | None:
    if exception.kind == "value":
        return exception.value
    x = number(value or "")
    if x is None:
        return value
    by = float(exception.value)
    return f"{ {'times': x * by, 'plus': x + by, 'minus': x - by}[exception.kind]:g}"


@dataclass(frozen=True, slots=True)
class _Groups:
    """A base without values: which cases fall together. Sets of cases are bits of an integer."""

    name: str
    masks: Mapping[str, int]
    limits: tuple[float, ...]
    bits: float


class _Search:
    """Search for the cheapest account of one part."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self.seen = seen
        self.all = (1 << len(seen)) - 1
        self.fit: dict[str, int] = {}
        self.denied: dict[str, int] = {}
        self.keyed = 0
        for i, s in enumerate(seen):
            self.keyed |= (1 << i) if s.right else 0
            for v in s.right:
                self.fit[v] = self.fit.get(v, 0) | (1 << i)
            for v in s.wrong if not s.right else ():
                self.denied[v] = self.denied.get(v, 0) | (1 << i)
        self.is_numeric = any(number(v) is not None for v in self.fit)
        self.error = math.log2(len(seen) + 1) + math.log2(len(self.fit) + 1) + 1.0
        self.names = list(dict.fromkeys(n for s in seen for n in s.facts))
        self._ranked: dict[int, list[str]] = {}

    def best(self) -> Account:
        """Return the cheapest account."""
        scored: list[tuple[float, int, _Groups]] = []
        for groups in self._groups():
            base, wrong = self._fill(groups, ())
            if base is not None:
                scored.append((base.bits + wrong * self.error, len(scored), groups))
        scored.sort(key=lambda s: s[:2])
        accounts = [self._with_exceptions(groups) for _, _, groups in scored[:BASES]]
        return min(accounts, key=lambda a: a.bits)

    def bad(self, value: str | None) -> int:
        """Return the cases that speak against a value."""
        if value is None:
            return self.keyed
        return (self.keyed & ~self.fit.get(value, 0)) | self.denied.get(value, 0)

    def ranked(self, mask: int) -> list[str]:
        """Return the values that most cases of a set allow, the most general first on a tie."""
        if mask not in self._ranked:
            score = {
                v: (f & mask).bit_count() - (self.denied.get(v, 0) & mask).bit_count()
                for v, f in self.fit.items()
                if f & mask
            }
            self._ranked[mask] = sorted(score, key=lambda v: -score[v])[:5]
        return self._ranked[mask]

    def _mask(self, test: Test) -> int:
        return sum(1 << i for i, s in enumerate(self.seen) if test.holds(s.facts))

    def _groups(self) -> list[_Groups]:
        few = self.keyed.bit_count() < FEW
        ranked = self.ranked(self.all)
        general = bool(ranked) and ranked[0].startswith("as:")
        penalty = 20.0 if few and not general else 0.0
        found = [_Groups("", {"": self.all}, (), VALUE_BITS + penalty)]
        for i, name in enumerate(self.names):
            values = Counter(s.facts[name] for s in self.seen if name in s.facts)
            numeric = all(number(v) is not None for v in values)
            order = 0.01 * i
            if 1 < len(values) <= 8 or len(self.seen) < FEW:
                masks = {v: self._mask(Test(name, "is", v)) for v in values}
                bits = FIELD_BITS + VALUE_BITS * len(values) + order
                found.append(_Groups(name, masks, (), bits))
            if numeric and len(values) > 3:
                points = sorted(float(v) for v in values)
                for a, b in pairwise(points):
                    cut = (a + b) / 2
                    high = self._mask(Test(name, ">", f"{cut:g}"))
                    low = self._mask(Test(name, "<", f"{cut:g}"))
                    bits = FIELD_BITS + ATOM_BITS + 2 * VALUE_BITS + order
                    found.append(_Groups(name, {"0": low, "1": high}, (cut,), bits))
        return found

    def _fill(
        self, groups: _Groups, exceptions: Sequence[tuple[int, Exception_]]
    ) -> tuple[Base | None, int]:
        """Choose each group's value; returns the base and the number of cases it gets wrong."""
        table: dict[str, str] = {}
        wrong = 0
        for key, mask in groups.masks.items():
            regions = _regions(mask, exceptions)
            plain = regions[0][0]
            touched = [r for r in regions[1:] if r[1][-1].kind != "value"]
            choices: list[str | None] = [*self.ranked(plain)]
            for region, folds in touched:
                choices += self._undone(region, folds)
            best, least = None, 1 << 30
            for value in choices or [None]:
                errors = 0
                for region, folds in regions:
                    out = value
                    for fold in folds:
                        out = _changed(out, fold)
                    errors += (region & self.bad(out)).bit_count()
                if errors < least:
                    best, least = value, errors
            wrong += least
            if best is not None:
                table[key] = best
        if not table or (groups.limits and len(set(table.values())) < len(groups.masks)):
            return None, 0
        spared = VALUE_BITS * (len(groups.masks) - len(table))
        return Base(groups.name, table, groups.limits, groups.bits - spared), wrong

    def _undone(self, region: int, folds: Sequence[Exception_]) -> list[str]:
        """Return the base values from which a change leads to what a set of cases shows."""
        found = []
        for value in self.ranked(region):
            x = number(value)
            fold = folds[-1]
            if x is not None and fold.kind != "value":
                by = float(fold.value)
                found.append(f"{ {'times': x / by, 'plus': x - by, 'minus': x + by}[fold.kind]:g}")
        return found

    def _with_exceptions(self, groups: _Groups) -> Account:
        base, wrong = self._fill(groups, ())
        assert base is not None
        chosen: list[tuple[int, Exception_]] = []
        spent = 0.0
        bits = base.bits + self.error * wrong
        while len(chosen) < MAX_EXCEPTIONS and wrong > 1:
            best: tuple[float, Base, Exception_, int, int] | None = None
            for mask, exception in self._candidates(groups, base, [e for _, e in chosen]):
                refit, errors = self._fill(groups, [*chosen, (mask, exception)])
                if refit is None:
                    continue
                total = refit.bits + spent + _cost(exception) + self.error * errors
                if best is None or total < best[0] - 1e-9:
                    best = (total, refit, exception, mask, errors)
            if best is None or best[0] >= bits - 1e-9:
                break
            bits, base, exception, mask, wrong = best
            chosen.append((mask, exception))
            spent += _cost(exception)
        exceptions = tuple(e for _, e in chosen)
        return Account(base, exceptions, bits, _supports(base, exceptions, self.seen))

    def _candidates(
        self, groups: _Groups, base: Base, exceptions: Sequence[Exception_]
    ) -> list[tuple[int, Exception_]]:
        """Return the exceptions that could put at least two cases right."""
        failing = 0
        for i, s in enumerate(self.seen):
            if s.fits(_apply(base, exceptions, s.facts)) is False:
                failing |= 1 << i
        found: list[tuple[int, int, Exception_]] = []
        for mask, test in self._tests():
            if (mask & failing).bit_count() < 2 or (test.name == groups.name and test.op == "is"):
                continue
            ranked = self.ranked(mask & failing)[:1] + self.ranked(mask)[:1]
            kinds = [("value", v) for v in dict.fromkeys(ranked)]
            if self.is_numeric:
                inside = [s for i, s in enumerate(self.seen) if mask & failing & (1 << i)]
                kinds += _modifiers(base, exceptions, inside)
            for kind, value in kinds:
                right = failing if kind != "value" else failing & self.fit.get(value, 0)
                spoilt = mask & ~failing & self.bad(value) if kind == "value" else mask & ~failing
                gain = (mask & right).bit_count() - spoilt.bit_count() // 2
                found.append((-gain, mask, Exception_(test, kind, value)))
        found.sort(key=lambda f: f[0])
        return [(mask, exception) for _, mask, exception in found[:CANDIDATES]]

    def _tests(self) -> list[tuple[int, Test]]:
        if not hasattr(self, "_all_tests"):
            found = []
            for name in self.names:
                values = Counter(s.facts[name] for s in self.seen if name in s.facts)
                if len(values) <= 8:
                    found += [Test(name, "is", v) for v, n in values.items() if n > 1]
                if all(number(v) is not None for v in values) and len(values) > 3:
                    points = sorted(float(v) for v in values)
                    for a, b in pairwise(points):
                        cut = f"{(a + b) / 2:g}"
                        found += [Test(name, ">", cut), Test(name, "<", cut)]
            self._all_tests = [(self._mask(t), t) for t in found]
        return self._all_tests


def _regions(
    mask: int, exceptions: Sequence[tuple[int, Exception_]]
) -> list[tuple[int, tuple[Exception_, ...]]]:
    """Cut a set of cases by the exceptions that hold; the first piece is the one without any."""
    regions: list[tuple[int, tuple[Exception_, ...]]] = [(mask, ())]
    for held, exception in exceptions:
        cut = []
        for region, folds in regions:
            cut.append((region & ~held, folds))
            if region & held:
                before = () if exception.kind == "value" else folds
                cut.append((region & held, (*before, exception)))
        regions = cut
    return [regions[0], *[r for r in regions[1:] if r[0]]]


def _cost(exception: Exception_) -> float:
    return ATOM_BITS + (VALUE_BITS if exception.kind == "value" else VALUE_BITS + 1.0)


def _modifiers(
    base: Base, exceptions: Sequence[Exception_], inside: Sequence[Seen]
) -> list[tuple[str, str]]:
    """Return "doubled" and the like, where two cases with different bases agree on it."""
    votes: dict[tuple[str, str], set[str]] = {}
    for s in inside:
        x = number(_apply(base, exceptions, s.facts) or "")
        y = number(s.right[-1]) if s.right else None
        if x is None or y is None or x == y:
            continue
        found = [("plus", f"{y - x:g}") if y > x else ("minus", f"{x - y:g}")]
        if x and y / x in (0.5, 2.0, 3.0):
            found.append(("times", f"{y / x:g}"))
        for option in found:
            votes.setdefault(option, set()).add(f"{x:g}")
    return [option for option, bases in votes.items() if len(bases) > 1]


def _supports(
    base: Base, exceptions: Sequence[Exception_], seen: Sequence[Seen]
) -> tuple[tuple[str, ...], ...]:
    out: list[list[str]] = [[] for _ in range(1 + len(exceptions))]
    for s in seen:
        if not s.right or s.fits(_apply(base, exceptions, s.facts)) is not True:
            continue
        used = 0
        for i, exception in enumerate(exceptions, 1):
            if exception.test.holds(s.facts):
                used = i
        out[used].append(s.case)
    return tuple(tuple(o) for o in out)
