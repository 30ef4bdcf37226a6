"""Step-level credit against values worked out by hand. Every step has one token unless told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.credit import rows_of
from tfgrpo.rl.formulas.credit.steps import (
    a2tgpo,
    eapo,
    gigpo,
    hgpo,
    igpo,
    mapo,
    rank_grpo,
    turn_widths,
)


def walks(
    outcomes: Sequence[float],
    states: Sequence[str],
    *,
    groups: Sequence[int] | None = None,
    steps: Sequence[Sequence[float]] | None = None,
) -> Any:
    """Rollouts as strings of one-letter states, one token a step."""
    sizes = [len(s) for s in states]
    batch = rewards(
        list(outcomes),
        lengths=sizes,
        step_R=[np.arange(n) for n in sizes],
        state_keys_R=[tuple(s) for s in states],
        step_reward_R=None if steps is None else [np.array(s, dtype=float) for s in steps],
    )
    if groups is None:
        return batch
    return type(batch)(
        batch.reward_R,
        np.array(groups),
        batch.length_R,
        step_R=batch.step_R,
        state_keys_R=batch.state_keys_R,
        step_reward_R=batch.step_reward_R,
    )


def z(values: Sequence[float]) -> list[float]:
    array = np.array(values, dtype=float)
    return ((array - array.mean()) / array.std(ddof=1)).tolist()


def test_gigpo_adds_the_step_part_of_equal_states() -> None:
    """State a is met three times, b twice, c once (no step part)."""
    batch = walks([1.0, 0.0], ["ab", "abac"[1:]])
    # returns, gamma 0.5: row 0: a 0.5, b 1; row 1 (b, a, c): all 0
    episode = z([1.0, 0.0])
    a, b = z([0.5, 0.0]), z([1.0, 0.0])
    step = [a[0], b[0], b[1], a[1], 0.0]
    expected = [episode[row] + 2.0 * s for row, s in zip([0, 0, 1, 1, 1], step, strict=True)]
    found = gigpo(batch, gamma=0.5, w=2.0, eps=0)
    assert found.tolist() == pytest.approx(expected)
    plain = np.repeat(grpo(batch, eps=0), [2, 3])
    assert gigpo(batch, w=0.0, eps=0).tolist() == pytest.approx(plain.tolist())
    centred = gigpo(batch, gamma=0.5, w=1.0, scaled=0)
    assert centred.tolist() == pytest.approx([0.75, 1.0, -1.0, -0.75, -0.5])
    with pytest.raises(ConfigError, match="state_keys_R"):
        gigpo(rewards([1, 0]))


def test_gigpo_prefers_the_better_return_from_one_state_and_groups_by_task() -> None:
    batch = walks([1.0, 0.0, 1.0, 0.0], ["s", "s", "s", "t"], groups=[0, 0, 1, 1])
    found = gigpo(batch, scaled=0)
    assert found[0] > found[1]
    # the third rollout's state s is alone in its own group: only its episode part remains
    assert found[2] == pytest.approx(0.5)


def test_hgpo_at_depth_zero_is_the_step_part_of_gigpo() -> None:
    batch = walks([1.0, 0.0, 0.5], ["abc", "abd", "xbc"])
    step_only = gigpo(batch, scaled=0) - np.repeat(dr_grpo(batch), 3)
    assert hgpo(batch, depth=0).tolist() == pytest.approx(step_only.tolist())


def test_hgpo_weighs_deeper_histories_more() -> None:
    """b after a is met twice, b after x once; returns with gamma 1 are the outcomes."""
    batch = walks([1.0, 0.0, 0.5], ["ab", "ab", "xb"])
    layer_0 = [0.5, -0.5, 0.0]  # all three b
    layer_1 = [0.5, -0.5, 0.0]  # the two with history a; the third is alone
    options = {"depth": 1, "gamma": 1.0, "scaled": 0}
    at_b = hgpo(batch, **options)[1::2]
    assert at_b.tolist() == pytest.approx([0.5, -0.5, 0.0])
    uneven = walks([1.0, 0.0, 0.2], ["ab", "ab", "xb"])
    layer_0 = [0.6, -0.4, -0.2]
    at_b = hgpo(uneven, **options)[1::2]
    # terms of 0 are left out of the mean as released: the third keeps its layer 0 alone
    expected = [(x + 2 * y) / 3 for x, y in zip(layer_0[:2], layer_1[:2], strict=True)]
    assert at_b.tolist() == pytest.approx([*expected, -0.2])
    counted = hgpo(uneven, count_zeros=1, **options)[1::2]
    assert counted.tolist() == pytest.approx([*expected, -0.2 / 3])
    with_episode = hgpo(uneven, episode=1.0, **options)[1::2]
    rollout = grpo(uneven)
    assert with_episode.tolist() == pytest.approx((np.array([*expected, -0.2]) + rollout).tolist())


def test_hgpo_scales_by_the_population_and_skips_histories_that_are_too_long() -> None:
    """Two rollouts at one state with returns 1 and 0: ±1 scaled, ±½ as released."""
    one = walks([1.0, 0.0], ["s", "s"])
    assert hgpo(one, scaled=1).tolist() == pytest.approx([1.0, -1.0])
    assert hgpo(one).tolist() == [0.5, -0.5]
    # at the first step of three only layer 0 exists, whatever the depth
    first = [hgpo(walks([1.0, 0.0], ["abc", "abd"]), depth=d, gamma=1.0)[0] for d in (0, 2)]
    assert first == [0.5, 0.5]


@pytest.mark.parametrize("credit", [gigpo, hgpo])
def test_step_rewards_come_on_top_of_the_outcome(credit: Any) -> None:
    """Outcomes 1 and 0: step rewards of 0 change nothing, and the outcome stays without them."""
    plain = walks([1.0, 0.0], ["s", "s"])
    zero = walks([1.0, 0.0], ["s", "s"], steps=[[0.0], [0.0]])
    assert credit(zero).tolist() == credit(plain).tolist()
    assert gigpo(zero, eps=0).tolist() == pytest.approx([2 * 0.70711, -2 * 0.70711], abs=5e-5)
    paid = walks([1.0, 0.0], ["ab", "ab"], steps=[[0.0, 0.0], [0.0, 3.0]])
    assert credit(paid, scaled=0)[1] < 0 < credit(paid, scaled=0)[3]


def test_hgpo_gives_zero_to_singletons() -> None:
    assert hgpo(walks([1.0, 0.0], ["ab", "cd"])).tolist() == [0.0] * 4


def test_igpo_centres_returns_at_equal_turns() -> None:
    """Turn returns: row 0 (0.9, 0.7), row 1 (0.5), so turn 1 is row 0's alone."""
    batch = walks([0.7, 0.5], ["ab", "c"], steps=[[0.2, 0.0], [0.0]])
    assert igpo(batch).tolist() == pytest.approx([0.2, 0.0, -0.2])
    discounted = igpo(batch, gamma=0.5)
    assert discounted.tolist() == pytest.approx([0.025, 0.0, -0.025])


def test_a2tgpo_scales_by_the_root_of_the_terms() -> None:
    gains = [[0.3, 0.1, 0.2], [0.1, 0.5], [0.2, 0.0]]
    batch = walks([1, 0, 0], ["abc", "de", "fg"], steps=gains)
    first, second = z([0.3, 0.1, 0.2]), z([0.1, 0.5, 0.0])
    found = rows_of(batch, a2tgpo(batch, gamma=0.5, eps=0))
    # the third turn is row 0's alone: z = 0
    assert found[0] == pytest.approx(
        ((first[0] + 0.5 * second[0]) / math.sqrt(3), second[0] / math.sqrt(2), 0.0)
    )
    assert found[1] == pytest.approx(((first[1] + 0.5 * second[1]) / math.sqrt(2), second[1]))
    draw = np.random.default_rng(0)
    steps = draw.normal(size=(400, 4)).tolist()
    many = walks([0] * 400, ["abcd"] * 400, steps=steps)
    spread = np.array(rows_of(many, a2tgpo(many))).std(0)
    assert spread.tolist() == pytest.approx([1.0] * 4, abs=0.12)


def test_mapo_meets_its_two_extremes() -> None:
    batch = walks([0, 0], ["ab", "cd"], groups=[0, 0], steps=[[1.0, 2.0], [0.0, 0.5]])
    returns = [3.0, 2.0, 0.5, 0.5]
    turn = [z([3.0, 0.5])[0], z([2.0, 0.5])[0], z([3.0, 0.5])[1], z([2.0, 0.5])[1]]
    assert mapo(batch, a=1.0, eps=0).tolist() == pytest.approx(turn)
    assert mapo(batch, a=0.0, eps=0).tolist() == pytest.approx(z(returns))
    half = (np.array(turn) + np.array(z(returns))) / 2
    assert mapo(batch, a=0.5, eps=0).tolist() == pytest.approx(half.tolist())


def test_eapo_discounts_by_the_distance_to_the_end() -> None:
    batch = walks([1.0, 0.0], ["abc", "d"])
    assert eapo(batch, gamma=0.5, eps=0).tolist() == pytest.approx(z([0.25, 0.5, 1.0, 0.0]))
    flat = walks([1.0, 1.0], ["a", "b"])
    assert eapo(flat).tolist() == [0.0, 0.0]


def test_a_step_spreads_its_advantage_on_all_its_tokens() -> None:
    batch = rewards(
        [1.0, 0.0],
        lengths=[3, 1],
        step_R=[np.array([0, 0, 1]), np.array([0])],
        state_keys_R=[("s", "t"), ("s",)],
    )
    found = rows_of(batch, gigpo(batch, gamma=0.5, scaled=0))
    centred = dr_grpo(batch)
    assert found == [
        pytest.approx((centred[0] + 0.25, centred[0] + 0.25, centred[0])),
        pytest.approx((centred[1] - 0.25,)),
    ]


def test_a2tgpo_tells_the_clip_width_of_each_turn() -> None:
    """z is ±1/√2 at the first turn and 0 at the second, which no sibling reached."""
    batch = rewards(
        [1.0, 0.0],
        lengths=[3, 1],
        step_R=[np.array([0, 0, 1]), np.array([0])],
        step_reward_R=[np.array([1.0, 5.0]), np.array([0.0])],
    )
    width_D = turn_widths(batch, {"widen": 0.5})["width"]
    high = 0.5 * math.tanh(math.sqrt(0.5))
    assert width_D.tolist() == pytest.approx([1 + high, 1 + high, 1.0, 1 - high], abs=1e-5)
    assert turn_widths(batch, {}) == {}
    assert a2tgpo(batch, widen=0.5).tolist() == a2tgpo(batch).tolist()


def test_rank_grpo_pays_a_rank_for_itself_and_the_later_ones() -> None:
    """Relevance 1, 0, 1 and 0, 0, 1: gains to come are 2, 1, 1 and 1, 1, 1."""
    batch = rewards(
        [0.0, 0.0],
        lengths=[3, 4],
        step_R=[np.arange(3), np.array([0, 0, 1, 2])],
        step_reward_R=[np.array([1.0, 0.0, 1.0]), np.array([0.0, 0.0, 1.0])],
    )
    one = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert rank_grpo(batch).tolist() == pytest.approx([one, 0, 0, -one, -one, 0, 0])
    # under the log discount rank 1 counts 1, rank 3 a half: 1.5 against .5
    other = rank_grpo(batch, discount="log")
    assert other[:3].tolist() == pytest.approx([one, 0, 0])
    changed = replace(batch, step_reward_R=[np.array([0.0, 0.0, 1.0]), batch.step_reward_R[1]])
    assert rank_grpo(changed).tolist() == [0.0] * 7
