"""Which lever pays next, from the groups already paid for.

Each lever gets its evidence, the gain to expect on the mean reward with an interval, and what it
costs. A gain is `measured` (this run's own draws show it), a `ceiling` (no more than this can be
won, perhaps much less) or `unknown` (the run holds no evidence; the text says what would give
some). Measured gains come first, then ceilings, each by the low end of its interval: what is least
likely to disappoint.

Does not know journals, files or money beyond the usage of rollouts. Source: own; the oracle gap
follows router evaluation, cross-fitted so that lucky draws are not called a better model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from tfgrpo.group_figures import GroupFigures, figures_of
from tfgrpo.report.view import scores_of
from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import (
    Interval,
    Scores,
    max_at_k,
    mean_interval,
    paired_difference,
)

__all__ = ["Advice", "advise"]

Lever = Literal["setup", "experience", "routing", "best_of_k", "hints", "rl"]
Evidence = Literal["measured", "ceiling", "unknown"]
_ORDER: Mapping[Evidence, int] = {"measured": 0, "ceiling": 1, "unknown": 2}


@dataclass(frozen=True, slots=True)
class Advice:
    """What one lever promises."""

    lever: Lever
    headline: str
    evidence: str
    """What it rests on, in numbers."""
    kind: Evidence
    gain: Interval | None
    """Change of the mean reward; None where nothing is known."""
    cost: str
    """What it takes, in words and tokens."""
    tokens_per_point: float | None
    """Tokens for each 0.01 of mean reward at the estimate: per task where the cost comes with
    every task, once where it is paid once. None where it cannot be told or nothing is gained."""
    command: str = ""
    """What to type; empty where no command does it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def advise(
    groups: Sequence[RolloutGroup | GroupFigures], *, k: int = 4, level: float = 0.90, seed: int = 0
) -> list[Advice]:
    """Return one piece of advice for each lever, best first.

    Args:
        groups: all groups of a run, or their figures, with `stage`, `step` and `arm` in their
            metadata.
        k: draws to think of for best-of-k; lowered to what the groups have.
        level: of the intervals.
        seed: of the bootstrap.
    """
    made = list(figures_of(groups))
    found = [
        _experience(made, level, seed),
        _routing(made, level, seed),
        _best_of_k(made, k, level, seed),
        _hints(made, level, seed),
        _rl(made, k, level, seed),
    ]
    return sorted(
        found, key=lambda a: (_ORDER[a.kind], -(a.gain.low if a.gain else -math.inf), a.lever)
    )


def _experience(groups: Sequence[GroupFigures], level: float, seed: int) -> Advice:
    practice = [g for g in groups if g.metadata.get("stage") == "practice"]
    gated = [g for g in groups if g.metadata.get("stage") == "gate"]
    proposed = [g for g in gated if g.metadata.get("arm") == "proposed"]
    steps = sorted({g.metadata.get("step", 0) for g in proposed})
    tokens = _tokens(practice) / max(1, len({g.metadata.get("step", 0) for g in practice}))
    cost = f"about {_number(tokens)} tokens of practice a step, once"
    mixed = _share(practice, lambda g: g.is_informative())
    best = max((r for g in practice for r in g.rewards_G), default=0.0)
    taught = _share(practice, lambda g: _can_teach(g, best))
    if not steps:
        return Advice(
            "experience",
            "more experience: not measured",
            f"{mixed:.0%} of {len(practice)} practice groups were mixed, {taught:.0%} can teach; "
            "no gated step to go by",
            "unknown",
            None,
            cost,
            None,
        )
    last = steps[-1]
    base, other = _last_look(gated, practice, last)
    gain = None
    if any(base.get(t) for t, r in other.items() if r):
        gain = paired_difference(base, other, level=level, seed=seed)
    return Advice(
        "experience",
        "more experience: another step of practice",
        f"the newest proposal (step {last}) moved the gate tasks by {gain or 'nothing known'}; "
        f"attempts differed in {mixed:.0%} of the practice groups, and {taught:.0%} can teach, by "
        "a reference at least",
        "measured" if gain else "unknown",
        gain,
        cost,
        _per_point(tokens, gain),
    )


def _can_teach(group: GroupFigures, best: float) -> bool:
    """As `experience.informative.is_improvable` says it of a group, under default settings."""
    if not group.readable:
        return False
    if group.is_informative():
        return True
    top = max(group.rewards_G)
    is_full = top >= best - 1e-9 and top > 0.0
    return not is_full and (group.has_feedback or group.has_reference)


def _last_look(
    gated: Sequence[GroupFigures], practice: Sequence[GroupFigures], step: int
) -> tuple[Scores, Scores]:
    """Gate rewards of the library that step practised with, and of the first one it proposed.

    A version is scored on the gate split once, so the current one's groups may lie at an earlier
    step; the first proposal is the whole one, not the best of several.
    """
    at = [g for g in gated if g.metadata.get("step") == step]
    proposed = [g for g in at if g.metadata.get("arm") == "proposed"]
    first = proposed[0].metadata.get("library_version")
    used = {g.metadata.get("library_version") for g in practice if g.metadata.get("step") == step}
    current = [g for g in gated if g.metadata.get("library_version") in used - {None, first}]
    current = current or [g for g in at if g.metadata.get("arm") == "current"]
    return scores_of(current), scores_of(
        g for g in proposed if g.metadata.get("library_version") == first
    )


def _routing(groups: Sequence[GroupFigures], level: float, seed: int) -> Advice:
    by_policy: dict[str, dict[str, list[float]]] = {}
    for group in _bare(groups):
        row = by_policy.setdefault(group.policy_id, {})
        row.setdefault(group.task_id, []).extend(group.rewards_G)
    shared = (
        [
            t
            for t in set.intersection(*(set(r) for r in by_policy.values()))
            if all(len(r[t]) >= 2 for r in by_policy.values())
        ]
        if len(by_policy) > 1
        else []
    )
    if len(shared) < 2:
        return Advice(
            "routing",
            "routing between models: not measured",
            f"{len(by_policy)} policy in this run: sample the same tasks with a second model, "
            "two attempts or more",
            "unknown",
            None,
            "a few attempts at each task with each model to find out",
            None,
        )
    rewards = {p: {t: r[t] for t in shared} for p, r in by_policy.items()}
    single = max(sorted(rewards), key=lambda p: math.fsum(map(fmean, rewards[p].values())))
    base, oracle = _cross_fitted(rewards, shared, single)
    gain = paired_difference(base, oracle, level=level, seed=seed)
    return Advice(
        "routing",
        f"routing over {len(rewards)} models",
        f"the better model for each task, chosen on one half of the attempts and scored on the "
        f"other over {len(shared)} tasks, is above {single!r} alone by {gain}",
        "ceiling",
        gain,
        "no further attempts; a router decides before the call",
        0.0 if gain.estimate > 0 else None,
    )


def _cross_fitted(
    rewards: Mapping[str, Scores], tasks: Sequence[str], single: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per task: the single best model's score, and that of the model chosen on other draws."""
    base: dict[str, list[float]] = {}
    oracle: dict[str, list[float]] = {}
    for task in tasks:
        halves = {p: (list(r[task][0::2]), list(r[task][1::2])) for p, r in rewards.items()}
        for choose, test in ((0, 1), (1, 0)):
            # Ties go to the single best model, so that no gain comes from equal models.
            best = max(
                halves,
                key=lambda p: (math.fsum(halves[p][choose]) / len(halves[p][choose]), p == single),
            )
            base.setdefault(task, []).append(fmean(halves[single][test]))
            oracle.setdefault(task, []).append(fmean(halves[best][test]))
    return base, oracle


def _best_of_k(groups: Sequence[GroupFigures], k: int, level: float, seed: int) -> Advice:
    scores, k, rollouts_tokens = _deployed(groups, k)
    if k < 2:
        return Advice(
            "best_of_k",
            "search or best of k: not measured",
            "no task was tried twice with the same prompt",
            "unknown",
            None,
            "k times the tokens of a task",
            None,
        )
    gain = _lift(scores, k, level, seed)
    extra = (k - 1) * rollouts_tokens
    return Advice(
        "best_of_k",
        f"best of {k} with a verifier at run time, or search",
        f"the best of {k} attempts is above a single one by {gain}, over {gain.n_tasks} tasks; to "
        "have it, a verifier must choose among the answers when the agent is used",
        "measured",
        gain,
        f"{k} times the tokens: {_number(extra)} more a task, with every task",
        _per_point(extra, gain),
    )


def _hints(groups: Sequence[GroupFigures], level: float, seed: int) -> Advice:
    practice = [g for g in _bare_or_practice(groups) if len(g.rewards_G) >= 2]
    rewards = [r for g in practice for r in g.rewards_G]
    hinted = [g for g in groups if g.is_hinted]
    if not rewards or min(rewards) == max(rewards):
        return Advice(
            "hints",
            "hints for tasks where all fail: not measured",
            "no two different rewards in this run",
            "unknown",
            None,
            "one more group for each failed task and level of hint",
            None,
        )
    worst, best = min(rewards), max(rewards)
    dead: dict[str, list[float]] = {}
    for group in practice:
        is_dead = not group.is_informative() and group.rewards_G[0] == worst
        dead.setdefault(group.task_id, []).append((best - worst) * is_dead)
    gain = mean_interval(dead, level=level, seed=seed)
    tokens = _tokens(practice) / len(practice)
    share = _share(practice, lambda g: not g.is_informative() and g.rewards_G[0] == worst)
    return Advice(
        "hints",
        "hints for tasks where all fail",
        f"{share:.0%} of {len(practice)} groups failed as a whole and teach nothing as they are"
        + (f"; {len(hinted)} groups with hints so far" if hinted else "; no hints tried yet"),
        "ceiling",
        gain,
        f"about {_number(tokens)} tokens for each task and level of hint, while learning only",
        _per_point(tokens * share * len(dead), gain),
    )


def _rl(groups: Sequence[GroupFigures], k: int, level: float, seed: int) -> Advice:
    practice = [g for g in _bare_or_practice(groups) if len(g.rewards_G) >= 2]
    mixed = _share(practice, lambda g: g.is_informative())
    scores, k, _ = _deployed(practice, k)
    if k < 2:
        return Advice(
            "rl",
            "train the weights (RL): not measured",
            "no task was tried twice",
            "unknown",
            None,
            "training on a GPU",
            None,
        )
    gain = _lift(scores, k, level, seed)
    tokens = _tokens(practice)
    useful = f"{_number(tokens * mixed)} of {_number(tokens)} tokens lie in mixed groups"
    return Advice(
        "rl",
        "train the weights (RL)",
        f"{mixed:.0%} of {len(practice)} groups are mixed and carry a gradient ({useful}); a model "
        f"whose first attempt is as good as its best of {k} would gain {gain}",
        "ceiling",
        gain,
        f"an epoch over these tasks takes about {_number(tokens)} tokens and a GPU, once",
        _per_point(tokens, gain),
    )


def _lift(scores: Scores, k: int, level: float, seed: int) -> Interval:
    base = {t: [fmean(r)] for t, r in scores.items()}
    best = {t: [max_at_k(r, k)] for t, r in scores.items()}
    return paired_difference(base, best, level=level, seed=seed)


def _deployed(groups: Sequence[GroupFigures], k: int) -> tuple[dict[str, list[float]], int, float]:
    """Rewards a task under one context, the k that they allow, and tokens of one rollout.

    Prefers the arm that will be used (test groups of the final library), then the bare model's
    test groups, then practice.
    """
    arms = [
        [g for g in groups if g.metadata.get("stage") == "test" and g.metadata.get("arm") == arm]
        for arm in ("final", "empty")
    ]
    for chosen in (*arms, list(groups)):
        scores: dict[str, list[float]] = {}
        for group in chosen:
            kept = scores.setdefault(group.task_id, [])
            if len(group.rewards_G) > len(kept):
                scores[group.task_id] = list(group.rewards_G)
        counts = sorted(len(r) for r in scores.values())
        # The k that nine tenths of the tasks allow.
        allowed = min(k, counts[len(counts) // 10]) if counts else 0
        if allowed >= 2:
            enough = {t: r for t, r in scores.items() if len(r) >= allowed}
            rollouts = sum(g.n_rollouts for g in chosen)
            return enough, allowed, _tokens(chosen) / max(1, rollouts)
    return {}, 0, 0.0


def _bare(groups: Iterable[GroupFigures]) -> list[GroupFigures]:
    return [g for g in groups if g.is_bare]


def _bare_or_practice(groups: Sequence[GroupFigures]) -> list[GroupFigures]:
    practice = [g for g in groups if g.metadata.get("stage") == "practice"]
    return practice or _bare(groups)


def _share(groups: Sequence[GroupFigures], test: Any) -> float:
    return sum(bool(test(g)) for g in groups) / len(groups) if groups else 0.0


def _tokens(groups: Iterable[GroupFigures]) -> float:
    return float(sum(g.tokens for g in groups))


def _per_point(tokens: float, gain: Interval | None) -> float | None:
    if gain is None or gain.estimate <= 0 or tokens <= 0:
        return None
    return tokens / (gain.estimate * 100)


def _number(value: float) -> str:
    """A count with thin precision: 1234567 is 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"
