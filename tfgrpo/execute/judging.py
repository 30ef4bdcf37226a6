"""The one way from an attempt to its reward, for sampling, training, search and escalation.

Does not know where rollouts come from or go to. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeGuard

from tfgrpo.errors import (
    ConfigError,
    PolicyError,
    ProviderError,
    TfgrpoError,
    VerifierError,
    boundary,
)
from tfgrpo.execute.protocol import OnTruncated
from tfgrpo.protocols import GroupVerifier, Verifier
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.call_scope import CallScope, call_scope

__all__ = ["is_group_verifier", "judge", "judge_group", "refuse_group_verifier"]


def is_group_verifier(verifier: Verifier) -> TypeGuard[GroupVerifier]:
    """True where a rollout's score depends on its siblings: as `isinstance` says, in a fiftieth of
    the time, since it is asked for every rollout."""
    return callable(getattr(verifier, "score_group", None))


def refuse_group_verifier(verifier: Verifier, where: str) -> None:
    """Refuse a verifier of whole groups where each reply is judged alone: alone every answer is the
    majority, and beats half of its group.

    Args:
        where: what judges replies alone, for the message.

    Raises:
        ConfigError: it scores the rollouts of a group against each other.
    """
    if is_group_verifier(verifier):
        raise ConfigError(
            f"verifier {verifier.verifier_id!r} scores the rollouts of a group against each other, "
            f"but {where} judges each reply alone: name a verifier of single replies, such as "
            "exact, judge or function; `tfgrpo train` takes this one"
        )


async def judge(
    rollout: Rollout,
    task: Task,
    verifier: Verifier,
    *,
    timeout_s: float = 120.0,
    on_truncated: OnTruncated = "grade",
    raises_fatal: bool = True,
) -> Rollout:
    """Return the rollout with its score, or with the outcome that says why it has none.

    An attempt that has an outcome already comes back as it is. No score in time, a verifier that
    raises, and a judge's LM that fails for this one call are `verifier_failed`, never a reward of
    0 and never the end of a run.

    Args:
        timeout_s: wall time of this verification, seconds.
        on_truncated: `exclude` makes an attempt that hit its token limit `truncated`, ungraded.
        raises_fatal: False makes a provider's failure that no further call can mend an outcome
            too, so that it never ends a step of training.

    Raises:
        ProviderError: no call of the judge's LM can succeed (key, model, credit).
        ConfigError: the verifier judges whole groups.
        BudgetError, StoreError: the run cannot go on.
    """
    if rollout.outcome != "ungraded":
        return rollout
    if rollout.is_truncated and on_truncated == "exclude":
        return rollout.failed("truncated", "the reply hit its token limit")
    refuse_group_verifier(verifier, "sampling, search or escalation")

    async def alone() -> list[Score]:
        return [await verifier.score(rollout, task)]

    return (await _scored([rollout], verifier, alone, timeout_s, raises_fatal))[0]


async def judge_group(
    rollouts: Sequence[Rollout],
    task: Task,
    verifier: Verifier,
    *,
    timeout_s: float = 120.0,
    on_truncated: OnTruncated = "grade",
    raises_fatal: bool = True,
) -> list[Rollout]:
    """Return the rollouts of one task as `judge` would, in order.

    A `GroupVerifier` scores together those that have no outcome yet, within `timeout_s` for each of
    them; where it fails, all of them are `verifier_failed`.
    """

    async def one(rollout: Rollout) -> Rollout:
        return await judge(
            rollout,
            task,
            verifier,
            timeout_s=timeout_s,
            on_truncated=on_truncated,
            raises_fatal=raises_fatal,
        )

    if not is_group_verifier(verifier):
        return list(await asyncio.gather(*map(one, rollouts)))
    cut = on_truncated == "exclude"
    open_ones = [r for r in rollouts if r.outcome == "ungraded" and not (cut and r.is_truncated)]
    if not open_ones:
        return [await one(r) for r in rollouts]
    together: GroupVerifier = verifier

    async def scores() -> list[Score]:
        return await together.score_group(open_ones, task)

    limit = timeout_s * len(open_ones)
    made = await _scored(open_ones, verifier, scores, limit, raises_fatal)
    by_id = {r.rollout_id: r for r in made}
    return [by_id.get(r.rollout_id) or await one(r) for r in rollouts]


async def _scored(
    rollouts: Sequence[Rollout],
    verifier: Verifier,
    scores: Callable[[], Awaitable[list[Score]]],
    timeout_s: float,
    raises_fatal: bool,
) -> list[Rollout]:
    """The rollouts with their scores, or all as `verifier_failed` with the one cause."""
    first = rollouts[0]
    scope = CallScope("judge", first.task_id, first.rollout_id, first.sample_index)
    where = f"verifier {verifier.verifier_id!r} on rollout {first.rollout_id!r}"
    try:
        async with asyncio.timeout(timeout_s):
            with call_scope(scope), boundary(VerifierError, where):
                found = await scores()
                if len(found) != len(rollouts):
                    raise VerifierError(
                        f"{where}: {len(found)} scores for {len(rollouts)} rollouts"
                    )
                return [r.graded(score) for r, score in zip(rollouts, found, strict=True)]
    except TimeoutError:
        error = f"{where}: no score within {timeout_s:g} s"
    except VerifierError as exc:
        error = str(exc)
    except TfgrpoError as exc:
        is_fatal = raises_fatal and getattr(exc, "is_fatal", False)
        if is_fatal or not isinstance(exc, (ProviderError, PolicyError)):
            raise
        error = f"{where}: {exc}"
    return [r.failed("verifier_failed", error) for r in rollouts]
