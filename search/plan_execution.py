"""Carry out a plan that a search found, for real, irreversible steps included.

A search runs no irreversible tool; this does, one step after another, in this order:

1. everything that can be refused is refused before the first step: no plan, irreversible steps and
   nobody who confirms them, tool calls that the budget does not hold;
2. each irreversible step is put to `confirm`, with what has happened so far, right before it runs;
3. each step's outcome is compared with what the search saw; at the first difference nothing more
   runs, because the rest of the plan was made for another world;
4. the report says what was done, what was not, and why.

Nothing is undone and nothing is tried again: a step that failed half-way may have had its effect.
Does not know how the plan was found. Source: own.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tfgrpo.errors import ConfigError, PolicyError, boundary
from tfgrpo.search.environments.protocol import Effect, Environment, StepResult
from tfgrpo.search.node import Node, action_name, show_action
from tfgrpo.search.settings import SearchResult
from tfgrpo.search.worker import NOT_RUN
from tfgrpo.store.budget import Budget, Ledger

__all__ = ["CarriedStep", "PlanReport", "carry_out"]

StopReason = Literal["done", "diverged", "declined"]


@dataclass(frozen=True, slots=True)
class CarriedStep:
    """One step that was run."""

    action: Any
    effect: Effect
    outcome: StepResult
    divergence: str = ""
    """How the outcome differs from what the search saw; empty where it does not."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What became of a plan."""

    stop_reason: StopReason
    """`done`: all of it ran as foreseen. `diverged`: the last step's outcome was another one.
    `declined`: the next step was not confirmed."""
    steps: tuple[CarriedStep, ...] = ()
    """What was run, in order."""
    left: tuple[Any, ...] = ()
    """The actions that were not run."""
    state: Any = None
    """Handle of the state after the last step that worked."""
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True when the whole plan ran as foreseen."""
        return self.stop_reason == "done"

    def to_text(self) -> str:
        """Return the report as lines for people."""
        lines = [f"{self.stop_reason}: {len(self.steps)} run, {len(self.left)} not run"]
        for step in self.steps:
            mark = "✗" if step.divergence else "■"
            note = f"  {step.divergence}" if step.divergence else ""
            lines.append(f"{mark} {show_action(step.action)} [{step.effect}]{note}")
        return "\n".join([*lines, *(f"· {show_action(action)}" for action in self.left)])


Confirm = Callable[[Any, Sequence[CarriedStep]], bool | Awaitable[bool]]
"""(action, steps so far) to whether the irreversible action may run."""
Differ = Callable[[Node, StepResult], str]
"""(node of the search, outcome now) to how they differ, or an empty text."""


def difference(node: Node, outcome: StepResult) -> str:
    """Return how an outcome differs from the one that the search saw, or an empty text.

    A step that the search did not run has only its success to be compared with. States are compared
    where both have a key, else observations.
    """
    if outcome.error:
        return f"failed: {outcome.error}" if not node.error else ""
    if node.error:
        return f"worked, where the search saw: {node.error}"
    if not node.is_executed or node.observation == NOT_RUN:
        return ""
    if outcome.observation != node.observation:
        return f"answered {outcome.observation[:120]!r}, the search saw {node.observation[:120]!r}"
    keys = outcome.state_key, node.state_key
    if None not in keys and keys[0] != keys[1]:
        return "left another state than in the search"
    return ""


async def carry_out(
    result: SearchResult,
    environment: Environment,
    *,
    confirm: Confirm | None = None,
    budget: Budget | Ledger | None = None,
    differ: Differ = difference,
    node: Node | None = None,
) -> PlanReport:
    """Run a search's best plan in an environment, step by step, up to the first surprise.

    Args:
        environment: where it is to happen; started anew, so in the state that the search began in.
        confirm: asked before each irreversible step; synchronous or async.
        budget: holds one tool call a step before anything runs.
        differ: what counts as a difference; give one of your own where answers hold times or
            numbers that are new each time.
        node: end of another path than the best.

    Raises:
        ConfigError: the search found no plan, or it has irreversible steps and nobody confirms.
        BudgetError: the plan needs more tool calls than are left; nothing was run.
    """
    tree, end = result.fold.tree, result.best if node is None else node
    path = tree.path(end)[1:]
    if not path or end.status != "terminal":
        raise ConfigError(
            f"this search of task {result.task.task_id!r} has no finished plan "
            f"({result.stop_reason}): carry out a result that is solved, or name a finished node"
        )
    effects = [environment.effects(step.action) for step in path]
    if confirm is None and "irreversible" in effects:
        first = show_action(path[effects.index("irreversible")].action)
        raise ConfigError(
            f"step {first} cannot be undone: give `confirm`, which is asked before it"
        )
    ledger = budget if isinstance(budget, Ledger) else Ledger(budget or Budget())
    held = ledger.reserve(tool_calls=float(len(path)))
    steps: list[CarriedStep] = []
    state: Any = None
    reason: StopReason = "done"
    try:
        state = await environment.start()
        for step, effect in zip(path, effects):
            if effect == "irreversible" and not await _is_confirmed(confirm, step.action, steps):
                reason = "declined"
                break
            outcome = await _run(environment, state, step.action)
            steps.append(CarriedStep(step.action, effect, outcome, differ(step, outcome)))
            state = state if outcome.error else outcome.state
            if steps[-1].divergence:
                reason = "diverged"
                break
    finally:
        held.settle(tool_calls=float(sum(s.outcome.tool_calls for s in steps)))
    left = tuple(step.action for step in path[len(steps) :])
    return PlanReport(reason, tuple(steps), left, state, ledger.spent)


async def _is_confirmed(confirm: Confirm | None, action: Any, steps: Sequence[CarriedStep]) -> bool:
    """Ask; only a plain True is a yes."""
    assert confirm is not None
    answer = confirm(action, tuple(steps))
    if inspect.isawaitable(answer):
        answer = await answer
    return answer is True


async def _run(environment: Environment, state: Any, action: Any) -> StepResult:
    try:
        with boundary(PolicyError, f"environment, action {action_name(action)!r}"):
            return await environment.apply(state, action)
    except PolicyError as exc:
        return StepResult(error=str(exc))
