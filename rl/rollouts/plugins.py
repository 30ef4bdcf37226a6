"""Loads the tools and the environment that a config names.

Nothing is imported that the settings do not name; modules stand beside the config file or are
installed. Does not know training. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.policies.tool_loop import offer_text
from tfgrpo.policies.tools import Tool, tool
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.config_sections import MultiTurnConfig
from tfgrpo.rl.rollouts.multi_turn import MakeEnvironment
from tfgrpo.rl.rollouts.turn_tools import TurnTools
from tfgrpo.runtime.import_string import load_object


def _callable(name: str, where: str) -> Any:
    """The function, class or tool that `module:name` names."""
    value = load_object(name, where)
    if not callable(value) and not isinstance(value, Tool):
        raise ConfigError(f"{where}: {name!r} is a {type(value).__name__}, not a function")
    return value


def tools_of(multi_turn: MultiTurnConfig) -> dict[str, Tool]:
    """Return the tools that [multi_turn] names, by name.

    Raises:
        ConfigError: one cannot be loaded or has no schema, or two share a name.
    """
    found: dict[str, Tool] = {}
    for name in multi_turn.tools:
        value = _callable(name, "multi_turn.tools")
        made = value if isinstance(value, Tool) else tool(value)
        if made.spec.name in found:
            raise ConfigError(f"multi_turn.tools: two tools are named {made.spec.name!r}")
        found[made.spec.name] = made
    return found


def environment_of(multi_turn: MultiTurnConfig, tools: Mapping[str, Tool]) -> MakeEnvironment:
    """Return what makes the environment of one rollout."""
    if multi_turn.environment:
        make: MakeEnvironment = _callable(multi_turn.environment, "multi_turn.environment")
        return make
    return lambda task: TurnTools(
        tools,
        native=multi_turn.calls == "native",
        timeout_s=multi_turn.tool_timeout_s,
        max_chars=multi_turn.max_observation_chars,
    )


def system_text(config: TrainConfig, tools: Mapping[str, Tool]) -> str:
    """Return the system text, with the tools where they are offered as text."""
    as_text = tools and config.multi_turn.calls == "text"
    offer = offer_text([t.spec for t in tools.values()]) if as_text else ""
    return "\n\n".join(t for t in (config.model.system, offer) if t)
