"""Groups and critics for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfgrpo.lm.scripted import Reply, ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.rollout import Message, Outcome, Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.runtime.call_scope import current_scope

PLAIN = "When quantities carry different units, convert them before adding."


def rollout(
    group_id: str,
    task_id: str,
    index: int,
    reward: float | None,
    answer: str = "",
    *,
    observations: Sequence[str] = (),
    outcome: Outcome = "provider_failed",
    feedback: str = "",
) -> Rollout:
    """One attempt; a tool-using one where it has observations; ungraded where reward is None."""
    final = Step(Message("assistant", answer or f"my answer number {index}"))
    tools = tuple(
        Step(Message("assistant", f"I look at page {i}"), (Message("tool", text),))
        for i, text in enumerate(observations)
    )
    return Rollout(
        f"{group_id}r{index}",
        task_id,
        (*tools, final) if reward is not None else (),
        "graded" if reward is not None else outcome,
        None if reward is None else Score(reward, feedback),
        sample_index=index,
    )


def group(
    number: int | str,
    rewards: Sequence[float | None],
    prompt: str = "",
    *,
    reference: Any = None,
    answers: Sequence[str] = (),
    observations: Sequence[str] = (),
    outcome: Outcome = "provider_failed",
) -> RolloutGroup:
    """A group of one rollout a reward; None is a rollout without one."""
    task = Task(f"t{number}", prompt or f"Puzzle {number}: how long is the rope?", reference)
    rollouts = tuple(
        rollout(
            f"g{number}",
            task.task_id,
            i,
            reward,
            answers[i] if i < len(answers) else "",
            observations=observations,
            outcome=outcome,
        )
        for i, reward in enumerate(rewards)
    )
    return RolloutGroup(f"g{number}", task, rollouts)


class StagedLM(ScriptedLM):
    """A critic whose replies are given by stage; a list is used up in order, then its last stays.

    `stages` holds the stage of every request, in order of arrival.
    """

    def __init__(self, **replies: Reply | list[Reply] | Callable[[Request], Reply]) -> None:
        super().__init__(self._staged, model_id="scripted:critic")
        self._replies = replies
        self._used: dict[str, int] = {}
        self.stages: list[str] = []

    def _staged(self, request: Request, seed: int | None) -> Reply:
        stage = current_scope().stage
        self.stages.append(stage)
        reply = self._replies.get(stage, "[]")
        if isinstance(reply, list):
            at = min(self._used.get(stage, 0), len(reply) - 1)
            self._used[stage] = self._used.get(stage, 0) + 1
            return reply[at]
        if callable(reply) and not isinstance(reply, Exception):
            return reply(request)
        return reply

    def prompts(self, stage: str) -> list[str]:
        """The last user text of each request of a stage."""
        return [
            request.messages[-1].content
            for request, name in zip(self.requests, self.stages, strict=True)
            if name == stage
        ]
