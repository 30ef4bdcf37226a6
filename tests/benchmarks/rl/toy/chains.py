"""Chains of sums modulo five whose letters mean operations that a model does not know for sure.

"Start 4, p 3, q 4." is worked out a line a letter and ends with "So three."; a reply is right when
every line is. A letter means one of three operations; the model that every arm starts from draws
the right one with a chance that differs between letters (`PRIOR`), so a chain of rare ones hardly
ever succeeds and an early step decides about the rest. Replies may begin with dots that mean
nothing and whose number has a long tail. Does not know training. Source: own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Score, Task

WORDS = ("zero", "one", "two", "three", "four")
BASE = len(WORDS)
MEANINGS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: (a + b) % BASE,
    "subtract": lambda a, b: (a - b) % BASE,
    "double": lambda a, b: (a + 2 * b) % BASE,
}
RIGHT = {"p": "add", "q": "subtract", "r": "double", "s": "subtract", "t": "double", "u": "add"}
PRIOR = {"p": 0.75, "q": 0.6, "r": 0.45, "s": 0.3, "t": 0.2, "u": 0.12}
"""Chance of the right meaning at the start."""
EASY, ALL, HARD = "pqrs", "pqrstu", "rstu"
_CHAIN = re.compile(r"Start (\d)((?:, [p-u] \d)+)\.")
STEP_BY_STEP = "Step by step. "


def chain(text: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the start and the links of the last question in a text."""
    found = _CHAIN.findall(text)[-1]
    links = [(part[0], int(part[2])) for part in found[1].split(", ")[1:]]
    return int(found[0]), links


def lines_of(start: int, links: Sequence[tuple[str, int]], meanings: Sequence[str]) -> list[int]:
    """Return the value after each link."""
    values = [start]
    for (_, number), meaning in zip(links, meanings, strict=True):
        values.append(MEANINGS[meaning](values[-1], number))
    return values[1:]


def right_lines(text: str) -> list[int]:
    """Return the values of a right reply."""
    start, links = chain(text)
    return lines_of(start, links, [RIGHT[letter] for letter, _ in links])


def written(lines: Sequence[int]) -> str:
    """Return lines as a reply."""
    return "".join(f"{x}\n" for x in lines) + f"So {WORDS[lines[-1]]}."


def question(draw: random.Random, letters: str, length: tuple[int, int]) -> str:
    """Draw a question of so many links."""
    n = draw.randint(*length)
    links = "".join(f", {draw.choice(letters)} {draw.randint(1, BASE - 1)}" for _ in range(n))
    return f"Start {draw.randint(0, BASE - 1)}{links}."


def tasks(
    n: int, seed: int, length: tuple[int, int], turns: bool = False, letters: str = HARD
) -> list[Task]:
    """Draw n different tasks with worked solution, steps, hints and strategies."""
    draw = random.Random(f"tasks {seed} {letters} {length}")
    texts: dict[str, None] = {}
    while len(texts) < n:
        texts[question(draw, letters, length)] = None
    return [_task(f"{seed}-{i}", STEP_BY_STEP * turns + text) for i, text in enumerate(texts)]


def _task(task_id: str, text: str) -> Task:
    lines = right_lines(text)
    links = chain(text)[1]
    return Task(
        task_id,
        text,
        reference=WORDS[lines[-1]],
        metadata={
            "solution": written(lines),
            "steps": [*(f"{x}\n" for x in lines), f"So {WORDS[lines[-1]]}."],
            "strategies": [f"Lean to {m}." for m in MEANINGS],
            "hops": len(links) - 2,
            "target": len(links) + 2,
        },
    )


def share_right(text: str, said: str) -> float:
    """Return the share of a reply's lines, its end included, that are right before a wrong one."""
    wanted = written(right_lines(text)).split("\n")
    good = 0
    for want, got in zip(wanted, said.lstrip(".").split("\n"), strict=False):
        if want != got:
            break
        good += 1
    return good / len(wanted)


class Right:
    """Reward 1 where every line is right, with the share of right lines and the form as parts."""

    verifier_id = "right-chain"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Score a reply of one turn, or what an environment counted."""
        room = rollout.metadata.get("right_steps")
        if room is not None:
            share = room / len(chain(task.text)[1])
            is_formed = share > 0
        else:
            said = rollout.answer
            share = share_right(task.text, said)
            is_formed = bool(re.fullmatch(r"\.*(\d\n)+So \w+\.", said))
        parts = {"content": share, "structure": float(is_formed)}
        return Score(float(share == 1.0), parts=parts)


class Room:
    """An environment: a turn a link. It says nothing of what is right."""

    def __init__(self, task: Task) -> None:
        self.wanted = [str(x) for x in right_lines(task.text)]
        self.said: list[str] = []
        self.is_right: list[bool] = []
        self.keys = ["start"]

    async def act(self, action: Message) -> list[Message] | None:
        """Take a line; None after the last."""
        said = action.content.strip().lstrip(".")
        place = len(self.said)
        before = not self.is_right or self.is_right[-1]
        self.said.append(said)
        self.is_right.append(before and place < len(self.wanted) and said == self.wanted[place])
        if len(self.said) >= len(self.wanted):
            return None
        self.keys.append(f"{len(self.said)} {said[:2]}")
        return [Message("user", "Next.")]

    def facts(self) -> dict[str, Any]:
        """How far the lines are right, and states by turn and value."""
        n = len(self.said)
        return {
            "right_steps": sum(self.is_right),
            "tool_calls": n,
            "invalid_actions": sum(len(s) != 1 for s in self.said),
            "state_keys": self.keys,
            "step_rewards": [*(x / len(self.wanted) for x in self.is_right), 0.0],
        }
