"""The loop that plays a rollout of several turns, token by token.

Token-in/token-out: what the model wrote is kept as the ids it wrote, never as text tokenised
again; a turn's prompt is the sequence so far plus the ids of the tool's answer. Only sampled
tokens bear a loss. Steps keep their numbers, for estimators that give credit by step.

Does not know losses. Idea: one growing sequence a rollout (verifiers, verl's agent loop); the
traps are re-tokenisation and off-by-one masks (trl#5224, verl#6719).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Step, Task, Usage


class TurnEnvironment(Protocol):
    """What answers an action; one object a rollout.

    Contract: `act` returns the observation turns, or None when the rollout has ended; it raises
    nothing for a bad action but says so in the observation. It may also have a method `facts()`,
    asked at the end, whose mapping becomes the rollout's metadata. Estimators read `tool_calls` and
    `invalid_actions` (counts), `state_keys` (a text a step: the state before it) and `step_rewards`
    (a number a step).
    """

    async def act(self, action: Message) -> Sequence[Message] | None:
        """Take the model's turn."""
        ...


TurnTokens = Callable[[Sequence[Message], Sequence[int]], Sequence[int]]
"""(observation turns, the model's last turn) to the ids between that turn and its next one."""

SampleTurn = Callable[
    [Sequence[int], int], Awaitable[tuple[tuple[int, ...], tuple[float, ...], bool]]
]
"""(token ids so far, seed) to (sampled ids, log-probs, was it cut at its limit)."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How long a rollout may become."""

    max_turns: int = 8
    max_tokens: int = 4096
    """Of the whole sequence, prompt included."""


@dataclass(frozen=True, slots=True)
class TurnModel:
    """The model's side of a rollout of several turns."""

    sample: SampleTurn
    """Draws one turn; called with seed + turn number."""
    turn_tokens: TurnTokens
    """Renders observations, the next generation prompt included."""
    text_of: Callable[[Sequence[int]], str]
    """Token ids to the action's text."""
    limits: TurnLimits = TurnLimits()  # frozen, shared on purpose


@dataclass(frozen=True, slots=True)
class Replayed:
    """Turns of an earlier rollout that a new one begins with."""

    steps: tuple[Step, ...] = ()
    recalls: bool = False
    """The answers are those that were given then; else the environment acts again."""


async def play(
    task: Task,
    prompt_ids: Sequence[int],
    environment: TurnEnvironment,
    model: TurnModel,
    *,
    seed: int,
    rollout_id: str,
    replay: Replayed | None = None,
) -> Rollout:
    """Play one rollout to its end and return it ungraded, with token ids at every step.

    Args:
        task: what is played.
        prompt_ids: token ids of the first prompt.
        environment: answers each action; its exceptions pass through.
        model: takes the turns.
        seed: fixes the draws.
        rollout_id: of the result.
        replay: turns that come first, as they were; their tokens are kept.
    """
    past = replay or Replayed()
    sequence = list(prompt_ids)
    steps: list[Step] = []
    is_cut = False
    for turn in range(model.limits.max_turns):
        answer: Sequence[Message] | None
        if turn < len(past.steps):
            again, is_cut = past.steps[turn], False
            ids, logps, action = again.token_ids or (), again.logprobs or (), again.action
            answer = again.observations if past.recalls else await environment.act(action)
        else:
            ids, logps, is_cut = await model.sample(sequence, seed + turn)
            action = Message("assistant", model.text_of(ids))
            answer = None if is_cut else await environment.act(action)
        steps.append(Step(action, tuple(answer or ()), ids, logps, tuple(sequence)))
        sequence.extend(ids)
        if answer is None:
            break
        sequence.extend(model.turn_tokens(answer, ids))
        if len(sequence) >= model.limits.max_tokens:
            is_cut = True
            break
    else:
        is_cut = True
    tokens = sum(len(s.token_ids or ()) for s in steps)
    return Rollout(
        rollout_id,
        task.task_id,
        steps=tuple(steps),
        usage=Usage(uncached_tokens=len(sequence) - tokens, text_tokens=tokens, calls=len(steps)),
        seed=seed,
        is_truncated=is_cut,
        metadata=dict(facts()) if (facts := getattr(environment, "facts", None)) else {},
    )
