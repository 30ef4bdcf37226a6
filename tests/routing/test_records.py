"""Outcomes, tables, groups: what is refused and what is merged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task, Usage
from tfgrpo.routing.records import ModelInfo, OutcomeTable, SuccessCount, outcomes_of_groups


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"model": ""}, "model"),
        ({"successes": math.nan}, "finite"),
        ({"successes": math.inf}, "finite"),
        ({"successes": 2.0}, "2.0 successes of 1.0"),
        ({"successes": -0.5}, "-0.5 successes"),
        ({"trials": 0.0}, "more than 0"),
        ({"trials": math.nan}, "finite"),
        ({"successes": "yes"}, "number"),
        ({"successes": True}, "number"),
        ({"output_tokens": -1.0}, "output_tokens"),
        ({"cost_usd": math.nan}, "cost_usd"),
    ],
)
def test_a_malformed_outcome_is_refused_by_name(fields, word):
    good = {"prompt": "add 1 and 1", "model": "m", "successes": 1.0, "trials": 1.0}
    with pytest.raises(ConfigError, match=word):
        SuccessCount(**{**good, **fields})


def test_prices_that_are_no_prices_are_refused():
    with pytest.raises(ConfigError, match="input_usd_per_mtok"):
        ModelInfo("m", input_usd_per_mtok=-1.0)
    with pytest.raises(ConfigError, match="empty name"):
        ModelInfo("")


def test_equal_prompt_and_model_add_their_counts_and_absent_cells_stay_unknown():
    rows = [
        SuccessCount("a", "m", 1.0, output_tokens=10),
        SuccessCount("a", "m", 0.0, 3.0, output_tokens=30),
        SuccessCount("b", "n", 1.0),
    ]
    table = OutcomeTable.from_outcomes(rows)
    assert table.model_names == ("m", "n")
    assert table.successes[0, 0] == 1.0
    assert table.trials[0, 0] == 4.0
    assert table.output_tokens[0, 0] == pytest.approx((10 + 3 * 30) / 4)
    assert np.isnan(table.rates[0, 1])
    assert [o.prompt for o in table.outcomes("n")] == ["b"]


def test_one_id_for_two_texts_is_refused():
    rows = [SuccessCount("a", "m", 1.0, prompt_id="x"), SuccessCount("b", "m", 1.0, prompt_id="x")]
    with pytest.raises(ConfigError, match="two texts"):
        OutcomeTable.from_outcomes(rows)


def test_an_unknown_model_is_named_with_the_known_ones():
    table = OutcomeTable.from_outcomes([SuccessCount("a", "m", 1.0)])
    with pytest.raises(ConfigError, match=r"'z'.*known are m"):
        table.column("z")


def _group(rewards, outcome="graded", **fields):
    task = Task("t1", "add 1 and 1")
    rollouts = [
        Rollout(
            f"r{i}", "t1", outcome="graded", score=Score(r), usage=Usage(text_tokens=8, calls=1)
        )
        for i, r in enumerate(rewards)
    ]
    if outcome != "graded":
        rollouts.append(Rollout("x", "t1", outcome=outcome))
    return RolloutGroup("g1", task, tuple(rollouts), policy_id="p", **fields)


def test_a_group_is_k_of_n_and_failed_rollouts_count_for_nothing():
    (row,) = outcomes_of_groups([_group([1.0, 0.0, 1.0], outcome="provider_failed")])
    assert (row.successes, row.trials, row.model, row.prompt_id) == (2.0, 3.0, "p", "t1")
    assert row.output_tokens == 8
    assert outcomes_of_groups([_group([], outcome="cancelled")]) == []


def test_a_policy_with_lessons_is_another_model():
    context = Context((ContextPart("lesson", "check the sign"),))
    bare, taught = outcomes_of_groups([_group([1.0]), _group([1.0], context=context)])
    assert bare.model == "p"
    assert taught.model.startswith("p+")


def test_rewards_outside_the_unit_interval_need_a_success_mark():
    with pytest.raises(ConfigError, match="success_at"):
        outcomes_of_groups([_group([-1.0, 1.0])])
    (row,) = outcomes_of_groups([_group([-1.0, 1.0])], success_at=0.5)
    assert (row.successes, row.trials) == (1.0, 2.0)
