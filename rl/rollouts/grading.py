"""Sampled replies of one turn as rollouts, and their verdicts.

Does not know where replies come from. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, Verifier
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rollout import Rollout, Step, Task, Usage
from tfgrpo.sampling import OnTruncated, judge_group

RunAsync = Callable[[Any], Any]
"""Runs a coroutine to its end and returns its result."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled reply."""

    task: Task
    group_id: str
    index: int
    """Sample index in its group."""
    seed: int
    prompt_ids: tuple[int, ...]
    row: Generated
    forced: int = 0
    """Tokens at the end of the prompt's that are the forced start of the reply."""
    is_given: bool = False
    """Nobody sampled it."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class Grader:
    """Judges replies of one turn."""

    prompter: Prompter
    verifier: Verifier
    """Awaited, all of a group at once."""
    on_truncated: OnTruncated = "grade"
    timeout_s: float = 120.0
    """Wall time of one verification."""

    def rollout(self, reply: Reply) -> Rollout:
        """Return a reply as an ungraded rollout; a forced start is part of its text, and of its
        prompt's tokens."""
        row, n = reply.row, len(reply.prompt_ids)
        forced = reply.prompt_ids[n - reply.forced :]
        step = Step(
            action=Message("assistant", self.prompter.text((*forced, *row.token_ids))),
            token_ids=row.token_ids,
            logprobs=None if reply.is_given else row.logprobs,
            prompt_token_ids=reply.prompt_ids,
        )
        drawn = Usage(uncached_tokens=n, text_tokens=len(row.token_ids), calls=1)
        return Rollout(
            rollout_id=f"{reply.group_id}-{reply.index}",
            task_id=reply.task.task_id,
            steps=(step,),
            usage=Usage() if reply.is_given else drawn,
            sample_index=reply.index,
            seed=reply.seed,
            is_truncated=row.finish != "stop",
            metadata=dict(reply.metadata),
        )

    def judged(
        self, replies: Sequence[Reply], figures: RolloutFigures, run: RunAsync
    ) -> list[Rollout]:
        """Return one task's replies as graded rollouts, in order."""
        started = time.monotonic()
        found: list[Rollout] = run(
            judge_group(
                [self.rollout(r) for r in replies],
                replies[0].task,
                self.verifier,
                timeout_s=self.timeout_s,
                on_truncated=self.on_truncated,
                raises_fatal=False,
            )
        )
        figures.verify_seconds += time.monotonic() - started
        figures.dropped_rollouts += sum(r.outcome == "truncated" for r in found)
        return found
