"""Verifiers of a whole group by pairs: a single-elimination tournament, or all pairs.

Each pair is asked in both orders, since judges favour a side; where the two verdicts disagree, or
one cannot be read, the better seed goes on in a tournament, and it is a tie elsewhere. Does not
know what is done with the result. Sources: ArenaRL (tournament-based relative ranking), abstract:
an approximation, since its bracket and its prompts are unknown; SPPO's win rates.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.execute.judging import refuse_group_verifier
from tfgrpo.messages import Message
from tfgrpo.prompts import load, render
from tfgrpo.protocols import LM, Limits, Request, Sampling, Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.canonical import derive_seed, digest
from tfgrpo.runtime.terminal import clip
from tfgrpo.runtime.thinking import without_thinking
from tfgrpo.verifiers.answer import UnitVerifier, verifier_name

__all__ = ["Arena", "PairJudge", "WinRate", "tournament"]

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


class PairJudge:
    """An LM that says which of two answers is better.

    Args:
        lm: what compares.
        rubric: what is good and what is bad, in words.
        sampling: temperature 0 unless given.
        limits: of each call.
        max_chars: longest task and answer shown; longer ones keep head and tail.
    """

    def __init__(
        self,
        lm: LM,
        rubric: str,
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        max_chars: int = 20_000,
    ) -> None:
        if not rubric.strip():
            raise ConfigError("the rubric is empty; say what a better answer is")
        self._lm = lm
        self._rubric = rubric.strip()
        self._sampling = sampling or Sampling(temperature=0.0)
        self._limits = limits or Limits()
        self._max_chars = max_chars

    @property
    def settings(self) -> list[Any]:
        """What fixes its verdicts."""
        return [self._lm.identity, self._rubric, self._sampling, self._max_chars]

    async def both_orders(
        self, task: Task, one: Rollout, two: Rollout
    ) -> tuple[bool | None, bool | None]:
        """Return whether the first one shown was better, asked with `one` first and with `two`."""
        first, second = await asyncio.gather(
            self._first_wins(task, one, two), self._first_wins(task, two, one)
        )
        return first, second

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


class Arena:
    """Rewards of a base verifier, and the part `round` that an answer reached in a tournament.

    Args:
        base: gives each answer its reward, which also seeds the bracket.
        lm: what compares two answers.
        rubric: what is good and what is bad, in words.
        options: of the `PairJudge`.
    """

    def __init__(self, base: Verifier, lm: LM, rubric: str, **options: Any) -> None:
        refuse_group_verifier(base, "the base of an arena")
        self._base = base
        self._judge = PairJudge(lm, rubric, **options)
        settings = [base.verifier_id, *self._judge.settings]
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
            both = await self._judge.both_orders(task, rollouts[i], rollouts[j])
            return both != (False, True)

        rounds = await tournament([s.reward for s in scores], better)
        return [
            Score(s.reward, s.feedback, {**s.parts, "round": float(n)})
            for s, n in zip(scores, rounds, strict=True)
        ]


class WinRate(UnitVerifier):
    """The share of its group that an answer beats, an LM comparing all pairs in both orders.

    A pair whose verdicts disagree, or of which one cannot be read, is a tie, as each answer is with
    itself: the rates of a group sum to half its size.

    Args:
        lm: what compares two answers, asked G (G − 1) times for a group of G.
        rubric: what is good and what is bad, in words.
        verdicts: keep what each pair gave, as part `beats_J` for the J-th answer of the group: 1,
            0, or one half for a tie; and as part `place` which answer of the group it is.
        options: of the `PairJudge`.
    """

    def __init__(self, lm: LM, rubric: str, *, verdicts: bool = False, **options: Any) -> None:
        self._judge = PairJudge(lm, rubric, **options)
        self._verdicts = verdicts
        fixed = {"of": self._judge.settings, "prompt": load("arena")}
        super().__init__("win_rate", fixed | ({"verdicts": True} if verdicts else {}))

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return one half: an answer alone ties with itself."""
        return (await self.score_group([rollout], task))[0]

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        """Return each answer's rate.

        Raises:
            ProviderError: a call failed.
        """
        pairs = list(itertools.combinations(range(len(rollouts)), 2))
        found = await asyncio.gather(
            *(self._judge.both_orders(task, rollouts[i], rollouts[j]) for i, j in pairs)
        )
        beats = [[0.5] * len(rollouts) for _ in rollouts]
        for (i, j), both in zip(pairs, found, strict=True):
            share = 1.0 if both == (True, False) else 0.0 if both == (False, True) else 0.5
            beats[i][j], beats[j][i] = share, 1 - share
        return [
            Score(sum(row) / len(row), parts=_verdicts_of(place, row) if self._verdicts else {})
            for place, row in enumerate(beats)
        ]


def _verdicts_of(place: int, row: Sequence[float]) -> dict[str, float]:
    return {"place": float(place)} | {f"beats_{j}": x for j, x in enumerate(row)}
