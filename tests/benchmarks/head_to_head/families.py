"""The families of tasks of the head-to-head: texts, rewards, and how a reply is read.

A family says what the actor is told, how learning and the table judge a reply, and which text of a
reply counts as its answer where votes are counted. Does not know methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Task
from tfgrpo.tasks.files import read_tasks
from tfgrpo.verifiers import Exact, Numeric
from tfgrpo.verifiers.numeric import numbers_in

MESSAGES_FILE = Path(__file__).parents[3] / "examples" / "customer_messages" / "tasks.jsonl"
CONTAINS_REWARD = 0.3


@dataclass(frozen=True, slots=True)
class Family:
    """Tasks of one sort and what is said about them."""

    name: str
    system: str
    """The actor's instructions."""
    description: str
    """What methods that take a description are told."""
    objective: str
    """What lessons shall be about."""
    tasks: Callable[[], list[Task]]
    verifier: Mapping[str, Any]
    """Section `verifier` of a config: the reward of learning."""
    learning_verifier: Callable[[], Verifier]
    """The same reward as an object."""
    test_verifier: Callable[[], Verifier]
    """1 for a right answer alone: what the table reports."""
    vote: Callable[[str], str]
    """What of a reply is counted as its vote."""


def _word(reply: str) -> str:
    return " ".join(reply.split()).casefold()


def _number(reply: str) -> str:
    found = numbers_in(reply)
    return str(found[-1]) if found else ""


def messages() -> list[Task]:
    """Return the messages of customers that the repository's example ships."""
    return read_tasks(MESSAGES_FILE)


def sums() -> list[Task]:
    """Return small sums, bare and told as a story, two of each for a pair of numbers.

    The bare model gets some of them right and some wrong, so that methods can differ.
    """
    found = []
    for a in range(2, 10):
        for b in range(2, 10):
            story = f"Ann has {a} apples and buys {b} more. How many apples does Ann have now?"
            for kind, text in (("sum", f"What is {a} + {b}?"), ("story", story)):
                task_id = f"{kind}-{a}-{b}"
                found.append(Task(task_id, text, reference=str(a + b), metadata={"kind": kind}))
    return found


FAMILIES: Mapping[str, Family] = {
    f.name: f
    for f in (
        Family(
            "messages",
            "You answer questions about messages of customers. Reply with the answer alone.",
            "Messages of customers, each followed by a question: the order number in the message, "
            "a date in the form YYYY-MM-DD, or one category of billing, delivery, returns and "
            "account.",
            "short rules for finding and writing the value",
            messages,
            {"kind": "exact", "ignore_case": True, "contains_reward": CONTAINS_REWARD},
            lambda: Exact(ignore_case=True, contains_reward=CONTAINS_REWARD),
            lambda: Exact(ignore_case=True),
            _word,
        ),
        Family(
            "sums",
            "You answer questions about numbers. Reply with the number alone.",
            "Small sums of two numbers, as a formula or as a story about apples.",
            "short rules for adding two numbers and writing the result",
            sums,
            {"kind": "numeric"},
            Numeric,
            Numeric,
            _number,
        ),
    )
}
