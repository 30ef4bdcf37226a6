"""Makes groups by a strategy: many of them at once, from one queue of draws.

Does not know any strategy. Source: own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.protocols import Generated
from tfgrpo.rl.generation.requests import GroupRequest
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.grading import Reply, RunAsync
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.strategies.growth import Ask, Draw, Growth, Leaf, Look, Root
from tfgrpo.rl.strategies.look import look_at
from tfgrpo.rollout import RolloutGroup, Task, group_id_of


@dataclass(frozen=True, slots=True)
class Sight:
    """How distributions are looked at."""

    decoder: Decoder
    """The weights that sample."""
    temperature: float
    eos_ids: tuple[int, ...]
    max_tokens: int
    """Input tokens of one forward."""
    chunk: int
    """Tokens whose logits exist at once."""


@dataclass(slots=True)
class _Growing:
    """A group in the making."""

    root: Root
    asks: Generator[Ask, Any, list[Leaf]]
    answers: list[Generated | None] = field(default_factory=list)
    """Of the present draw, None where a row still decodes."""
    leaves: list[Leaf] | None = None


class GrowingMaker:
    """Makes one group per task as a strategy says.

    Args:
        plain: generator, grader and sampling.
        growth: the strategy.
        sight: how it looks at distributions.
    """

    def __init__(self, plain: SingleTurnMaker, growth: Growth, sight: Sight) -> None:
        self._plain = plain
        self._growth = growth
        self._sight = sight
        self.figures = RolloutFigures()

    def make(
        self, tasks: Sequence[Task], group_size: Sequence[int], *, seed: int, step: int
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; draws are fixed by (seed, task, row, token)."""
        self.figures = RolloutFigures()
        started = time.monotonic()
        plain = self._plain
        with asyncio.Runner() as runner:
            run: RunAsync = runner.get_loop().run_until_complete
            call = _Call(self, run)
            requests: list[GroupRequest] = []
            growing = []
            for task, size in zip(tasks, group_size, strict=True):
                prompt = plain.prompter.ids(task)
                room = plain.prompter.context_tokens - len(prompt)
                limit = min(plain.sampling.max_tokens or room, room)
                root = Root(task, prompt, size, limit, seed, step, self._sight.eos_ids)
                one = _Growing(root, self._growth.grow(root))
                growing.append(one)
                requests += call.go_on(one, None)
            if requests:
                plain.generator.run(requests, plain.sampling, call.on_done)
            groups = [self._group(one, seed, run) for one in growing]
        self.figures.seconds = time.monotonic() - started
        return groups

    def rewards(
        self, root: Root, rows: Sequence[tuple[int, ...]], run: RunAsync
    ) -> list[float | None]:
        """Judge replies that are not trained."""
        if not rows:
            return []
        replies = [
            Reply(root.task, "value", i, 0, root.prompt_ids, Generated(ids, (), "stop"))
            for i, ids in enumerate(rows)
        ]
        self.figures.value_rollouts += len(rows)
        return [r.reward for r in self._plain.grader.judged(replies, self.figures, run)]

    def look(self, root: Root, ask: Look) -> list[Any]:
        """Look at distributions."""
        s = self._sight
        return look_at(
            s.decoder,
            root.prompt_ids,
            ask,
            temperature=s.temperature,
            max_tokens=s.max_tokens,
            chunk=s.chunk,
        )

    def _group(self, one: _Growing, seed: int, run: RunAsync) -> RolloutGroup:
        root, leaves = one.root, one.leaves
        assert leaves
        policy_id = self._plain.policy_id
        group_id = group_id_of(root.task, EMPTY_CONTEXT, policy_id, seed=seed, scope="grown")
        replies = [
            Reply(
                root.task,
                group_id,
                i,
                leaf.seed,
                root.prompt_ids,
                Generated(leaf.ids, leaf.logps, "length" if leaf.is_cut else "stop"),
                metadata=leaf.metadata,
            )
            for i, leaf in enumerate(leaves)
        ]
        graded = self._plain.grader.judged(replies, self.figures, run)
        self.figures.rollouts += len(graded)
        self.figures.prompt_tokens += len(root.prompt_ids)
        metadata = {"prompt_tokens": len(root.prompt_ids)}
        return RolloutGroup(
            group_id, root.task, tuple(graded), policy_id=policy_id, metadata=metadata
        )


class _Call:
    """One call of `GrowingMaker.make`."""

    def __init__(self, maker: GrowingMaker, run: RunAsync) -> None:
        self._maker = maker
        self._run = run

    def go_on(self, one: _Growing, answer: Any) -> list[GroupRequest]:
        """Send an answer and return the requests of the next draw; empty where the group is made.

        What needs no draw is answered at once.
        """
        while True:
            try:
                ask = one.asks.send(answer)
            except StopIteration as ended:
                one.leaves = ended.value
                return []
            if isinstance(ask, Draw):
                if ask.pieces:
                    return self._requests(one, ask)
                answer = []
            elif isinstance(ask, Look):
                answer = self._maker.look(one.root, ask)
            else:
                answer = self._maker.rewards(one.root, ask.rows, self._run)

    def on_done(self, request: GroupRequest, rows: list[Generated]) -> list[GroupRequest]:
        """Take the tokens of a row; when the draw is whole, go on."""
        one, place = request.key
        one.answers[place] = rows[0]
        self._maker.figures.completion_tokens += len(rows[0].token_ids)
        if any(row is None for row in one.answers):
            return []
        return self.go_on(one, one.answers)

    def _requests(self, one: _Growing, ask: Draw) -> list[GroupRequest]:
        one.answers = [None] * len(ask.pieces)
        requests = []
        for place, piece in enumerate(ask.pieces):
            if piece.limit < 1:  # a full row: nothing is left to draw
                one.answers[place] = Generated((), (), "length")
                continue
            ids = one.root.prompt_ids + piece.ids
            start = len(piece.ids)
            requests.append(GroupRequest((one, place), ids, (piece.seed,), piece.limit, start))
        return requests or self.go_on(one, one.answers)
