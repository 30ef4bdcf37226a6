"""Why a run kept nothing: causes read off its records, the likeliest first, each with a remedy.

A cause stands here only where the records show it: replies that were cut, attempts that could not
be scored, a critic that failed or could not be read, groups without contrast, lessons that guards
refused, a gate too small for the effect that was seen, a candidate that did not help, a cap. Does
not know how a run learns; it reads what a journal keeps. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tfgrpo.diagnosis.outcome import outcome_of
from tfgrpo.group_figures import GroupFigures, figures_of
from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import Scores, choice_level, min_detectable, paired_difference, tasks_needed

__all__ = ["KINDS", "Cause", "Reason", "reward_range_of", "why_not_kept"]

Cause = Literal[
    "cut",
    "not_scored",
    "critic_failed",
    "critic_unread",
    "nothing_to_gain",
    "no_contrast",
    "refused_lessons",
    "silent_critic",
    "small_gate",
    "no_effect",
    "small_test",
    "stopped",
]
_MANY = 0.25
"""A share of the attempts that is worth naming."""
_NEAR_FULL = 0.98
_ENDED_WELL = ("graded", "ungraded", "truncated")
_CRITIC_REPLY = 4000
"""What the default preset allows a reply of the critic."""

KINDS = ("step", "gate", "final", "rewards")
"""The kinds of decisions that are read."""
Decisions = Mapping[str, Sequence[Mapping[str, Any]]]
"""Payloads of a run's decisions by kind, oldest first."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause, what shows it, and what to do."""

    cause: Cause
    text: str
    """What happened, in numbers."""
    remedy: str
    """What to do, in words."""
    settings: tuple[str, ...] = ()
    """The same as `section.key=value`, where settings do it."""

    def command(self, config: str = "CONFIG.toml") -> str:
        """Return the command that tries the remedy; empty where no setting does it."""
        if not self.settings:
            return ""
        return f"tfgrpo learn {config} --fork " + " ".join(f"--set {s}" for s in self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self) | {"settings": list(self.settings)}


def why_not_kept(
    groups: Iterable[RolloutGroup | GroupFigures],
    decisions: Decisions,
    config: Mapping[str, Any],
) -> list[Reason]:
    """Return why a run kept nothing, or why what it kept is unproven; empty where neither holds.

    Args:
        groups: all groups of the run, or their figures, with `stage` and `arm` in their metadata.
        decisions: those of `KINDS`.
        config: its settings.
    """
    record = _Record(list(figures_of(groups)), decisions, config)
    if outcome_of(record.final or None, has_candidates=True).is_kept:
        return list(_small_test(record.groups))
    return [reason for find in _FINDERS for reason in find(record)]


def reward_range_of(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the range of rewards that a run recorded of its verifier; None without bounds."""
    row = rows[-1] if rows else {}
    low, high = row.get("low"), row.get("high")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
        return float(low), float(high)
    return None


@dataclass(frozen=True, slots=True)
class _Record:
    """What the finders read."""

    groups: Sequence[GroupFigures]
    decisions: Decisions
    config: Mapping[str, Any]

    @property
    def final(self) -> Mapping[str, Any]:
        return next(iter(self.decisions.get("final", ())[-1:]), {})

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return reward_range_of(self.decisions.get("rewards", ()))

    def of(self, *stages: str) -> list[GroupFigures]:
        return [g for g in self.groups if g.metadata.get("stage") in stages]

    def setting(self, *path: str) -> Any:
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        return self.decisions.get("step", ())

    @property
    def looks(self) -> Sequence[Mapping[str, Any]]:
        return self.decisions.get("gate", ())

    def calls(self, *kinds: str) -> int:
        return sum(int((s.get("calls") or {}).get(k, 0)) for s in self.steps for k in kinds)

    @property
    def lessons(self) -> list[Mapping[str, Any]]:
        rows = [o for s in self.steps for o in s.get("outcomes", ())]
        return [o for o in rows if (o.get("edit") or {}).get("kind") == "lesson"]


def _stopped(record: _Record) -> Iterator[Reason]:
    stopped_by = str(record.final.get("stopped_by") or "")
    if stopped_by.startswith("budget"):
        yield Reason(
            "stopped",
            f"the run ended early: {stopped_by}",
            "raise the cap under [budget] and run the same command: what was paid is kept",
        )


def _cut(record: _Record) -> Iterator[Reason]:
    groups = record.of("practice", "gate")
    rollouts, cut = sum(g.n_rollouts for g in groups), sum(g.truncated for g in groups)
    rewards = [x for g in groups for x in g.cut_rewards]
    if not rollouts or cut < _MANY * rollouts or _is_best(rewards, groups, record):
        return
    limit = record.setting("policy", "sampling", "max_tokens")
    where = f"at policy.sampling.max_tokens = {limit}" if limit else "at the model's own limit"
    larger = 4 * limit if isinstance(limit, int) and limit else 1024
    scored = f", best reward {max(rewards):g}" if rewards else " and could not be scored"
    yield Reason(
        "cut",
        f"{cut} of {rollouts} replies were cut {where}{scored}",
        "let replies end: raise the limit",
        (f"policy.sampling.max_tokens={larger}",),
    )


def _is_best(cut: Sequence[float], groups: Sequence[GroupFigures], record: _Record) -> bool:
    """True where cut replies score as well as any: then the cut does no harm."""
    rewards = [x for g in groups for x in (*g.rewards_G, *g.cut_rewards)]
    full = record.reward_range[1] if record.reward_range else max(rewards, default=0.0)
    return bool(cut) and sum(cut) / len(cut) >= _NEAR_FULL * full > 0


def _not_scored(record: _Record) -> Iterator[Reason]:
    groups = record.of("practice", "gate")
    ended: Counter[str] = Counter()
    for group in groups:
        ended.update(group.outcomes)
    rollouts = ended.total()
    lost = Counter({k: n for k, n in ended.items() if k not in _ENDED_WELL})
    if not rollouts or lost.total() < _MANY * rollouts:
        return
    (kind, count), *_ = lost.most_common(1)
    words = next((g.errors[kind] for g in groups if g.errors.get(kind)), "")
    yield Reason(
        "not_scored",
        f"{lost.total()} of {rollouts} attempts could not be scored, {count} as {kind}"
        + (f", such as: {words}" if words else ""),
        _CURES.get(kind, "mend what the message names and run the same command again"),
    )


_CURES = {
    "verifier_failed": "mend the verifier, then run the same command: attempts are kept",
    "timed_out": "raise run.timeout_s, or lower run.concurrency",
    "refused": "the model refuses these tasks: reword them, or take another model",
    "provider_failed": "`tfgrpo models --check SPEC` asks the server once; then run it again",
}


def _critic(record: _Record) -> Iterator[Reason]:
    calls, failed = record.calls("calls"), record.calls("failed")
    unread = record.calls("cut", "unusable")
    if any(o.get("result") != "rejected" for o in record.lessons):
        return
    problems = [n.get("problem", "") for s in record.steps for n in s.get("notes", ())]
    if failed and failed >= _MANY * max(1, calls):
        causes = [
            n.get("problem", "")
            for s in record.steps
            for n in s.get("notes", ())
            if n.get("kind") == "failed"
        ]
        yield Reason(
            "critic_failed",
            f"{failed} of {max(calls, failed)} calls of the critic failed"
            + (f", the first with {causes[0][:200]}" if causes else ""),
            "`tfgrpo models --check SPEC` asks the critic's model once; [critic] has its settings",
        )
    limit = record.setting("critic", "sampling", "max_tokens")
    if unread and unread >= _MANY * max(1, calls - failed):
        yield Reason(
            "critic_unread",
            f"{unread} replies of the critic were cut or could not be read"
            + (f", such as: {problems[0][:160]}" if problems and not failed else ""),
            "give the critic more room or take a larger model; worked examples need no critic",
            (f"critic.sampling.max_tokens={2 * (limit or _CRITIC_REPLY)}",),
        )


def _contrast(record: _Record) -> Iterator[Reason]:
    practice = [g for g in record.of("practice") if len(g.rewards_G) >= 2]
    if not practice:
        return
    rewards = [r for g in practice for r in g.rewards_G]
    mean, best = sum(rewards) / len(rewards), max(rewards)
    mixed = sum(g.is_informative() for g in practice)
    full = record.reward_range[1] if record.reward_range else best
    if full > 0 and mean >= _NEAR_FULL * full:
        yield Reason(
            "nothing_to_gain",
            f"practice tasks are solved already: mean reward {mean:.2f} of {full:g}",
            "take harder tasks, or a cheaper model",
        )
    elif mixed <= 0.1 * len(practice):
        worst = record.reward_range[0] if record.reward_range else min(rewards)
        failed = sum(max(g.rewards_G) <= worst for g in practice)
        told = f"{failed} failed throughout" if failed else "each group's rewards are all alike"
        yield Reason(
            "no_contrast",
            f"{mixed} of {len(practice)} practice groups differ in reward ({told}, best {best:g})",
            *_more_contrast(record, failed > len(practice) / 2),
        )


def _more_contrast(record: _Record, is_too_hard: bool) -> tuple[str, tuple[str, ...]]:
    """Return a remedy and its settings."""
    if record.setting("policy", "sampling", "temperature") == 0:
        return "draws at temperature 0 cannot differ", ("policy.sampling.temperature=0.7",)
    size = record.setting("learn", "group_size") or 4
    more = f"learn.group_size={2 * size}"
    if is_too_hard:
        return (
            "too hard for this model: give help while learning, give part marks in the verifier, "
            "or take a stronger model",
            ("nudge.kind=hints", "nudge.writer=critic"),
        )
    return "draw more attempts a task, or at a higher temperature", (more,)


def _refused(record: _Record) -> Iterator[Reason]:
    lessons = record.lessons
    if not lessons:
        asked = record.calls("calls") - record.calls("failed", "cut", "unusable")
        kinds = record.setting("learn", "entries")
        if asked > 0 and kinds != "exemplars" and not record.looks:
            yield Reason(
                "silent_critic",
                f"the critic was asked {asked} times and proposed no lesson",
                "take a critic that can compare attempts ([critic] lm), or try worked examples "
                "alone",
                ("learn.entries=exemplars",),
            )
        return
    refused = [o for o in lessons if o.get("result") == "rejected"]
    if len(refused) < len(lessons):
        return
    reasons = Counter(str(o.get("reason", "")) for o in refused).most_common(2)
    yield Reason(
        "refused_lessons",
        f"none of {len(lessons)} proposed lessons was fit to be tried: "
        + "; ".join(f"{n} x {why}" for why, n in reasons),
        "the report's part Rejected shows each; a larger critic words lessons that pass, worked "
        "examples need none",
        ("learn.entries=both",) if record.setting("learn", "entries") == "lessons" else (),
    )


def _gate(record: _Record) -> Iterator[Reason]:
    rows = [look for look in record.looks if isinstance(look.get("difference"), Mapping)]
    if not rows:
        return
    best = max(rows, key=lambda look: look["difference"]["estimate"])
    found = record.final.get("difference") or best["difference"]
    gain, tasks = found["estimate"], int(found.get("n_tasks") or 0)
    tried = f"{len(rows)} candidate{'s' * (len(rows) > 1)} tried at the gate, the best"
    moved = f"moved the {tasks} gate tasks by {gain:+.2f} (at worst {found['low']:+.2f})"
    if _is_full(record):
        yield Reason(
            "nothing_to_gain",
            f"the {tasks} gate tasks are solved without a library, so none can show a gain",
            "take more or harder gate tasks",
        )
        return
    if gain <= 0.01:
        yield Reason(
            "no_effect",
            f"{tried} {moved}",
            "what was learnt does not help this model: `tfgrpo advise` ranks the other levers",
        )
        return
    draws = int(record.setting("gate", "group_size") or 2)
    level = choice_level(len(record.looks))
    pilot = _gate_scores(record)
    width = _width(record)
    seen: dict[str, Any] = {"pilot": pilot, "level": level, "reward_width": width}
    least = min_detectable(max(2, tasks), draws, **seen)
    kept = f"only a gain of about {least:+.2f} is kept" if least < width else "no gain is kept"
    needed = tasks_needed(gain, draws, **seen)
    enough = f"about {needed} gate tasks find a gain of {gain:+.2f}" if needed else "more tasks"
    yield Reason(
        "small_gate",
        f"{tried} {moved}: with {tasks} gate tasks x {draws} draws and {len(record.looks)} "
        f"comparisons {kept}",
        f"give the gate more tasks ({enough}), or more draws for each",
        (f"gate.group_size={2 * draws}",) if needed is None or needed < 2 * tasks else (),
    )


def _is_full(record: _Record) -> bool:
    """True where the bare model has full marks on the gate split."""
    bare = [g for g in record.of("gate") if g.is_bare]
    rewards = [r for g in bare for r in g.rewards_G]
    full = record.reward_range[1] if record.reward_range else max(rewards, default=0.0)
    return bool(rewards) and sum(rewards) / len(rewards) >= _NEAR_FULL * full > 0


def _gate_scores(record: _Record) -> Scores:
    return {f"{g.group_id}": g.rewards_G for g in record.of("gate") if len(g.rewards_G) > 1}


def _width(record: _Record) -> float:
    if record.reward_range:
        return record.reward_range[1] - record.reward_range[0]
    rewards = [r for g in record.groups for r in g.rewards_G]
    return (max(rewards) - min(rewards) if rewards else 0.0) or 1.0


def _small_test(groups: Sequence[GroupFigures]) -> Iterator[Reason]:
    """Say it where what was kept shows no gain on the test split."""
    arms: dict[str, dict[str, Sequence[float]]] = {"empty": {}, "final": {}}
    for group in groups:
        arm = group.metadata.get("arm")
        if group.metadata.get("stage") == "test" and arm in arms and group.rewards_G:
            arms[arm][group.task_id] = group.rewards_G
    both = sorted(arms["empty"].keys() & arms["final"].keys())
    if len(both) < 2:
        return
    found = paired_difference(arms["empty"], arms["final"])
    if found.low > 0:
        return
    draws = max(1, min(len(arms["empty"][t]) for t in both))
    least = min_detectable(len(both), draws, pilot=arms["empty"])
    yield Reason(
        "small_test",
        f"the gate kept a library and the test split shows no gain beyond noise: "
        f"{found.estimate:+.2f} (at worst {found.low:+.2f}); {len(both)} test tasks x {draws} "
        f"draws find a gain of about {least:.2f}",
        "give the test split more tasks or draws",
        (f"gate.test_group_size={2 * draws}",),
    )


_FINDERS = (_stopped, _not_scored, _cut, _critic, _contrast, _refused, _gate)
"""In the order in which a cause makes the ones behind it follow."""
