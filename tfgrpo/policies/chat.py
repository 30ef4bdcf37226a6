"""What acts: one chat turn, any function of the user's, or the tool loop of `tool_policy`.

A policy makes attempts and judges none: a finished attempt is `ungraded`, a failed one carries
its outcome and one line of cause. What belongs to the run and not to the attempt (a spent budget,
a full disk, a wrong setting) passes through as an error.

Does not know: references, metadata, rewards, retries, concurrency. Source: own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.context import Context, render_messages
from tfgrpo.errors import ConfigError, PolicyError, ProviderError, boundary
from tfgrpo.messages import Message
from tfgrpo.policies.attempt import (
    all_or_none,
    cause_of,
    check_sampling,
    finished_by,
    new_rollout,
    provider_failure,
)
from tfgrpo.policies.tool_loop import ToolPolicy
from tfgrpo.protocols import LM, Limits, Request, Sampling
from tfgrpo.rollout import Rollout, Step, Task, Usage
from tfgrpo.runtime.call_scope import call_scope, current_scope
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.thinking import split_thinking
from tfgrpo.runtime.user_code import CallTimeout, call_foreign

__all__ = ["ChatPolicy", "FunctionPolicy", "ToolPolicy"]


class ChatPolicy:
    """One reply of an LM to the rendered task.

    Args:
        lm: what writes.
        system: system text before the lessons.
        sampling: how tokens are drawn.
        limits: what one call may take; not part of the policy's identity.
        policy_id: a name of your own; it must then change whenever the settings do.
    """

    def __init__(
        self,
        lm: LM,
        *,
        system: str = "",
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        policy_id: str | None = None,
    ) -> None:
        self._lm = lm
        self._system = system
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        check_sampling(self._sampling, "ChatPolicy")
        self._policy_id = policy_id or "chat-" + digest(
            {"lm": lm.identity, "system": system, "sampling": self._sampling}, 16
        )

    @property
    def policy_id(self) -> str:
        """Fixed by the LM's identity, the system text and the sampling."""
        return self._policy_id

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return self._sampling

    @property
    def prefers_groups(self) -> bool:
        """True when one call for several draws is cheaper than several calls."""
        return self._lm.prefers_n

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        """Return one attempt; one LM call."""
        return (await self._draw(self._request(task, context), task, [seed], 0))[0]

    async def attempt_group(
        self, task: Task, context: Context, seeds: Sequence[int]
    ) -> list[Rollout]:
        """Return one attempt a seed, in order; one LM call where the LM prefers that.

        A short answer is asked for again until every seed has its attempt. Where a later call
        fails, the attempts that are there already stay good.
        """
        request = self._request(task, context)
        if self._lm.prefers_n:
            return await self._draw(request, task, seeds, 0)
        singles = (self._draw(request, task, [s], i) for i, s in enumerate(seeds))
        return [one for group in await all_or_none(singles) for one in group]

    def _request(self, task: Task, context: Context) -> Request:
        messages = render_messages(task.messages, context, system=self._system)
        return Request(messages, sampling=self._sampling, limits=self._limits)

    async def _draw(
        self, request: Request, task: Task, seeds: Sequence[int], offset: int
    ) -> list[Rollout]:
        made: list[Rollout] = []
        scope = current_scope()
        while len(made) < len(seeds):
            rest = seeds[len(made) :]
            place = offset + len(made)
            started = time.perf_counter()
            blanks = [new_rollout(self._policy_id, task, s, place + i) for i, s in enumerate(rest)]
            try:
                with (
                    call_scope(replace(scope, sample_index=scope.sample_index + place)),
                    boundary(PolicyError, f"lm {self._lm.model_id!r}"),
                ):
                    replies = await self._lm.complete(request, len(rest), list(rest))
            except ProviderError as exc:
                # One call failed, however many draws it stood for.
                lost = [provider_failure(b, exc) for b in blanks]
                made.extend(r if i == 0 else replace(r, usage=Usage()) for i, r in enumerate(lost))
            except PolicyError as exc:
                made.extend(b.failed("policy_failed", cause_of(exc)) for b in blanks)
            else:
                if not replies:
                    empty = ProviderError(
                        f"{self._lm.model_id} returned no reply where {len(rest)} were asked for",
                        kind="bad_reply",
                    )
                    made.extend(provider_failure(b, empty) for b in blanks)
                seconds = time.perf_counter() - started
                made.extend(
                    replace(finished_by(blank, reply), duration_s=seconds)
                    for blank, reply in zip(blanks, replies, strict=False)
                )
        return made


Made = str | Message | Rollout | Sequence[Step]
"""What a user's function may return."""


class FunctionPolicy:
    """Any function of the user's: an agent framework, a subprocess, a rule.

    The function is called as `fn(prompt, context)`, or `fn(prompt, context, seed=...)` where it
    has a parameter of that name. `prompt` is the task's text, or its turns (a tuple of `Message`)
    where the task has turns; `context` is the `Context`, to be rendered by
    `tfgrpo.context.render_messages` or as the function likes. It sees neither the task's id nor its
    reference nor its metadata.

    It returns a text, a `Message`, a sequence of `Step`, or a `Rollout` without a score. A
    synchronous function runs in a thread. What it raises makes the attempt `policy_failed`;
    a `ProviderError` makes it `provider_failed`, `refused` or `timed_out`.

    Args:
        fn: the function.
        policy_id: a name that changes whenever the function could act otherwise.
        timeout_s: limit of one attempt in seconds; None leaves it to the sampler.
    """

    def __init__(
        self, fn: Callable[..., Any], *, policy_id: str, timeout_s: float | None = None
    ) -> None:
        if not policy_id:
            raise ConfigError(
                "FunctionPolicy: policy_id is empty; give a name that changes with the function"
            )
        self._fn = fn
        self._policy_id = policy_id
        self._timeout_s = timeout_s
        self._wants_seed = _check_signature(fn, policy_id)

    @property
    def policy_id(self) -> str:
        """The name given at construction."""
        return self._policy_id

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        """Return one attempt; what it costs is up to the function."""
        blank = new_rollout(self._policy_id, task, seed)
        prompt = task.prompt if isinstance(task.prompt, str) else tuple(task.prompt)
        extra = {"seed": seed} if self._wants_seed else {}
        started = time.perf_counter()
        try:
            made = await call_foreign(
                self._fn,
                prompt,
                context,
                error=PolicyError,
                where=f"policy {self._policy_id!r}",
                timeout_s=self._timeout_s,
                named=extra,
            )
            done = _rollout_from(made, blank, self._policy_id)
        except ProviderError as exc:
            done = provider_failure(blank, exc)
        except CallTimeout as exc:
            done = blank.failed("timed_out", cause_of(exc))
        except PolicyError as exc:
            done = blank.failed("policy_failed", cause_of(exc))
        return replace(done, duration_s=done.duration_s or time.perf_counter() - started)


def _check_signature(fn: Callable[..., Any], policy_id: str) -> bool:
    """Return whether the function takes a seed; raise where it cannot take prompt and context."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some callables written in C do not tell
        return False
    wants_seed = "seed" in signature.parameters
    try:
        signature.bind("prompt", "context", **({"seed": 0} if wants_seed else {}))
    except TypeError as exc:
        raise ConfigError(
            f"policy {policy_id!r}: the function is {signature}, but it is called as "
            f"fn(prompt, context) or fn(prompt, context, seed=...): {exc}"
        ) from exc
    return wants_seed


def _rollout_from(made: Any, blank: Rollout, policy_id: str) -> Rollout:
    if isinstance(made, str):
        answer, thought = split_thinking(made)
        return replace(blank, steps=(Step(Message("assistant", answer, reasoning=thought)),))
    if isinstance(made, Message):
        return replace(blank, steps=(Step(made),))
    if isinstance(made, Rollout):
        if made.score is not None:
            raise PolicyError(
                f"policy {policy_id!r} returned a rollout that is graded already; "
                "a policy never scores itself: leave outcome 'ungraded' and let the verifier judge"
            )
        return replace(
            made,
            rollout_id=blank.rollout_id,
            task_id=blank.task_id,
            sample_index=blank.sample_index,
            seed=blank.seed,
        )
    if isinstance(made, (list, tuple)) and all(isinstance(s, Step) for s in made):
        return replace(blank, steps=tuple(made))
    raise PolicyError(
        f"policy {policy_id!r} returned {type(made).__name__} {made!r:.80}; "
        "allowed are str, Message, a sequence of Step, and Rollout"
    )
