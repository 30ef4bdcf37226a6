"""Per-rollout features that advantage estimators read, gathered only where one asks for them.

`collect` reads facts off this process's rollouts; `batch_of` lays those of all processes end to end
as one `RewardBatch`. Does not know which estimator reads what. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.policies.tool_calls import calls_of
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.hint_notes import is_hinted
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.rollout_rows import n_steps, step_numbers
from tfgrpo.rl.update.token_marks import (
    TextOf,
    before_first,
    lines_of,
    planning,
    states_of_lines,
    thinking_tokens,
)
from tfgrpo.rl.update.token_stats import Measured
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import digest
from tfgrpo.verifiers.final_answer import answer_class

GROUP_FACTS = {"prior_R": "predicted", "past_share_R": "past_share"}
"""Columns that a group's metadata hold, NaN where they do not."""


@dataclass(frozen=True, slots=True)
class Graded:
    """One graded rollout with its tokens laid out."""

    group: int
    """Number of its group among this process's groups."""
    rollout: Rollout
    row: Row
    of: RolloutGroup

    @property
    def reward(self) -> float:
        """Its reward."""
        assert self.rollout.score is not None
        return self.rollout.score.reward

    @property
    def parts(self) -> Mapping[str, float]:
        """The named parts of its score."""
        assert self.rollout.score is not None
        return self.rollout.score.parts

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its sampled tokens."""
        return tuple(t for s in self.rollout.steps for t in s.token_ids or ())

    @property
    def engine_logp(self) -> tuple[float, ...] | None:
        """What the sampler reported, or None."""
        return tuple(p for s in self.rollout.steps for p in (s.logprobs or ())) or None


@dataclass(slots=True)
class RowFeatures:
    """One row of a `RewardBatch`, as plain values that travel between processes."""

    reward: float
    group: int
    length: int
    parts: dict[str, float]
    logp_T: tuple[float, ...] | None = None
    entropy_T: tuple[float, ...] | None = None
    token_T: tuple[int, ...] | None = None
    step_T: tuple[int, ...] | None = None
    states: tuple[Hashable, ...] | None = None
    step_rewards: tuple[float, ...] | None = None
    answer: Hashable = None
    baseline: float | None = None
    columns_R: dict[str, float] = field(default_factory=dict)
    columns_D: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeatureSources:
    """Where facts come from that a rollout does not carry."""

    needs: frozenset[str]
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column to `task:KEY`, `part:NAME`, `rollout:KEY`, `length`, `entropy` or `logp`."""
    measured: Measured = field(default_factory=Measured)
    tempered: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Log-probs at another temperature, by row index."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Reward of a greedy rollout, by task id."""
    text_of: TextOf = str
    answer_pattern: str = ""
    by_history: bool = False
    """States are equal where all tokens so far are, not where the last observation is."""
    phrases: Sequence[str] = ()
    separator: str = ""
    """Ends a step of a reply of one turn; empty for none."""
    prompts: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    """How sure the policy is of a prompt, by its tokens."""


def collect(graded: Sequence[Graded], sources: FeatureSources) -> list[RowFeatures]:
    """Return the facts of this process's rows, in order.

    Raises:
        ConfigError: a rollout lacks what an entry needs, such as a column's key.
    """
    contexts = _contexts(graded) if "extra:context_R" in sources.needs else {}
    return [_facts(g, sources, contexts) for g in graded]


def _facts(g: Graded, s: FeatureSources, contexts: Mapping[int, int]) -> RowFeatures:
    needs, i = s.needs, g.row.index
    facts = RowFeatures(g.reward, g.group, g.row.n_loss, dict(g.parts))
    if needs & {"logp", "logp_tokens", "extra:ratio_R", "extra:score_norm_R"}:
        facts.logp_T = s.measured.logp[i]
    if needs & {"entropy_tokens", "extra:think_entropy_R", "extra:answer_entropy_R"}:
        facts.entropy_T = s.measured.entropy[i]
    if "token_ids" in needs:
        facts.token_T = g.token_ids
    if needs & {"steps", "maybe:steps", "states", "step_rewards", "maybe:step_rewards"}:
        _steps(g, s, facts)
    if "answers" in needs:
        facts.answer = answer_class(g.rollout.answer, s.answer_pattern, "loss.answer_pattern")
    if "baseline" in needs:
        facts.baseline = s.baselines.get(g.rollout.task_id)
    for need in needs:
        kind, _, name = need.partition(":")
        if kind == "extra" and name.endswith("_R"):
            facts.columns_R[name] = _column(name, g, facts, s, contexts)
    if "extra:sum_square_D" in needs:
        facts.columns_D["sum_square_D"] = s.measured.sum_square[i]
    if "extra:tempered_logp_D" in needs:
        facts.columns_D["tempered_logp_D"] = s.tempered[i]
    if "extra:planning_D" in needs:
        facts.columns_D["planning_D"] = planning(g.token_ids, s.text_of, s.phrases)
    if "extra:reasoning_D" in needs:
        touched = planning(g.token_ids, s.text_of, s.phrases)
        facts.columns_D["reasoning_D"] = before_first(touched, step_numbers(g.rollout))
    return facts


def _steps(g: Graded, s: FeatureSources, facts: RowFeatures) -> None:
    """Fill in the steps, the states before them and their rewards."""
    needs, is_cut = s.needs, bool(s.separator)
    if is_cut:
        facts.step_T = lines_of(g.token_ids, s.text_of, s.separator)
    else:
        facts.step_T = step_numbers(g.rollout)
    if "states" in needs:
        facts.states = (
            states_of_lines(g.token_ids, facts.step_T)
            if is_cut
            else state_keys(g.rollout, by_history=s.by_history)
        )
    if "step_rewards" in needs or ("maybe:step_rewards" in needs and has_step_rewards(g.rollout)):
        if is_cut:
            n = max(facts.step_T, default=-1) + 1
            facts.step_rewards = tuple(float(g.parts.get(f"step_{i}", 0.0)) for i in range(n))
        else:
            facts.step_rewards = step_rewards(g.rollout)


def _column(
    name: str, g: Graded, facts: RowFeatures, s: FeatureSources, contexts: Mapping[int, int]
) -> float:
    """A number a rollout: the one that the settings name, else the run's own reading."""
    if name in s.columns:
        return _named(name, s.columns[name], g, s)
    if name == "tool_calls_R":
        made = g.rollout.metadata.get("tool_calls", len(calls_of(g.rollout)))
        return float(made + g.rollout.metadata.get("recalled_turns", 0))
    if name == "invalid_R":
        return float(g.rollout.metadata.get("invalid_actions", 0))
    if name == "round_R":
        return _named(name, "part:round", g, s)
    if name == "context_R":
        return float(contexts[g.row.index])
    if name == "prompt_confidence_R":
        return s.prompts.get(g.row.prompt_ids, 1.0)
    if name in GROUP_FACTS:
        return float(g.of.metadata.get(GROUP_FACTS[name], math.nan))
    if name in ("think_entropy_R", "answer_entropy_R"):
        cut = thinking_tokens(g.token_ids, s.text_of)
        assert facts.entropy_T is not None
        part = facts.entropy_T[:cut] if name == "think_entropy_R" else facts.entropy_T[cut:]
        return math.fsum(part) / len(part) if part else 0.0
    assert facts.logp_T is not None
    if name == "ratio_R":
        return math.exp(math.fsum(facts.logp_T) - math.fsum(g.engine_logp or facts.logp_T))
    # score_norm_R: the norm of ∇ log π by the logits, √Σ_t (1 − 2π_t + Σπ²)
    square_T = s.measured.sum_square[g.row.index]
    terms = (1 - 2 * math.exp(p) + q for p, q in zip(facts.logp_T, square_T, strict=True))
    return math.sqrt(max(0.0, math.fsum(terms)))


def _named(name: str, source: str, g: Graded, s: FeatureSources) -> float:
    if source == "length":
        return float(g.row.n_loss)
    if source in ("entropy", "logp"):
        values = getattr(s.measured, source)[g.row.index]
        return math.fsum(values) / max(1, len(values))
    kind, _, key = source.partition(":")
    place: Mapping[str, Any] = {
        "task": g.of.task.metadata,
        "part": g.parts,
        "rollout": g.rollout.metadata,
    }[kind]
    value = place.get(key)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise ConfigError(
        f"features.{name} = {source!r}: {kind} of task {g.rollout.task_id!r} has {value!r} there; "
        f"a number is needed; it has {sorted(place)}"
    )


def _contexts(graded: Sequence[Graded]) -> dict[int, int]:
    """Number the prompts of each group, 0 and up; −1 is a rollout without any added context."""
    seen: dict[int, list[Any]] = {}
    found = {}
    planned = {g.group for g in graded if is_hinted(g.rollout)}
    for g in graded:
        prompt = g.row.prompt_ids
        known = seen.setdefault(g.group, [])
        if prompt not in known:
            known.append(prompt)
        bare = not is_hinted(g.rollout) if g.group in planned else not g.of.context.parts
        found[g.row.index] = -1 if bare else known.index(prompt)
    return found


def state_keys(rollout: Rollout, *, by_history: bool) -> tuple[Hashable, ...]:
    """Return a key of the state before each step.

    An environment's own keys (`state_keys` in the rollout's metadata; one more than there are steps
    is left out) come first; else the last observation, or all tokens so far.
    """
    own = rollout.metadata.get("state_keys")
    n = n_steps(rollout)
    if own is not None and len(own) >= n:
        return tuple(str(key) for key in own[:n])
    if by_history:
        return tuple(digest(list(s.prompt_token_ids or ()), 16) for s in rollout.steps)
    seen = [[m.content for m in s.observations] for s in rollout.steps[:-1]]
    return ("start", *(digest(texts, 16) for texts in seen))


def has_step_rewards(rollout: Rollout) -> bool:
    """True where an environment or a score gives a reward per step."""
    parts = {} if rollout.score is None else rollout.score.parts
    return "step_rewards" in rollout.metadata or "step_0" in parts


def step_rewards(rollout: Rollout) -> tuple[float, ...]:
    """Return a reward per step, the outcome not in it: the environment's (`step_rewards` in the
    metadata), else the score's parts `step_0`, `step_1`, ….

    Raises:
        ConfigError: neither is there for every step.
    """
    n = n_steps(rollout)
    own = rollout.metadata.get("step_rewards")
    if own is not None and len(own) >= n:
        return tuple(float(x) for x in own[:n])
    parts = {} if rollout.score is None else rollout.score.parts
    if all(f"step_{i}" in parts for i in range(n)):
        return tuple(float(parts[f"step_{i}"]) for i in range(n))
    raise ConfigError(
        f"rollout {rollout.rollout_id!r} of {n} steps has no reward a step: the environment gives "
        f"{own!r:.80} as step_rewards and the score's parts are {sorted(parts)}"
    )


def batch_of(everyone: Sequence[tuple[Sequence[RowFeatures], int]]) -> RewardBatch:
    """Return the rows of all processes, each given as (rows, number of its groups), as one batch.

    Raises:
        ConfigError: some rows have a fact that others lack.
    """
    offsets = np.cumsum([0, *(n for _, n in everyone)])
    rows = [r for part, _ in everyone for r in part]
    groups = [r.group + int(o) for (p, _), o in zip(everyone, offsets, strict=False) for r in p]
    # in a score's own order; rows with most parts first, since a verifier may stop early
    fullest = sorted(rows, key=lambda r: -len(r.parts))
    names = list(dict.fromkeys(name for r in fullest for name in r.parts))

    def each(name: str) -> list[Any] | None:
        values = [getattr(r, name) for r in rows]
        if not rows or all(v is None for v in values):
            return None
        if any(v is None for v in values):
            raise ConfigError(f"some rollouts have no {name}: an estimator needs it of all")
        return values

    def flat(values: list[Any] | None, kind: Any = np.float64) -> Any:
        return None if values is None else np.array([x for v in values for x in v], dtype=kind)

    def arrays(values: list[Any] | None, kind: Any) -> Any:
        return None if values is None else [np.array(v, dtype=kind) for v in values]

    logps, baselines = each("logp_T"), each("baseline")
    by_row, by_token = (rows[0].columns_R, rows[0].columns_D) if rows else ({}, {})
    extra = {n: np.array([r.columns_R[n] for r in rows]) for n in by_row}
    extra |= {n: flat([r.columns_D[n] for r in rows]) for n in by_token}
    return RewardBatch(
        reward_R=np.array([r.reward for r in rows], dtype=np.float64),
        group_R=np.array(groups, dtype=np.int64),
        length_R=np.array([r.length for r in rows], dtype=np.int64),
        part_RM=np.array([[r.parts.get(n, 0.0) for n in names] for r in rows]) if names else None,
        part_names=tuple(names),
        logp_R=None if logps is None else np.array([math.fsum(v) for v in logps]),
        logp_D=flat(logps),
        entropy_D=flat(each("entropy_T")),
        token_D=flat(each("token_T"), np.int64),
        step_R=arrays(each("step_T"), np.int64),
        state_keys_R=each("states"),
        step_reward_R=arrays(each("step_rewards"), np.float64),
        answer_R=each("answer"),
        baseline_R=None if baselines is None else np.array(baselines, dtype=np.float64),
        extra=extra,
    )
