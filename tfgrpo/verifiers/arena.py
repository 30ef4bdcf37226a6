"""Verifier of a whole group: a single-elimination tournament of answers, an LM comparing pairs.

Each pair is asked in both orders, since judges favour a side; where the two verdicts disagree, or
one cannot be read, the better seed goes on. Does not know what is done with the rounds. Source:
ArenaRL (tournament-based relative ranking), abstract: an approximation, since its bracket and its
prompts are unknown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.prompts import load, render
from tfgrpo.protocols import LM, Limits, Request, Sampling, Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.canonical import derive_seed, digest
from tfgrpo.runtime.terminal import clip
from tfgrpo.runtime.thinking import without_thinking
from tfgrpo.verifiers.answer import verifier_name

__all__ = ["Arena", "tournament"]

_VERDICT = re.compile(r"better\s*[:=]\s*\**([AB])\b", re.IGNORECASE)


async def tournament(
    strength: Sequence[float], better: Callable[[int, int], Awaitable[bool]]
) -> list[int]:
    """Return the round that each of G entrants reached in a seeded single elimination.

    Args:
        strength: a quick score of each, for seeding: the strongest meet last, and a field that is
            no power of two gives its first rounds' byes to them.
        better: (i, j), i the better seed, to whether i beats j; called exactly G − 1 times, the
            matches of a round side by side.
    """
    size = len(strength)
    seeds = sorted(range(size), key=lambda i: -strength[i])
    rank = {entrant: place for place, entrant in enumerate(seeds)}
    order = [0]
    while len(order) < size:  # the usual bracket: seed k meets seed (field − 1 − k)
        order = [s for k in order for s in (k, 2 * len(order) - 1 - k)]
    field = [seeds[k] if k < size else None for k in order]
    reached = [0] * size

    async def match(one: int | None, two: int | None) -> int | None:
        if one is None or two is None:
            winner = two if one is None else one
        else:
            high, low = sorted((one, two), key=rank.__getitem__)
            winner = high if await better(high, low) else low
        if winner is not None:
            reached[winner] += 1
        return winner

    while len(field) > 1:
        pairs = zip(field[::2], field[1::2], strict=True)
        field = list(await asyncio.gather(*(match(a, b) for a, b in pairs)))
    return reached


class Arena:
    """Rewards of a base verifier, and the part `round` that an answer reached in a tournament.

    Args:
        base: gives each answer its reward, which also seeds the bracket.
        lm: what compares two answers.
        rubric: what is good and what is bad, in words.
        sampling: temperature 0 unless given.
        limits: of each call.
        max_chars: longest task and answer shown; longer ones keep head and tail.
    """

    def __init__(
        self,
        base: Verifier,
        lm: LM,
        rubric: str,
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        max_chars: int = 20_000,
    ) -> None:
        if not rubric.strip():
            raise ConfigError("Arena: the rubric is empty; say what a better answer is")
        self._base = base
        self._lm = lm
        self._rubric = rubric.strip()
        self._sampling = sampling or Sampling(temperature=0.0)
        self._limits = limits or Limits()
        self._max_chars = max_chars
        settings = [base.verifier_id, lm.identity, self._rubric, self._sampling, max_chars]
        self._verifier_id = verifier_name("arena", {"of": settings, "prompt": load("arena")})

    @property
    def verifier_id(self) -> str:
        """Fixed by the base, the LM's identity, the rubric, the sampling and the prompt."""
        return self._verifier_id

    @property
    def reward_range(self) -> tuple[float, float]:
        """The base's."""
        return self._base.reward_range

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` where the base does."""
        self._base.check_task(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return the base's score, in round 0 of a tournament of one."""
        return (await self.score_group([rollout], task))[0]

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        """Return the base's scores with the part `round`: 2 (G − 1) calls of the LM.

        Raises:
            VerifierError: the base cannot judge one of them.
            ProviderError: a call failed.
        """
        scores = list(await asyncio.gather(*(self._base.score(r, task) for r in rollouts)))

        async def better(i: int, j: int) -> bool:
            one, two = rollouts[i], rollouts[j]
            both = await asyncio.gather(
                self._first_wins(task, one, two), self._first_wins(task, two, one)
            )
            return not (both[0] is False and both[1] is True)

        rounds = await tournament([s.reward for s in scores], better)
        return [
            Score(s.reward, s.feedback, {**s.parts, "round": float(n)})
            for s, n in zip(scores, rounds, strict=True)
        ]

    async def _first_wins(self, task: Task, one: Rollout, two: Rollout) -> bool | None:
        """The judge's verdict, or None where it cannot be read."""
        shown = [clip(t, self._max_chars) for t in (task.text, one.answer, two.answer)]
        token = digest([self._rubric, *shown], 16)  # a text cannot hold the digest of itself
        prompt = render(
            "arena",
            rubric=self._rubric,
            task=shown[0],
            first=shown[1],
            second=shown[2],
            open_mark=f"<<<{token}>>>",
            close_mark=f"<<<end {token}>>>",
        )
        request = Request((Message("user", prompt),), sampling=self._sampling, limits=self._limits)
        seed = derive_seed("arena", one.rollout_id, two.rollout_id)
        replies = await self._lm.complete(request, 1, [seed])
        found = _VERDICT.findall(without_thinking(replies[0].text)) if replies else []
        return found[-1].upper() == "A" if found else None
