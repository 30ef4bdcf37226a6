"""Inference-time search over tool calls and reasoning steps.

One node, expander, environment and scorer under every algorithm, one asynchronous driver. A search
returns a `RolloutGroup`, so that what it found feeds learning, plan memory and training.

    group = await search(task, LMExpander(lm, tools), environment, budget=Budget(calls=40))

Names are loaded on first use. The core needs the standard library only; `lm_expander`,
`tool_environment`, `mcp_environment`, `graph` and `config` load more where they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgrpo.search.ab_mcts import ABMCTS
    from tfgrpo.search.algorithm import Algorithm, Work
    from tfgrpo.search.astar import BestFirst
    from tfgrpo.search.beam import Beam
    from tfgrpo.search.carrying_out import PlanReport, carry_out
    from tfgrpo.search.chains import Chains
    from tfgrpo.search.costs import PAPER, ROBUST, CostPreset, ToolChainScorer
    from tfgrpo.search.depth_first import DepthFirst
    from tfgrpo.search.driver import Driver
    from tfgrpo.search.environment import Environment, Outcome, TextEnvironment
    from tfgrpo.search.expander import (
        ArmExpander,
        CheckedExpander,
        EquivalentExpander,
        Expander,
        FunctionExpander,
        RecordingExpander,
    )
    from tfgrpo.search.fold import Fold, explore
    from tfgrpo.search.groups import fork_advantages, group_of, tree_advantages
    from tfgrpo.search.log import FileLog, MemoryLog
    from tfgrpo.search.mcts import MCTS
    from tfgrpo.search.node import Node, NodeScore, Proposal, action_key, call
    from tfgrpo.search.plan_memory import PlanMemory
    from tfgrpo.search.replay_environment import ReplayEnvironment
    from tfgrpo.search.rollouts import EntropyRollouts, LookaheadRollouts
    from tfgrpo.search.scorer import (
        FrequencyScorer,
        FunctionScorer,
        LikelihoodScorer,
        Scorer,
        SearchContext,
        UnitScorer,
    )
    from tfgrpo.search.settings import SearchResult, SearchSettings
    from tfgrpo.search.tree import Tree
    from tfgrpo.search.value_environments import DeepcopyEnvironment, ImmutableEnvironment
    from tfgrpo.search.verb import ALGORITHMS, make_algorithm, search, search_tree

_HOME = {
    "ABMCTS": "ab_mcts",
    "ALGORITHMS": "verb",
    "Algorithm": "algorithm",
    "ArmExpander": "expander",
    "Beam": "beam",
    "BestFirst": "astar",
    "Chains": "chains",
    "CheckedExpander": "expander",
    "CostPreset": "costs",
    "DeepcopyEnvironment": "value_environments",
    "DepthFirst": "depth_first",
    "Driver": "driver",
    "EntropyRollouts": "rollouts",
    "Environment": "environment",
    "EquivalentExpander": "expander",
    "Expander": "expander",
    "FileLog": "log",
    "Fold": "fold",
    "FrequencyScorer": "scorer",
    "FunctionExpander": "expander",
    "FunctionScorer": "scorer",
    "ImmutableEnvironment": "value_environments",
    "LikelihoodScorer": "scorer",
    "LookaheadRollouts": "rollouts",
    "MCTS": "mcts",
    "MemoryLog": "log",
    "Node": "node",
    "NodeScore": "node",
    "Outcome": "environment",
    "PAPER": "costs",
    "PlanMemory": "plan_memory",
    "PlanReport": "carrying_out",
    "Proposal": "node",
    "ROBUST": "costs",
    "RecordingExpander": "expander",
    "ReplayEnvironment": "replay_environment",
    "Scorer": "scorer",
    "SearchContext": "scorer",
    "SearchResult": "settings",
    "SearchSettings": "settings",
    "TextEnvironment": "environment",
    "ToolChainScorer": "costs",
    "Tree": "tree",
    "UnitScorer": "scorer",
    "Work": "algorithm",
    "action_key": "node",
    "call": "node",
    "carry_out": "carrying_out",
    "explore": "fold",
    "fork_advantages": "groups",
    "group_of": "groups",
    "make_algorithm": "verb",
    "search": "verb",
    "search_tree": "verb",
    "tree_advantages": "groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "ABMCTS",
    "ALGORITHMS",
    "Algorithm",
    "ArmExpander",
    "Beam",
    "BestFirst",
    "Chains",
    "CheckedExpander",
    "CostPreset",
    "DeepcopyEnvironment",
    "DepthFirst",
    "Driver",
    "EntropyRollouts",
    "Environment",
    "EquivalentExpander",
    "Expander",
    "FileLog",
    "Fold",
    "FrequencyScorer",
    "FunctionExpander",
    "FunctionScorer",
    "ImmutableEnvironment",
    "LikelihoodScorer",
    "LookaheadRollouts",
    "MCTS",
    "MemoryLog",
    "Node",
    "NodeScore",
    "Outcome",
    "PAPER",
    "PlanMemory",
    "PlanReport",
    "Proposal",
    "ROBUST",
    "RecordingExpander",
    "ReplayEnvironment",
    "Scorer",
    "SearchContext",
    "SearchResult",
    "SearchSettings",
    "TextEnvironment",
    "ToolChainScorer",
    "Tree",
    "UnitScorer",
    "Work",
    "action_key",
    "call",
    "carry_out",
    "explore",
    "fork_advantages",
    "group_of",
    "make_algorithm",
    "search",
    "search_tree",
    "tree_advantages",
]
