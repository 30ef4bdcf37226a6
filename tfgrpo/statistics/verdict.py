"""One verdict, from which screen text, JSON, JUnit and the exit code come.

A rule has one meaning, named in the output: the mean reaches a score, a share of the tasks reaches
a score, each task reaches a score, or an arm is better than another. "Met" says whether it is met
beyond noise; where too few tasks could be scored there is no verdict at all.

Does not know groups, learning or files. Idea: one rule for one word (own).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal
from xml.etree import ElementTree

from tfgrpo.errors import ConfigError
from tfgrpo.statistics import (
    Interval,
    Scores,
    level_words,
    mean_interval,
    paired_difference,
)

__all__ = ["VerdictRule", "Verdict", "reach_verdict", "judge_gain", "make_rule"]

Status = Literal["met", "not_met", "inconclusive"]
RuleKind = Literal["mean", "share", "each", "gain"]

_EXIT_CODES: Mapping[Status, int] = {"met": 0, "not_met": 1, "inconclusive": 5}


@dataclass(frozen=True, slots=True)
class VerdictRule:
    """What must hold."""

    kind: RuleKind
    score: float
    """Score that the mean, or a task's own mean, must reach; for a gain, what it must pass."""
    share: float = 1.0
    """Share of tasks in (0, 1] that must reach `score`, for kind share."""

    def __str__(self) -> str:
        if self.kind == "mean":
            return f"mean ≥ {self.score:g}"
        if self.kind == "share":
            return f"share of tasks with score ≥ {self.score:g} is at least {self.share:g}"
        if self.kind == "each":
            return f"each task ≥ {self.score:g}"
        return f"gain > {self.score:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule, what was measured, and whether the rule is met."""

    rule: VerdictRule
    status: Status
    interval: Interval | None
    """Interval of the mean (of the gain for that rule); None where nothing was scored."""
    n_reaching: int
    """Scored tasks that reach `rule.score` (whose gain passes it, for a gain)."""
    n_scored: int
    n_attempted: int
    is_beyond_noise: bool
    """True when the whole interval lies on the verdict's side of the limit; only for the rules
    about a mean or a gain, False for the others."""
    reason: str = ""
    """Why there is no verdict, where there is none."""

    @property
    def exit_code(self) -> int:
        """0 met, 1 not met, 5 inconclusive."""
        return _EXIT_CODES[self.status]

    @property
    def text(self) -> str:
        """The verdict in one line, for the screen."""
        word = self.status.replace("_", " ")
        if self.interval is None:
            return f"verdict {word}: {self.reason} (rule: {self.rule})"
        parts = [f"verdict {word}{self._noise_words()}: {self._measured()}"]
        if self.n_scored < self.n_attempted:
            parts.append(f"{self.n_attempted - self.n_scored} task(s) could not be scored")
        if self.reason:
            parts.append(self.reason)
        return "; ".join(parts)

    def _noise_words(self) -> str:
        if self.status == "inconclusive" or self.rule.kind not in ("mean", "gain"):
            return ""
        return " beyond noise" if self.is_beyond_noise else ", within noise"

    def _measured(self) -> str:
        if self.interval is None:
            return self.reason
        value, low, high = (
            f"{x:.3f}" for x in (self.interval.estimate, self.interval.low, self.interval.high)
        )
        level = f"{level_words(self.interval.level)} interval {low} to {high}"
        reach = f"{self.n_reaching}/{self.n_scored} tasks"
        rule = self.rule
        if rule.kind == "mean":
            sign = "≥" if self.interval.estimate >= rule.score else "<"
            return f"mean {value} {sign} {rule.score:g} ({level}); {reach} reach {rule.score:g}"
        if rule.kind == "gain":
            return f"gain {value} ({level}); {reach} are better"
        if rule.kind == "share":
            wanted = f"at least {rule.share:g} of the tasks must reach {rule.score:g}"
        else:
            wanted = f"each task must reach {rule.score:g}"
        return f"{wanted}: {reach} do; mean {value} ({level})"

    def within(self, reward_range: tuple[float, float]) -> Verdict:
        """Return the verdict with its interval cut to what rewards of that range can give."""
        if self.interval is None:
            return self
        is_gain = self.rule.kind == "gain"
        return replace(self, interval=self.interval.within(reward_range, of_difference=is_gain))

    def of_nothing_kept(self) -> Verdict:
        """Return the verdict on a run that kept nothing: there is no gain to judge."""
        if self.status != "not_met":
            return self
        reason = "nothing was kept, so nothing changes"
        return replace(self, interval=None, is_beyond_noise=False, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        interval = self.interval
        return {
            "rule": {"kind": self.rule.kind, "score": self.rule.score, "share": self.rule.share},
            "rule_text": str(self.rule),
            "status": self.status,
            "exit_code": self.exit_code,
            "is_beyond_noise": self.is_beyond_noise,
            "interval": interval and interval.to_dict(),
            "n_reaching": self.n_reaching,
            "n_scored": self.n_scored,
            "n_attempted": self.n_attempted,
            "reason": self.reason,
            "text": self.text,
            "junit": self.to_junit(),
        }

    def to_junit(self, name: str = "tfgrpo") -> str:
        """Return a JUnit report with the rule as its one test case; inconclusive is an error, so
        that no build passes on it."""
        suite = ElementTree.Element(
            "testsuite",
            name=name,
            tests="1",
            failures=str(int(self.status == "not_met")),
            errors=str(int(self.status == "inconclusive")),
            skipped="0",
        )
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=str(self.rule))
        if self.status != "met":
            tag = "failure" if self.status == "not_met" else "error"
            ElementTree.SubElement(case, tag, message=_xml_text(self.text), type=self.status)
        else:
            ElementTree.SubElement(case, "system-out").text = _xml_text(self.text)
        return ElementTree.tostring(suite, encoding="unicode")


_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml_text(text: str) -> str:
    """Return text without the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("?", text)


def make_rule(
    *,
    min_mean: float | None = None,
    min_share: float | None = None,
    min_each: float | None = None,
    min_gain: float | None = None,
    score: float | None = None,
) -> VerdictRule:
    """Return the one rule that the options mean.

    `min_share` needs `score`: the score that this share of the tasks must reach.

    Raises:
        ConfigError: no option, more than one, or a share without a score: one word must not have
            two meanings.
    """
    given = {
        "min_mean": min_mean,
        "min_share": min_share,
        "min_each": min_each,
        "min_gain": min_gain,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = " and ".join(named) if named else "none"
        raise ConfigError(
            f"a verdict follows one rule, given: {found}. Choose min_mean (the mean reaches it), "
            "min_share with score (that share of tasks reaches the score), min_each (every task "
            "reaches it) or min_gain (better than without by more than it, beyond noise)"
        )
    for name, value in [*given.items(), ("score", score)]:
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name}={value!r} is not a finite number")
    if min_share is not None:
        if score is None or not 0 < min_share <= 1:
            raise ConfigError(
                f"min_share={min_share!r} with score={score!r}: give a share in (0, 1] and the "
                "score that this share of the tasks must reach, such as min_share=0.9, score=0.8"
            )
        return VerdictRule("share", score, min_share)
    if score is not None:
        raise ConfigError(f"score={score!r} belongs to min_share only, not to {named[0]}")
    kinds: Mapping[str, RuleKind] = {"min_mean": "mean", "min_each": "each", "min_gain": "gain"}
    return VerdictRule(kinds[named[0]], float(given[named[0]] or 0.0))


def reach_verdict(
    scores: Scores,
    rule: VerdictRule,
    *,
    n_attempted: int | None = None,
    min_scored: float = 0.5,
    level: float = 0.95,
    seed: int = 0,
) -> Verdict:
    """Judge one arm by a rule.

    Args:
        scores: rewards of graded rollouts by task id.
        rule: of kind mean, share or each.
        n_attempted: tasks that were tried, scored or not; default those in `scores`.
        min_scored: share of the attempted tasks that must have a score; below it the verdict is
            inconclusive, never a pass and never a fail.
        level: of the interval.
        seed: of the bootstrap.

    Raises:
        ValueError: the rule compares two arms.
    """
    if rule.kind == "gain":
        raise ValueError("a gain compares two arms: use judge_gain")
    means = [fmean(r) for r in scores.values() if len(r)]
    attempted = max(len(scores) if n_attempted is None else n_attempted, len(means))
    if not means:
        return _nothing_scored(rule, attempted)
    interval = mean_interval(scores, level=level, seed=seed)
    reaching = sum(m >= rule.score for m in means)
    if rule.kind == "mean":
        is_met = interval.estimate >= rule.score
        beyond = interval.low >= rule.score if is_met else interval.high < rule.score
    else:
        # A task that could not be scored has not reached the score.
        is_met = reaching >= (rule.share * attempted if rule.kind == "share" else attempted)
        beyond = False
    return _finish(rule, is_met, beyond, interval, (reaching, len(means), attempted), min_scored)


def judge_gain(
    base: Scores,
    other: Scores,
    *,
    min_gain: float = 0.0,
    n_attempted: int | None = None,
    min_scored: float = 0.5,
    level: float = 0.95,
    seed: int = 0,
) -> Verdict:
    """Judge whether `other` is better than `base` by more than `min_gain`.

    Met only when the whole interval lies above `min_gain`: a gain inside the noise is not met.
    """
    rule = VerdictRule("gain", min_gain)
    shared = [t for t, r in base.items() if len(r) and len(other.get(t, ()))]
    attempted = max(len(base.keys() | other.keys()) if n_attempted is None else n_attempted, 0)
    if not shared:
        return _nothing_scored(rule, attempted)
    interval = paired_difference(base, other, level=level, seed=seed)
    gains = [
        math.fsum(other[t]) / len(other[t]) - math.fsum(base[t]) / len(base[t]) for t in shared
    ]
    better = sum(g > min_gain for g in gains)
    is_met = interval.low > min_gain
    beyond = is_met or interval.high <= min_gain
    return _finish(rule, is_met, beyond, interval, (better, len(shared), attempted), min_scored)


def _nothing_scored(rule: VerdictRule, attempted: int) -> Verdict:
    reason = f"none of {attempted} task(s) could be scored"
    return Verdict(rule, "inconclusive", None, 0, 0, attempted, False, reason)


def _finish(
    rule: VerdictRule,
    is_met: bool,
    beyond: bool,
    interval: Interval,
    counts: tuple[int, int, int],
    min_scored: float,
) -> Verdict:
    reaching, scored, attempted = counts
    status: Status = "met" if is_met else "not_met"
    reason = ""
    if scored < min_scored * attempted:
        status, beyond = "inconclusive", False
        reason = (
            f"only {scored} of {attempted} tasks could be scored, at least {min_scored:.0%} needed"
        )
    return Verdict(rule, status, interval, reaching, scored, attempted, beyond, reason)
