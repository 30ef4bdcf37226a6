"""What could come next: the expander's interface, wrappers, and recorded answers.

An expander draws k samples of the next action and returns the distinct ones with their counts.
Wrappers add one thing each: schema checks, equality by meaning, recording and replay.

Does not know costs, algorithms or environments. Source: own; one batch of k samples an expansion
as in ToolChain*.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Usage
from tfgrpo.search.node import Node, Proposal, action_key
from tfgrpo.search.scorers.scorer import SearchContext

__all__ = [
    "ArmExpander",
    "CheckedExpander",
    "EquivalentExpander",
    "Expander",
    "FunctionExpander",
    "RecordingExpander",
    "estimate_of",
    "recording_key",
]


class Expander(Protocol):
    """Something that offers next actions.

    Contract:
        1. `propose` returns the outcome of about k samples; equal actions may be merged already.
        2. `ctx.seed` and `ctx.first_sample` are the only randomness.
        3. Model calls are reported through `ctx.spend("propose", …)`.
        4. A failed call raises an error of our tree; the driver makes it an outcome.
        5. `estimate`, where there is one, bounds what one call may use: the driver reserves it.
    """

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Return next actions at `node`."""
        ...


def estimate_of(expander: Expander, ctx: SearchContext, node: Node, k: int) -> dict[str, float]:
    """Return what a proposal may use at most, by resource; by default one call."""
    estimate = getattr(expander, "estimate", None)
    return {"calls": 1.0} if estimate is None else dict(estimate(ctx, node, k))


Offered = Sequence[Any]


class FunctionExpander:
    """A function of (context, node, k) that returns actions or proposals, synchronous or async.

    Repeated actions count as repeated samples. `calls` says how many model calls one use stands
    for in budgets; 0 for a function that asks nobody. `most` says what one use may spend beside
    them, by resource (`cost_usd`, `prompt_tokens`, …): a budget that caps one needs to know it.
    """

    def __init__(
        self,
        fn: Callable[[SearchContext, Node, int], Offered | Awaitable[Offered]],
        *,
        calls: int = 0,
        most: Mapping[str, float] | None = None,
    ) -> None:
        self._fn, self._calls = fn, calls
        self._most = dict(most or {})

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Return what the function offers."""
        offered: Any = self._fn(ctx, node, k)
        if inspect.isawaitable(offered):
            offered = await offered
        if self._calls:
            ctx.spend("propose", Usage(calls=self._calls))
        return [a if isinstance(a, Proposal) else Proposal(a) for a in offered]

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the declared calls and amounts."""
        return {"calls": float(self._calls), **self._most}


class ArmExpander:
    """Several proposers side by side; the algorithm says which one by `work.arm`."""

    def __init__(self, expanders: Sequence[Expander]) -> None:
        if not expanders:
            raise ConfigError("ArmExpander needs at least one expander")
        self._expanders = list(expanders)

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Ask the arm that the algorithm chose."""
        arm = ctx.work.arm % len(self._expanders)
        offered = await self._expanders[arm].propose(ctx, node, k)
        return [_with_arm(p, arm) for p in offered]

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the chosen arm's estimate."""
        arm = ctx.work.arm % len(self._expanders)
        return estimate_of(self._expanders[arm], ctx, node, k)


def _with_arm(proposal: Proposal, arm: int) -> Proposal:
    return Proposal.from_dict(proposal.to_dict() | {"arm": arm}) if arm else proposal


class CheckedExpander:
    """Drops proposals that `check` finds wrong, so that no call is spent on running them.

    Args:
        inner: the expander asked.
        check: action to the reasons why it cannot work; empty where it can.
    """

    def __init__(self, inner: Expander, check: Callable[[Any], Sequence[str]]) -> None:
        self._inner, self._check = inner, check
        self.dropped: dict[str, int] = {}
        """Reason to how many samples it cost."""

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Return the proposals that pass."""
        kept = []
        for proposal in await self._inner.propose(ctx, node, k):
            reasons = self._check(proposal.action)
            if reasons:
                self.dropped[reasons[0]] = self.dropped.get(reasons[0], 0) + proposal.count
            else:
                kept.append(proposal)
        return kept

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the inner estimate."""
        return estimate_of(self._inner, ctx, node, k)


Same = Callable[[Any, Any], bool | Awaitable[bool]]


class EquivalentExpander:
    """Merges proposals that mean the same, for steps of free text.

    Args:
        inner: the expander asked.
        same: whether two actions mean the same, for example by entailment both ways; asked for
            pairs of distinct actions only, and taken as transitive.
    """

    def __init__(self, inner: Expander, same: Same) -> None:
        self._inner, self._same = inner, same

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Return one proposal a meaning, with the summed count; the first wording stays."""
        kept: list[Proposal] = []
        for proposal in await self._inner.propose(ctx, node, k):
            for i, other in enumerate(kept):
                if await self._equal(other.action, proposal.action):
                    merged = {"count": other.count + proposal.count}
                    kept[i] = Proposal.from_dict(other.to_dict() | merged)
                    break
            else:
                kept.append(proposal)
        return kept

    async def _equal(self, first: Any, second: Any) -> bool:
        if action_key(first) == action_key(second):
            return True
        verdict = self._same(first, second)
        return bool(await verdict) if inspect.isawaitable(verdict) else bool(verdict)

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the inner estimate."""
        return estimate_of(self._inner, ctx, node, k)


def recording_key(ctx: SearchContext, node: Node, k: int) -> str:
    """Return what identifies an expander's answer: the task, the path, k and the draws before it.

    Two algorithms that stand at the same path ask the same question, so they get the same answer;
    that makes comparisons fair.
    """
    path = "/".join(n.action_key for n in ctx.tree.path(node)[1:])
    return f"{ctx.task.task_id}|{path}|{k}|{ctx.work.arm}|{ctx.work.prefix}|{ctx.first_sample}"


class RecordingExpander:
    """Answers from recorded answers; asks the inner expander, if any, for the rest and keeps them.

    Args:
        inner: asked for what is not recorded; None makes a missing answer an error.
        answers: key (see `recording_key`) to the JSON forms of the proposals; filled in place.
    """

    def __init__(
        self, inner: Expander | None, answers: dict[str, list[dict[str, Any]]] | None = None
    ) -> None:
        self._inner = inner
        self.answers = answers if answers is not None else {}
        self.replayed = 0

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Return the recorded answer, or a new one that is recorded.

        Raises:
            ConfigError: nothing is recorded here and there is nobody to ask.
        """
        key = recording_key(ctx, node, k)
        if key in self.answers:
            self.replayed += 1
            return [Proposal.from_dict(row) for row in self.answers[key]]
        if self._inner is None:
            raise ConfigError(
                f"no recorded answer for {key[:200]!r} among {len(self.answers)}: give an inner "
                "expander, or the recording of the same tasks"
            )
        offered = await self._inner.propose(ctx, node, k)
        self.answers[key] = [p.to_dict() for p in offered]
        return offered

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Nothing for a recorded answer, else the inner estimate."""
        if self._inner is None or recording_key(ctx, node, k) in self.answers:
            return {}
        return estimate_of(self._inner, ctx, node, k)
