"""A small pool of library versions: which one a step starts from, and which two are merged.

Members are versions that the gate accepted. A step's parent is drawn among the tips (members that
no other member grew from), each with the share of gate tasks on which it is best. Two tips that are
each best somewhere can be united. Pure but for the list of members. Does not know rollouts or
decisions. Source: Pareto pool over instances as in GEPA; one line of descent where there is no
second tip.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tfgrpo.experience import Library
from tfgrpo.experience.similarity import normal
from tfgrpo.learning.version import Version
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.statistics import Scores


@dataclass(frozen=True, slots=True)
class Member:
    """An accepted version and what it grew from."""

    version: Version
    parents: tuple[str, ...]


class Pool:
    """The accepted versions of a run.

    Args:
        size: members kept; beyond it the one that is best on fewest tasks goes.
        scores: gate scores of a version that was scored.
    """

    def __init__(self, size: int, scores: Callable[[str], Scores]) -> None:
        self._size = size
        self._scores = scores
        self._members: dict[str, Member] = {}
        self._merged: set[frozenset[str]] = set()

    @property
    def tips(self) -> list[Version]:
        """Members that no other member grew from, oldest first."""
        parents = {p for m in self._members.values() for p in m.parents}
        return [m.version for key, m in self._members.items() if key not in parents]

    def add(self, version: Version, parents: Sequence[str]) -> None:
        """Take a version in; the weakest tip leaves where there are too many."""
        self._members[version.version_id] = Member(version, tuple(parents))
        tips = self.tips
        if len(tips) > self._size:
            shares = best_shares({t.version_id: self._scores(t.version_id) for t in tips})
            weakest = min(tips, key=lambda t: shares[t.version_id])
            del self._members[weakest.version_id]

    def renew(self, version: Version) -> None:
        """Replace a member by itself with newer books (values, counters)."""
        known = self._members.get(version.version_id)
        if known is not None:
            self._members[version.version_id] = replace(known, version=version)

    def parent(self, step: int, seed: int) -> Version | None:
        """Return the tip that a step starts from, None for an empty pool."""
        tips = self.tips
        if len(tips) < 2:
            return tips[0] if tips else None
        shares = best_shares({t.version_id: self._scores(t.version_id) for t in tips})
        chance = random.Random(derive_seed("parent", seed, step))
        return chance.choices(tips, [shares[t.version_id] for t in tips])[0]

    def pair(self) -> tuple[Version, Version] | None:
        """Return two tips to unite, the best two that are each best somewhere; each pair once."""
        tips = self.tips
        if len(tips) < 2:
            return None
        scores = {t.version_id: self._scores(t.version_id) for t in tips}
        shares = best_shares(scores)
        ranked = sorted(tips, key=lambda t: -shares[t.version_id])
        for i, first in enumerate(ranked):
            for second in ranked[i + 1 :]:
                names = frozenset((first.version_id, second.version_id))
                each = [scores[first.version_id], scores[second.version_id]]
                if names not in self._merged and _is_open(*each):
                    self._merged.add(names)
                    return first, second
        return None


def best_shares(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Return the share of tasks on which each version is best; ties are shared.

    >>> best_shares({"a": {"t1": [1.0], "t2": [0.0]}, "b": {"t1": [1.0], "t2": [1.0]}})
    {'a': 0.25, 'b': 0.75}
    """
    shares = dict.fromkeys(scores, 0.0)
    tasks = sorted({t for by_task in scores.values() for t, r in by_task.items() if r})
    for task in tasks:
        means = {v: fmean(s[task]) for v, s in scores.items() if s.get(task)}
        top = max(means.values())
        best = [v for v, m in means.items() if m >= top - 1e-9]
        for version in best:
            shares[version] += 1 / len(best) / len(tasks)
    return shares


def united(first: Library, second: Library) -> Library:
    """Return the first library with what only the second has, under ids of its own."""
    have = {normal(e.body) for e in first.entries}
    number = max(first.next_number, second.next_number)
    rows = list(first.entries)
    for entry in second.shown:
        if normal(entry.body) not in have:
            rows.append(replace(entry, experience_id=f"E{number}"))
            number += 1
    return replace(first, entries=tuple(rows), next_number=number)


def _is_open(first: Scores, second: Scores) -> bool:
    """True when each of two versions is better than the other on some task."""
    both = [t for t in first if first[t] and second.get(t)]
    gaps = [fmean(first[t]) - fmean(second[t]) for t in both]
    return any(g > 1e-9 for g in gaps) and any(g < -1e-9 for g in gaps)
