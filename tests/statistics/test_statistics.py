"""Statistics against closed forms, brute force and scipy, never against their own output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tfgrpo.statistics import (
    Interval,
    choice_level,
    gate_level,
    lower_bound,
    max_at_k,
    mean_interval,
    min_detectable,
    noise_floor,
    paired_difference,
    pass_at_k,
    pass_at_k_interval,
    permutation_p,
    seeds_difference,
    tasks_needed,
)
from tfgrpo.statistics.intervals import _bootstrap_means


def tasks(rows: list[list[float]]) -> dict[str, list[float]]:
    return {f"t{i:03d}": row for i, row in enumerate(rows)}


def random_pair(seed: int, n: int = 30, draws: int = 4) -> tuple[dict, dict]:
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 3, n)
    base, other = rng.binomial(1, p[:, None], (n, draws)), rng.binomial(1, p[:, None], (n, draws))
    return tasks(base.tolist()), tasks(other.tolist())


def test_the_tasks_that_an_effect_needs_are_the_fewest_that_find_it() -> None:
    for difference, draws in ((0.2, 2), (0.35, 4), (0.5, 1)):
        needed = tasks_needed(difference, draws)
        assert needed is not None
        assert min_detectable(needed, draws) <= difference < min_detectable(needed - 1, draws)
    assert tasks_needed(0.0, 2) is None and tasks_needed(0.3, 1, most=5) is None


def test_every_further_look_makes_the_choice_stricter() -> None:
    levels = [choice_level(looks) for looks in range(1, 12)]
    assert levels == sorted(levels) and levels[0] == 0.95 and choice_level(0) == 0.95


def test_an_interval_is_cut_to_what_rewards_can_be() -> None:
    mean = Interval(0.9, 0.7, 1.1, 0.95, 9).within((0.0, 1.0))
    assert (mean.low, mean.high) == (0.7, 1.0)
    change = Interval(0.3, -2.0, 1.4, 0.95, 9).within((0.0, 1.0), of_difference=True)
    assert (change.low, change.high) == (-1.0, 1.0)


def test_the_estimate_is_the_mean_over_shared_tasks_of_differences_of_task_means() -> None:
    base = {"a": [0, 1], "b": [1], "only-base": [1, 1, 1]}
    other = {"b": [0, 0, 1], "a": [1, 1], "only-other": [0]}
    interval = paired_difference(base, other)
    assert interval.estimate == pytest.approx(((1 - 0.5) + (1 / 3 - 1)) / 2)
    assert interval.n_tasks == 2


def test_the_order_of_tasks_and_the_number_of_draws_of_a_task_do_not_weigh() -> None:
    base, other = random_pair(3)
    turned = dict(reversed(base.items()))
    assert paired_difference(base, other) == paired_difference(turned, other)
    tripled = {t: r * 3 for t, r in base.items()}
    assert paired_difference(tripled, other) == paired_difference(base, other)


def test_the_same_seed_gives_the_same_interval_and_swapping_the_arms_mirrors_it() -> None:
    base, other = random_pair(5)
    one, again = paired_difference(base, other, seed=4), paired_difference(base, other, seed=4)
    assert one == again
    mirrored = paired_difference(other, base, seed=4)
    assert mirrored.estimate == pytest.approx(-one.estimate)
    assert mirrored.low == pytest.approx(-one.high, abs=0.01)


def test_the_interval_is_the_wider_of_scipys_bca_and_students_t() -> None:
    rng = np.random.default_rng(0)
    values = rng.gamma(0.5, size=400)  # skewed, many tasks: Student's t is near the normal
    interval = mean_interval(tasks([[v] for v in values]), n_boot=20_000)
    bca = scipy_stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    t_low, t_high = scipy_stats.t.interval(
        0.95, len(values) - 1, values.mean(), scipy_stats.sem(values)
    )
    tolerance = 0.03 * (bca.high - bca.low)
    assert interval.low == pytest.approx(min(bca.low, t_low), abs=tolerance)
    assert interval.high == pytest.approx(max(bca.high, t_high), abs=tolerance)
    assert bca.high > t_high and t_low < bca.low  # both sides of the rule are exercised


def test_arms_that_never_differ_leave_room_for_what_was_not_met() -> None:
    same = tasks([[0.0, 1.0]] * 10)
    interval = paired_difference(same, same, level=0.95)
    # If a share q of tasks differed by 1, ten tasks would all miss it with chance (1 - q)**10.
    assert (1 - interval.high) ** 10 == pytest.approx(0.025)
    assert interval.low == pytest.approx(-interval.high)
    assert not interval.excludes_zero


def test_one_task_alone_never_proves_a_gain() -> None:
    assert lower_bound({"a": [0, 0]}, {"a": [1, 1]}, level=0.9) < 0.2
    assert paired_difference({"a": [0, 0]}, {"a": [1, 1]}).low < 0.05


def test_the_lower_bound_is_the_low_end_of_the_two_sided_interval_with_twice_the_tail() -> None:
    base, other = random_pair(8)
    assert lower_bound(base, other, level=0.9) == paired_difference(base, other, level=0.8).low


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.1])
def test_a_level_that_is_no_probability_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="probability between 0 and 1"):
        paired_difference({"a": [1]}, {"a": [0]}, level=level)


@pytest.mark.parametrize("call", [paired_difference, lower_bound, permutation_p])
def test_arms_without_a_common_task_are_refused(call: Callable) -> None:
    with pytest.raises(ValueError, match="same tasks in both"):
        call({"a": [1], "b": []}, {"b": [0]})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_and_named(bad: float) -> None:
    scores = {"fine": [1.0, 0.0], "broken": [0.0, bad]}
    for figure in (mean_interval, noise_floor, lambda s: pass_at_k_interval(s, 2)):
        with pytest.raises(ValueError, match="task 'broken' has reward"):
            figure(scores)
    with pytest.raises(ValueError, match="only finite rewards"):
        paired_difference({"broken": [0.0]}, scores)


@pytest.mark.parametrize("n", [1000, 2000])
def test_many_tasks_with_few_levels_are_resampled_as_if_one_by_one(n: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.binomial(4, 0.02, size=n) / 4  # skewed: the bootstrap's own bounds count
    drawn = _bootstrap_means(values, 10_000, 0)
    one_by_one = values[rng.integers(n, size=(10_000, n), dtype=np.int32)].mean(axis=1)
    for at in (0.025, 0.5, 0.975):
        assert np.quantile(drawn, at) == pytest.approx(
            np.quantile(one_by_one, at), abs=0.1 * values.std() / math.sqrt(n)
        )
    assert drawn.std() == pytest.approx(values.std() / math.sqrt(n), rel=0.03)


def test_many_tasks_swapped_between_the_arms_mirror_the_interval() -> None:
    base, other = random_pair(6, n=1200)
    one, swapped = paired_difference(base, other), paired_difference(other, base)
    assert (swapped.low, swapped.high) == pytest.approx((-one.high, -one.low), abs=1e-3)


def test_many_tasks_are_resampled_in_chunks_without_changing_the_result() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=3000)
    interval = mean_interval(tasks([[v] for v in values]), n_boot=2000)
    half = 1.96 * values.std(ddof=1) / math.sqrt(3000)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


@pytest.mark.parametrize(("shape", "draws"), [("rare", 4), ("skewed", 4), ("common", 1)])
def test_coverage_at_forty_tasks_is_within_two_points_of_nominal(shape: str, draws: int) -> None:
    rng = np.random.default_rng(11)
    runs, n = 600, 40
    truth = {"rare": 0.0, "skewed": 0.15 * 0.5 * (1 - 0.3 / 6.3), "common": 0.1}[shape]
    hits = 0
    for _ in range(runs):
        if shape == "rare":
            p = rng.beta(0.5, 5, n)
            q = p
        elif shape == "skewed":
            p = rng.beta(0.3, 6, n)
            q = np.where(rng.random(n) < 0.15, p + (1 - p) * rng.beta(2, 2, n), p)
        else:
            p = rng.beta(2, 2, n) * 0.9
            q = p + 0.1
        base, other = rng.binomial(draws, p) / draws, rng.binomial(draws, q) / draws
        interval = paired_difference(
            tasks([[b] for b in base]), tasks([[o] for o in other]), n_boot=600
        )
        hits += interval.low <= truth <= interval.high
    # 2 points plus two standard errors of the simulation itself.
    assert abs(hits / runs - 0.95) <= 0.02 + 2 * math.sqrt(0.95 * 0.05 / runs)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 0, 3), (5, 2, 1), (5, 2, 3), (6, 3, 2), (4, 4, 4)])
def test_pass_at_k_and_max_at_k_equal_brute_force_over_all_subsets(n: int, c: int, k: int) -> None:
    rewards = [1.0] * c + [0.0] * (n - c)
    subsets = list(itertools.combinations(rewards, k))
    brute = sum(max(s) for s in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(brute)
    assert max_at_k(rewards, k) == pytest.approx(brute)


def test_max_at_k_equals_brute_force_for_fractional_and_negative_rewards() -> None:
    rewards = [0.3, -1.0, 0.3, 2.5, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(rewards, k))
        assert max_at_k(rewards, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


@pytest.mark.parametrize("args", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be_judged(args: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        pass_at_k(*args)


def test_the_interval_of_pass_at_k_uses_the_tasks_with_enough_draws_only() -> None:
    scores = {"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "short": [1]}
    interval = pass_at_k_interval(scores, 2)
    assert interval.estimate == pytest.approx((0.5 + 0.0) / 2)
    assert interval.n_tasks == 2
    with pytest.raises(ValueError, match="no task has 9 graded draws"):
        pass_at_k_interval(scores, 9)


def test_the_permutation_test_enumerates_all_swaps_of_few_tasks() -> None:
    rng = np.random.default_rng(4)
    differences = rng.normal(0.4, 1, 9)
    base, other = tasks([[0.0]] * 9), tasks([[d] for d in differences])
    signs = np.array(list(itertools.product([1, -1], repeat=9)))
    means = (signs * differences).mean(axis=1)
    greater = float((means >= differences.mean() - 1e-12).mean())
    assert permutation_p(base, other, alternative="greater") == pytest.approx(greater)
    assert permutation_p(base, other) == pytest.approx(
        min(1.0, 2 * min(greater, 1 - greater + 1 / 512))
    )


def test_the_permutation_test_of_equal_arms_is_one() -> None:
    same = tasks([[0, 1], [1, 1]])
    assert permutation_p(same, same) == 1.0


def test_several_learning_seeds_are_wider_than_one_when_the_libraries_differ() -> None:
    rng = np.random.default_rng(6)
    p = rng.beta(2, 2, 30) * 0.6
    base = tasks([[v] for v in p])
    pairs = []
    for gain in (0.0, 0.15, 0.30):
        noise = rng.normal(0, 0.01, 30)
        pairs.append((base, tasks([[v + gain + e] for v, e in zip(p, noise, strict=True)])))
    both = seeds_difference(pairs)
    assert both.estimate == pytest.approx(0.15, abs=0.01)
    # With no spread between tasks the interval is Student's t over the three seeds.
    half = scipy_stats.t.ppf(0.975, 2) * np.std([0, 0.15, 0.3], ddof=1) / math.sqrt(3)
    assert both.high - both.estimate == pytest.approx(half, rel=0.05)


def test_seeds_that_agree_leave_the_spread_between_tasks() -> None:
    rng = np.random.default_rng(7)
    gains = rng.normal(0.1, 0.3, 50)
    pair = (tasks([[0.0]] * 50), tasks([[g] for g in gains]))
    both = seeds_difference([pair, pair, pair])
    t_low, t_high = scipy_stats.t.interval(0.95, 49, gains.mean(), scipy_stats.sem(gains))
    assert (both.low, both.high) == pytest.approx((t_low, t_high))


def test_coverage_over_further_learning_seeds_holds_with_three_seeds() -> None:
    rng = np.random.default_rng(8)
    hits, runs = 0, 400
    for _ in range(runs):
        seed_effects, task_effects = rng.normal(0.1, 0.08, 3), rng.normal(0, 0.2, 30)
        pairs = []
        for s in seed_effects:
            gain = s + task_effects + rng.normal(0, 0.2, 30)
            pairs.append((tasks([[0.0]] * 30), tasks([[g] for g in gain])))
        both = seeds_difference(pairs)
        hits += both.low <= 0.1 <= both.high
    assert hits / runs >= 0.93


def test_one_learning_seed_is_refused_because_its_spread_is_unknown() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        seeds_difference([({"a": [1], "b": [0]}, {"a": [1], "b": [0]})])


def test_the_noise_floor_matches_the_normal_theory_of_repeated_draws() -> None:
    rng = np.random.default_rng(9)
    scores = tasks(rng.normal(0, 1.0, (60, 8)).tolist())
    floor = noise_floor(scores, level=0.95)
    assert floor.width == pytest.approx(1.96 * math.sqrt(2 / 8 / 60), rel=0.1)
    assert (floor.n_tasks, floor.draws) == (60, 8.0)
    fewer = noise_floor(scores, draws=2, level=0.95)
    assert fewer.width == pytest.approx(2 * floor.width, rel=0.05)


def test_the_noise_floor_of_single_draws_is_unknown_not_zero() -> None:
    with pytest.raises(ValueError, match="repeated draws"):
        noise_floor({"a": [1], "b": [0]})


def test_the_smallest_detectable_effect_is_found_with_the_power_stated() -> None:
    n, draws, tau, power = 40, 4, 0.1, 0.8
    effect = min_detectable(n, draws, effect_sd=tau, power=power)
    rng = np.random.default_rng(10)
    runs, found = 2000, 0
    true = rng.normal(effect, tau, (runs, n))
    noise = rng.normal(0, math.sqrt(2 * 0.25 / draws), (runs, n))
    result = scipy_stats.ttest_1samp(true + noise, 0.0, axis=1)
    found = int(((result.pvalue < 0.05) & (result.statistic > 0)).sum())
    assert found / runs == pytest.approx(power, abs=0.03)


def test_a_pilot_with_little_noise_promises_a_finer_comparison_than_the_worst_case() -> None:
    pilot = tasks([[0, 0, 0, 0]] * 9 + [[0, 1, 0, 0]])
    worst = min_detectable(40, 4)
    assert min_detectable(40, 4, pilot=pilot) < worst
    assert min_detectable(40, 4, pilot={"a": [1], "b": [0]}) == worst  # single draws tell nothing
    assert min_detectable(160, 4, effect_sd=0) == pytest.approx(worst_at(160, 4))
    with pytest.raises(ValueError, match="at least 2 tasks"):
        min_detectable(1, 4)


def worst_at(n: int, draws: int) -> float:
    reach = scipy_stats.t.ppf(0.975, n - 1) + scipy_stats.norm.ppf(0.8)
    return float(reach * math.sqrt(2 * 0.25 / draws / n))


def test_the_error_spent_by_all_looks_never_passes_what_is_allowed() -> None:
    assert sum(1 - gate_level(i, 7, 0.9) for i in range(1, 8)) == pytest.approx(0.1)
    spent = sum(1 - gate_level(i, None, 0.9) for i in range(1, 1001))
    assert 0.0998 < spent <= 0.1
    with pytest.raises(ValueError, match="counted from 1"):
        gate_level(8, 7, 0.9)


def test_an_interval_prints_its_three_numbers() -> None:
    assert str(Interval(0.1, -0.05, 0.25, 0.95, 12)) == "+0.100 [-0.050, +0.250]"
