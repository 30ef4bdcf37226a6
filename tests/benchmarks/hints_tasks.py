"""Arithmetic tasks with worked solutions, and the part of them that a model cannot do yet.

A task is hard when neither a greedy reply nor any of many draws at temperature 1 is right. Does
not know training. Idea: hard sets by pass rate (POPE, QuestA); the tasks are own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

Make = Callable[[random.Random], tuple[str, int, str]]
"""Draws a question, its answer and a worked solution."""
Sample = Callable[[Sequence[Task], int, float, int, int], list[RolloutGroup]]
"""(tasks, draws, temperature, seed, hint level) to groups."""


def _sum_of_three_digits(draw: random.Random) -> tuple[str, int, str]:
    a, b = draw.randint(100, 899), draw.randint(100, 899)
    hundreds, tens, ones = ((a // k % 10, b // k % 10) for k in (100, 10, 1))
    parts = [100 * sum(hundreds), 10 * sum(tens), sum(ones)]
    steps = (
        f"{100 * hundreds[0]} + {100 * hundreds[1]} = {parts[0]}, "
        f"{10 * tens[0]} + {10 * tens[1]} = {parts[1]}, "
        f"{ones[0]} + {ones[1]} = {parts[2]}, "
        f"{parts[0]} + {parts[1]} = {parts[0] + parts[1]}, "
        f"{parts[0] + parts[1]} + {parts[2]} = {a + b}"
    )
    return f"What is {a} + {b}? Give only the number.", a + b, steps


def _sum_of_three(draw: random.Random) -> tuple[str, int, str]:
    a, b, c = (draw.randint(11, 99) for _ in range(3))
    steps = f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}"
    return f"What is {a} + {b} + {c}? Give only the number.", a + b + c, steps


def _word_problem(draw: random.Random) -> tuple[str, int, str]:
    name = draw.choice(("Tom", "Ana", "Ben", "Mia", "Sam", "Eva"))
    thing = draw.choice(("apples", "books", "stones", "coins", "cards", "shells"))
    a, b = draw.randint(21, 99), draw.randint(21, 99)
    c = draw.randint(11, a + b - 11)
    text = (
        f"{name} has {a} {thing}. {name} finds {b} more and then gives {c} away. "
        f"How many {thing} does {name} have now? Give only the number."
    )
    return text, a + b - c, f"{a} + {b} = {a + b}, {a + b} - {c} = {a + b - c}"


def _product(draw: random.Random) -> tuple[str, int, str]:
    a, b = draw.randint(12, 99), draw.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    steps = (
        f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, {tens * b} + {ones * b} = {a * b}"
    )
    return f"What is {a} * {b}? Give only the number.", a * b, steps


def _sum_of_two(draw: random.Random) -> tuple[str, int, str]:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return f"What is {a} + {b}? Give only the number.", a + b, f"{a} + {b} = {a + b}"


def _sum_of_four(draw: random.Random) -> tuple[str, int, str]:
    a, b, c, d = (draw.randint(11, 99) for _ in range(4))
    steps = f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}, {a + b + c} + {d} = {a + b + c + d}"
    return f"What is {a} + {b} + {c} + {d}? Give only the number.", a + b + c + d, steps


FAMILIES: dict[str, Make] = {
    "sum_of_three": _sum_of_three,
    "word_problem": _word_problem,
    "product": _product,
    "sum_of_three_digits": _sum_of_three_digits,
    "sum_of_four": _sum_of_four,
    "sum_of_two": _sum_of_two,
}


def pool(family: str, n: int, seed: int, prefix: str) -> list[Task]:
    """Draw n different tasks of a family; the same arguments give the same tasks."""
    draw = random.Random(f"{family} {seed}")
    seen: dict[str, Task] = {}
    while len(seen) < n:
        text, answer, solution = FAMILIES[family](draw)
        seen.setdefault(
            text, Task(f"{prefix}-{len(seen)}", text, answer, metadata={"solution": solution})
        )
    return list(seen.values())


class LastNumber:
    """1 when the last number of the reply is the answer."""

    verifier_id = "last-number"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task has an integer answer."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare the last number of the reply."""
        found = re.findall(r"-?\d+", rollout.answer.replace(",", ""))
        return Score(float(bool(found) and int(found[-1]) == task.reference))


def pass_at(groups: Sequence[RolloutGroup]) -> float:
    """Share of groups with a success."""
    return sum(any(r > 0 for r in g.rewards_G) for g in groups) / max(1, len(groups))


def hard_ones(tasks: Sequence[Task], sample: Sample, seed: int, draws: int) -> list[Task]:
    """Keep the tasks that fail greedily and in all draws at temperature 1."""
    greedy = sample(tasks, 1, 0.0, seed, 0)
    drawn = sample(tasks, draws, 1.0, seed, 0)
    return [
        t
        for t, *groups in zip(tasks, greedy, drawn, strict=True)
        if not any(r > 0 for g in groups for r in g.rewards_G)
    ]
