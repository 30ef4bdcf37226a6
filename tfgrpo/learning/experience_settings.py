"""How groups become edits in a run: `[learn]`, `[critic]` and `repairs` as one checked record.

Every value under `learn.settings` is checked against the type of the field that it sets. Does not
know what a setting does. Source: own; the presets are in `experience.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tfgrpo.config.learn import Config
from tfgrpo.errors import ConfigError
from tfgrpo.experience import ExperienceSettings, preset
from tfgrpo.learning.components import agent_text

__all__ = ["SET_ELSEWHERE", "experience_settings"]

SET_ELSEWHERE = {
    "objective": "learn.objective_agent",
    "learning_objective": "learn.objective_learning",
    "ground_truth": "learn.ground_truth",
    "reference_exemplars": "learn.reference_exemplars",
    "agent": "policy.system",
    "seed": "learn.seed",
    "limits": "critic.timeout_s",
    "sampling": "critic.sampling",
    "repairs": "repairs",
    "flow": "learn.preset",
}
"""Experience settings that have a key of their own."""


def experience_settings(config: Config) -> ExperienceSettings:
    """Return how groups become edits under these settings.

    Raises:
        ConfigError: an unknown experience setting or repair.
    """
    learn = config.learn
    changes: dict[str, Any] = dict(learn.settings)
    _check_settings(changes)
    changes |= {
        "objective": learn.objective_agent,
        "learning_objective": learn.objective_learning,
        "ground_truth": learn.ground_truth and not _is_judged_by_critic(config),
        "reference_exemplars": learn.reference_exemplars,
        "seed": learn.seed,
        "limits": config.critic.to_limits(),
        "agent": agent_text(config.policy),
    }
    if config.repairs:
        changes["repairs"] = config.repairs
    if learn.entries == "lessons":
        changes["exemplars"] = 0
    if learn.entries == "exemplars":
        changes["lessons"] = False
    settings = preset(learn.preset, **changes)
    asked = config.critic.sampling
    if asked != type(asked)():
        settings = replace(settings, sampling=asked.to_sampling())
    if config.critic.context_tokens or asked.max_tokens is not None:
        budget = settings.budget
        settings = replace(
            settings,
            budget=replace(
                budget,
                context_tokens=config.critic.context_tokens or budget.context_tokens,
                reply_tokens=asked.max_tokens or budget.reply_tokens,
                send_limit=asked.max_tokens != 0,
            ),
        )
    return settings


def _is_judged_by_critic(config: Config) -> bool:
    """True without a verifier, unless the majority of a group stands in for one."""
    verifier = config.verifier
    return verifier.get("kind") == "none" and verifier.get("by", "critic") == "critic"


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check the values of `learn.settings`; names are the preset's to check."""
    hints = get_type_hints(ExperienceSettings)
    for key, value in given.items():
        if key in SET_ELSEWHERE:
            raise ConfigError(f"learn.settings.{key}: set {SET_ELSEWHERE[key]} instead")
        kind = hints.get(key)
        if is_dataclass(kind) and isinstance(value, dict):
            inner = get_type_hints(kind)
            for name, part in value.items():
                _check_value(f"learn.settings.{key}.{name}", part, inner.get(name, Any))
        elif kind is not None:
            _check_value(f"learn.settings.{key}", value, kind)


def _check_value(name: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as exc:
        raise ConfigError(f"{name} = {value!r}: {exc.errors()[0]['msg']}") from None
