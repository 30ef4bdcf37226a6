"""Judges replies of traffic by the route's verifier, on the scale of its feedback.

Does not know where replies come from or what is made of the values. Source: own.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import TfgrpoError, VerifierError, boundary
from tfgrpo.messages import Message
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.runtime.redaction import redact
from tfgrpo.serve import tables
from tfgrpo.serve.settings import FeedbackSettings, LearnSettings
from tfgrpo.store.rows import Statement
from tfgrpo.verifiers import make_verifier

log = logging.getLogger(__name__)

__all__ = ["Judged", "RouteVerifier"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A value that a verifier gave one draw of a response."""

    response_id: str
    choice: int
    value: float
    source: str

    def row(self, metric: str, key: str, at: float) -> Statement:
        """Return its row of feedback."""
        return (
            tables.FEEDBACK,
            ("fb_" + secrets.token_hex(12), at, at, "response", self.response_id, self.choice,
             metric, "reward", json.dumps(self.value), self.source, "", key, ""),
        )  # fmt: skip


class RouteVerifier:
    """The verifier of a route's `learn` section, made when it is first asked."""

    def __init__(self) -> None:
        self._made: tuple[Mapping[str, Any], Verifier] | None = None

    async def value(
        self, task: Task, message: Mapping[str, Any], settings: LearnSettings
    ) -> float | None:
        """Return what a reply is worth, in the range of the route's feedback; None where the
        verifier cannot say it, and for a reply that calls a tool."""
        if message.get("tool_calls"):
            return None
        verifier = self._verifier(settings)
        step = Step(Message("assistant", str(message.get("content") or "")))
        rollout = Rollout("reply", task.task_id, (step,))
        try:
            with boundary(VerifierError, "the route's verifier"):
                verifier.check_task(task)
                reward = (await verifier.score(rollout, task)).reward
        except TfgrpoError as error:
            log.info("a reply could not be judged: %s", redact(str(error)))
            return None
        return _scaled(reward, verifier.reward_range, settings.feedback)

    def _verifier(self, settings: LearnSettings) -> Verifier:
        assert settings.verifier is not None
        if self._made is None or self._made[0] != settings.verifier:
            self._made = (settings.verifier, make_verifier(settings.verifier))
        return self._made[1]


def _scaled(reward: float, scale: tuple[float, float], feedback: FeedbackSettings) -> float:
    low, high = scale
    if not math.isfinite(high - low):  # a function that does not say it: from 0 to 1
        low, high = 0.0, 1.0
    share = min(1.0, max(0.0, (reward - low) / (high - low)))
    return feedback.low + share * (feedback.high - feedback.low)
