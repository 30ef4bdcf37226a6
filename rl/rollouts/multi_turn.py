"""Groups of rollouts of several turns: tools or an environment, token in and token out.

All rollouts of a step play at once. Those that wait for the model are drawn together, in one call
of the generator, as soon as none can go on without it, so tools run side by side and the draws
don't depend on how fast they are.

Does not know losses or what tools do. Source: own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError, PolicyError, boundary
from tfgrpo.execute.judging import is_group_verifier
from tfgrpo.hint_plan import BARE, Ask, HintPlan, Write
from tfgrpo.messages import Message
from tfgrpo.policies.attempt import cause_of
from tfgrpo.protocols import Generator, HintScheduler, Sampling, Verifier
from tfgrpo.rl.hint_notes import note_of
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import sizes_of
from tfgrpo.rl.rollouts.task_session import Accepted, TaskSession, TextDraw, begin_text
from tfgrpo.rl.rollouts.turn_draws import Round, TurnDraws
from tfgrpo.rl.rollouts.turn_tools import STOP, TurnText
from tfgrpo.rl.rollouts.turns import (
    Replayed,
    TurnEnvironment,
    TurnLimits,
    TurnModel,
    play,
)
from tfgrpo.rollout import Rollout, RolloutGroup, Task, group_id_of
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.user_code import CallTimeout, call_foreign
from tfgrpo.sampling import OnTruncated, judge_group

MakeEnvironment = Callable[[Task], TurnEnvironment]


class _Guarded:
    """A user's environment whose errors and delays become ours."""

    def __init__(self, environment: TurnEnvironment, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s

    async def act(self, action: Message) -> Sequence[Message] | None:
        answer: Sequence[Message] | None = await call_foreign(
            self._environment.act,
            action,
            error=PolicyError,
            where="multi_turn.environment",
            timeout_s=self._timeout_s,
        )
        return answer

    def facts(self) -> Mapping[str, Any]:
        made = getattr(self._environment, "facts", None)
        with boundary(PolicyError, "multi_turn.environment, facts"):
            return dict(made()) if made is not None else {}


@dataclass(frozen=True, slots=True)
class TurnSetup:
    """What answers the model's turns, and how long a rollout may become."""

    make_environment: MakeEnvironment
    """Called with the task for each rollout."""
    text: TurnText
    """Observation turns to token ids."""
    limits: TurnLimits
    """Turns and tokens of a rollout."""
    act_timeout_s: float = 60.0
    """Wall time of one answer of the environment."""
    recalls: bool = False
    """Answers do not depend on earlier ones, so turns that are taken again need not be answered
    again."""


@dataclass(frozen=True, slots=True)
class Judging:
    """What a finished rollout is judged by."""

    verifier: Verifier
    on_truncated: OnTruncated = "grade"
    """`grade` or `exclude`."""
    timeout_s: float = 120.0
    """Wall time of one verification."""


class MultiTurnMaker:
    """Makes one group per task of rollouts of several turns; a `step_groups.RolloutMaker`.

    Args:
        generator: what makes tokens.
        prompter: tasks to token ids and back.
        judging: what judges a finished rollout.
        sampling: of each turn; `max_tokens` set.
        turns: what answers a turn.
        policy_id: names the weights in groups' ids.
    """

    def __init__(
        self,
        generator: Generator,
        prompter: Prompter,
        judging: Judging,
        sampling: Sampling,
        turns: TurnSetup,
        *,
        policy_id: str,
    ) -> None:
        self._generator = generator
        self.prompter = prompter
        self._judging = judging
        self._sampling = sampling
        self._turns = turns
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
        hints: HintScheduler | None = None,
        sampling: Sampling | None = None,
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; draws are fixed by (seed, task, sample, turn, plan's
        place in the visit)."""
        self.figures = RolloutFigures()
        started = time.monotonic()
        if sampling is not None:  # the turns' own stop strings stay
            sampling = replace(sampling, stop=self._sampling.stop)
        sizes = sizes_of(tasks, group_size)
        draws = TurnDraws(self._generator, sampling or self._sampling, len(tasks))

        async def visits() -> list[Accepted]:
            each = (TaskSession(t, sizes[t.task_id], hints) for t in tasks)
            return list(await asyncio.gather(*(self._visit(v, seed, draws) for v in each)))

        with asyncio.Runner() as runner:
            found = runner.run(visits())
        self.figures.seconds = time.monotonic() - started
        self.beside = {x.group.task.task_id: x.beside for x in found if x.beside}
        return [x.group for x in found]

    async def _visit(self, visit: TaskSession, seed: int, draws: TurnDraws) -> Accepted:
        """Roll what the scheduler asks for, round by round."""
        keeps = visit.hints is not None
        asks: Sequence[Ask] = visit.first()
        try:
            while asks:
                jobs = self._jobs(visit, asks) or ([] if visit.sets else self._jobs(visit, [BARE]))
                if not jobs:
                    break
                current = Round(draws, sum(job.n for job in jobs), keeps=keeps)
                await asyncio.gather(*(job.run(seed, draws, current) for job in jobs))
                asks = visit.following()
        finally:
            if keeps:
                draws.ended()
        found = visit.accept()
        if keeps:
            levels = self.figures.levels
            levels[found.label] = levels.get(found.label, 0) + 1
        return found

    def _jobs(self, visit: TaskSession, asks: Sequence[Ask]) -> list[_SetJob | _TextJob]:
        jobs: list[_SetJob | _TextJob] = []
        for ask in asks:
            if isinstance(ask, Write):
                text = begin_text(visit, ask, self.prompter)
                jobs += [] if text is None else [_TextJob(self, text)]
            else:
                job = self._set_job(visit, ask)
                jobs += [] if job is None else [job]
        return jobs

    def _set_job(self, visit: TaskSession, plan: HintPlan) -> _SetJob | None:
        """Return how a plan is rolled, or None where its prompt fills the model's context."""
        if plan.forces_prefix or plan.is_given:
            raise ConfigError(
                f"the hint plan {plan.label!r} forces the start of a reply, which rollouts of "
                "several turns cannot be given: leave out [multi_turn], or take a method whose "
                "help stands in the prompt"
            )
        part, task = plan.part(), visit.task
        context = EMPTY_CONTEXT if part is None else EMPTY_CONTEXT.with_parts(part)
        bare = self.prompter.ids(task)
        prompt = bare if part is None else self.prompter.encode(task, context)
        room = min(self.prompter.context_tokens, self._turns.limits.max_tokens)
        if part is not None and len(prompt) >= room:
            self.figures.hints_too_long += 1
            return None
        note = note_of(plan, n_prefix=0, bare_prompt=bare)
        return _SetJob(self, visit, visit.begin_set(), plan, context, prompt, note)

    async def play_one(
        self, job: _SetJob, i: int, seed: int, draws: TurnDraws, current: Round
    ) -> Rollout:
        """Play one rollout of a set and judge it, unless its siblings are needed for that."""
        task, rollout_id = job.visit.task, f"{job.group_id(self.policy_id, seed)}-{i}"
        place = (i, job.number) if job.number else (i,)
        try:
            with boundary(PolicyError, "multi_turn.environment"):
                environment = _Guarded(
                    self._turns.make_environment(task), self._turns.act_timeout_s
                )
            made = await play(
                task,
                job.prompt,
                environment,
                TurnModel(draws.sample, self._turns.text, self._text, self._turns.limits),
                seed=derive_seed(seed, task.task_id, *place),
                rollout_id=rollout_id,
                replay=Replayed(job.plan.replay, self._turns.recalls),
            )
        except (PolicyError, CallTimeout) as exc:
            return Rollout(rollout_id, task.task_id, sample_index=i).failed(
                "policy_failed", cause_of(exc)
            )
        finally:
            current.ended()
        note: dict[str, Any] = {"hint": job.note} if job.note else {}
        if job.plan.replay and self._turns.recalls:
            note["recalled_turns"] = len(job.plan.replay)
        made = replace(made, sample_index=i, metadata={**made.metadata, **note})
        figures, drawn = self.figures, made.steps[len(job.plan.replay) :]
        figures.rollouts += 1
        figures.hinted_rollouts += not job.plan.is_bare
        figures.prompt_tokens += len(job.prompt)
        figures.completion_tokens += sum(len(s.token_ids or ()) for s in drawn)
        if self.judges_groups:
            return made  # judged beside its siblings
        return (await self.judged([made], task))[0]

    @property
    def judges_groups(self) -> bool:
        """True where a rollout's score depends on its siblings."""
        return is_group_verifier(self._judging.verifier)

    async def judged(self, played: Sequence[Rollout], task: Task) -> list[Rollout]:
        started = time.monotonic()
        judged = await judge_group(
            played,
            task,
            self._judging.verifier,
            timeout_s=self._judging.timeout_s,
            on_truncated=self._judging.on_truncated,
            raises_fatal=False,
        )
        self.figures.verify_seconds += time.monotonic() - started
        self.figures.dropped_rollouts += sum(r.outcome == "truncated" for r in judged)
        return judged

    def _text(self, ids: Sequence[int]) -> str:
        """The turn's text; a made-up observation at its end is no part of it."""
        return self.prompter.text(ids).removesuffix(STOP)


@dataclass(frozen=True, slots=True)
class _SetJob:
    """The rollouts of one plan in a visit."""

    maker: MultiTurnMaker
    visit: TaskSession
    number: int
    """Place in the visit; with it every plan has draws of its own."""
    plan: HintPlan
    context: Context
    prompt: tuple[int, ...]
    note: dict[str, Any]
    """The rollouts' `hint` metadata."""

    @property
    def n(self) -> int:
        """Rollouts of the set."""
        return self.plan.n or self.visit.size

    def group_id(self, policy_id: str, seed: int) -> str:
        """Return the id of its group."""
        scope = f"play-{self.number}" if self.number else "play"
        return group_id_of(self.visit.task, self.context, policy_id, seed=seed, scope=scope)

    async def run(self, seed: int, draws: TurnDraws, current: Round) -> None:
        """Play and judge the set, and give it to its visit."""
        maker, task = self.maker, self.visit.task
        played = await asyncio.gather(
            *(maker.play_one(self, i, seed, draws, current) for i in range(self.n))
        )
        if maker.judges_groups:
            played = await maker.judged(played, task)
        group = RolloutGroup(
            self.group_id(maker.policy_id, seed),
            task,
            tuple(played),
            self.context,
            policy_id=maker.policy_id,
            metadata={"play": True},
        )
        self.visit.end_set(self.number, self.plan, group)


@dataclass(frozen=True, slots=True)
class _TextJob:
    """A text that the policy writes."""

    maker: MultiTurnMaker
    text: TextDraw
    n = 1

    async def run(self, seed: int, draws: TurnDraws, current: Round) -> None:
        """Draw it until it can be read or the tries are used up."""
        text, is_read = self.text, False
        try:
            while not is_read:
                row = await draws.text(text.prompt_ids, text.seed(seed), text.ask.max_tokens)
                is_read = text.read(row, self.maker.prompter, self.maker.figures)
        finally:
            current.ended()
