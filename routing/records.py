"""Outcomes: k successes of n trials of one model on one prompt, as rows and as a sparse table.

Rows come from groups (graded rollouts only), from files (`readers`) or from a user. Bad rows are
refused with the row named; nothing is guessed, a missing cell is never a failure.
Does not know vectors, priors or routing. Idea: labels are counts, not bits (own; the published
in-context value model cuts them at one half).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup

__all__ = [
    "ModelInfo",
    "OutcomeTable",
    "SuccessCount",
    "outcomes_of_groups",
    "prompt_key",
    "tags_of",
]


def prompt_key(prompt: str) -> str:
    """Return 24 hex digits fixed by the text: the id of a prompt that was given none."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def tags_of(dataset: str, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return `name=value` of a data set and of metadata, sorted.

    >>> tags_of("mmlu", {"language": "de"})
    ('dataset=mmlu', 'language=de')
    """
    pairs = {**metadata, **({"dataset": dataset} if dataset else {})}
    return tuple(sorted(f"{name}={value}" for name, value in pairs.items()))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model besides its outcomes."""

    name: str
    family: str = ""
    """Models of one family stay on one side of a split; empty means the name itself."""
    input_usd_per_mtok: float | None = None
    """US dollars per million input tokens; None is unknown."""
    output_usd_per_mtok: float | None = None
    """US dollars per million output tokens; None is unknown."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a model has an empty name: give every model a name of its own")
        for field_name in ("input_usd_per_mtok", "output_usd_per_mtok"):
            price = getattr(self, field_name)
            if price is not None and not (math.isfinite(price) and price >= 0):
                raise ConfigError(
                    f"model {self.name!r}: {field_name} is {price!r}; allowed is a finite number "
                    f"of "
                    "dollars from 0 up, or nothing where it is unknown"
                )

    @property
    def group(self) -> str:
        """The family, or the name where there is none."""
        return self.family or self.name


@dataclass(frozen=True, slots=True)
class SuccessCount:
    """One model on one prompt: `successes` of `trials`."""

    prompt: str
    model: str
    successes: float
    """From 0 to `trials`; fractions are allowed where the reward is a fraction."""
    trials: float = 1.0
    prompt_id: str = ""
    """Identity of the prompt; empty means `prompt_key(prompt)`."""
    dataset: str = ""
    output_tokens: float | None = None
    """Mean output tokens a trial; None is unknown."""
    cost_usd: float | None = None
    """Mean dollars a trial; None is unknown."""
    at: float | None = None
    """When it was seen, in any unit that grows (seconds, training steps); None is undated."""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What else is known of the prompt, such as category, source or language."""

    def __post_init__(self) -> None:
        where = (
            f"outcome of model {self.model!r} on prompt {(self.prompt_id or self.prompt)[:60]!r}"
        )
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ConfigError(f"{where}: the prompt is empty; give its text")
        if not self.model:
            raise ConfigError(f"{where}: the model is empty; name it")
        for name in ("successes", "trials"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise ConfigError(f"{where}: {name} is {value!r}; allowed is a number")
            if not math.isfinite(value):
                raise ConfigError(
                    f"{where}: {name} is {value!r}; allowed is a finite number: leave out rollouts "
                    "without a reward instead of counting them"
                )
        if self.trials <= 0 or not 0 <= self.successes <= self.trials:
            raise ConfigError(
                f"{where}: {self.successes} successes of {self.trials} trials; allowed are more "
                f"than 0 "
                "trials and from 0 to that many successes"
            )
        for name in ("output_tokens", "cost_usd"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{where}: {name} is {value!r}; allowed is a finite number from 0 up, or "
                    f"nothing"
                )

    @property
    def key(self) -> str:
        """The prompt's identity."""
        return self.prompt_id or prompt_key(self.prompt)

    @property
    def tags(self) -> tuple[str, ...]:
        """The data set and every pair of the metadata, as `name=value`."""
        return tags_of(self.dataset, self.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, unknown fields left out."""
        row: dict[str, Any] = {
            "prompt": self.prompt,
            "model": self.model,
            "successes": self.successes,
            "trials": self.trials,
        }
        for name in ("prompt_id", "dataset", "output_tokens", "cost_usd", "at"):
            value = getattr(self, name)
            if value not in (None, ""):
                row[name] = value
        if self.metadata:
            row["metadata"] = dict(self.metadata)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a row from its JSON form; see `readers` for foreign spellings."""
        return cls(**{str(k): v for k, v in row.items()})


def _model_of(group: RolloutGroup) -> str:
    name = group.policy_id or "policy"
    return name if group.context.is_empty else f"{name}+{group.context.context_hash[:8]}"


def outcomes_of_groups(
    groups: Iterable[RolloutGroup],
    *,
    success_at: float | None = None,
    model_of: Callable[[RolloutGroup], str] = _model_of,
) -> list[SuccessCount]:
    """Return one outcome a group that has a graded rollout; ungraded rollouts count for nothing.

    `success_at=None` takes rewards from 0 to 1 as (parts of) successes; a number counts the rewards
    that reach it. `model_of` names the column; by default the policy id, followed by the context's
    hash where the context is not empty, since a policy with lessons is another model.

    Raises:
        ConfigError: a reward lies outside [0, 1] and no `success_at` was given.
    """
    rows = []
    for group in groups:
        rewards_G = group.rewards_G
        if not rewards_G:
            continue
        if success_at is None:
            if min(rewards_G) < 0 or max(rewards_G) > 1:
                raise ConfigError(
                    f"group {group.group_id!r} has rewards from {min(rewards_G):g} to "
                    f"{max(rewards_G):g}; allowed is 0 to 1, or give success_at, the reward from "
                    f"which "
                    "a rollout counts as a success"
                )
            successes = math.fsum(rewards_G)
        else:
            successes = float(sum(r >= success_at for r in rewards_G))
        usages = [r.usage for r in group.graded]
        costs = [u.cost_usd for u in usages if u.cost_usd is not None]
        step = group.metadata.get("step")
        rows.append(
            SuccessCount(
                prompt=group.task.text,
                model=model_of(group),
                successes=min(successes, float(len(rewards_G))),
                trials=float(len(rewards_G)),
                prompt_id=group.task.task_id,
                dataset=str(group.task.metadata.get("dataset", "")),
                output_tokens=float(np.mean([u.completion_tokens for u in usages])) or None,
                cost_usd=float(np.mean(costs)) if costs and len(costs) == len(usages) else None,
                at=float(step) if isinstance(step, (int, float)) else None,
            )
        )
    return rows


Array = NDArray[np.float64]


@dataclass(frozen=True)
class OutcomeTable:
    """Outcomes as arrays: prompts in first-seen order, models in first-seen order, sparse cells."""

    keys: tuple[str, ...]
    prompts: tuple[str, ...]
    datasets: tuple[str, ...]
    models: tuple[ModelInfo, ...]
    successes: Array
    """Shape (prompts, models); 0 where the cell is unknown."""
    trials: Array
    """Shape (prompts, models); 0 where the cell is unknown."""
    output_tokens: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Shape (prompts, models); NaN where unknown."""
    cost_usd: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Shape (prompts, models), mean dollars a trial; NaN where unknown."""

    @classmethod
    def from_outcomes(cls, rows: Iterable[SuccessCount], models: Sequence[ModelInfo] = ()) -> Self:
        """Merge rows into a table: equal (prompt id, model) add their counts.

        Raises:
            ConfigError: one prompt id stands for two texts.
        """
        rows = list(rows)
        known = {m.name: m for m in models}
        names = dict.fromkeys([*known, *(r.model for r in rows)])
        first: dict[str, SuccessCount] = {}
        for row in rows:
            seen = first.setdefault(row.key, row)
            if seen.prompt != row.prompt:
                raise ConfigError(
                    f"prompt id {row.key!r} stands for two texts, {seen.prompt[:60]!r} and "
                    f"{row.prompt[:60]!r}: give each prompt an id of its own"
                )
        column = {name: j for j, name in enumerate(names)}
        line = {key: i for i, key in enumerate(first)}
        shape = (len(first), len(names))
        successes, trials = np.zeros(shape), np.zeros(shape)
        sums = {"output_tokens": np.zeros(shape), "cost_usd": np.zeros(shape)}
        weights = {name: np.zeros(shape) for name in sums}
        for row in rows:
            cell = line[row.key], column[row.model]
            successes[cell] += row.successes
            trials[cell] += row.trials
            for name, total in sums.items():
                value = getattr(row, name)
                if value is not None:
                    total[cell] += value * row.trials
                    weights[name][cell] += row.trials
        means = {
            name: np.where(weights[name] > 0, sums[name] / np.maximum(weights[name], 1e-12), np.nan)
            for name in sums
        }
        return cls(
            keys=tuple(first),
            prompts=tuple(r.prompt for r in first.values()),
            datasets=tuple(r.dataset for r in first.values()),
            models=tuple(known.get(name, ModelInfo(name)) for name in names),
            successes=successes,
            trials=trials,
            **means,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(m.name for m in self.models)

    @property
    def rates(self) -> Array:
        """Success rate a cell; NaN where the cell is unknown."""
        return np.where(self.trials > 0, self.successes / np.maximum(self.trials, 1e-12), np.nan)

    def column(self, model: str) -> int:
        """Return the index of a model.

        Raises:
            ConfigError: there is no such model.
        """
        if model not in self.model_names:
            raise ConfigError(
                f"model {model!r} has no outcomes here; known are "
                f"{', '.join(self.model_names) or 'none'}"
            )
        return self.model_names.index(model)

    def outcomes(self, model: str) -> list[SuccessCount]:
        """Return the known rows of one model."""
        j = self.column(model)
        return [
            SuccessCount(
                self.prompts[i],
                model,
                float(self.successes[i, j]),
                float(self.trials[i, j]),
                prompt_id=self.keys[i],
                dataset=self.datasets[i],
                output_tokens=_known(self.output_tokens, i, j),
                cost_usd=_known(self.cost_usd, i, j),
            )
            for i in map(int, np.flatnonzero(self.trials[:, j] > 0))
        ]

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> OutcomeTable:
        """Return the table of some prompts, in the order given."""
        index = np.asarray(rows, dtype=np.intp)
        return replace(
            self,
            keys=tuple(self.keys[i] for i in index),
            prompts=tuple(self.prompts[i] for i in index),
            datasets=tuple(self.datasets[i] for i in index),
            successes=self.successes[index],
            trials=self.trials[index],
            output_tokens=_rows(self.output_tokens, index),
            cost_usd=_rows(self.cost_usd, index),
        )

    def of_models(self, columns: Sequence[int] | NDArray[np.intp]) -> OutcomeTable:
        """Return the table of some models, in the order given; prompts stay."""
        index = np.asarray(columns, dtype=np.intp)
        return replace(
            self,
            models=tuple(self.models[j] for j in index),
            successes=self.successes[:, index],
            trials=self.trials[:, index],
            output_tokens=_columns(self.output_tokens, index),
            cost_usd=_columns(self.cost_usd, index),
        )


def _rows(array: Array, index: NDArray[np.intp]) -> Array:
    return array[index] if array.size else array


def _columns(array: Array, index: NDArray[np.intp]) -> Array:
    return array[:, index] if array.size else array


def _known(array: Array, i: int, j: int) -> float | None:
    return float(array[i, j]) if array.size and math.isfinite(array[i, j]) else None
