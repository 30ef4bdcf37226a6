"""Verifiers: what turns a finished attempt into a reward, feedback and components.

Each judges by `async score(rollout, task)` and checks references by `check_task` before anything
is spent. What cannot be judged raises `VerifierError`: it is never a reward of 0.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgrpo.runtime.import_string import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from tfgrpo.verifiers.arena import Arena, WinRate
    from tfgrpo.verifiers.code import Code
    from tfgrpo.verifiers.exact import Exact, Regex
    from tfgrpo.verifiers.factory import make_verifier
    from tfgrpo.verifiers.function import FunctionVerifier, Weighted
    from tfgrpo.verifiers.json_schema import JsonSchema
    from tfgrpo.verifiers.judge import Judge
    from tfgrpo.verifiers.majority import Majority
    from tfgrpo.verifiers.math import Math
    from tfgrpo.verifiers.numeric import Numeric
    from tfgrpo.verifiers.tool_calls import ToolCalls

__all__ = [
    "Arena",
    "Code",
    "Exact",
    "FunctionVerifier",
    "JsonSchema",
    "Judge",
    "Majority",
    "Math",
    "Numeric",
    "Regex",
    "ToolCalls",
    "Weighted",
    "WinRate",
    "make_verifier",
]

_HOME = {
    "Arena": "arena",
    "Code": "code",
    "Exact": "exact",
    "FunctionVerifier": "function",
    "JsonSchema": "json_schema",
    "Judge": "judge",
    "Majority": "majority",
    "Math": "math",
    "Numeric": "numeric",
    "Regex": "exact",
    "ToolCalls": "tool_calls",
    "Weighted": "function",
    "WinRate": "arena",
    "make_verifier": "factory",
}

__getattr__, __dir__ = _lazy_exports(__name__, _HOME)
