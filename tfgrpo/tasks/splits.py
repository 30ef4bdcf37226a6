"""Three splits by task id: practice teaches, gate decides, test reports.

The order within a seed depends on ids alone, so the same tasks give the same splits on any day and
in any order. A task may name its split in `metadata["split"]`. Near-duplicates across splits are
found and told. Does not know scores. Idea: hashed assignment (own);
template comparison masks what differs between fillings of one form (own).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tfgrpo.errors import ConfigError
from tfgrpo.experience.similarity import normal, shingles, words
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import digest

SplitName = Literal["practice", "gate", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
_NEAR = 0.8
_COMMON_TASKS = 12
"""A word run that more tasks than this, and more than a fifth, share is common wording."""
_TEMPLATE_WORDS = 4
"""A form of fewer words is no form."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint by task id; the order inside each is the seed's."""

    practice: tuple[Task, ...]
    gate: tuple[Task, ...]
    test: tuple[Task, ...]

    def __post_init__(self) -> None:
        seen = Counter(t.task_id for name in SPLITS for t in getattr(self, name))
        twice = [key for key, n in seen.items() if n > 1]
        if twice:
            raise ConfigError(f"task ids in more than one place of the splits: {twice[:5]}")

    def of(self, task_id: str) -> SplitName | None:
        """Return which split holds a task."""
        for name in SPLITS:
            if any(t.task_id == task_id for t in getattr(self, name)):
                return name
        return None

    def to_dict(self) -> dict[str, list[str]]:
        """Return the task ids by split, for the journal."""
        return {name: [t.task_id for t in getattr(self, name)] for name in SPLITS}


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two tasks of different splits that are too alike."""

    first: str
    first_split: SplitName
    second: str
    second_split: SplitName
    kind: Literal["exact", "near", "template"]
    similarity: float
    """Share of common three-word runs, 0 to 1; runs that many tasks share count for nothing."""


def split_tasks(
    tasks: Sequence[Task],
    *,
    practice: int | None = None,
    gate: int | None = None,
    test: int | None = None,
    seed: int = 0,
    stratify: str = "",
) -> Splits:
    """Return the three splits.

    Args:
        tasks: ids must be unique.
        practice, gate, test: sizes; those that are None share equally what is left. Tasks that
            name their split count towards its size.
        seed: another seed, another order.
        stratify: metadata key whose values are spread evenly over the splits.

    Raises:
        ConfigError: no tasks, duplicate ids, unknown split name, more asked than there are.

    >>> tasks = [Task(f"t{i}", "x") for i in range(9)]
    >>> split_tasks(tasks) == split_tasks(list(reversed(tasks)))
    True
    """
    _check_ids(tasks)
    fixed: dict[SplitName, list[Task]] = {name: [] for name in SPLITS}
    free: list[Task] = []
    for task in sorted(tasks, key=lambda t: digest([seed, t.task_id])):
        name = task.metadata.get("split")
        if name is None:
            free.append(task)
        elif name in SPLITS:
            fixed[name].append(task)
        else:
            raise ConfigError(
                f"task {task.task_id!r}: metadata split is {name!r}; allowed: {', '.join(SPLITS)}"
            )
    asked: Mapping[SplitName, int | None] = {"practice": practice, "gate": gate, "test": test}
    need = _sizes(asked, {name: len(rows) for name, rows in fixed.items()}, len(free))
    for name, rows in _dealt(free, need, stratify).items():
        fixed[name].extend(rows)
    return Splits(tuple(fixed["practice"]), tuple(fixed["gate"]), tuple(fixed["test"]))


def _check_ids(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise ConfigError("there are no tasks: give at least one of each split")
    twice = [key for key, n in Counter(t.task_id for t in tasks).items() if n > 1]
    if twice:
        raise ConfigError(
            f"{len(twice)} task ids occur more than once, first {twice[0]!r}: "
            "a task's id is its only identity, give each its own"
        )


def _sizes(
    asked: Mapping[SplitName, int | None], have: Mapping[SplitName, int], free: int
) -> dict[SplitName, int]:
    """Return how many free tasks each split takes."""
    need: dict[SplitName, int] = {}
    for name, size in asked.items():
        if size is not None:
            need[name] = max(0, size - have[name])
    left = free - sum(need.values())
    if left < 0:
        raise ConfigError(
            f"the splits ask for {sum(need.values())} tasks and {free} are free: ask for fewer or "
            "give more tasks"
        )
    open_names = [name for name in SPLITS if name not in need]
    total = left + sum(have[name] for name in open_names)
    for i, name in enumerate(open_names):
        goal = total // len(open_names) + (i < total % len(open_names))
        need[name] = min(left, max(0, goal - have[name]))
        left -= need[name]
    if open_names and left:
        need[open_names[0]] += left
    return need


def _dealt(
    free: Sequence[Task], need: Mapping[SplitName, int], stratify: str
) -> dict[SplitName, list[Task]]:
    """Deal tasks so that each stratum is spread in proportion to the splits' sizes."""
    out: dict[SplitName, list[Task]] = {name: [] for name in SPLITS}
    strata: dict[str, list[Task]] = {}
    for task in free:
        key = str(task.metadata.get(stratify, "")) if stratify else ""
        strata.setdefault(key, []).append(task)
    total = sum(need.values())
    in_order = [task for key in sorted(strata) for task in strata[key]]
    if not stratify:
        start = 0
        for name in SPLITS:
            out[name] = in_order[start : start + need[name]]
            start += need[name]
        return out
    for i, task in enumerate(in_order[:total], 1):
        open_names = [name for name in SPLITS if len(out[name]) < need[name]]
        behind = max(open_names, key=lambda n: need[n] * i / total - len(out[n]))
        out[behind].append(task)
    return out


def overlaps(splits: Splits, *, near: float = _NEAR) -> list[Overlap]:
    """Return pairs of tasks of different splits that are equal, nearly equal, or one form.

    Two tasks are of one form when their texts agree once numbers, quoted passages and words with
    digits are masked. Sorted by kind (exact first), then ids.
    """
    rows = [(name, task) for name in SPLITS for task in getattr(splits, name)]
    grams = _telling([shingles(task.text, 3) for _, task in rows])
    exact = [normal(task.text) for _, task in rows]
    forms = [template(task.text) for _, task in rows]
    home = [name for name, _ in rows]
    same = _linked(exact, home) | _linked(forms, home)
    found: list[Overlap] = []
    for i, j in sorted(same | _sharing(grams, home)):
        union = len(grams[i] | grams[j])
        similarity = len(grams[i] & grams[j]) / union if union else 0.0
        kind: Literal["exact", "near", "template"]
        if exact[i] == exact[j]:
            kind, similarity = "exact", 1.0
        elif similarity >= near:
            kind = "near"
        elif forms[i] and forms[i] == forms[j]:
            kind = "template"
        else:
            continue
        first, second = rows[i], rows[j]
        found.append(
            Overlap(first[1].task_id, first[0], second[1].task_id, second[0], kind, similarity)
        )
    rank = {"exact": 0, "near": 1, "template": 2}
    return sorted(found, key=lambda o: (rank[o.kind], o.first, o.second))


def _telling(grams: Sequence[set[tuple[str, ...]]]) -> list[set[tuple[str, ...]]]:
    """Drop the runs that many tasks share: an instruction around the data tells nothing."""
    counts = Counter(gram for mine in grams for gram in mine)
    common = {gram for gram, n in counts.items() if n > max(_COMMON_TASKS, len(grams) // 5)}
    return [mine - common for mine in grams]


def _linked(keys: Sequence[str], home: Sequence[str]) -> set[tuple[int, int]]:
    """Pair each task with the first task of every other split that has the same key."""
    first: dict[tuple[str, str], int] = {}
    for i, key in enumerate(keys):
        first.setdefault((key, home[i]), i)
    pairs: set[tuple[int, int]] = set()
    for i, key in enumerate(keys):
        for name in SPLITS:
            j = first.get((key, name))
            if key and j is not None and name != home[i]:
                pairs.add((min(i, j), max(i, j)))
    return pairs


def _sharing(grams: Sequence[set[tuple[str, ...]]], home: Sequence[str]) -> set[tuple[int, int]]:
    """Pairs across splits that share at least half of the longer one's telling runs."""
    where: dict[tuple[str, ...], list[int]] = {}
    for i, mine in enumerate(grams):
        for gram in mine:
            where.setdefault(gram, []).append(i)
    shared: Counter[tuple[int, int]] = Counter()
    for members in where.values():
        for a, i in enumerate(members):
            shared.update((i, j) for j in members[a + 1 :] if home[i] != home[j])
    return {(i, j) for (i, j), n in shared.items() if 2 * n >= max(len(grams[i]), len(grams[j]))}


def _masked_number(run: re.Match[str]) -> str:
    return " numbertext " if re.search(r"\d", run[0]) else run[0]


def template(text: str) -> str:
    """Return the form of a task text: numbers, quotations and codes masked; short ones give none.

    >>> template("Order A-12 cost 5, is it paid?") == template("Order B-7 cost 90, is it paid?")
    True
    """
    masked = re.sub(r"\"[^\"]*\"|“[^“”]*”|`[^`]*`", " quotedtext ", text)
    masked = re.sub(r"\w[\w\-/.:,]*", _masked_number, masked)
    masked = re.sub(r"(?: numbertext [\s\-/.:,]*)+", " numbertext ", masked)
    found = words(masked)
    kept = [w for w in found if w not in ("numbertext", "quotedtext")]
    if len(kept) < _TEMPLATE_WORDS or len(kept) == len(found):
        return ""
    return " ".join(found)
