"""An attempt in the making: the blank record, replies as steps, failures as outcomes.

Every policy of ours builds its rollouts from these functions. Does not know how a policy acts.
Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Sampling
from tfgrpo.rollout import Outcome, Rollout, Step, Task, Usage
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.terminal import one_line

T = TypeVar("T")

__all__ = [
    "all_or_none",
    "check_sampling",
    "finished_by",
    "new_rollout",
    "cause_of",
    "outcome_of",
    "provider_failure",
    "step_of",
]

_OUTCOME_OF_KIND: Mapping[str, Outcome] = {"refused": "refused", "timeout": "timed_out"}


def outcome_of(error: ProviderError) -> Outcome:
    """Return how an attempt ends whose call failed so."""
    return _OUTCOME_OF_KIND.get(error.kind, "provider_failed")


def step_of(reply: Completion, observations: Iterable[Message] = ()) -> Step:
    """Return a reply as a step; token ids and log-probabilities stay with it."""
    return Step(
        reply.message,
        tuple(observations),
        token_ids=reply.token_ids,
        logprobs=reply.logprobs,
        prompt_token_ids=reply.prompt_token_ids,
    )


def check_sampling(sampling: Sampling, where: str) -> None:
    """Raise `ConfigError` for values that no provider takes."""
    if sampling.temperature is not None and sampling.temperature < 0:
        raise ConfigError(f"{where}: temperature is {sampling.temperature}; it must be 0 or more")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise ConfigError(f"{where}: top_p is {sampling.top_p}; it must be above 0, at most 1")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not 0 <= sampling.top_logprobs <= 20:
        raise ConfigError(f"{where}: top_logprobs is {sampling.top_logprobs}; 0 to 20 are allowed")


def new_rollout(policy_id: str, task: Task, seed: int, offset: int = 0) -> Rollout:
    """Return an attempt without steps, under an id fixed by policy, task and seed."""
    return Rollout(
        rollout_id="r" + digest([policy_id, task.task_id, seed], 20),
        task_id=task.task_id,
        sample_index=current_scope().sample_index + offset,
        seed=seed,
    )


def provider_failure(rollout: Rollout, error: ProviderError, usage: Usage | None = None) -> Rollout:
    """Return the attempt as one whose call failed; the kind stands in the metadata.

    The failed call is counted. What it cost is known to the ledger alone.
    """
    spent = (usage or rollout.usage) + Usage(calls=1)
    return replace(
        rollout.failed(outcome_of(error), cause_of(error)),
        usage=spent,
        metadata={**rollout.metadata, "provider_kind": error.kind},
    )


def cause_of(error: BaseException) -> str:
    """Return an error's message as one line, cut at 500 characters."""
    return one_line(str(error), 500)


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await everything in order; the first error ends the rest, awaited, before it leaves."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def finished_by(blank: Rollout, reply: Completion) -> Rollout:
    """Return the attempt that consists of one reply."""
    done = replace(
        blank,
        steps=(step_of(reply),),
        usage=reply.usage,
        is_truncated=reply.finish == "length",
    )
    if reply.finish == "content_filter":
        return done.failed("refused", "the provider's content filter ended the reply")
    return done
