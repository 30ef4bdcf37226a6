"""APRIL: more groups are begun than a step needs; what is unfinished goes on in the next step.

A step ends when enough groups are whole. The tokens of unfinished rows are kept with the log-probs
that they were sampled with, and are the beginning of the next step's draws; whole groups beyond the
target are kept for it too. A resumed rollout is therefore of several weights, and its ratio is to
its own samplers. Rows go on from token ids, so nothing is tokenised again.

Does not know losses or tasks' order. Source: APRIL, released code RLsys-Foundation/APRIL, which
goes on from text and forgets surplus groups; a least window for resumed rows is own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.protocols import Generated
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.rollouts.curriculum import Draw
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.grading import Reply
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.strategy_options import PartialOptions
from tfgrpo.rollout import RolloutGroup, Task, group_id_of
from tfgrpo.runtime.canonical import derive_seed


@dataclass(slots=True)
class _Row:
    seed: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str = ""
    """`stop` or `length` once it is whole."""
    steps: list[int] = field(default_factory=list)
    """Training steps that sampled it."""


@dataclass(slots=True)
class _Group:
    task: Task
    seed: int
    rows: list[_Row]

    @property
    def is_whole(self) -> bool:
        return all(row.finish for row in self.rows)


@dataclass(slots=True)
class PartialStep:
    """What a step trains on."""

    groups: list[RolloutGroup]
    resumed: frozenset[str]
    """Ids of rollouts that earlier steps began."""
    figures: dict[str, float]


DrawTasks = Callable[[int, Iterable[str]], list[Draw]]
"""(number, ids of tasks that are taken) to further tasks with their sizes."""


class PartialRolls:
    """Groups in flight.

    Args:
        plain: generator, grader and sampling.
        options: how much is begun.
    """

    def __init__(self, plain: SingleTurnMaker, options: PartialOptions) -> None:
        self._plain = plain
        self._options = options
        self._flying: list[_Group] = []
        self.figures = RolloutFigures()

    def step(self, wanted: int, draw: DrawTasks, *, seed: int, step: int) -> PartialStep:
        """Return up to `wanted` whole groups, oldest first; draws are fixed by (seed of the step
        that began a group, task, sample, token)."""
        self.figures = RolloutFigures()
        started = time.monotonic()
        begun = max(0, math.ceil(self._options.over * wanted) - len(self._flying))
        taken = [g.task.task_id for g in self._flying]
        for one in draw(begun, taken) if begun else ():
            rows = [_Row(derive_seed(seed, one.task.task_id, i, 0)) for i in range(one.size)]
            self._flying.append(_Group(one.task, seed, rows))
        stored = self._stored()
        self._run(wanted, step)
        whole = [g for g in self._flying if g.is_whole][:wanted]
        self._flying = [g for g in self._flying if all(g is not w for w in whole)]
        groups, resumed = self._graded(whole, step)
        self.figures.seconds = time.monotonic() - started
        return PartialStep(
            groups,
            resumed,
            {
                "partial_tokens_before": float(stored),
                "partial_tokens_kept": float(self._stored()),
                "partial_groups_kept": float(len(self._flying)),
                "resumed_rollouts": float(len(resumed)),
            },
        )

    def _stored(self) -> int:
        return sum(len(row.ids) for g in self._flying for row in g.rows)

    def _run(self, wanted: int, step: int) -> None:
        call = _Call(self, wanted, step)
        going = [(g, row) for g in self._flying for row in g.rows if not row.finish]
        requests = [r for group, row in going for r in call.request(group, row)]
        if requests and (call.missing > 0 or self._options.window):
            generator: Any = self._plain.generator
            generator.run(requests, self._plain.sampling, call.on_done, call)

    def limit_of(self, prompt: Sequence[int]) -> int:
        """Return the most tokens of a rollout."""
        room = self._plain.prompter.context_tokens - len(prompt)
        return min(self._plain.sampling.max_tokens or room, room)

    def prompt_of(self, task: Task) -> tuple[int, ...]:
        """Return a task's prompt."""
        return self._plain.prompter.ids(task)

    def _graded(
        self, whole: Sequence[_Group], step: int
    ) -> tuple[list[RolloutGroup], frozenset[str]]:
        plain, groups = self._plain, list[RolloutGroup]()
        resumed: set[str] = set()
        with asyncio.Runner() as runner:
            run = runner.get_loop().run_until_complete
            for one in whole:
                prompt = self.prompt_of(one.task)
                group_id = group_id_of(
                    one.task, EMPTY_CONTEXT, plain.policy_id, seed=one.seed, scope="train-0"
                )
                replies = [
                    Reply(
                        one.task,
                        group_id,
                        i,
                        row.seed,
                        prompt,
                        Generated(
                            tuple(row.ids),
                            tuple(row.logps),
                            "stop" if row.finish == "stop" else "length",
                        ),
                    )
                    for i, row in enumerate(one.rows)
                ]
                rollouts = plain.grader.judged(replies, self.figures, run)
                self.figures.rollouts += len(rollouts)
                self.figures.prompt_tokens += len(prompt)
                resumed |= {
                    r.rollout_id
                    for r, row in zip(rollouts, one.rows, strict=True)
                    if any(s < step for s in row.steps)
                }
                metadata = {"prompt_tokens": len(prompt)}
                groups.append(
                    RolloutGroup(
                        group_id,
                        one.task,
                        tuple(rollouts),
                        policy_id=plain.policy_id,
                        metadata=metadata,
                    )
                )
        return groups, frozenset(resumed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "groups": [
                {
                    "task": g.task.to_dict(),
                    "seed": g.seed,
                    "rows": [[r.seed, r.ids, r.logps, r.finish, r.steps] for r in g.rows],
                }
                for g in self._flying
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._flying = [
            _Group(
                Task.from_dict(g["task"]),
                int(g["seed"]),
                [
                    _Row(int(seed), list(ids), list(logps), str(finish), list(steps))
                    for seed, ids, logps, finish, steps in g["rows"]
                ],
            )
            for g in state["groups"]
        ]


class _Call:
    """One step's draws; a `requests.Feed` that ends rows once enough groups are whole."""

    def __init__(self, rolls: PartialRolls, wanted: int, step: int) -> None:
        self._rolls = rolls
        self._step = step
        self.missing = wanted - sum(g.is_whole for g in rolls._flying)
        self._window = rolls._options.window

    def request(self, group: _Group, row: _Row) -> list[GroupRequest]:
        """Return what is asked for a row; nothing where it has no room left."""
        prompt = self._rolls.prompt_of(group.task)
        left = self._rolls.limit_of(prompt) - len(row.ids)
        if left < 1:
            row.finish = "length"
            return []
        ids = (*prompt, *row.ids)
        return [GroupRequest((group, row), ids, (row.seed,), left, len(row.ids))]

    def on_done(self, request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        """Take a row's tokens."""
        group, row = request.key
        made = rows[0]
        if made.token_ids:
            row.steps.append(self._step)
        row.ids += made.token_ids
        row.logps += made.logprobs
        row.finish = "" if made.finish == "partial" else made.finish
        self._rolls.figures.completion_tokens += len(made.token_ids)
        self.missing -= bool(row.finish) and group.is_whole
        return []

    def more(self, free: int) -> list[GroupRequest]:
        """Nothing comes in while others decode."""
        return []

    def is_cancelled(self, request: GroupRequest, made: int) -> bool:
        """True once enough groups are whole and a resumed row has had its window."""
        _, row = request.key
        is_owed = bool(row.steps) and made < self._window
        return self.missing <= 0 and not is_owed
