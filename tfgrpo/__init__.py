"""tfgrpo makes LLM agents better from a few dozen examples.

A `RolloutGroup` is the rollouts of one task under one context; everything produces or consumes
groups.
Names are loaded on first use, so that `import tfgrpo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgrpo.config.learn import Config
    from tfgrpo.context import Context
    from tfgrpo.errors import TfgrpoError
    from tfgrpo.experience import Library, load_artefact
    from tfgrpo.learning.evaluate import evaluate
    from tfgrpo.learning.learn import learn, learn_async
    from tfgrpo.learning.result import Result
    from tfgrpo.lm import open_lm
    from tfgrpo.policies.chat import ChatPolicy, FunctionPolicy, ToolPolicy
    from tfgrpo.protocols import LM, Policy, Verifier
    from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task, Usage
    from tfgrpo.runtime.event_loop import run_sync
    from tfgrpo.sampling import GroupSpec, sample_group
    from tfgrpo.verifiers import Exact, FunctionVerifier

__all__ = [
    "LM",
    "ChatPolicy",
    "Config",
    "Context",
    "Exact",
    "FunctionPolicy",
    "FunctionVerifier",
    "GroupSpec",
    "Library",
    "Policy",
    "Result",
    "Rollout",
    "RolloutGroup",
    "Score",
    "Task",
    "TfgrpoError",
    "ToolPolicy",
    "Usage",
    "Verifier",
    "evaluate",
    "learn",
    "learn_async",
    "load_artefact",
    "open_lm",
    "run_sync",
    "sample_group",
]

_HOME = {
    "LM": "protocols",
    "ChatPolicy": "policies.chat",
    "Config": "config.learn",
    "Context": "context",
    "Exact": "verifiers",
    "FunctionPolicy": "policies.chat",
    "FunctionVerifier": "verifiers",
    "GroupSpec": "sampling",
    "Library": "experience",
    "Policy": "protocols",
    "Result": "learning.result",
    "Rollout": "rollout",
    "RolloutGroup": "rollout",
    "Score": "rollout",
    "Task": "rollout",
    "TfgrpoError": "errors",
    "ToolPolicy": "policies.chat",
    "Usage": "rollout",
    "Verifier": "protocols",
    "evaluate": "learning.evaluate",
    "learn": "learning.learn",
    "learn_async": "learning.learn",
    "load_artefact": "experience",
    "open_lm": "lm",
    "run_sync": "runtime.event_loop",
    "sample_group": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tfgrpo' has no attribute {name!r}")
    return getattr(import_module(f"tfgrpo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
