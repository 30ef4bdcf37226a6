"""Tasks to graded groups with token ids: prompt, sample, verify, and hint where it failed.

Prompts come from `render_messages`, the function that practice and deployment use too. Each group
has one context; a hint scheduler may ask for a failed task again under a hint while other rows
still decode, so that the extra rounds hide in the tail of the step.

Does not know losses or weights. Ideas: token-in/token-out (verifiers, prime-rl); escalation
without a barrier (own; SAGE, arXiv 2602.03143, re-rolls whole batches).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tfgrpo.canonical import derive_seed
from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart, render_messages
from tfgrpo.errors import ConfigError, VerifierError, boundary
from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, HintScheduler, Sampling, Verifier
from tfgrpo.rl.generator import GroupRequest, OnDone
from tfgrpo.rollout import Rollout, RolloutGroup, Step, Task, Usage, group_id_of


class QueueGenerator(Protocol):
    """A generator that serves a queue, as `GroupGenerator.run` does."""

    def run(self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone) -> object:
        """Serve requests and those that `on_done` adds."""
        ...


class Prompter:
    """Messages to token ids, by the tokenizer's chat template or as plain text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        system: system text of every prompt.
        template: `chat` or `plain`.
        context_tokens: the model's window.

    Raises:
        ConfigError: `chat` with a tokenizer that has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, system: str = "", template: str = "chat", context_tokens: int
    ) -> None:
        if template == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "this tokenizer has no chat template; set model.template = 'plain' to join the "
                "turns' texts, or use a model with one"
            )
        self.tokenizer = tokenizer
        self._system = system
        self._template = template
        self._context_tokens = context_tokens

    def ids(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Raises:
            ConfigError: the prompt leaves no room for a reply in the model's context.
        """
        messages = render_messages(task.messages, context, system=self._system)
        if self._template == "chat":
            turns = [{"role": m.role, "content": m.content} for m in messages]
            text = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        else:
            text = "\n\n".join(m.content for m in messages)
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) < self._context_tokens:
            raise ConfigError(
                f"task {task.task_id!r}: its prompt has {len(ids)} tokens and the model's context "
                f"{self._context_tokens}; shorten the task or leave it out"
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Return a reply's text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(slots=True)
class RolloutFigures:
    """What making the groups cost."""

    seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rollouts: int = 0
    """All that were made, those of failed groups included."""
    hinted_rollouts: int = 0
    dropped_rollouts: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    """Accepted groups by hint source; `none` is the bare task."""


@dataclass(slots=True)
class _Open:
    task: Task
    context: Context
    plan: ContextPart | None
    tries: int


class RolloutMaker:
    """Makes one accepted group a task.

    Args:
        generator: what makes tokens.
        prompter: tasks to token ids and back.
        verifier: what judges; awaited, all of a group at once.
        sampling: how tokens are drawn; `max_tokens` set.
        policy_id: names the weights in groups' ids.
        on_truncated: `grade` or `drop`.
        verifier_timeout_s: wall time of one verification.
    """

    def __init__(
        self,
        generator: QueueGenerator,
        prompter: Prompter,
        verifier: Verifier,
        sampling: Sampling,
        *,
        policy_id: str,
        on_truncated: str = "grade",
        verifier_timeout_s: float = 120.0,
    ) -> None:
        self._generator = generator
        self._prompter = prompter
        self._verifier = verifier
        self._sampling = sampling
        self._policy_id = policy_id
        self._on_truncated = on_truncated
        self._timeout_s = verifier_timeout_s
        self.figures = RolloutFigures()

    def make(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        seed: int,
        context: Context = EMPTY_CONTEXT,
        hints: HintScheduler | None = None,
        sampling: Sampling | None = None,
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; draws are fixed by (seed, task, sample, hint try)."""
        self.figures = figures = RolloutFigures()
        started = time.monotonic()
        accepted: dict[str, RolloutGroup] = {}
        sampling = sampling or self._sampling

        def request(opened: _Open) -> GroupRequest:
            ids = self._prompter.ids(opened.task, opened.context)
            figures.prompt_tokens += len(ids)
            seeds = [
                derive_seed(seed, opened.task.task_id, i, opened.tries) for i in range(group_size)
            ]
            return GroupRequest(opened, ids, tuple(seeds), sampling.max_tokens or 0)

        def opening(task: Task, plan: Any, tries: int) -> _Open:
            given = context if plan is None else context.with_parts(plan)
            return _Open(task, given, plan, tries)

        def on_done(done: GroupRequest, rows: list[Generated]) -> Iterable[GroupRequest]:
            opened: _Open = done.key
            group = self._grade(opened, done, rows, seed, runner.run)
            figures.completion_tokens += sum(len(r.token_ids) for r in rows)
            figures.rollouts += len(rows)
            figures.hinted_rollouts += len(rows) if opened.plan is not None else 0
            plan = hints.after(opened.task, opened.plan, group) if hints is not None else None
            if plan is not None:
                return [request(opening(opened.task, plan, opened.tries + 1))]
            level = "none" if opened.plan is None else opened.plan.source or "hint"
            figures.levels[level] = figures.levels.get(level, 0) + 1
            accepted[opened.task.task_id] = group
            return []

        first = [opening(t, hints.start(t) if hints is not None else None, 0) for t in tasks]
        with asyncio.Runner() as runner:
            self._generator.run([request(o) for o in first], sampling, on_done)
        figures.seconds = time.monotonic() - started
        return [accepted[t.task_id] for t in tasks]

    def _grade(
        self,
        opened: _Open,
        request: GroupRequest,
        rows: Sequence[Generated],
        seed: int,
        run: Callable[[Any], Any],
    ) -> RolloutGroup:
        scope = f"train-{opened.tries}"
        group_id = group_id_of(opened.task, opened.context, self._policy_id, seed=seed, scope=scope)
        attempts = [
            self._attempt(group_id, opened.task, request, i, row) for i, row in enumerate(rows)
        ]
        started = time.monotonic()
        graded = run(self._judge_all(attempts, opened.task))
        self.figures.verify_seconds += time.monotonic() - started
        return RolloutGroup(
            group_id=group_id,
            task=opened.task,
            rollouts=tuple(graded),
            context=opened.context,
            policy_id=self._policy_id,
            metadata={"prompt_tokens": len(request.prompt_ids)},
        )

    def _attempt(
        self, group_id: str, task: Task, request: GroupRequest, i: int, row: Generated
    ) -> Rollout:
        step = Step(
            action=Message("assistant", self._prompter.text(row.token_ids)),
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            prompt_token_ids=request.prompt_ids,
        )
        return Rollout(
            rollout_id=f"{group_id}-{i}",
            task_id=task.task_id,
            steps=(step,),
            usage=Usage(
                uncached_tokens=len(request.prompt_ids), text_tokens=len(row.token_ids), calls=1
            ),
            sample_index=i,
            seed=request.seeds[i],
            is_truncated=row.finish == "length",
        )

    async def _judge_all(self, attempts: Sequence[Rollout], task: Task) -> list[Rollout]:
        return list(await asyncio.gather(*(self._judge(a, task) for a in attempts)))

    async def _judge(self, attempt: Rollout, task: Task) -> Rollout:
        if attempt.is_truncated and self._on_truncated == "drop":
            self.figures.dropped_rollouts += 1
            return attempt.failed("truncated", "the reply hit its token limit")
        return await judge(attempt, task, self._verifier.score, self._timeout_s)


async def judge(
    attempt: Rollout,
    task: Task,
    score: Callable[[Rollout, Task], Awaitable[Any]],
    timeout_s: float,
) -> Rollout:
    """Return the attempt with its score, or as `verifier_failed` with the cause; never a 0."""
    where = f"verifier on rollout {attempt.rollout_id!r}"
    try:
        async with asyncio.timeout(timeout_s):
            with boundary(VerifierError, where):
                return attempt.graded(await score(attempt, task))
    except TimeoutError:
        return attempt.failed("verifier_failed", f"{where}: no score within {timeout_s:g} s")
    except VerifierError as exc:
        return attempt.failed("verifier_failed", str(exc))
