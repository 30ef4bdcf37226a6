"""Makes graded groups of single-turn rollouts: prompt, sample, verify, and hint where all failed.

A hint scheduler may ask for a task under several plans, and again under others (or for a text by
the policy) while other tasks' rows still decode, so that extra rounds hide in the tail of the step.
Each plan's rollouts have one context; what training must know of a plan stands in their metadata.

Does not know losses or weights. Ideas: token-in/token-out (verifiers, prime-rl); escalation
without a barrier (own; SAGE, arXiv 2602.03143, re-rolls whole batches).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, Ask, HintPlan, Write
from tfgrpo.protocols import Generated, HintScheduler, Sampling
from tfgrpo.rl.generation.requests import GroupRequest, OnDone
from tfgrpo.rl.hint_notes import note_of
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.grading import Grader, Reply, RunAsync
from tfgrpo.rl.rollouts.task_session import TaskSession, TextDraw, begin_text
from tfgrpo.rollout import RolloutGroup, Task, group_id_of
from tfgrpo.runtime.canonical import derive_seed


class QueueGenerator(Protocol):
    """A generator that serves a queue, as `GroupGenerator.run` does."""

    def run(self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone) -> object:
        """Serve requests and those that `on_done` adds."""
        ...


@dataclass(slots=True)
class _Set:
    """The rollouts of one plan in a visit."""

    visit: TaskSession
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
        grader: tasks to token ids, and what judges.
        sampling: how tokens are drawn; `max_tokens` set.
        policy_id: names the weights in groups' ids.
    """

    def __init__(
        self, generator: QueueGenerator, grader: Grader, sampling: Sampling, *, policy_id: str
    ) -> None:
        self.generator = generator
        self.grader = grader
        self.prompter = grader.prompter
        self.sampling = sampling
        self.policy_id = policy_id
        self.figures = RolloutFigures()
        self.beside: dict[str, tuple[RolloutGroup, ...]] = {}
        """Further groups of the last call's tasks, by task id."""

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
        sampling = sampling or self.sampling
        with asyncio.Runner() as runner:
            # the loop itself: `Runner.run` sets up signals anew for each group, a third of the time
            run = runner.get_loop().run_until_complete
            call = _Call(self, sizes_of(tasks, group_size), seed, context, hints, sampling, run)
            requests = [r for task in tasks for r in call.first(task)]
            self.generator.run(requests, sampling, call.on_done)
        self.figures.seconds = time.monotonic() - started
        self.beside = call.beside
        return [call.accepted[t.task_id] for t in tasks]

    def request(self, one: _Set, seeds: Sequence[int], max_tokens: int) -> GroupRequest | None:
        """Return what the generator is asked, or None where a hinted prompt fills the context.

        Raises:
            ConfigError: the bare task does.
        """
        task, plan = one.visit.task, one.plan
        if plan.is_bare:
            ids = self.prompter.ids(task, one.context)
            one.note = note_of(plan, n_prefix=0, bare_prompt=ids)
        else:
            forced = self.kept(plan) + (() if plan.is_given else self.forced(plan))
            ids = self.prompter.encode(task, one.context) + forced
            given = self.forced(plan) if plan.is_given else ()
            if len(ids) + len(given) >= self.prompter.context_tokens:
                self.figures.hints_too_long += 1
                return None
            bare = self.prompter.encode(task)
            one.note = note_of(plan, n_prefix=len(forced), bare_prompt=bare)
        self.figures.prompt_tokens += len(ids)
        return GroupRequest(one, ids, tuple(seeds), max_tokens)

    def kept(self, plan: HintPlan) -> tuple[int, ...]:
        """Return the own tokens that a plan keeps."""
        ids, most = plan.prefix_ids, plan.prefix_chars
        if most is None:
            return ids
        lengths = range(1, len(ids) + 1)
        return ids[: bisect_right(lengths, most, key=lambda n: len(self.prompter.text(ids[:n])))]

    def forced(self, plan: HintPlan) -> tuple[int, ...]:
        """Return the token ids of a plan's text of the response; a whole reply has its end."""
        ids = self.prompter.prefix_ids(plan.response_prefix)
        end = self.prompter.tokenizer.eos_token_id
        return (*ids, int(end)) if plan.is_given and end is not None else ids

    def grade(
        self,
        request: GroupRequest,
        rows: Sequence[Generated],
        seed: int,
        run: RunAsync,
    ) -> RolloutGroup:
        """Return the rows as a graded group."""
        one: _Set = request.key
        task, scope = one.visit.task, f"train-{one.number}"
        group_id = group_id_of(task, one.context, self.policy_id, seed=seed, scope=scope)
        given, forced = one.plan.is_given, int(one.note.get("prefix_tokens", 0))
        metadata = {"hint": one.note} if one.note else {}
        replies = [
            Reply(
                task,
                group_id,
                i,
                request.seeds[i],
                request.prompt_ids,
                row,
                forced,
                given,
                metadata,
            )
            for i, row in enumerate(rows)
        ]
        figures = self.figures
        if not given:
            figures.completion_tokens += sum(len(r.token_ids) for r in rows)
        figures.rollouts += len(rows)
        figures.hinted_rollouts += 0 if one.plan.is_bare else len(rows)
        graded = self.grader.judged(replies, figures, run)
        return RolloutGroup(
            group_id=group_id,
            task=task,
            rollouts=tuple(graded),
            context=one.context,
            policy_id=self.policy_id,
            metadata={"prompt_tokens": len(request.prompt_ids)},
        )


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
        run: RunAsync,
    ) -> None:
        self._maker = maker
        self._sizes = sizes
        self._seed = seed
        self._context = context
        self._hints = hints
        self._max_tokens = sampling.max_tokens or 0
        self._run = run
        self.accepted: dict[str, RolloutGroup] = {}
        self.beside: dict[str, tuple[RolloutGroup, ...]] = {}

    def first(self, task: Task) -> list[GroupRequest]:
        """Return a task's first requests; the bare task where no plan fits the context."""
        visit = TaskSession(task, self._sizes[task.task_id], self._hints)
        requests = self._ask(visit, visit.first())
        if not visit.sets:
            requests = self._ask(visit, [BARE])
        return requests or self._go_on(visit)

    def on_done(self, request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        """Take a set or a text; when its round is whole, ask for what follows or accept."""
        one: _Set | TextDraw = request.key
        if isinstance(one, TextDraw):
            if not one.read(rows[0], self._maker.prompter, self._maker.figures):
                return [self._text_request(one)]
        else:
            self._end(one, request, rows)
        return self._go_on(one.visit)

    def _go_on(self, visit: TaskSession) -> list[GroupRequest]:
        """Return what follows once a round is whole; what needs no drawing is made at once."""
        while not visit.open:
            known = len(visit.sets), visit.texts
            requests = self._ask(visit, visit.following())
            if requests:
                return requests
            if known == (len(visit.sets), visit.texts):
                self._accept(visit)
                break
        return []

    def _ask(self, visit: TaskSession, asks: Sequence[Ask]) -> list[GroupRequest]:
        requests = []
        for ask in asks:
            if isinstance(ask, Write):
                draw = begin_text(visit, ask, self._maker.prompter)
                requests += [] if draw is None else [self._text_request(draw)]
            else:
                requests += self._plan_requests(visit, ask)
        return requests

    def _plan_requests(self, visit: TaskSession, plan: HintPlan) -> list[GroupRequest]:
        if plan.replay:
            raise ConfigError(
                f"the hint plan {plan.label!r} takes earlier turns again, which rollouts of one "
                "turn do not have: set [multi_turn]"
            )
        part = plan.part()
        context = self._context if part is None else self._context.with_parts(part)
        one = _Set(visit, len(visit.sets), plan, context, {})
        seeds = [
            derive_seed(self._seed, visit.task.task_id, i, one.number)
            for i in range(plan.n or visit.size)
        ]
        request = self._maker.request(one, seeds, self._max_tokens)
        if request is None:
            return []
        visit.begin_set()
        if not plan.is_given:
            return [request]
        given = self._maker.forced(plan)
        self._end(one, request, [Generated(given, (), "stop") for _ in seeds])
        return []

    def _end(self, one: _Set, request: GroupRequest, rows: Sequence[Generated]) -> None:
        group = self._maker.grade(request, rows, self._seed, self._run)
        one.visit.end_set(one.number, one.plan, group)

    def _text_request(self, draw: TextDraw) -> GroupRequest:
        limit = draw.ask.max_tokens or self._max_tokens
        return GroupRequest(draw, draw.prompt_ids, (draw.seed(self._seed),), limit)

    def _accept(self, visit: TaskSession) -> None:
        found = visit.accept()
        levels = self._maker.figures.levels
        levels[found.label] = levels.get(found.label, 0) + 1
        self.accepted[visit.task.task_id] = found.group
        if found.beside:
            self.beside[visit.task.task_id] = found.beside


def sizes_of(tasks: Sequence[Task], group_size: int | Sequence[int]) -> dict[str, int]:
    """Return the group size of each task by its id."""
    each = [group_size] * len(tasks) if isinstance(group_size, int) else group_size
    return {t.task_id: n for t, n in zip(tasks, each, strict=True)}
