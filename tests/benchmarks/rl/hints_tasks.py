"""Arithmetic tasks with worked solutions, and the part of them that a model cannot do yet.

A task is hard when neither a greedy reply nor any of many draws at temperature 1 is right. Does
not know training. Idea: hard sets by pass rate (POPE, QuestA); the tasks are own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from tfgrpo.prompts import render
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

Make = Callable[[random.Random], tuple[str, int, tuple[str, ...]]]
"""Draws a question, its answer and a worked solution in sentences, the last of which tells it."""
Sample = Callable[[Sequence[Task], int, float, int, int], list[RolloutGroup]]
"""(tasks, draws, temperature, seed, hint level) to groups."""
ONLY = "Give only the number."


def _warm(draw: random.Random) -> tuple[str, int, tuple[str, ...]]:
    """What every arm can do at its start: sums and differences, asked plainly or, in a third of the
    tasks, by the hint to a question that cannot be answered without it."""
    a, b = draw.randint(10, 99) + 100 * (draw.random() < 0.3), draw.randint(10, 99)
    sign = draw.choice("+-")
    if sign == "-":
        a, b = max(a, b) + 10, min(a, b)
    answer = a + b if sign == "+" else a - b
    text = f"What is {a} {sign} {b}? {ONLY}"
    if draw.random() < 1 / 3:
        who, what = draw.choice(("Lou", "Kim", "Pat")), draw.choice(("marbles", "pages", "keys"))
        x, y = draw.randint(10, 99), draw.randint(10, 99)
        first = draw.choice(
            ("", f"{who} counts well. ", f"First see {x} and {y}. {x} + {y} = {x + y}. ")
        )
        text = f"How many {what} has {who}? {ONLY}\n\n" + render("hint", text=first + text)
    return text, answer, (f"It is {answer}.",)


def _other_notation(draw: random.Random) -> tuple[str, int, tuple[str, ...]]:
    """A rule that the model cannot know, and takes for another one that it does know."""
    b = draw.randint(10, 79)
    a = draw.randint(b + 10, 99)
    return (
        f"In Zed's notation, what is {a} + {b}? {ONLY}",
        a - b,
        (
            "In Zed's notation, + means minus.",
            f"So {a} + {b} means {a} - {b}.",
            f"What is {a} - {b}? {ONLY}",
            f"It is {a - b}.",
        ),
    )


def _sum_of_three(draw: random.Random) -> tuple[str, int, tuple[str, ...]]:
    a, b, c = (draw.randint(11, 99) for _ in range(3))
    return (
        f"What is {a} + {b} + {c}? {ONLY}",
        a + b + c,
        (
            f"First add {a} and {b}.",
            f"{a} + {b} = {a + b}.",
            f"What is {a + b} + {c}? {ONLY}",
            f"It is {a + b + c}.",
        ),
    )


def _word_problem(draw: random.Random) -> tuple[str, int, tuple[str, ...]]:
    name = draw.choice(("Tom", "Ana", "Ben", "Mia", "Sam", "Eva"))
    thing = draw.choice(("apples", "books", "stones", "coins", "cards", "shells"))
    a, b = draw.randint(21, 99), draw.randint(21, 99)
    c = draw.randint(11, min(99, a + b - 11))
    return (
        f"{name} has {a} {thing}. {name} finds {b} more and then gives {c} away. "
        f"How many {thing} does {name} have now? {ONLY}",
        a + b - c,
        (
            f"First add {a} and {b}.",
            f"{a} + {b} = {a + b}.",
            f"What is {a + b} - {c}? {ONLY}",
            f"It is {a + b - c}.",
        ),
    )


def _sum_of_four(draw: random.Random) -> tuple[str, int, tuple[str, ...]]:
    a, b, c, d = (draw.randint(11, 60) for _ in range(4))
    return (
        f"What is {a} + {b} + {c} + {d}? {ONLY}",
        a + b + c + d,
        (
            f"First add {a}, {b} and {c}.",
            f"{a} + {b} + {c} = {a + b + c}.",
            f"What is {a + b + c} + {d}? {ONLY}",
            f"It is {a + b + c + d}.",
        ),
    )


WARM = "warm"
FAMILIES: dict[str, Make] = {
    "other_notation": _other_notation,
    "sum_of_three": _sum_of_three,
    "word_problem": _word_problem,
    "sum_of_four": _sum_of_four,
}


def pool(family: str, n: int, seed: int, prefix: str) -> list[Task]:
    """Draw n different tasks of a family; the same arguments give the same tasks.

    Hints are the solution's first one, two and three sentences.
    """
    draw = random.Random(f"{family} {seed}")
    make = _warm if family == WARM else FAMILIES[family]
    seen: dict[str, Task] = {}
    while len(seen) < n:
        text, answer, sentences = make(draw)
        hints = [" ".join(sentences[:k]) for k in range(1, len(sentences))]
        metadata = {
            "solution": " ".join(sentences),
            "hints": hints,
            "hints_source": "reference",
            "oracle_prefixes": hints,
        }
        seen.setdefault(text, Task(f"{prefix}-{len(seen)}", text, answer, metadata=metadata))
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
