"""Predicted success of any model on a prompt: routing and rollout budgets.

    router = fit("outcomes.jsonl", models="prices.json", out="router")
    router = load("router")
    router.ask("Prove that ...").model

Names are loaded on first use. Does not know learning, search or training. Source: V_0 and the
layers in `estimator.value_model`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgrpo.routing.calibration import Gate, calibrate
    from tfgrpo.routing.cascade import Cascade, StopRule
    from tfgrpo.routing.estimator.value_model import Estimates, ModelState, ValueModel
    from tfgrpo.routing.outcome_files import read_models, read_outcomes
    from tfgrpo.routing.promises import Calibrated, HeldOut, calibrate_pool, calibrate_router
    from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount
    from tfgrpo.routing.routed_lm import RoutedLM
    from tfgrpo.routing.router import Router, RouterOptions, Session
    from tfgrpo.routing.rules import Candidate, Cheapest, Guaranteed, RouteDecision, TradeOff
    from tfgrpo.routing.verbs import fit, load, route
    from tfgrpo.runtime.cooldown import Cooldowns

_HOME = {
    "Calibrated": "promises",
    "Candidate": "rules",
    "Cascade": "cascade",
    "Cheapest": "rules",
    "Cooldowns": "cooldown",
    "Estimates": "estimator.value_model",
    "Gate": "calibration",
    "Guaranteed": "rules",
    "HeldOut": "promises",
    "ModelInfo": "records",
    "ModelState": "estimator.value_model",
    "OutcomeTable": "records",
    "RouteDecision": "rules",
    "RoutedLM": "routed_lm",
    "Router": "router",
    "RouterOptions": "router",
    "Session": "router",
    "StopRule": "cascade",
    "SuccessCount": "records",
    "TradeOff": "rules",
    "ValueModel": "estimator.value_model",
    "calibrate": "calibration",
    "calibrate_pool": "promises",
    "calibrate_router": "promises",
    "fit": "verbs",
    "load": "verbs",
    "read_models": "outcome_files",
    "read_outcomes": "outcome_files",
    "route": "verbs",
}

__all__ = [
    "Calibrated",
    "Candidate",
    "Cascade",
    "Cheapest",
    "Cooldowns",
    "Estimates",
    "Gate",
    "Guaranteed",
    "HeldOut",
    "ModelInfo",
    "ModelState",
    "OutcomeTable",
    "RouteDecision",
    "RoutedLM",
    "Router",
    "RouterOptions",
    "Session",
    "StopRule",
    "SuccessCount",
    "TradeOff",
    "ValueModel",
    "calibrate",
    "calibrate_pool",
    "calibrate_router",
    "fit",
    "load",
    "read_models",
    "read_outcomes",
    "route",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tfgrpo.routing' has no attribute {name!r}")
    home = "runtime" if name == "Cooldowns" else "routing"
    return getattr(import_module(f"tfgrpo.{home}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
