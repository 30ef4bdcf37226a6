"""Makes graded groups of single-turn rollouts: prompt, sample, verify, and hint where all failed.

Prompts come from `render_messages`, the function that practice and deployment use too. A hint
scheduler may ask for a task under several plans, and again under others while other tasks' rows
still decode, so that extra rounds hide in the tail of the step. Each plan's rollouts have one
context; what training must know of a plan stands in their metadata.

Does not know losses or weights. Ideas: token-in/token-out (verifiers, prime-rl); escalation
without a barrier (own; SAGE, arXiv 2602.03143, re-rolls whole batches).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from tfgrpo.context import EMPTY_CONTEXT, Context, render_messages
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.lm.local.chat_template import render_turns
from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, HintScheduler, Sampling, Verifier
from tfgrpo.rl.generation.requests import GroupRequest, OnDone
from tfgrpo.rl.hint_notes import note_of
from tfgrpo.rollout import Rollout, RolloutGroup, Step, Task, Usage, group_id_of
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.surrogates import without_surrogates
from tfgrpo.sampling import OnTruncated, judge_group

PROMPTS_KEPT = 8192
"""Prompts whose token ids are remembered."""


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
        self.context_tokens = context_tokens
        # templates are slow and a task comes again in each epoch
        self._encode = lru_cache(maxsize=PROMPTS_KEPT)(self._encode_messages)

    def ids(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Raises:
            ConfigError: the prompt leaves no room for a reply in the model's context.
        """
        ids = self.encode(task, context)
        if not 0 < len(ids) < self.context_tokens:
            raise ConfigError(
                f"task {task.task_id!r}: its prompt has {len(ids)} tokens and the model's context "
                f"{self.context_tokens}; shorten the task or leave it out"
            )
        return ids

    def encode(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids, however many they are."""
        return self._encode(render_messages(task.messages, context, system=self._system))

    def _encode_messages(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        if self._template == "chat":
            turns = [{"role": m.role, "content": m.content} for m in messages]
            # As the model is asked elsewhere: what its template refuses is folded.
            text, _ = render_turns(self.tokenizer, turns, add_generation_prompt=True)
        else:
            text = without_surrogates("\n\n".join(m.content for m in messages))
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prefix_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a forced start of a reply; its last blanks belong to the next word."""
        if not text:
            return ()
        return tuple(
            self.tokenizer(without_surrogates(text.rstrip(" ")), add_special_tokens=False)[
                "input_ids"
            ]
        )

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
    hints_too_long: int = 0
    """Plans that were not rolled, since their prompt fills the model's context."""
    levels: dict[str, int] = field(default_factory=dict)
    """Accepted groups by their plan's label; `none` is the bare task, `mixed` several plans."""


@dataclass(slots=True)
class _Visit:
    """A task in a call of `make`."""

    task: Task
    made: list[PlannedGroup | None] = field(default_factory=list)
    """One entry a plan asked for, None while it is rolled."""


@dataclass(slots=True)
class _Set:
    """The rollouts of one plan in a visit."""

    visit: _Visit
    number: int
    """Place in the visit; with it every plan has draws of its own."""
    plan: HintPlan
    context: Context
    note: dict[str, Any]
    """The rollouts' `hint` metadata."""


class SingleTurnMaker:
    """Makes one accepted group a task.

    Args:
        generator: what makes tokens.
        prompter: tasks to token ids and back.
        verifier: what judges; awaited, all of a group at once.
        sampling: how tokens are drawn; `max_tokens` set.
        policy_id: names the weights in groups' ids.
        on_truncated: `grade` or `exclude`.
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
        on_truncated: OnTruncated = "grade",
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
        group_size: int | Sequence[int],
        *,
        seed: int,
        context: Context = EMPTY_CONTEXT,
        hints: HintScheduler | None = None,
        sampling: Sampling | None = None,
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; draws are fixed by (seed, task, sample, plan's place
        in the visit). `group_size` is one number, or one a task."""
        self.figures = RolloutFigures()
        started = time.monotonic()
        sampling = sampling or self._sampling
        with asyncio.Runner() as runner:
            # the loop itself: `Runner.run` sets up signals anew for each group, a third of the time
            run = runner.get_loop().run_until_complete
            call = _Call(self, sizes_of(tasks, group_size), seed, context, hints, sampling, run)
            requests = [r for task in tasks for r in call.first(task)]
            self._generator.run(requests, sampling, call.on_done)
        self.figures.seconds = time.monotonic() - started
        return [call.accepted[t.task_id] for t in tasks]

    def request(self, one: _Set, seeds: Sequence[int], max_tokens: int) -> GroupRequest | None:
        """Return what the generator is asked, or None where a hinted prompt fills the context.

        Raises:
            ConfigError: the bare task does.
        """
        task, plan = one.visit.task, one.plan
        if plan.is_bare:
            ids = self._prompter.ids(task, one.context)
            one.note = note_of(plan, n_prefix=0, bare_prompt=())
        else:
            prefix = self._prompter.prefix_ids(plan.response_prefix)
            ids = self._prompter.encode(task, one.context) + prefix
            if len(ids) >= self._prompter.context_tokens:
                self.figures.hints_too_long += 1
                return None
            bare = self._prompter.encode(task) if plan.condition == "original" else ()
            one.note = note_of(plan, n_prefix=len(prefix), bare_prompt=bare)
        self.figures.prompt_tokens += len(ids)
        return GroupRequest(one, ids, tuple(seeds), max_tokens)

    def grade(
        self,
        request: GroupRequest,
        rows: Sequence[Generated],
        seed: int,
        run: Callable[[Any], Any],
    ) -> RolloutGroup:
        """Return the rows as a graded group."""
        one: _Set = request.key
        task, scope = one.visit.task, f"train-{one.number}"
        group_id = group_id_of(task, one.context, self._policy_id, seed=seed, scope=scope)
        attempts = [self._attempt(group_id, one, request, i, row) for i, row in enumerate(rows)]
        figures = self.figures
        figures.completion_tokens += sum(len(r.token_ids) for r in rows)
        figures.rollouts += len(rows)
        figures.hinted_rollouts += 0 if one.plan.is_bare else len(rows)
        started = time.monotonic()
        graded = run(self._judge_all(attempts, task))
        figures.verify_seconds += time.monotonic() - started
        return RolloutGroup(
            group_id=group_id,
            task=task,
            rollouts=tuple(graded),
            context=one.context,
            policy_id=self._policy_id,
            metadata={"prompt_tokens": len(request.prompt_ids)},
        )

    def _attempt(
        self, group_id: str, one: _Set, request: GroupRequest, i: int, row: Generated
    ) -> Rollout:
        """Return a row as an ungraded rollout; a forced prefix is part of its text, and of its
        prompt's tokens."""
        n = len(request.prompt_ids)
        forced = request.prompt_ids[n - int(one.note.get("prefix_tokens", 0)) :]
        step = Step(
            action=Message("assistant", self._prompter.text((*forced, *row.token_ids))),
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            prompt_token_ids=request.prompt_ids,
        )
        return Rollout(
            rollout_id=f"{group_id}-{i}",
            task_id=one.visit.task.task_id,
            steps=(step,),
            usage=Usage(uncached_tokens=n, text_tokens=len(row.token_ids), calls=1),
            sample_index=i,
            seed=request.seeds[i],
            is_truncated=row.finish == "length",
            metadata={"hint": one.note} if one.note else {},
        )

    async def _judge_all(self, attempts: Sequence[Rollout], task: Task) -> list[Rollout]:
        judged = await judge_group(
            attempts,
            task,
            self._verifier,
            timeout_s=self._timeout_s,
            on_truncated=self._on_truncated,
            raises_fatal=False,
        )
        self.figures.dropped_rollouts += sum(r.outcome == "truncated" for r in judged)
        return judged


class _Call:
    """One call of `SingleTurnMaker.make`: the visits of its tasks."""

    def __init__(
        self,
        maker: SingleTurnMaker,
        sizes: Mapping[str, int],
        seed: int,
        context: Context,
        hints: HintScheduler | None,
        sampling: Sampling,
        run: Callable[[Any], Any],
    ) -> None:
        self._maker = maker
        self._sizes = sizes
        self._seed = seed
        self._context = context
        self._hints = hints
        self._max_tokens = sampling.max_tokens or 0
        self._run = run
        self.accepted: dict[str, RolloutGroup] = {}

    def first(self, task: Task) -> list[GroupRequest]:
        """Return a task's first requests; the bare task where no plan fits the context."""
        visit = _Visit(task)
        plans = (
            [BARE] if self._hints is None else self._hints.start(task, self._sizes[task.task_id])
        )
        return self._ask(visit, plans) or self._ask(visit, [BARE])

    def on_done(self, request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        """Grade a set; when its round is whole, ask for what follows or accept."""
        one: _Set = request.key
        visit = one.visit
        group = self._maker.grade(request, rows, self._seed, self._run)
        visit.made[one.number] = PlannedGroup(one.plan, group)
        made = [x for x in visit.made if x is not None]
        if len(made) < len(visit.made):
            return []
        following = self._hints.after(visit.task, made) if self._hints is not None else ()
        requests = self._ask(visit, following)
        if not requests:
            self._accept(visit.task, made)
        return requests

    def _ask(self, visit: _Visit, plans: Sequence[HintPlan]) -> list[GroupRequest]:
        requests = []
        for plan in plans:
            part = plan.part()
            context = self._context if part is None else self._context.with_parts(part)
            one = _Set(visit, len(visit.made), plan, context, {})
            seeds = [
                derive_seed(self._seed, visit.task.task_id, i, one.number)
                for i in range(plan.n or self._sizes[visit.task.task_id])
            ]
            request = self._maker.request(one, seeds, self._max_tokens)
            if request is not None:
                visit.made.append(None)
                requests.append(request)
        return requests

    def _accept(self, task: Task, made: Sequence[PlannedGroup]) -> None:
        group = made[0].group if self._hints is None else self._hints.accept(task, made)
        label = next((x.plan.label for x in made if x.group is group), "mixed")
        levels = self._maker.figures.levels
        levels[label] = levels.get(label, 0) + 1
        self.accepted[task.task_id] = group


def sizes_of(tasks: Sequence[Task], group_size: int | Sequence[int]) -> dict[str, int]:
    """Return the group size of each task by its id."""
    each = [group_size] * len(tasks) if isinstance(group_size, int) else group_size
    return {t.task_id: n for t, n in zip(tasks, each, strict=True)}
