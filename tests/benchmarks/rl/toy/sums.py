"""Sums of long numbers, worked out a digit a line: tasks that no hint method was made for.

"Add 482 and 97." is answered from the right, "9 0", "7 1", "5 0" (digit and carry), and ends with
"So 579."; a reply is right when its end is. The model that every arm starts from was taught short
sums mostly, and to go on from the first lines of a solution; long ones, on which it is trained, it
has seen too seldom to do them well. Does not know training.
Source: scratchpads (Nye et al., 2021); the tasks are own.
"""

from __future__ import annotations

import random
import re
from typing import Any

from tests.benchmarks.rl.toy.warm_start import Example, ModelSize, asked, said, start_model
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rollout import Rollout, Score, Task

TAUGHT = {1: 0.25, 2: 0.3, 3: 0.3, 4: 0.1, 5: 0.05}
"""Share of the sums of so many digits among those that are taught."""


def question(draw: random.Random, length: tuple[int, int]) -> str:
    """Draw a sum of two numbers, the longer one of so many digits."""
    n = draw.randint(*length)
    numbers = [draw.randint(10 ** (n - 1), 10**n - 1), draw.randint(1, 10**n - 1)]
    draw.shuffle(numbers)
    return f"Add {numbers[0]} and {numbers[1]}."


def numbers_of(text: str) -> tuple[int, int]:
    """Return the two numbers of the last question in a text."""
    first, second = re.findall(r"Add (\d+) and (\d+)\.", text)[-1]
    return int(first), int(second)


def solution(text: str) -> list[str]:
    """Return the lines of a worked solution; the last one tells the sum."""
    first, second = numbers_of(text)
    lines, carry = [], 0
    for place in range(max(len(str(first)), len(str(second)))):
        digit = first // 10**place % 10 + second // 10**place % 10 + carry
        carry = digit // 10
        lines.append(f"{digit % 10} {carry}")
    return [*lines, f"So {first + second}."]


def examples(draw: random.Random, n: int) -> list[Example]:
    """Draw n solved sums; in a third of them the first lines stand in a hint."""
    lengths = draw.choices(list(TAUGHT), list(TAUGHT.values()), k=n)
    return [_example(draw, length) for length in lengths]


def _example(draw: random.Random, length: int) -> Example:
    text = question(draw, (length, length))
    lines = solution(text)
    shown = draw.randint(1, len(lines)) if draw.random() < 1 / 3 else 0
    hint = "\n".join(lines[:shown])
    prompt = asked(text, "hint", hint) if shown else asked(text)
    return [*prompt, said("\n".join(lines))]


def start(size: ModelSize, device: str) -> tuple[LoadedModel, dict[str, float]]:
    """Return the taught model, and its last losses."""
    return start_model(size, device, examples)


def tasks(n: int, seed: int, length: tuple[int, int], turns: bool = False) -> list[Task]:
    """Draw n different tasks with worked solution and steps."""
    draw = random.Random(f"sums {seed} {length}")
    texts: dict[str, None] = {}
    while len(texts) < n:
        texts[question(draw, length)] = None
    return [_task(f"{seed}-{i}", text) for i, text in enumerate(texts)]


def _task(task_id: str, text: str) -> Task:
    lines = solution(text)
    steps = [*(f"{line}\n" for line in lines[:-1]), lines[-1]]
    metadata: dict[str, Any] = {"solution": "\n".join(lines), "steps": steps}
    return Task(task_id, text, reference=str(sum(numbers_of(text))), metadata=metadata)


class Right:
    """Reward 1 where the reply ends with the sum."""

    verifier_id = "right-sum"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Compare the reply's last line."""
        last = rollout.answer.rsplit("\n", 1)[-1]
        return Score(float(last == solution(task.text)[-1]))
