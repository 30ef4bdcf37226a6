from __future__ import annotations

import numpy as np
import pytest

from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Provenance
from tfgrpo.experience.gate_rules import final_choice, gate_step, smaller_sets


def scores(values: list[float], draws: int = 4) -> dict[str, list[float]]:
    return {f"t{i}": [v] * draws for i, v in enumerate(values)}


def mixed(n: int, p: float, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": [float(x) for x in rng.random(4) < p] for i in range(n)}


def test_a_clear_gain_is_accepted_and_a_clear_loss_rejected_with_its_reason() -> None:
    low, high = mixed(40, 0.2, 1), mixed(40, 0.8, 2)
    assert gate_step(low, high).accepted
    decision = gate_step(high, low)
    assert not decision.accepted
    assert decision.reason.startswith("worse: -0.") and "at worst -0." in decision.reason
    assert decision.tasks == 40


def test_a_gain_on_average_with_much_doubt_is_rejected_by_the_lower_bound() -> None:
    current = scores([0.5] * 8)
    proposed = scores([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5])
    decision = gate_step(current, proposed)
    assert decision.difference is not None and decision.difference.estimate > 0
    assert not decision.accepted and decision.reason.startswith("not better beyond noise: +0.0")


def test_both_settings_count() -> None:
    current, proposed = mixed(40, 0.2, 1), mixed(40, 0.8, 2)
    assert not gate_step(current, proposed, min_difference=0.9).accepted
    noisy = scores([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5])
    assert gate_step(scores([0.5] * 8), noisy, max_harm=1.0).accepted


def test_tasks_scored_in_one_arm_only_count_in_neither() -> None:
    current = scores([0.0] * 10) | {"blocked": [1.0]}
    proposed = scores([1.0] * 9) | {"t9": []}
    decision = gate_step(current, proposed)
    assert decision.tasks == 9
    assert decision.dropped == ("blocked", "t9")


def test_nothing_scored_is_no_acceptance() -> None:
    decision = gate_step({"a": []}, {"b": [1.0]})
    assert (decision.accepted, decision.tasks) == (False, 0)
    assert decision.reason == "no gate task was scored in both arms"


def test_a_library_that_makes_a_weak_actor_worse_is_rejected_and_empty_is_returned() -> None:
    empty, harmful = mixed(51, 0.43, 3), mixed(51, 0.25, 4)
    assert not gate_step(empty, harmful).accepted
    choice = final_choice({"empty": empty, "v1": harmful})
    assert choice.is_empty
    assert choice.reason.endswith("includes zero")


def test_the_empty_library_wins_wherever_the_interval_of_the_best_includes_zero() -> None:
    empty = mixed(20, 0.5, 5)
    slightly = {t: [min(1.0, x + 0.0) for x in r] for t, r in empty.items()}
    slightly["t0"] = [1.0] * 4
    choice = final_choice({"empty": empty, "v1": slightly})
    assert choice.is_empty and choice.difference is not None and choice.difference.low <= 0


def test_the_best_version_wins_when_it_is_surely_better() -> None:
    empty = mixed(40, 0.1, 1)
    choice = final_choice({"empty": empty, "v1": mixed(40, 0.5, 2), "v2": mixed(40, 0.9, 3)})
    assert choice.version_id == "v2"
    assert choice.difference is not None and choice.difference.low > 0
    assert set(choice.considered) == {"v1", "v2"}


def test_noise_alone_is_nearly_never_chosen() -> None:
    wins = 0
    for seed in range(60):
        arms = {"empty": mixed(30, 0.5, 2 * seed), "v1": mixed(30, 0.5, 2 * seed + 1)}
        wins += not final_choice(arms).is_empty
    assert wins <= 6


def test_final_choice_needs_the_empty_library_as_a_candidate() -> None:
    with pytest.raises(ValueError, match="'empty' must be a candidate"):
        final_choice({"v1": scores([1.0])})


def test_smaller_sets_are_single_edits_with_the_widest_support_first() -> None:
    one = Edit("add", "a", provenance=Provenance((), ("g1",)))
    two = Edit("add", "b", provenance=Provenance((), ("g1", "g2")))
    assert smaller_sets([one, two], 5) == [(two,), (one,)]
    assert smaller_sets([one, two], 1) == [(two,)]
    assert smaller_sets([one], 5) == []
