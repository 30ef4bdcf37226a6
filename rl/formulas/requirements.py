"""What a run can give to the registries' entries, and the check that it gives what they need.

Every need of a chosen loss, advantage, reward or credit is either met by the settings or refused
before anything is loaded, in one line that says what to set. Does not know how a need is met
(`facts` does). Source: own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry, check_needs, check_options, lookup
from tfgrpo.rl.formulas.rewards import REWARDS

if TYPE_CHECKING:
    from tfgrpo.rl.config import TrainConfig

_ALWAYS = (
    *("sequence", "group", "every_row", "entropy", "reference", "next_gap"),
    *("logp", "logp_tokens", "entropy_tokens", "token_ids", "answers"),
    *("extra:sum_square_D", "extra:tempered_logp_D", "extra:score_norm_R"),
    *("extra:think_entropy_R", "extra:answer_entropy_R"),
)
_PLAYED = ("steps", "states", "extra:tool_calls_R", "extra:invalid_R")
_FILLED = ("step", "steps", "progress", "max_tokens")
"""Options that the trainer fills in where they are not given."""
COLUMN_SOURCES = re.compile(r"(task|part|rollout):.+|length|entropy|logp")


def supplied(config: TrainConfig) -> set[str]:
    """Return the needs that a run with these settings meets."""
    found = set(_ALWAYS) | {f"extra:{name}" for name in config.features}
    kind = config.verifier.get("kind")
    if kind in ("weighted", "function"):
        found.add("parts")
    if config.rollout.temperature == 1.0:
        found |= {"behaviour", "extra:ratio_R"}
    if config.multi_turn.is_on:
        found |= set(_PLAYED)
    if kind == "tool_calls":
        found.add("extra:tool_calls_R")
    if config.multi_turn.is_on and (config.multi_turn.environment or kind == "function"):
        found.add("step_rewards")
    if config.hints:
        found.add("extra:context_R")
    else:
        found.add("baseline")
    if config.credit.phrases:
        found.add("extra:planning_D")
    return found


def advice(need: str) -> str:
    """Return what to set so that a need is met."""
    if need in ("steps", "states", "extra:tool_calls_R", "extra:invalid_R"):
        return "set [multi_turn], so that rollouts have several turns"
    if need == "step_rewards":
        return (
            "set multi_turn.environment, or a verifier of kind 'function' with parts step_0, "
            "step_1, …"
        )
    if need == "parts":
        return "use a verifier of kind 'weighted' or 'function' that names its parts"
    if need in ("behaviour", "extra:ratio_R"):
        return "set rollout.temperature = 1: samplers tell log-probs at temperature 1 only"
    if need == "baseline":
        return "leave [hints] out: the greedy rollout is asked without hints"
    if need == "extra:context_R":
        return "set [hints], so that rollouts of a group may have several contexts"
    if need == "extra:planning_D":
        return "list the planning phrases in credit.phrases"
    name = need.removeprefix("extra:")
    return f"say where the column comes from, such as features.{name} = 'task:KEY' or 'part:NAME'"


def check(config: TrainConfig) -> None:
    """Check names, needs and options of everything that the settings choose.

    Raises:
        ConfigError: an unknown name or option, or a need that is not met.
    """
    lookup(AGGREGATIONS, "aggregation", config.loss.aggregation)
    if config.credit.name and "advantage" in config.loss.model_fields_set:
        raise ConfigError(
            f"credit.name {config.credit.name!r} and loss.advantage {config.loss.advantage!r} both "
            "make the advantages: keep one of them"
        )
    unused = sorted(set(config.rewards.options) - set(config.rewards.names))
    if unused:
        raise ConfigError(f"rewards.options names {unused[0]!r}, which is not in rewards.names")
    _check_columns(config)
    have = supplied(config)
    for kind, entry, options in chosen(config):
        check_needs(entry, kind, have, advice)
        check_options(entry, kind, options, _FILLED)
    entry = lookup(LOSSES, "loss", config.loss.name)
    check_needs(entry, "loss", have, advice)
    check_options(entry, "loss", config.loss.options)


def _check_columns(config: TrainConfig) -> None:
    entries = [e for registry in (ADVANTAGES, REWARDS, CREDIT) for e in registry.values()]
    known = {n.removeprefix("extra:") for e in entries for n in e.needs if n.endswith("_R")}
    for name, source in config.features.items():
        if name not in known:
            raise ConfigError(f"features.{name}: no entry has it; known are {sorted(known)}")
        if not COLUMN_SOURCES.fullmatch(source):
            raise ConfigError(
                f"features.{name} is {source!r}; allowed are 'task:KEY' (of its metadata), "
                "'part:NAME' (of the score), 'rollout:KEY' (of its metadata), 'length', 'entropy' "
                "and 'logp' (means over the tokens)"
            )


def chosen(config: TrainConfig) -> Iterator[tuple[str, Entry, Mapping[str, float]]]:
    """Yield (kind, entry, options) of what makes the advantages, in the order of use."""
    for name in config.rewards.names:
        yield "reward", lookup(REWARDS, "reward", name), config.rewards.options.get(name, {})
    if config.credit.name:
        yield "credit", lookup(CREDIT, "credit", config.credit.name), config.credit.options
    else:
        entry = lookup(ADVANTAGES, "advantage", config.loss.advantage)
        yield "advantage", entry, config.loss.advantage_options


def needs_of(config: TrainConfig) -> set[str]:
    """Return what the chosen rewards and the advantage or credit ask for, columns' needs too."""
    found = {need for _, entry, _ in chosen(config) for need in entry.needs}
    found |= {"entropy_tokens" for s in config.features.values() if s == "entropy"}
    found |= {"logp_tokens" for s in config.features.values() if s == "logp"}
    return found


def filled(
    entry: Entry, options: Mapping[str, float], config: TrainConfig, step: int
) -> dict[str, float]:
    """Return the options with the run's own step, progress in [0, 1] and token limit."""
    steps = config.optimiser.steps
    values = {
        "step": step,
        "steps": steps,
        "progress": min(1.0, step / steps),
        "max_tokens": config.multi_turn.max_tokens
        if config.multi_turn.is_on
        else config.rollout.max_tokens,
    }
    names = inspect.signature(entry.fn).parameters
    return {n: v for n, v in values.items() if n in names} | dict(options)
