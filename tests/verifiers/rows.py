"""Tasks and rollouts for the verifiers' tests."""

from __future__ import annotations

from typing import Any

from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Step, Task


def said(text: str) -> Rollout:
    """Return a finished attempt with this answer."""
    return Rollout("r1", "t1", (Step(Message("assistant", text)),))


def task(reference: Any, prompt: str = "What?") -> Task:
    """Return a task with this reference."""
    return Task("t1", prompt, reference=reference)
