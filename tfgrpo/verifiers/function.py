"""Verifiers made of other parts: a user's function, and a weighted mean of verifiers.

A user's function is foreign code: it runs under a time limit, synchronous ones in a thread, and
what it returns becomes a reward only where that loses nothing. Whatever else it does is a
`VerifierError`, never a reward of 0.

Does not know what is judged. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError, VerifierError, boundary
from tfgrpo.execute.judging import refuse_group_verifier
from tfgrpo.policies.attempt import all_or_none
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.user_code import CallTimeout, call_foreign
from tfgrpo.verifiers.answer import verifier_name

__all__ = ["FunctionVerifier", "Weighted", "as_score"]


def as_score(value: Any, where: str) -> Score:
    """Return what a function said as a score.

    Allowed: `Score`; a bool (1 or 0), int or float; a scalar of numpy or torch; a pair of one of
    these and a feedback text.

    Raises:
        VerifierError: anything else, a number that is not finite, or one that a float cannot hold.

    >>> as_score(True, "f").reward, as_score((0.5, "half"), "f").feedback
    (1.0, 'half')
    """
    feedback = ""
    if isinstance(value, Score):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        value, feedback = value
    # Scalars of array libraries have no axes and an `item`, which gives the Python number.
    plain = (
        value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    )
    if not isinstance(plain, (bool, int, float)):
        raise VerifierError(
            f"{where} returned {type(value).__name__} {value!r:.80}; "
            "allowed are a number, a bool, a Score, and (number, feedback)"
        )
    try:
        reward = float(plain)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise VerifierError(f"{where} returned {value!r:.80}, which is not a finite number")
    if reward != plain:
        raise VerifierError(f"{where} returned {value!r:.80}, which no float can hold exactly")
    return Score(reward, feedback)


class FunctionVerifier:
    """Any function of the user's, called as `fn(rollout, task)`, synchronous or async.

    Args:
        fn: returns a number, a bool, a `Score`, or (number, feedback).
        verifier_id: a name that changes whenever the function could judge otherwise.
        timeout_s: limit of one call, seconds. A synchronous function that runs on after it is left
            alone in its thread.
        reward_range: smallest and largest reward; one outside is an error.
        check: called as `check(task)` before anything is spent; what it raises is a `ConfigError`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        verifier_id: str,
        timeout_s: float = 60.0,
        reward_range: tuple[float, float] = (-math.inf, math.inf),
        check: Callable[[Task], None] | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"FunctionVerifier: {fn!r:.80} is not a function")
        if not verifier_id:
            raise ConfigError("FunctionVerifier: verifier_id is empty; give the function a name")
        if not timeout_s > 0:
            raise ConfigError(f"FunctionVerifier: timeout_s is {timeout_s}; it must be above 0")
        self._fn = fn
        self._verifier_id = verifier_id
        self._timeout_s = timeout_s
        self._range = reward_range
        self._check = check

    @property
    def verifier_id(self) -> str:
        """The name given at construction."""
        return self._verifier_id

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range given at construction."""
        return self._range

    def check_task(self, task: Task) -> None:
        """Call the user's check, where there is one."""
        if self._check is not None:
            with boundary(ConfigError, f"task {task.task_id!r}, verifier {self._verifier_id!r}"):
                self._check(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Return what the function says; raises `VerifierError` for everything but a score."""
        where = f"verifier {self._verifier_id!r}"
        try:
            value = await call_foreign(
                self._fn,
                rollout,
                task,
                error=VerifierError,
                where=where,
                timeout_s=self._timeout_s,
            )
        except CallTimeout as exc:
            raise VerifierError(str(exc)) from exc
        with boundary(VerifierError, where):
            made = as_score(value, where)
        low, high = self._range
        if not low <= made.reward <= high:
            raise VerifierError(
                f"{where} returned {made.reward}, outside its range {low} to {high}"
            )
        return made


class Weighted:
    """The weighted mean of several verifiers; one that fails fails the whole.

    Args:
        parts: name to (verifier, weight); weights are above 0 and need not sum to 1.
        gate: parts that are asked first; the others are asked only where these are full, and count
            as their lowest elsewhere. A judge behind a rule costs nothing for malformed replies.
    """

    def __init__(
        self, parts: Mapping[str, tuple[Verifier, float]], gate: Sequence[str] = ()
    ) -> None:
        if not parts:
            raise ConfigError("Weighted: no parts; give at least one verifier")
        for name, (part, weight) in parts.items():
            refuse_group_verifier(part, f"Weighted (part {name!r})")
            if not 0 < weight < math.inf:
                raise ConfigError(f"Weighted: weight of {name!r} is {weight}; it must be above 0")
        unknown = sorted(set(gate) - set(parts))
        if unknown or (gate and not set(parts) - set(gate)):
            told = f"{unknown[0]!r} is none of them" if unknown else "no part is left behind it"
            raise ConfigError(f"Weighted: gate names some of the parts {sorted(parts)}; {told}")
        for name, (part, _) in parts.items() if gate else ():
            if math.isinf(part.reward_range[1 if name in gate else 0]):
                end = "largest" if name in gate else "smallest"
                raise ConfigError(
                    f"Weighted: with a gate, part {name!r} needs a {end} reward, and its range is "
                    f"{part.reward_range}; give its verifier a reward_range"
                )
        self._parts = dict(parts)
        self._gate = tuple(dict.fromkeys(gate))
        self._total = math.fsum(w for _, w in self._parts.values())
        settings: dict[str, Any] = {n: [v.verifier_id, w] for n, (v, w) in self._parts.items()}
        if self._gate:
            settings = {"parts": settings, "gate": list(self._gate)}
        self._verifier_id = verifier_name("weighted", settings)

    @property
    def verifier_id(self) -> str:
        """Fixed by the parts' ids and weights."""
        return self._verifier_id

    @property
    def reward_range(self) -> tuple[float, float]:
        """The weighted mean of the parts' bounds."""
        lows = [v.reward_range[0] * w for v, w in self._parts.values()]
        highs = [v.reward_range[1] * w for v, w in self._parts.values()]
        return sum(lows) / self._total, sum(highs) / self._total

    def check_task(self, task: Task) -> None:
        """Check the task with every part."""
        for verifier, _ in self._parts.values():
            verifier.check_task(task)

    async def score(self, rollout: Rollout, task: Task) -> Score:
        """Ask all parts at once, or the gate's first; `parts` of the score holds each one's own
        reward."""
        named = await self._asked(self._gate or list(self._parts), rollout, task)
        rest = [n for n in self._parts if n not in named]
        if all(s.reward >= self._parts[n][0].reward_range[1] for n, s in named.items()):
            named |= await self._asked(rest, rollout, task)
        else:
            named |= {n: Score(self._parts[n][0].reward_range[0]) for n in rest}
        named = {n: named[n] for n in self._parts}
        reward = math.fsum(s.reward * self._parts[n][1] for n, s in named.items()) / self._total
        feedback = "\n".join(f"{n}: {s.feedback}" for n, s in named.items() if s.feedback)
        return Score(reward, feedback, {n: s.reward for n, s in named.items()})

    async def _asked(self, names: Sequence[str], rollout: Rollout, task: Task) -> dict[str, Score]:
        scores = await all_or_none(self._parts[n][0].score(rollout, task) for n in names)
        return dict(zip(names, scores, strict=True))
