"""The verb: search one task, get a group of rollouts.

`search` is the short way; `search_tree` gives the whole result with the tree. Does not know
configuration files (`config.py`) or commands. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfgrpo.config.flat_options import gathered
from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.search.algorithms.ab_mcts import ABMCTS
from tfgrpo.search.algorithms.astar import BestFirst
from tfgrpo.search.algorithms.beam import Beam
from tfgrpo.search.algorithms.best_of_n import BestOfN
from tfgrpo.search.algorithms.depth_first import DepthFirst
from tfgrpo.search.algorithms.mcts import MCTS
from tfgrpo.search.algorithms.protocol import Algorithm
from tfgrpo.search.algorithms.tree_rollouts import EntropyRollouts, LookaheadRollouts
from tfgrpo.search.driver import Driver
from tfgrpo.search.environments.protocol import Environment, TextEnvironment
from tfgrpo.search.event_log import EventLog
from tfgrpo.search.groups import group_of
from tfgrpo.search.plan_memory import PlanMemory
from tfgrpo.search.proposers.expander import Expander
from tfgrpo.search.scorers.scorer import Scorer
from tfgrpo.search.scorers.toolchain import ToolChainScorer
from tfgrpo.search.settings import SearchJob, SearchResult, SearchSettings
from tfgrpo.search.state import SearchState
from tfgrpo.store.budget import Budget, Ledger

if TYPE_CHECKING:
    import asyncio

__all__ = ["ALGORITHMS", "make_algorithm", "search", "search_tree"]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "astar": BestFirst.astar,
    "uniform_cost": BestFirst.uniform_cost,
    "greedy": BestFirst.greedy,
    "beam": Beam,
    "diverse_beam": Beam.diverse,
    "breadth_first": Beam.breadth_first,
    "depth_first": DepthFirst,
    "dfsdt": DepthFirst.dfsdt,
    "mcts": MCTS,
    "ab_mcts": ABMCTS,
    "best_of_n": BestOfN.best_of,
    "self_consistency": BestOfN.self_consistency,
    "entropy_rollouts": EntropyRollouts,
    "lookahead_rollouts": LookaheadRollouts,
}
"""Name to what makes it."""


_DEFAULT_SETTINGS = SearchSettings()
_DEFAULT_BUDGET = Budget(expansions=64)


def make_algorithm(name: str, **options: Any) -> Algorithm:
    """Return a fresh algorithm by name.

    Raises:
        ConfigError: no such algorithm, or an option that it does not have.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"no algorithm {name!r}; there are {', '.join(sorted(ALGORITHMS))}")
    try:
        return ALGORITHMS[name](**gathered(ALGORITHMS[name], options))
    except TypeError as exc:
        raise ConfigError(f"algorithm {name!r} with {options}: {exc}") from exc


async def search_tree(
    task: Task,
    expander: Expander,
    environment: Environment | None = None,
    *,
    algorithm: Algorithm | str = "astar",
    scorer: Scorer | None = None,
    memory: PlanMemory | None = None,
    settings: SearchSettings = _DEFAULT_SETTINGS,
    budget: Budget | Ledger = _DEFAULT_BUDGET,
    context: Context = EMPTY_CONTEXT,
    verifier: Verifier | None = None,
    log: EventLog | None = None,
    cancel: asyncio.Event | None = None,
    on_commit: Callable[[SearchState], None] | None = None,
) -> SearchResult:
    """Search one task and return the tree with everything about it.

    Args:
        environment: where actions run; None is for reasoning in text.
        algorithm: a fresh algorithm, or its name.
        scorer: None takes ToolChain*'s `robust` preset over `memory`.
        memory: plans that solved other tasks.
        budget: limits; a search without any limit may never end.
        verifier: steers the search only with `verify="during"`.
    """
    ledger = budget if isinstance(budget, Ledger) else Ledger(budget)
    depth = ledger.budget.depth
    chosen = make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    low, high = verifier.reward_range if verifier is not None else (0.0, 1.0)
    fold = SearchState(
        chosen,
        max_depth=None if depth is None else int(depth),
        goal_reward=high if high < float("inf") else max(low, 1.0),
    )
    fold.tree.root.h = 0.0
    job = SearchJob(
        task,
        expander,
        environment if environment is not None else TextEnvironment(),
        scorer if scorer is not None else ToolChainScorer(memory),
        settings=settings,
        context=context,
        verifier=verifier,
        log=log,
        cancel=cancel,
        on_commit=on_commit,
    )
    return await Driver(fold, job, ledger).run()


async def search(
    task: Task,
    expander: Expander,
    environment: Environment | None = None,
    *,
    algorithm: Algorithm | str = "astar",
    scorer: Scorer | None = None,
    memory: PlanMemory | None = None,
    settings: SearchSettings = _DEFAULT_SETTINGS,
    budget: Budget | Ledger = _DEFAULT_BUDGET,
    context: Context = EMPTY_CONTEXT,
    verifier: Verifier | None = None,
    log: EventLog | None = None,
    policy_id: str = "",
    include_failed: bool = False,
) -> RolloutGroup:
    """Search one task and return its finished paths as a group of rollouts.

    Verified plans enter `memory`, where one is given, after the search.

    Args:
        policy_id: of the group; empty names the algorithm.
        include_failed: keep paths that ended in a failed action, for learning from contrast.
        algorithm, scorer, settings, budget, context, log: as for `search_tree`.

    Raises:
        ProviderError: the model cannot be reached at all and nothing was found.
    """
    result = await search_tree(
        task,
        expander,
        environment,
        algorithm=algorithm,
        scorer=scorer,
        memory=memory,
        settings=settings,
        budget=budget,
        context=context,
        verifier=verifier,
        log=log,
    )
    if result.error is not None and not result.fold.tree.with_status("terminal"):
        raise result.error
    group = await group_of(
        result,
        verifier=verifier,
        context=context,
        policy_id=policy_id or f"search:{type(result.fold.algorithm).__name__}",
        seed=settings.seed,
        include_failed=include_failed,
        verifier_timeout_s=settings.verifier_timeout_s,
    )
    if memory is not None:
        memory.add_group(group)
    return group
