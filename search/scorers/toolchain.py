"""ToolChain*'s scorer from four parts, with two presets.

`paper`: the four terms rebuilt from descriptions of the paper (there is no public code; formulas
recalled, alpha, beta and k unknown); an approximation of it, never a reproduction:

    step cost  (1 − g1)^alpha · (1 − g2)^(1 − alpha)       summed along the path: g
    to go      (1 − h1)^beta  · (1 − h2)^(1 − beta)        h, a number in [0, 1]
    g1  best over memory plans of LCS(s, m) / min(len s, len m)
    g2  share of the samples that said this action
    h1  mean over memory plans with the action of position / length; else of the nearest name
    h2  ancestors / ancestors of the imagined finish

`robust` (default): what measuring showed to be needed. A floor under each factor, so that one
perfect part does not make a step free; LCS over the longer length and plans of two calls or more,
so that short plans do not match everything; costs as means instead of products; and an h that
counts the steps still to go, averaged over the memory, so that it weighs as much deep in the tree
as at the root. Neither h is admissible: no optimality is claimed.

LCS rows are kept on the node, so a child costs O(length of the plans). Does not know how the
search uses the numbers. Source: Zhuang et al. 2023, arXiv 2310.13227 (`paper`); `robust`: own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

from tfgrpo.errors import ConfigError
from tfgrpo.search.node import Node, NodeScore, action_name
from tfgrpo.search.plan_memory import Plan, PlanMemory, next_row
from tfgrpo.search.scorers.scorer import SearchContext

__all__ = [
    "CostPreset",
    "Imagination",
    "MemoryImagination",
    "PAPER",
    "ROBUST",
    "ToolChainScorer",
    "cost_preset",
]


@dataclass(frozen=True, slots=True)
class CostPreset:
    """The knobs of the four-part scorer."""

    name: str
    alpha: float = 0.5
    """Weight of the memory in the step cost, in [0, 1]; the rest is frequency."""
    beta: float = 0.5
    """Weight of the memory position in `paper`'s h, in [0, 1]."""
    floor: float = 0.0
    """Smallest factor of a product."""
    combine: Literal["product", "mean"] = "product"
    normaliser: Literal["min", "max"] = "min"
    """LCS is divided by the shorter or by the longer length."""
    horizon: Literal["fraction", "steps"] = "fraction"
    """h as a number in [0, 1], or as steps still to go times `step_estimate`."""
    step_estimate: float = 0.5
    """What one remaining step is taken to cost, where h counts steps."""
    min_plan: int = 1
    """Memory plans shorter than this are not looked at."""

    def __post_init__(self) -> None:
        for knob in ("alpha", "beta", "floor"):
            if not _is_number(getattr(self, knob), most=1.0):
                raise ConfigError(f"{knob}={getattr(self, knob)!r}: give a number from 0 to 1")
        if not _is_number(self.step_estimate):
            raise ConfigError(f"step_estimate={self.step_estimate!r}: give a number of 0 or more")
        if type(self.min_plan) is not int or self.min_plan < 1:
            raise ConfigError(f"min_plan={self.min_plan!r}: give a whole number of 1 or more")
        for knob, words in _WORDS.items():
            if getattr(self, knob) not in words:
                raise ConfigError(f"{knob}={getattr(self, knob)!r}: {' or '.join(words)}")


_WORDS = {
    "combine": ("product", "mean"),
    "normaliser": ("min", "max"),
    "horizon": ("fraction", "steps"),
}


def _is_number(value: object, *, most: float = math.inf) -> bool:
    return type(value) in (int, float) and 0.0 <= float(value) <= most  # type: ignore[arg-type]


PAPER = CostPreset("paper")
"""As described; alpha, beta = 0.5 are ours, the paper's are unknown."""
ROBUST = CostPreset(
    "robust",
    alpha=0.3,
    floor=0.1,
    combine="mean",
    normaliser="max",
    horizon="steps",
    step_estimate=0.7,
    min_plan=2,
)
"""The arithmetic mean of the badness values; a step is taken to cost what a right step that 30 % of
the samples say costs."""


def cost_preset(name: str, knobs: Mapping[str, Any] = MappingProxyType({})) -> CostPreset:
    """Return the preset of that name, with some knobs turned.

    Raises:
        ConfigError: there is no such preset or knob, or a knob has no such value.
    """
    presets = {"paper": PAPER, "robust": ROBUST}
    if name not in presets:
        raise ConfigError(f"no cost preset {name!r}; there are {', '.join(sorted(presets))}")
    known = [f.name for f in fields(CostPreset) if f.name != "name"]
    for knob in knobs:
        if knob not in known:
            raise ConfigError(f"no knob {knob!r} of the cost preset {name!r}: {', '.join(known)}")
    return replace(presets[name], **knobs)


class Imagination(Protocol):
    """What guesses how long the whole plan will be."""

    async def total_steps(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[float]:
        """Return, one a child, the actions before the finish of the plan through that child."""
        ...


class MemoryImagination:
    """Guesses the length of the whole plan from memory; no model call.

    `paper` takes the plan that matches best. `robust` takes the mean of the steps that each plan
    would still need, weighted by how well it matches: the best match alone is a noisy judge, and
    its noise differs from sibling to sibling.
    """

    def __init__(self, *, weighted: bool, prior: float = 0.5) -> None:
        self._weighted, self._prior = weighted, prior

    def total(self, done: int, matches: Sequence[tuple[float, int]]) -> float:
        """Return the guessed length, at least what is done.

        Args:
            done: steps so far, this one included.
            matches: (LCS share, plan length) of each plan.
        """
        if not matches:
            return float(done + 1)
        if not self._weighted:
            score, length = max(matches, key=lambda m: (m[0], -m[1]))
            return float(max(done, length)) if score > 0 else float(done + 1)
        weights = [self._prior + share for share, _ in matches]
        left = sum(w * max(0, length - done) for w, (_, length) in zip(weights, matches))
        return done + left / sum(weights)


@dataclass(slots=True)
class _View:
    """One task's memory: the plans that it may see and where each action stands in them."""

    plans: list[Plan]
    positions: dict[str, float]
    """Name to the mean over the plans with it of position / length (1 = last)."""
    nearest: dict[str, str]


class ToolChainScorer:
    """The four-part scorer.

    Args:
        memory: plans that solved other tasks; an empty memory works.
        preset: `robust` or `paper` by name, or knobs of one's own.
        imagination: guesses the length of the whole plan; None takes it from memory.
    """

    is_additive = False
    """g1 looks at the whole path, so merging equal states is an approximation here."""

    def __init__(
        self,
        memory: PlanMemory | None = None,
        *,
        preset: CostPreset | str = ROBUST,
        imagination: Imagination | None = None,
    ) -> None:
        self.memory = memory if memory is not None else PlanMemory()
        self.preset = cost_preset(preset) if isinstance(preset, str) else preset
        self.imagination = imagination
        self._by_match = MemoryImagination(weighted=self.preset.horizon == "steps")
        self._views: dict[str, tuple[int, _View]] = {}

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return what the imagination may use; nothing without one."""
        if self.imagination is None:
            return {}
        own = getattr(self.imagination, "estimate", None)
        return {"calls": float(k)} if own is None else dict(own(ctx, node, k))

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Return costs with the parts g1, g2, h1, h2; model calls are the imagination's."""
        view = self._view(ctx.task.task_id)
        rows = (
            parent.scorer_state if parent.scorer_state is not None else _rows_of(view, ctx, parent)
        )
        totals: list[float] | None = None
        if self.imagination is not None:
            totals = await self.imagination.total_steps(ctx, parent, nodes)
        return [
            self._one(view, rows, node, None if totals is None else totals[i])
            for i, node in enumerate(nodes)
        ]

    def _one(
        self, view: _View, rows: Sequence[Sequence[int]], node: Node, total: float | None
    ) -> NodeScore:
        preset, name = self.preset, action_name(node.action)
        fresh = [next_row(row, name, plan.names) for row, plan in zip(rows, view.plans)]
        matches = [
            (self._share(row[-1], node.depth, len(plan.names)), len(plan.names))
            for row, plan in zip(fresh, view.plans)
        ]
        g1 = max((share for share, _ in matches), default=0.0)
        g2 = node.prior
        if total is None:
            total = self._by_match.total(node.depth, matches)
        h1 = self._position(view, name)
        h2 = min(1.0, (node.depth - 1) / total) if total > 0 else 1.0
        step_cost = self._step_cost(g1, g2, bool(view.plans))
        if preset.horizon == "steps":
            to_go = max(0.0, total - node.depth) * preset.step_estimate
        elif view.plans:
            to_go = _product(1 - h1, 1 - h2, preset.beta, preset.floor)
        else:
            to_go = 1 - h2
        parts = {"g1": g1, "g2": g2, "h1": h1, "h2": h2, "total": total}
        return NodeScore(step_cost, to_go, None, parts, fresh)

    def _share(self, common: int, done: int, length: int) -> float:
        over = min(done, length) if self.preset.normaliser == "min" else max(done, length)
        return common / over if over else 0.0

    def _step_cost(self, g1: float, g2: float, has_memory: bool) -> float:
        """Combine memory and frequency; without a memory only the frequency speaks."""
        preset = self.preset
        if not has_memory:
            return max(preset.floor, 1 - g2)
        if preset.combine == "mean":
            return preset.alpha * (1 - g1) + (1 - preset.alpha) * (1 - g2)
        return _product(1 - g1, 1 - g2, preset.alpha, preset.floor)

    def _position(self, view: _View, name: str) -> float:
        if not view.positions:
            return 0.0
        if name not in view.positions:
            if name not in view.nearest:
                view.nearest[name] = _nearest(name, view.positions)
            name = view.nearest[name]
        return view.positions[name]

    def _view(self, task_id: str) -> _View:
        size = len(self.memory)
        known = self._views.get(task_id)
        if known is None or known[0] != size:
            plans = [
                p for p in self.memory.plans_for(task_id) if len(p.names) >= self.preset.min_plan
            ]
            known = self._views[task_id] = (size, _View(plans, _positions(plans), {}))
        return known[1]


def _product(first: float, second: float, weight: float, floor: float) -> float:
    """Weighted geometric mean of two badness values, each at least `floor`."""
    return float(max(floor, first) ** weight * max(floor, second) ** (1 - weight))


def _positions(plans: Sequence[Plan]) -> dict[str, float]:
    """Return, for each action name, the mean of position / length over the plans with it.

    An action that occurs several times in a plan counts with its last position there.
    """
    found: dict[str, list[float]] = {}
    for plan in plans:
        last = {name: i + 1 for i, name in enumerate(plan.names)}
        for name, position in last.items():
            found.setdefault(name, []).append(position / len(plan.names))
    return {name: sum(values) / len(values) for name, values in found.items()}


def _nearest(name: str, known: dict[str, float]) -> str:
    import difflib  # only for names that no plan has

    def closeness(other: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, name, other).ratio(), other

    return min(known, key=closeness)


def _rows_of(view: _View, ctx: SearchContext, parent: Node) -> list[list[int]]:
    """Make a node's LCS rows from its path, for the root or after a restart."""
    rows = [[0] * (len(plan.names) + 1) for plan in view.plans]
    for node in ctx.tree.path(parent)[1:]:
        name = action_name(node.action)
        rows = [next_row(row, name, plan.names) for row, plan in zip(rows, view.plans)]
    return rows
