"""One verdict for screen, JSON, JUnit and exit code, for every combination of options."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.statistics.verdict import Verdict, VerdictRule, judge_gain, make_rule, reach_verdict

# 31 tasks, 28 of them at 0.8 or more, mean 0.927.
SUITE = {f"t{i:02d}": [1.0] for i in range(18)}
SUITE |= {f"u{i:02d}": [0.9] for i in range(10)}
SUITE |= {f"v{i:02d}": [x] for i, x in enumerate([0.55, 0.59, 0.6])}
CODES = {"met": 0, "not met": 1, "inconclusive": 5}


def assert_all_outputs_agree(verdict: Verdict) -> None:
    word = verdict.status.replace("_", " ")
    assert verdict.text.startswith(f"verdict {word}")
    assert verdict.to_dict()["status"] == verdict.status
    assert verdict.to_dict()["text"] == verdict.text
    assert verdict.exit_code == verdict.to_dict()["exit_code"] == CODES[word]
    junit = ElementTree.fromstring(verdict.to_junit())
    assert junit.get("skipped") == "0"
    shape = (junit.get("failures"), junit.get("errors"))
    assert (
        shape
        == {"met": ("0", "0"), "not_met": ("1", "0"), "inconclusive": ("0", "1")}[verdict.status]
    )


def test_a_mean_rule_is_met_and_names_how_many_tasks_reach_it() -> None:
    verdict = reach_verdict(SUITE, make_rule(min_mean=0.8))
    assert verdict.text.startswith("verdict met beyond noise: mean 0.927 ≥ 0.8 (95% interval ")
    assert verdict.text.endswith("28/31 tasks reach 0.8")
    assert verdict.exit_code == 0


def test_the_same_scores_fail_a_rule_about_each_task() -> None:
    verdict = reach_verdict(SUITE, make_rule(min_each=0.8))
    assert verdict.exit_code == 1
    assert verdict.text.startswith("verdict not met: each task must reach 0.8: 28/31 tasks do")


def test_a_share_rule_counts_tasks() -> None:
    assert reach_verdict(SUITE, make_rule(min_share=0.9, score=0.8)).exit_code == 0
    assert reach_verdict(SUITE, make_rule(min_share=0.91, score=0.8)).exit_code == 1


OPTIONS = {"min_mean": 0.8, "min_share": 0.9, "min_each": 0.8, "min_gain": 0.0, "score": 0.8}


@pytest.mark.parametrize(
    "names", [c for r in range(6) for c in itertools.combinations(OPTIONS, r)], ids="+".join
)
def test_every_combination_of_options_is_one_rule_or_a_usage_error(names: tuple[str, ...]) -> None:
    options = {name: OPTIONS[name] for name in names}
    if names in {("min_mean",), ("min_each",), ("min_share", "score")}:
        for scores, attempted in [(SUITE, 31), (SUITE, 80), ({"a": []}, 1), ({"a": [0.1]}, 1)]:
            assert_all_outputs_agree(
                reach_verdict(scores, make_rule(**options), n_attempted=attempted)
            )
    elif names == ("min_gain",):
        assert make_rule(**options) == VerdictRule("gain", 0.0)
    else:
        with pytest.raises(ConfigError):
            make_rule(**options)


@pytest.mark.parametrize("options", [{"min_mean": float("nan")}, {"min_share": 1.2, "score": 0.5}])
def test_numbers_that_mean_nothing_are_usage_errors(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        make_rule(**options)


def test_a_mean_just_over_the_limit_is_met_within_noise() -> None:
    verdict = reach_verdict({f"t{i}": [float(i % 2)] for i in range(20)}, make_rule(min_mean=0.49))
    assert verdict.status == "met"
    assert "within noise" in verdict.text
    assert not verdict.is_beyond_noise


def test_a_run_in_which_nothing_could_be_scored_is_no_pass() -> None:
    verdict = reach_verdict({"a": [], "b": []}, make_rule(min_mean=-5.0))
    assert verdict.exit_code == 5
    assert verdict.to_dict()["interval"] is None
    assert "none of 2 task(s) could be scored" in verdict.text


def test_too_few_scored_tasks_are_inconclusive_however_good_they_are() -> None:
    verdict = reach_verdict({"a": [1.0]}, make_rule(min_mean=0.5), n_attempted=10)
    assert verdict.exit_code == 5
    assert "only 1 of 10 tasks could be scored" in verdict.text


def test_a_task_without_score_has_not_reached_the_score() -> None:
    scores = {f"t{i}": [1.0] for i in range(9)}
    assert reach_verdict(scores, make_rule(min_each=0.5), n_attempted=10).exit_code == 1
    assert reach_verdict(scores, make_rule(min_share=0.9, score=0.5), n_attempted=10).exit_code == 0


def test_a_gain_is_met_only_beyond_noise() -> None:
    base = {f"t{i:02d}": [0.0, 0.0, 1.0, 0.0] for i in range(30)}
    better = {t: [1.0, 1.0, 1.0, float(i % 2)] for i, t in enumerate(base)}
    gain = judge_gain(base, better)
    assert (gain.status, gain.is_beyond_noise) == ("met", True)
    same = judge_gain(base, base)
    assert (same.status, same.is_beyond_noise) == ("not_met", False)
    worse = judge_gain(better, base)
    assert (worse.status, worse.is_beyond_noise) == ("not_met", True)
    for verdict in (gain, same, worse, judge_gain(base, {}), judge_gain({}, {})):
        assert_all_outputs_agree(verdict)
    assert judge_gain(base, {}).exit_code == 5


def test_a_rule_about_two_arms_is_not_judged_on_one() -> None:
    with pytest.raises(ValueError, match="judge_gain"):
        reach_verdict(SUITE, VerdictRule("gain", 0.0))
