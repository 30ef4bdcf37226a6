"""Training rows as their plans want them: prompt, prefix, weight, baseline, advantage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.hints.groups import group, task
from tests.rl.tiny import tiny_decoder
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan
from tfgrpo.messages import Message
from tfgrpo.rl.hint_notes import by_baseline, note_of
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate
from tfgrpo.rl.update.hint_shaping import shaped
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step

PREFIX = HintPlan(
    response_prefix="p", level=1, source="oracle", train_on="generated_and_prefix_if_positive"
)
PROMPT, FORCED, SAMPLED = (5, 9, 11), (20, 21), (30, 31, 2)


def rollout_of(plan: HintPlan, n_prefix: int = 0, bare: tuple[int, ...] = ()) -> Rollout:
    note = note_of(plan, n_prefix=n_prefix, bare_prompt=bare)
    step = Step(Message("assistant", "x"), token_ids=SAMPLED)
    made = Rollout("r", "t", (step,), metadata={"hint": note} if note else {})
    return made.graded(Score(1.0))


def no_entropy(rows):
    raise AssertionError("entropies were asked for")


def row(advantage: float | tuple[float, ...], prompt: tuple[int, ...] = (*PROMPT, *FORCED)):
    return TrainRow(Row(0, prompt, SAMPLED), advantage, engine_logp=(-1.0, -1.0, -1.0))


def shape(one, rollout, entropy_of=no_entropy):
    return shaped([one], {0: rollout}, entropy_of)


def test_a_rollout_without_a_note_passes_through() -> None:
    one = row(1.0)
    assert shape(one, rollout_of(BARE)) == [one]
    assert rollout_of(BARE).metadata == {}
    assert note_of(HintPlan(n=3), n_prefix=0, bare_prompt=()) == {}


def test_a_prefix_that_is_not_trained_stays_in_the_prompt() -> None:
    plan = replace(PREFIX, train_on="generated")
    (found,) = shape(row(1.0), rollout_of(plan, 2))
    assert found.row.prompt_ids == (*PROMPT, *FORCED)
    assert found.row.suffix_ids == SAMPLED
    assert found.engine_logp == (-1.0, -1.0, -1.0)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_prefix_is_trained_only_where_the_advantage_is_positive(advantage: float) -> None:
    (found,) = shape(row(advantage), rollout_of(PREFIX, 2))
    if advantage > 0:
        assert found.row == Row(0, PROMPT, (*FORCED, *SAMPLED))
        assert found.engine_logp is None
    else:
        assert found == row(advantage)
    assert found.advantage == advantage


def test_a_trained_prefix_moves_the_weights_as_a_written_one_would() -> None:
    """The gradient is that of a rollout that sampled the prefix itself: brute force."""

    def gradient(one: TrainRow):
        decoder = tiny_decoder().double().requires_grad_(True)
        accumulate(decoder, [one], UpdateSettings(loss="clip"))
        return torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])

    (found,) = shape(row(0.7), rollout_of(PREFIX, 2))
    as_written = TrainRow(Row(0, PROMPT, (*FORCED, *SAMPLED)), 0.7)
    torch.testing.assert_close(gradient(found), gradient(as_written), rtol=0, atol=0)
    (masked,) = shape(row(-0.7), rollout_of(PREFIX, 2))
    positions = TrainRow(Row(0, PROMPT, (*FORCED, *SAMPLED), (2, 3, 4)), -0.7)
    torch.testing.assert_close(gradient(masked), gradient(positions), rtol=1e-9, atol=1e-12)
    assert gradient(found).abs().max() > 0


def test_prefix_tokens_unlike_the_policys_own_weigh_less() -> None:
    plan = replace(PREFIX, weigh_prefix=True)
    asked = []

    def entropy_of(rows):
        asked.extend(rows)
        return {0: (1.0, 2.0, 0.5, 1.0, 1.5)}  # the sampled ones have a mean of 1

    (found,) = shape(row(2.0), rollout_of(plan, 2), entropy_of)
    assert found.advantage == pytest.approx((2.0, 2.0 * math.exp(-1), 2.0, 2.0, 2.0))
    assert asked == [Row(0, PROMPT, (*FORCED, *SAMPLED))]
    (down,) = shape(row(-2.0), rollout_of(plan, 2))  # not trained, so nothing is asked
    assert down.advantage == -2.0


def test_a_prefix_needs_one_advantage_a_rollout() -> None:
    with pytest.raises(ConfigError, match="one advantage a"):
        shape(row((1.0, 0.5, 0.2)), rollout_of(PREFIX, 2))


def test_the_original_condition_takes_the_help_out_of_the_prompt() -> None:
    plan = HintPlan(text="h", level=1, source="teacher", condition="original")
    (found,) = shape(row(1.0, (5, 9, 40, 41, 11)), rollout_of(plan, 0, PROMPT))
    assert found.row == Row(0, PROMPT, SAMPLED)
    assert found.engine_logp is None
    both = replace(plan, response_prefix="p")
    (found,) = shape(row(1.0, (5, 9, 40, 11, *FORCED)), rollout_of(both, 2, PROMPT))
    assert found.row.prompt_ids == (*PROMPT, *FORCED)
    as_rolled = replace(plan, condition="as_rolled")
    (kept,) = shape(row(1.0), rollout_of(as_rolled, 0, PROMPT))
    assert kept == row(1.0)


def test_a_plans_weight_multiplies_and_train_on_none_leaves_the_row_out() -> None:
    (found,) = shape(replace(row(1.0), weight=0.5), rollout_of(HintPlan(text="h", weight=0.4)))
    assert found.weight == pytest.approx(0.2)
    assert shape(row(1.0), rollout_of(HintPlan(text="h", train_on="none"))) == []
    assert shape(row(1.0), rollout_of(replace(PREFIX, train_on="none"), 2)) == []


def test_an_advantage_of_its_own_comes_before_the_estimators() -> None:
    rollout = rollout_of(PREFIX, 2)
    note = {**rollout.metadata["hint"], "advantage": -0.25}
    (found,) = shape(row(1.0), replace(rollout, metadata={"hint": note}))
    assert found.advantage == -0.25
    assert found.row.prompt_ids == (*PROMPT, *FORCED)  # negative: the prefix is not trained


def test_rollouts_of_other_keys_have_a_baseline_of_their_own() -> None:
    one = task()
    made = group(one, [1.0, 0.0, 1.0, 0.0])
    keys = ["", "a", "a", ""]
    noted = replace(
        made,
        rollouts=tuple(
            replace(r, metadata={"hint": {"key": k}} if k else {})
            for r, k in zip(made.rollouts, keys, strict=True)
        ),
    )
    parts = by_baseline([noted, made])
    assert [g.rewards_G for g in parts] == [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0, 1.0, 0.0)]
    assert parts[2] is made
    assert len({g.group_id for g in parts}) == 3
    assert isinstance(parts[0], RolloutGroup)
