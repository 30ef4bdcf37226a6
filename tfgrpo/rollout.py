"""The one idea: a `RolloutGroup` is the rollouts of one task under one context.

Makers: `sampling`, `search`, the trainer's generator, an importer of saved traces.
Eaters: `experience` (contrast and edits), `routing` (k of n per task and model), `search`
(verified plans), `rl` (advantages). All records are frozen: a reward is never overwritten,
an advantage is a new value elsewhere, and nothing is ever grouped by text.

Does not know: how text is generated, what a reward means, where records are kept.
Idea: group-relative rollouts (Training-Free GRPO; GRPO), typed outcomes (own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.messages import Message, ToolCall
from tfgrpo.runtime.canonical import digest, jsonable
from tfgrpo.runtime.thinking import without_thinking

__all__ = [
    "Message",
    "Outcome",
    "OUTCOMES",
    "Rollout",
    "RolloutGroup",
    "Score",
    "Step",
    "Task",
    "ToolCall",
    "Usage",
]

Outcome = Literal[
    "graded",
    "ungraded",
    "policy_failed",
    "verifier_failed",
    "provider_failed",
    "refused",
    "timed_out",
    "truncated",
    "cancelled",
]
"""How a rollout ended. Only `graded` has a reward; `ungraded` is a finished attempt that no
verifier has judged (yet)."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

MOST_TOKENS = 20_000_000
"""Largest count of tokens of one class in one call that is believed; no model's window is near."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be solved."""

    task_id: str
    """Unique in a run; the only identity a task has. Equal texts are still two tasks."""
    prompt: str | tuple[Message, ...]
    """A user message, or whole turns to start from."""
    reference: Any = None
    """The right answer or whatever the verifier needs, as JSON; never shown to a policy."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """JSON values for verifiers, reports and routers; never shown to a policy."""

    def __post_init__(self) -> None:
        if not self.task_id:
            raise ValueError("task_id is empty: give every task an id of its own")

    @property
    def text(self) -> str:
        """The task as one text, for embeddings and overlap checks."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(m.content for m in self.prompt)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The task as turns."""
        if isinstance(self.prompt, str):
            return (Message("user", self.prompt),)
        return self.prompt

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `from_dict` restores an equal task."""
        prompt: Any = (
            self.prompt if isinstance(self.prompt, str) else [m.to_dict() for m in self.prompt]
        )
        row: dict[str, Any] = {"task_id": self.task_id, "prompt": prompt}
        if self.reference is not None:
            row["reference"] = jsonable(self.reference)
        if self.metadata:
            row["metadata"] = jsonable(dict(self.metadata))
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a task from its JSON form."""
        prompt = row["prompt"]
        return cls(
            task_id=str(row["task_id"]),
            prompt=prompt
            if isinstance(prompt, str)
            else tuple(Message.from_dict(m) for m in prompt),
            reference=row.get("reference"),
            metadata=row.get("metadata") or _EMPTY,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What calls cost, in disjoint token classes, so that sums never count a token twice.

    Identity: `prompt_tokens = uncached_tokens + cache_read_tokens + cache_write_tokens` and
    `completion_tokens = text_tokens + reasoning_tokens`.

    >>> (Usage(uncached_tokens=3, calls=1, cost_usd=0.5) + Usage(calls=1, cost_usd=None)).cost_usd
    >>> Usage() + Usage(calls=1, cost_usd=0.25)
    Usage(uncached_tokens=0, cache_read_tokens=0, cache_write_tokens=0, text_tokens=0, \
reasoning_tokens=0, calls=1, cost_usd=0.25, is_estimated=False)
    """

    uncached_tokens: int = 0
    """Input tokens billed at the full input price."""
    cache_read_tokens: int = 0
    """Input tokens read from the provider's prompt cache."""
    cache_write_tokens: int = 0
    """Input tokens written to the provider's prompt cache."""
    text_tokens: int = 0
    """Output tokens of the visible answer and tool calls."""
    reasoning_tokens: int = 0
    """Output tokens of hidden or separate reasoning."""
    calls: int = 0
    """Requests sent, failed ones included."""
    cost_usd: float | None = 0.0
    """Money in US dollars; None is unknown, never 0."""
    is_estimated: bool = False
    """True where any token count is our estimate and not the provider's figure."""

    @property
    def prompt_tokens(self) -> int:
        """All input tokens."""
        return self.uncached_tokens + self.cache_read_tokens + self.cache_write_tokens

    @property
    def completion_tokens(self) -> int:
        """All output tokens."""
        return self.text_tokens + self.reasoning_tokens

    @property
    def total_tokens(self) -> int:
        """Input and output tokens."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        cost = (
            None
            if self.cost_usd is None or other.cost_usd is None
            else self.cost_usd + other.cost_usd
        )
        return Usage(
            self.uncached_tokens + other.uncached_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.text_tokens + other.text_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.calls + other.calls,
            cost,
            self.is_estimated or other.is_estimated,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, zero fields left out."""
        row: dict[str, Any] = {
            name: getattr(self, name) for name in _USAGE_COUNTS if getattr(self, name)
        }
        if self.cost_usd != 0.0:
            row["cost_usd"] = self.cost_usd
        if self.is_estimated:
            row["is_estimated"] = True
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a usage from its JSON form."""
        return cls(**row)


_USAGE_COUNTS = (
    "uncached_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "text_tokens",
    "reasoning_tokens",
    "calls",
)


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says about one rollout."""

    reward: float
    """Any finite number; its range is the verifier's business."""
    feedback: str = ""
    """Why, in words that a learner can use."""
    parts: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    """Named components of the reward."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward!r} is not a finite number")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row: dict[str, Any] = {"reward": self.reward}
        if self.feedback:
            row["feedback"] = self.feedback
        if self.parts:
            row["parts"] = dict(self.parts)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a score from its JSON form."""
        return cls(float(row["reward"]), row.get("feedback", ""), row.get("parts") or _EMPTY)


@dataclass(frozen=True, slots=True)
class Step:
    """One action of the policy and what came back."""

    action: Message
    """The assistant's message."""
    observations: tuple[Message, ...] = ()
    """Tool results or environment messages, in order."""
    token_ids: tuple[int, ...] | None = None
    """Token ids of the action, where the engine tells them."""
    logprobs: tuple[float, ...] | None = None
    """Natural-log probability of each token of `token_ids` as sampled."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Token ids the action was conditioned on, where known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row: dict[str, Any] = {"action": self.action.to_dict()}
        if self.observations:
            row["observations"] = [m.to_dict() for m in self.observations]
        for name in ("token_ids", "logprobs", "prompt_token_ids"):
            value = getattr(self, name)
            if value is not None:
                row[name] = list(value)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a step from its JSON form."""
        seen = row.get("observations")
        return cls(
            action=Message.from_dict(row["action"]),
            observations=tuple(Message.from_dict(m) for m in seen) if seen else (),
            token_ids=_optional_tuple(row.get("token_ids")),
            logprobs=_optional_tuple(row.get("logprobs")),
            prompt_token_ids=_optional_tuple(row.get("prompt_token_ids")),
        )


def _optional_tuple(value: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a task, however it ended."""

    rollout_id: str
    task_id: str
    steps: tuple[Step, ...] = ()
    outcome: Outcome = "ungraded"
    score: Score | None = None
    """Set exactly when `outcome` is `graded`."""
    usage: Usage = field(default_factory=Usage)
    sample_index: int = 0
    """Which draw of (task, context) this is; part of every cache key."""
    seed: int | None = None
    error: str = ""
    """One line of cause where the outcome is a failure; secrets removed."""
    is_truncated: bool = False
    """True when a reply hit its token limit, also where it was graded all the same."""
    duration_s: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """JSON values, such as the shared prefix of a search path."""

    def __post_init__(self) -> None:
        if (self.outcome == "graded") != (self.score is not None):
            raise ValueError(
                f"rollout {self.rollout_id!r}: outcome {self.outcome!r} with score {self.score!r}; "
                "a score belongs to 'graded' and to nothing else"
            )

    @property
    def reward(self) -> float | None:
        """The reward, or None for everything that was not graded."""
        return None if self.score is None else self.score.reward

    @property
    def answer(self) -> str:
        """The text of the last action after its thinking; empty when there is none."""
        return without_thinking(self.steps[-1].action.content) if self.steps else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Actions and observations in order, without the prompt."""
        return tuple(m for s in self.steps for m in (s.action, *s.observations))

    def graded(self, score: Score) -> Rollout:
        """Return this attempt with a verifier's score; `is_truncated` is kept."""
        return replace(self, outcome="graded", score=score, error="")

    def failed(self, outcome: Outcome, error: str) -> Rollout:
        """Return this attempt as a failure of the given kind."""
        return replace(self, outcome=outcome, score=None, error=error)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        row: dict[str, Any] = {
            "rollout_id": self.rollout_id,
            "task_id": self.task_id,
            "steps": [s.to_dict() for s in self.steps],
            "outcome": self.outcome,
            "usage": self.usage.to_dict(),
            "sample_index": self.sample_index,
        }
        if self.score is not None:
            row["score"] = self.score.to_dict()
        if self.seed is not None:
            row["seed"] = self.seed
        if self.error:
            row["error"] = self.error
        if self.is_truncated:
            row["is_truncated"] = True
        if self.duration_s:
            row["duration_s"] = self.duration_s
        if self.metadata:
            row["metadata"] = jsonable(dict(self.metadata))
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a rollout from its JSON form."""
        score = row.get("score")
        return cls(
            rollout_id=row["rollout_id"],
            task_id=row["task_id"],
            steps=tuple(Step.from_dict(s) for s in row.get("steps", ())),
            outcome=row["outcome"],
            score=None if score is None else Score.from_dict(score),
            usage=Usage.from_dict(row.get("usage") or {}),
            sample_index=row.get("sample_index", 0),
            seed=row.get("seed"),
            error=row.get("error", ""),
            is_truncated=row.get("is_truncated", False),
            duration_s=row.get("duration_s", 0.0),
            metadata=row.get("metadata") or _EMPTY,
        )


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one task under one context: the unit everything learns from."""

    group_id: str
    task: Task
    rollouts: tuple[Rollout, ...]
    context: Context = EMPTY_CONTEXT
    policy_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """JSON values such as `stage`, `step`, `verifier_id`."""

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.task_id != self.task.task_id:
                raise ValueError(
                    f"group {self.group_id!r} of task {self.task.task_id!r} holds rollout "
                    f"{rollout.rollout_id!r} of task {rollout.task_id!r}"
                )

    @property
    def graded(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward, in order."""
        return tuple(r for r in self.rollouts if r.score is not None)

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """Rewards of the graded rollouts, in order."""
        return tuple(r.score.reward for r in self.rollouts if r.score is not None)

    @property
    def mean_reward(self) -> float | None:
        """Mean over the graded rollouts, or None when there are none."""
        rewards_G = self.rewards_G
        return math.fsum(rewards_G) / len(rewards_G) if rewards_G else None

    @property
    def spread(self) -> float:
        """Largest minus smallest reward; 0 for fewer than two graded rollouts."""
        rewards_G = self.rewards_G
        return max(rewards_G) - min(rewards_G) if len(rewards_G) > 1 else 0.0

    def is_informative(self, tolerance: float = 1e-9) -> bool:
        """True when at least two graded rollouts differ in reward by more than `tolerance`."""
        return self.spread > tolerance

    @property
    def usage(self) -> Usage:
        """Usage of all rollouts together."""
        total = Usage()
        for rollout in self.rollouts:
            total = total + rollout.usage
        return total

    def outcome_counts(self) -> dict[Outcome, int]:
        """How many rollouts ended in each way; kinds that did not occur are left out."""
        counts: dict[Outcome, int] = {}
        for rollout in self.rollouts:
            counts[rollout.outcome] = counts.get(rollout.outcome, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: one line of a groups file."""
        row: dict[str, Any] = {
            "group_id": self.group_id,
            "task": self.task.to_dict(),
            "context": self.context.to_dict(),
            "policy_id": self.policy_id,
            "rollouts": [r.to_dict() for r in self.rollouts],
        }
        if self.metadata:
            row["metadata"] = jsonable(dict(self.metadata))
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a group from its JSON form."""
        return cls(
            group_id=row["group_id"],
            task=Task.from_dict(row["task"]),
            rollouts=tuple(Rollout.from_dict(r) for r in row["rollouts"]),
            context=Context.from_dict(row.get("context") or {}),
            policy_id=row.get("policy_id", ""),
            metadata=row.get("metadata") or _EMPTY,
        )


def group_id_of(
    task: Task, context: Context, policy_id: str, *, seed: int = 0, scope: str = ""
) -> str:
    """Return the id of the group that these settings make: equal settings, equal id.

    `scope` tells apart groups that should be separate draws, such as two epochs.
    """
    return "g" + digest([task.to_dict(), context.context_hash, policy_id, seed, scope], 20)
