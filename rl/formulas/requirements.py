"""Which inputs a run provides, and what each formula that it chose requires.

Every need of a chosen loss, advantage, reward or credit is either met by the settings or refused
before anything is loaded, in one line that says what to set. Does not know where settings are
written, nor how a need is met (`update.row_features` does). Source: own.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.aggregations import AGGREGATIONS
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.inputs import Floats, RewardBatch
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry, check_needs, check_options, lookup
from tfgrpo.rl.formulas.rewards import REWARDS

_ALWAYS = (
    *("sequence", "group", "every_row", "entropy", "reference", "next_gap", "ratio"),
    *("own_start", "rewards"),
    *("logp", "logp_tokens", "entropy_tokens", "token_ids", "answers", "width"),
    "extra:prompt_confidence_R",
    *("extra:sum_square_D", "extra:tempered_logp_D", "extra:score_norm_R"),
    *("extra:think_entropy_R", "extra:answer_entropy_R", "extra:prior_R", "extra:past_share_R"),
)
_PLAYED = ("steps", "states", "extra:tool_calls_R", "extra:invalid_R")
_FILLED = ("step", "steps", "progress", "max_tokens")
"""Options that the trainer fills in where they are not given."""
COLUMN_SOURCES = re.compile(r"(task|part|rollout):.+|length|entropy|logp")


@dataclass(frozen=True, slots=True)
class FormulaChoice:
    """What a run chooses from the registries, and what of its settings meets their needs."""

    loss: str = "clip"
    names_loss: bool = False
    """The loss or an option of it was chosen, not left at the default."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = ""
    """Empty takes the loss's own."""
    advantage: str = "grpo"
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    names_advantage: bool = False
    """The advantage was chosen, not left at the default."""
    rewards: tuple[str, ...] = ()
    """Applied in this order."""
    reward_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credit: str = ""
    """Takes the place of the advantage."""
    credit_options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column to its source."""
    verifier: str = ""
    """Kind of the verifier."""
    has_verdicts: bool = False
    """The verifier keeps its verdict of each pair."""
    temperature: float = 1.0
    is_multi_turn: bool = False
    has_environment: bool = False
    hints: str = ""
    """Method of [hints]; empty for none."""
    segments: str = ""
    """Strategy that cuts replies of one turn into segments; empty for none."""
    has_phrases: bool = False
    has_separator: bool = False
    """Replies of one turn are cut into steps."""
    group_size: int = 2
    steps: int = 1
    max_tokens: int = 1
    """Of a rollout."""
    passes: int = 1
    """Over each batch."""
    is_reused: bool = False
    """A batch serves several optimiser updates, or past groups are used again: the ratio of the
    weights that are trained to those that sampled moves away from 1."""


def supplied(choice: FormulaChoice) -> set[str]:
    """Return the needs that a run meets."""
    found = set(_ALWAYS) | {f"extra:{name}" for name in choice.columns}
    kind = choice.verifier
    if kind in ("weighted", "function"):
        found.add("parts")
    if kind == "arena":
        found.add("extra:round_R")
    if choice.temperature == 1.0:
        found |= {"behaviour", "extra:ratio_R"}
    if choice.is_multi_turn:
        found |= set(_PLAYED)
    if choice.segments:
        found |= {"steps", "states"}
    if choice.segments == "spo_chain":
        found.add("step_rewards")
    if kind == "tool_calls":
        found.add("extra:tool_calls_R")
    if choice.is_multi_turn and (choice.has_environment or kind == "function"):
        found.add("step_rewards")
    if choice.hints:
        found.add("extra:context_R")
    else:
        found.add("baseline")
    if not (choice.is_multi_turn or choice.hints or choice.segments):
        found.add("given")
    if choice.has_verdicts or kind == "function":
        found.add("verdicts")
    if not choice.is_reused:
        found.add("half_step")
    if choice.passes > 1:
        found.add("passes")
    if choice.has_phrases:
        found |= {"extra:planning_D", "extra:reasoning_D"}
    if choice.has_separator:
        found |= {"steps", "states"}
    if choice.has_separator and kind == "function":
        found.add("step_rewards")
    return found


def advice(need: str) -> str:
    """Return what to set so that a need is met."""
    if need in ("steps", "states", "extra:tool_calls_R", "extra:invalid_R"):
        return (
            "set [multi_turn], so that rollouts have several turns, rollout.strategy = 'tree' for "
            "segments of a reply, or credit.separator for its lines"
        )
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
    if need == "given":
        return (
            "leave [multi_turn], tasks.groups, [hints] and strategies of segments out: a reference "
            "is one reply to the bare prompt"
        )
    if need == "verdicts":
        return "use a verifier of kind 'win_rate' with verdicts = true"
    if need == "passes":
        return (
            "set optimiser.epochs_per_batch to 2 or more, since labels move from one pass over a "
            "batch to the next"
        )
    if need == "half_step":
        return (
            "set optimiser.epochs_per_batch and optimiser.updates_per_epoch to 1 and leave past "
            "groups and engine.max_staleness out, since both of its steps start from the weights "
            "that sampled"
        )
    if need == "extra:context_R":
        return "set [hints], so that rollouts of a group may have several contexts"
    if need == "extra:round_R":
        return "use a verifier of kind 'arena', or name a column, features.round_R = 'part:NAME'"
    if need == "extra:planning_D":
        return "list the planning phrases in credit.phrases"
    if need == "extra:reasoning_D":
        return "list what begins a call, such as 'Action:', in credit.phrases"
    name = need.removeprefix("extra:")
    return f"say where the column comes from, such as features.{name} = 'task:KEY' or 'part:NAME'"


def check(choice: FormulaChoice) -> None:
    """Check names, needs and options of everything that the settings choose.

    Raises:
        ConfigError: an unknown name or option, or a need that is not met.
    """
    if choice.aggregation:
        lookup(AGGREGATIONS, "aggregation", choice.aggregation)
    unused = sorted(set(choice.reward_options) - set(choice.rewards))
    if unused:
        raise ConfigError(f"rewards.options names {unused[0]!r}, which is not in rewards.names")
    _check_columns(choice)
    have = supplied(choice)
    for kind, entry, options in chosen(choice):
        check_needs(entry, kind, have, advice)
        check_options(entry, kind, options, _FILLED)
    entry = lookup(LOSSES, "loss", choice.loss)
    check_needs(entry, "loss", have, advice)
    check_options(entry, "loss", choice.loss_options, _FILLED)
    if {"sequence", "group"} <= set(entry.needs) and choice.group_size < 2:
        raise ConfigError(
            f"loss {choice.loss!r} compares the rollouts of a group, and rollout.group_size is "
            f"{choice.group_size}: use 2 or more"
        )
    if "given" in entry.needs:
        _check_given(choice)
    _check_spans(choice, have)
    k = choice.reward_options.get("length_outlier", {}).get("k", 2.0)
    if "length_outlier" in choice.rewards and k >= (bound := math.sqrt(choice.group_size - 1)):
        raise ConfigError(
            f"reward 'length_outlier' with k = {k:g} and rollout.group_size {choice.group_size}: "
            f"no length lies {k:g} population deviations above the mean of so few, the most is "
            f"{bound:.2f}; lower rewards.options.length_outlier.k or raise the group size"
        )


def _check_given(choice: FormulaChoice) -> None:
    """Refuse entries that would read of a reference what nobody judged."""
    for kind, entry, _ in chosen(choice):
        if "parts" in entry.needs:
            raise ConfigError(
                f"loss {choice.loss!r} with {kind} {entry.name!r}: a reference has a reward and no "
                f"parts, which {entry.name!r} goes by; choose another {kind}, such as "
                "loss.advantage = 'grpo'"
            )


def _check_spans(choice: FormulaChoice, have: set[str]) -> None:
    """Refuse options of turns and widths that nothing in the run would use."""
    entry = lookup(LOSSES, "loss", choice.loss)
    by_turn = [o for o in ("gate", "lam_last") if choice.loss_options.get(o) not in (None, "row")]
    if choice.loss == "llds" and by_turn and "steps" not in have:
        raise ConfigError(
            f"loss 'llds' with {by_turn[0]} = {choice.loss_options[by_turn[0]]!r} is for rollouts "
            f"of several turns: {advice('steps')}"
        )
    widen = choice.credit_options.get("widen") if choice.credit == "a2tgpo" else None
    if widen and "width" not in entry.uses:
        wide = sorted(n for n, e in LOSSES.items() if "width" in e.uses)
        raise ConfigError(
            f"credit 'a2tgpo' with widen = {widen} widens the clip of a turn, which loss "
            f"{choice.loss!r} cannot: choose one of {', '.join(wide)}"
        )


def remarks(choice: FormulaChoice) -> list[str]:
    """Return, a line each, what of the choice has no effect in this run."""
    found = []
    entry = lookup(LOSSES, "loss", choice.loss)
    has_ratio = "ratio" in entry.needs and not {"behaviour", "own_start"} & set(entry.needs)
    if choice.names_loss and has_ratio and not choice.is_reused:
        found.append(
            f"loss {choice.loss!r}: with one update per batch and no replay the ratio of trained "
            "to sampling weights is 1 throughout, so its clips, caps and gates do nothing and the "
            "gradient is that of 'reinforce'; set optimiser.epochs_per_batch or "
            "optimiser.updates_per_epoch to 2 or more to have what tells it apart"
        )
    if "rewards" in entry.needs and (choice.names_advantage or choice.credit):
        made = f"credit.name {choice.credit!r}" if choice.credit else "loss.advantage"
        found.append(
            f"loss {choice.loss!r} goes by rewards, not by advantages: {made} has no effect; leave "
            "it out, or shape rewards with [rewards]"
        )
    names = [e.name for _, e, _ in chosen(choice)]
    found += [_PARTIAL[n] for n in names if n in _PARTIAL and n != choice.hints]
    return found


_PARTIAL = {
    "nudge": "advantage 'nudge' is NudgeRL's advantage alone: its strategies and its distillation "
    "into the bare prompt are those of [hints] name = 'nudge'",
    "a2tgpo": "credit 'a2tgpo' trains on the step rewards alone, since how the paper mixes in the "
    "outcome is unknown: the verifier's reward has no effect; credit 'mapo' has both",
}
"""Entries of which a run has a part only, and what it lacks."""


def _check_columns(choice: FormulaChoice) -> None:
    entries = [e for registry in (ADVANTAGES, REWARDS, CREDIT) for e in registry.values()]
    known = {n.removeprefix("extra:") for e in entries for n in e.needs if n.endswith("_R")}
    for name, source in choice.columns.items():
        if name not in known:
            raise ConfigError(f"features.{name}: no entry has it; known are {sorted(known)}")
        if not COLUMN_SOURCES.fullmatch(source):
            raise ConfigError(
                f"features.{name} is {source!r}; allowed are 'task:KEY' (of its metadata), "
                "'part:NAME' (of the score), 'rollout:KEY' (of its metadata), 'length', 'entropy' "
                "and 'logp' (means over the tokens)"
            )


def chosen(choice: FormulaChoice) -> Iterator[tuple[str, Entry, Mapping[str, Any]]]:
    """Yield (kind, entry, options) of what makes the advantages, in the order of use."""
    for name in choice.rewards:
        yield "reward", lookup(REWARDS, "reward", name), choice.reward_options.get(name, {})
    if choice.credit:
        yield "credit", lookup(CREDIT, "credit", choice.credit), choice.credit_options
    else:
        entry = lookup(ADVANTAGES, "advantage", choice.advantage)
        yield "advantage", entry, choice.advantage_options


def needs_of(choice: FormulaChoice) -> set[str]:
    """Return what the chosen rewards and the advantage or credit ask for, columns' needs too."""
    have = supplied(choice)
    loss = lookup(LOSSES, "loss", choice.loss)
    entries = [entry for _, entry, _ in chosen(choice)]
    entries += [loss] if loss.columns is not None else []
    found = {need for entry in entries for need in entry.needs}
    found |= {f"maybe:{need}" for entry in entries for need in entry.uses if need in have}
    found |= {"entropy_tokens" for s in choice.columns.values() if s == "entropy"}
    found |= {"logp_tokens" for s in choice.columns.values() if s == "logp"}
    return found


def aggregation_of(choice: FormulaChoice) -> str:
    """Return the aggregation: the one set, else the loss's own, else the credit's own."""
    own = [lookup(LOSSES, "loss", choice.loss).aggregation]
    own += [entry.aggregation for _, entry, _ in chosen(choice)]
    return choice.aggregation or next((name for name in own if name), "token_mean")


def columns_of(batch: RewardBatch, choice: FormulaChoice, step: int) -> dict[str, Floats]:
    """Return what the loss is given a token besides advantages, by name: D each."""
    found: dict[str, Floats] = {}
    loss = lookup(LOSSES, "loss", choice.loss)
    for entry, options in (
        *((entry, filled(entry, options, choice, step)) for _, entry, options in chosen(choice)),
        (loss, choice.loss_options),
    ):
        if entry.columns is not None and len(batch.reward_R):
            found |= entry.columns(batch, options)
    return found


def filled(
    entry: Entry, options: Mapping[str, Any], choice: FormulaChoice, step: int
) -> dict[str, Any]:
    """Return the options with the run's own step, progress in [0, 1] and token limit."""
    values = {
        "step": step,
        "steps": choice.steps,
        "progress": min(1.0, step / choice.steps),
        "max_tokens": choice.max_tokens,
    }
    names = inspect.signature(entry.fn).parameters
    return {n: v for n, v in values.items() if n in names} | dict(options)
