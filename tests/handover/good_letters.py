"""A verifier of kind `function` that a handed-over folder can name."""

from __future__ import annotations

from tfgrpo.rollout import Rollout, Score, Task


def score(rollout: Rollout, task: Task) -> Score:
    """1 for the reference, a half for its first letter, else 0."""
    right = str(task.reference)
    answer = rollout.answer.strip()
    return Score(1.0 if answer == right else 0.5 * (answer[:1] == right[:1]))
