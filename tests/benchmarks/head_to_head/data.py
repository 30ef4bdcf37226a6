"""The split of the head-to-head's tasks, and the one reward that every method sees.

Test tasks are the same for all seeds and methods; what is left is split by the seed into tasks to
learn from and tasks to choose by. Does not know methods.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.benchmarks.head_to_head.families import Family
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Score, Step, Task


@dataclass(frozen=True, slots=True)
class Split:
    """Tasks of one learning seed."""

    train: list[Task]
    choose: list[Task]
    test: list[Task]


def split(family: Family, seed: int, *, n_test: int, n_learn: int) -> Split:
    """Return the split of one seed; kinds are spread evenly."""
    fixed = _shuffled_by_kind(family.tasks(), random.Random(0))
    rest = _shuffled_by_kind(fixed[n_test:], random.Random(1000 + seed))
    return Split(rest[:n_learn], rest[n_learn : 2 * n_learn], fixed[:n_test])


def _shuffled_by_kind(tasks: list[Task], rng: random.Random) -> list[Task]:
    """Kinds in turn, each in random order."""
    by_kind: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda t: t.task_id):
        by_kind.setdefault(str(task.metadata.get("kind")), []).append(task)
    for rows in by_kind.values():
        rng.shuffle(rows)
    longest = max(map(len, by_kind.values()), default=0)
    return [rows[i] for i in range(longest) for rows in by_kind.values() if i < len(rows)]


async def grade(family: Family, task: Task, reply: str) -> Score:
    """Return the learning reward of a peer's reply, with words for its reflection."""
    rollout = Rollout("peer", task.task_id, (Step(Message("assistant", reply)),))
    score = await family.learning_verifier().score(rollout, task)
    words = "Right." if score.reward == 1.0 else f"The right answer is {task.reference!r}, alone."
    return Score(score.reward, words)
