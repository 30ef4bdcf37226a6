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
from dataclasses import dataclass, field, replace
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.errors import ConfigError, PolicyError, boundary
from tfgrpo.messages import Message
from tfgrpo.policies.attempt import cause_of
from tfgrpo.protocols import Generated, Generator, GroupVerifier, HintScheduler, Sampling, Verifier
from tfgrpo.rl.rollouts.single_turn import Prompter, RolloutFigures, sizes_of
from tfgrpo.rl.rollouts.turn_tools import STOP, TurnText
from tfgrpo.rl.rollouts.turns import TurnEnvironment, TurnLimits, TurnModel, play
from tfgrpo.rollout import Rollout, RolloutGroup, Task, group_id_of
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.user_code import CallTimeout, call_foreign
from tfgrpo.sampling import OnTruncated, judge_group

MakeEnvironment = Callable[[Task], TurnEnvironment]


@dataclass(slots=True)
class _Draws:
    """Turns that live rollouts wait for; drawn when nobody else can go on."""

    generator: Generator
    sampling: Sampling
    live: int
    waiting: list[tuple[Sequence[int], int, asyncio.Future[Generated]]] = field(
        default_factory=list
    )

    async def sample(
        self, ids: Sequence[int], seed: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        """Return the next turn of one rollout."""
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(ids), seed, future))
        self.draw_if_all_wait()
        made = await future
        return made.token_ids, made.logprobs, made.finish == "length"

    def ended(self) -> None:
        """One rollout asks for nothing more."""
        self.live -= 1
        self.draw_if_all_wait()

    def draw_if_all_wait(self) -> None:
        """Draw all waiting turns; errors go to those who wait."""
        self.waiting = [w for w in self.waiting if not w[2].done()]  # cancelled ones are done
        if not self.waiting or len(self.waiting) < self.live:
            return
        batch, self.waiting = self.waiting, []
        try:
            made = self.generator.generate(
                [ids for ids, _, _ in batch], 1, self.sampling, [[seed] for _, seed, _ in batch]
            )
        except Exception as exc:
            for _, _, future in batch:
                future.set_exception(exc)
            return
        for (_, _, future), rows in zip(batch, made, strict=True):
            future.set_result(rows[0])


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
        self._prompter = prompter
        self._judging = judging
        self._sampling = sampling
        self._turns = turns
        self._policy_id = policy_id
        self.figures = RolloutFigures()

    def make(
        self,
        tasks: Sequence[Task],
        group_size: int | Sequence[int],
        *,
        seed: int,
        hints: HintScheduler | None = None,
        sampling: Sampling | None = None,
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; draws are fixed by (seed, task, sample, turn)."""
        if hints is not None:
            raise ConfigError(
                "[hints] with [multi_turn] is not supported: leave one of the sections out"
            )
        self.figures = RolloutFigures()
        started = time.monotonic()
        if sampling is not None:  # the turns' own stop strings stay
            sampling = replace(sampling, stop=self._sampling.stop)
        sizes = sizes_of(tasks, group_size)
        draws = _Draws(self._generator, sampling or self._sampling, sum(sizes.values()))
        with asyncio.Runner() as runner:
            groups = runner.run(self._groups(tasks, sizes, seed, draws))
        self.figures.seconds = time.monotonic() - started
        return groups

    async def _groups(
        self, tasks: Sequence[Task], sizes: Mapping[str, int], seed: int, draws: _Draws
    ) -> list[RolloutGroup]:
        async def group(task: Task) -> RolloutGroup:
            group_id = group_id_of(task, EMPTY_CONTEXT, self._policy_id, seed=seed, scope="play")
            prompt = self._prompter.ids(task)
            played = await asyncio.gather(
                *(
                    self._one(task, prompt, f"{group_id}-{i}", i, seed, draws)
                    for i in range(sizes[task.task_id])
                )
            )
            if isinstance(self._judging.verifier, GroupVerifier):
                played = await self._judged(played, task)
            return RolloutGroup(
                group_id, task, tuple(played), policy_id=self._policy_id, metadata={"play": True}
            )

        return list(await asyncio.gather(*(group(t) for t in tasks)))

    async def _one(
        self,
        task: Task,
        prompt: tuple[int, ...],
        rollout_id: str,
        i: int,
        seed: int,
        draws: _Draws,
    ) -> Rollout:
        try:
            with boundary(PolicyError, "multi_turn.environment"):
                environment = _Guarded(
                    self._turns.make_environment(task), self._turns.act_timeout_s
                )
            made = await play(
                task,
                prompt,
                environment,
                TurnModel(draws.sample, self._turns.text, self._text, self._turns.limits),
                seed=derive_seed(seed, task.task_id, i),
                rollout_id=rollout_id,
            )
        except (PolicyError, CallTimeout) as exc:
            return Rollout(rollout_id, task.task_id, sample_index=i).failed(
                "policy_failed", cause_of(exc)
            )
        finally:
            draws.ended()
        made = replace(made, sample_index=i)
        self.figures.rollouts += 1
        self.figures.prompt_tokens += len(prompt)
        self.figures.completion_tokens += sum(len(s.token_ids or ()) for s in made.steps)
        if isinstance(self._judging.verifier, GroupVerifier):
            return made  # judged beside its siblings
        return (await self._judged([made], task))[0]

    async def _judged(self, played: Sequence[Rollout], task: Task) -> list[Rollout]:
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
        return self._prompter.text(ids).removesuffix(STOP)
