"""Inference-time search over tool calls and reasoning steps.

One node, expander, environment and scorer under every algorithm, one asynchronous driver. A search
returns a `RolloutGroup`, so that what it found feeds learning, plan memory and training.

    group = await search(task, LMExpander(lm, tools), environment, budget=Budget(calls=40))

Names are loaded on first use. The core needs the standard library only; `lm_expander`,
`tool_environment`, `mcp_environment`, `graph` and `config` load more where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.search.algorithms.ab_mcts import ABMCTS
    from tfgrpo.search.algorithms.astar import BestFirst
    from tfgrpo.search.algorithms.beam import Beam
    from tfgrpo.search.algorithms.best_of_n import BestOfN
    from tfgrpo.search.algorithms.depth_first import DepthFirst
    from tfgrpo.search.algorithms.mcts import MCTS
    from tfgrpo.search.algorithms.protocol import Algorithm, VisitRequest
    from tfgrpo.search.algorithms.tree_rollouts import EntropyRollouts, LookaheadRollouts
    from tfgrpo.search.api import ALGORITHMS, make_algorithm, search, search_tree
    from tfgrpo.search.driver import Driver
    from tfgrpo.search.environments.in_memory import DeepcopyEnvironment, ImmutableEnvironment
    from tfgrpo.search.environments.protocol import Environment, StepResult, TextEnvironment
    from tfgrpo.search.environments.replay import ReplayEnvironment
    from tfgrpo.search.event_log import FileLog, MemoryLog
    from tfgrpo.search.groups import fork_advantages, group_of, tree_advantages
    from tfgrpo.search.node import Node, NodeScore, Proposal, action_key, call
    from tfgrpo.search.plan_execution import PlanReport, carry_out
    from tfgrpo.search.plan_memory import PlanMemory
    from tfgrpo.search.proposers.expander import (
        ArmExpander,
        CheckedExpander,
        EquivalentExpander,
        Expander,
        FunctionExpander,
        RecordingExpander,
    )
    from tfgrpo.search.scorers.scorer import (
        FrequencyScorer,
        FunctionScorer,
        LikelihoodScorer,
        Scorer,
        SearchContext,
        UnitScorer,
    )
    from tfgrpo.search.scorers.toolchain import PAPER, ROBUST, CostPreset, ToolChainScorer
    from tfgrpo.search.settings import SearchResult, SearchSettings
    from tfgrpo.search.state import SearchState, explore
    from tfgrpo.search.tree import Tree

_HOME = {
    "ABMCTS": "algorithms.ab_mcts",
    "ALGORITHMS": "api",
    "Algorithm": "algorithms.protocol",
    "ArmExpander": "proposers.expander",
    "Beam": "algorithms.beam",
    "BestFirst": "algorithms.astar",
    "BestOfN": "algorithms.best_of_n",
    "CheckedExpander": "proposers.expander",
    "CostPreset": "scorers.toolchain",
    "DeepcopyEnvironment": "environments.in_memory",
    "DepthFirst": "algorithms.depth_first",
    "Driver": "driver",
    "EntropyRollouts": "algorithms.tree_rollouts",
    "Environment": "environments.protocol",
    "EquivalentExpander": "proposers.expander",
    "Expander": "proposers.expander",
    "FileLog": "event_log",
    "SearchState": "state",
    "FrequencyScorer": "scorers.scorer",
    "FunctionExpander": "proposers.expander",
    "FunctionScorer": "scorers.scorer",
    "ImmutableEnvironment": "environments.in_memory",
    "LikelihoodScorer": "scorers.scorer",
    "LookaheadRollouts": "algorithms.tree_rollouts",
    "MCTS": "algorithms.mcts",
    "MemoryLog": "event_log",
    "Node": "node",
    "NodeScore": "node",
    "StepResult": "environments.protocol",
    "PAPER": "scorers.toolchain",
    "PlanMemory": "plan_memory",
    "PlanReport": "plan_execution",
    "Proposal": "node",
    "ROBUST": "scorers.toolchain",
    "RecordingExpander": "proposers.expander",
    "ReplayEnvironment": "environments.replay",
    "Scorer": "scorers.scorer",
    "SearchContext": "scorers.scorer",
    "SearchResult": "settings",
    "SearchSettings": "settings",
    "TextEnvironment": "environments.protocol",
    "ToolChainScorer": "scorers.toolchain",
    "Tree": "tree",
    "UnitScorer": "scorers.scorer",
    "VisitRequest": "algorithms.protocol",
    "action_key": "node",
    "call": "node",
    "carry_out": "plan_execution",
    "explore": "state",
    "fork_advantages": "groups",
    "group_of": "groups",
    "make_algorithm": "api",
    "search": "api",
    "search_tree": "api",
    "tree_advantages": "groups",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)


__all__ = [
    "ABMCTS",
    "ALGORITHMS",
    "Algorithm",
    "ArmExpander",
    "Beam",
    "BestFirst",
    "BestOfN",
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
    "SearchState",
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
    "StepResult",
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
    "VisitRequest",
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
