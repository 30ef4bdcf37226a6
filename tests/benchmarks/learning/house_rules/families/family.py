"""A family of tasks under house rules: records drawn by seed, the key of each, and its verifier.

A task is one line of text with a record in square brackets, `[device: laptop; day: Friday; …]`;
its answer has named parts. The reward is the share of right parts. The feedback names the right
and the wrong parts and, where references may be shown, what was wanted. Does not know simulators,
methods, models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Record = dict[str, str]
Parts = dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One task: what the agent reads and what the house wants."""

    task_id: str
    text: str
    key: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Split:
    """The tasks of one seed; no record stands in two of them."""

    practice: tuple[Case, ...]
    gate: tuple[Case, ...]
    test: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One house: its tasks, its hidden rules, its answer format."""

    name: str
    system: str
    """What the agent is told: the format and the values that exist, none of the rules."""
    description: str
    parts: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]
    """Every field of a record with its values."""
    intro: str
    rules: tuple[str, ...]
    """The hidden rules in plain prose, one each."""
    wanted: Callable[[Record], Parts]
    """The hidden rules as a function."""
    render: Callable[[Parts, Record], str]
    judge: Callable[[str, Case], dict[str, bool]]
    """Which parts of a reply are right."""

    def draw(self, seed: int, practice: int, gate: int, test: int) -> Split:
        """Return the tasks of a seed; in each split every field's values come equally often."""
        rng = random.Random(f"{self.name}-{seed}")
        seen: set[tuple[str, ...]] = set()
        splits = []
        for name, size in (("p", practice), ("g", gate), ("t", test)):
            rows = self._rows(rng, size, seen)
            splits.append(tuple(self.case(f"{name}{i}", r) for i, r in enumerate(rows)))
        return Split(*splits)

    def _rows(self, rng: random.Random, size: int, seen: set[tuple[str, ...]]) -> list[Record]:
        columns = {}
        for name, values in self.fields.items():
            column = [values[i % len(values)] for i in range(size)]
            rng.shuffle(column)
            columns[name] = column
        rows = []
        for i in range(size):
            row = {name: column[i] for name, column in columns.items()}
            while tuple(row.values()) in seen:
                name = rng.choice(list(self.fields))
                row[name] = rng.choice(self.fields[name])
            seen.add(tuple(row.values()))
            rows.append(row)
        return rows

    def case(self, task_id: str, record: Record) -> Case:
        """Return the task of a record."""
        inner = "; ".join(f"{k}: {v}" for k, v in record.items())
        parts = self.wanted(record)
        return Case(task_id, f"{self.intro} [{inner}]", self.render(parts, record), parts)

    def grade(self, reply: str, case: Case, *, tell: bool) -> tuple[float, str]:
        """Return reward and feedback; `tell` adds what was wanted to each wrong part."""
        right = self.judge(reply, case)
        words = []
        for part in self.parts:
            if right.get(part):
                words.append(f"{part}: right")
            else:
                wanted = f", wanted {case.parts[part]!r}" if tell else ""
                words.append(f"{part}: wrong{wanted}")
        return sum(right.get(p, False) for p in self.parts) / len(self.parts), "; ".join(
            words
        ) + "."


def same(a: str, b: str) -> bool:
    """True when two values differ in case and space at most."""
    return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()


def line_judge(parts: Sequence[str], separator: str) -> Callable[[str, Case], dict[str, bool]]:
    """Judge replies of one line whose parts are joined by `separator`."""

    def judge(reply: str, case: Case) -> dict[str, bool]:
        pieces = [p.strip() for p in reply.strip().split(separator)]
        if len(pieces) != len(parts):
            return {}
        return {p: same(v, case.parts[p]) for p, v in zip(parts, pieces, strict=True)}

    return judge


def shuffled_keys(cases: Sequence[Case], seed: int) -> tuple[Case, ...]:
    """Give every task the key of another one: nothing is left to learn."""
    rng = random.Random(f"shuffle-{seed}")
    order = list(range(len(cases)))
    rng.shuffle(order)
    return tuple(
        Case(c.task_id, c.text, cases[j].key, cases[j].parts)
        for c, j in zip(cases, order, strict=True)
    )


def wrong_keys(cases: Sequence[Case], share: float, seed: int) -> tuple[Case, ...]:
    """Give a share of the tasks the key of another task."""
    rng = random.Random(f"wrong-{seed}")
    chosen = rng.sample(range(len(cases)), round(share * len(cases)))
    out = list(cases)
    for i in chosen:
        others = [c for c in cases if c.key != cases[i].key]
        if others:
            other = rng.choice(others)
            out[i] = Case(cases[i].task_id, cases[i].text, other.key, other.parts)
    return tuple(out)
