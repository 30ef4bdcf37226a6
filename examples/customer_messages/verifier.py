"""Judges answers to questions about customer messages.

1 for exactly the value asked for, 0.3 where the reply holds it beside other words, 0 otherwise: the
small model often says the right thing in a sentence, and the part mark lets a group differ.
"""

from __future__ import annotations

import re

from tfgrpo import Rollout, Score, Task

PART_MARK = 0.3


def score(rollout: Rollout, task: Task) -> Score:
    """Return the reward of one reply, with the reason."""
    wanted = str(task.reference)
    answer = rollout.answer.strip().rstrip(".").strip()
    if answer.casefold() == wanted.casefold():
        return Score(1.0, "exactly the value")
    words = re.findall(r"[\w-]+", rollout.answer.casefold())
    kind = task.metadata.get("kind")
    if kind == "category":
        named = {w for w in words if w in ("billing", "delivery", "returns", "account")}
        found = named == {wanted}
    else:
        found = wanted.casefold() in words
    if found:
        return Score(PART_MARK, "the value stands among other words: answer with the value only")
    return Score(0.0, "the value is not in the reply")
