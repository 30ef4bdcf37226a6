"""Segment-level credit against small graphs and trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tests.rl.formulas.credit.test_steps import walks
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.credit import rows_of
from tfgrpo.rl.formulas.credit.segments import branch_grpo, portool, salt, spo_chain, spo_tree


def test_salt_neutralises_steps_that_good_and_bad_rollouts_share() -> None:
    """Both go from a to b; the good one on to c, the bad one to d."""
    batch = walks([1.0, 0.0], ["abc", "abd"])
    up, down = grpo(batch)
    assert rows_of(batch, salt(batch)) == [
        pytest.approx((0.0, up, up)),
        pytest.approx((0.0, down, down)),
    ]
    apart = walks([1.0, 0.0], ["abc", "xyz"])
    assert salt(apart).tolist() == pytest.approx(np.repeat(grpo(apart), 3).tolist())


def test_salt_with_history_merges_only_what_came_the_same_way() -> None:
    batch = walks([1.0, 0.0], ["abcd", "xbcd"])
    up, down = grpo(batch)
    # from b to c and from c to d are shared; with one earlier step only c to d is
    assert salt(batch)[1:3].tolist() == pytest.approx([0.0, 0.0])
    assert salt(batch, history=1)[1:3].tolist() == pytest.approx([up, 0.0])
    assert salt(batch, history=1)[5:7].tolist() == pytest.approx([down, 0.0])


def test_spo_tree_and_portool_match_a_small_tree() -> None:
    """Root r forks to a (leaves 1, 0, 0) and b (leaves 1, 1): V = 1/3 and 1."""
    batch = walks([1, 0, 0, 1, 1], ["ra", "ra", "ra", "rb", "rb"])
    fork = (1 / 3 + 1) / 2
    below = [(1 / 3 - fork, 1 - 1 / 3), (1 / 3 - fork, -1 / 3), (1 / 3 - fork, -1 / 3)]
    expected = [*below, (1 - fork, 0.0), (1 - fork, 0.0)]
    assert rows_of(batch, spo_tree(batch)) == [pytest.approx(e) for e in expected]
    path = dr_grpo(batch)
    mixed = [
        tuple(0.25 * v + 0.75 * path[row] for v in values) for row, values in enumerate(expected)
    ]
    assert rows_of(batch, portool(batch, a=0.25)) == [pytest.approx(m) for m in mixed]
    only_child = walks([1, 0], ["rab", "rac"])
    assert spo_tree(only_child)[0] == spo_tree(only_child)[3] == 0.0


def test_trees_are_refused_where_rollouts_share_no_more_than_the_prompt() -> None:
    """Rewards 1, 0, 0, 1 over three turns of their own would give turns 2 and 3 exactly 0."""
    apart = walks([1, 0, 0, 1], ["rab", "rcd", "ref", "rgh"])
    for credit in (spo_tree, portool):
        with pytest.raises(ConfigError, match="no two rollouts of a group share more than"):
            credit(apart)
    assert spo_tree(walks([1, 0], ["r", "r"])).tolist() == [0.5, -0.5]


def test_branch_grpo_normalises_nodes_of_one_depth() -> None:
    """Leaves 1, 0 below a and 1, 1 below b: nodes of depth 1 are 1/2 and 1, their own deviation."""
    batch = walks([1, 0, 1, 1], ["ra", "ra", "rb", "rb"])
    found = rows_of(batch, branch_grpo(batch, eps=0))
    assert [row[0] for row in found] == pytest.approx([-0.7071, -0.7071, 0.7071, 0.7071], abs=1e-4)
    # depth 2: values 1, 0, 1, 1 of mean 3/4 and sample deviation 1/2
    assert [row[1] for row in found] == pytest.approx([0.5, -1.5, 0.5, 0.5])
    flat = walks([1, 1], ["ra", "ra"])
    assert set(branch_grpo(flat).tolist()) == {0.0}


def test_a_sampler_of_trees_may_have_a_step_without_a_fork() -> None:
    apart = replace(walks([1, 0, 0, 1], ["rab", "rcd", "ref", "rgh"]), is_tree=True)
    assert spo_tree(apart)[0] == 0.5 and branch_grpo(apart).shape == spo_tree(apart).shape


def test_spo_chain_telescopes_and_masks_sure_tokens() -> None:
    batch = rewards(
        [1.0, 0.0],
        lengths=[4, 2],
        step_R=[np.array([0, 0, 1, 2]), np.array([0, 0])],
        step_reward_R=[np.array([0.25, 0.5, 0.25]), np.array([0.25])],
        logp_D=np.log([0.5, 0.95, 0.6, 0.7, 0.99, 0.2]),
    )
    found = rows_of(batch, spo_chain(batch, below=1.0))
    assert found == [pytest.approx((0.25, 0.25, -0.25, 0.75)), pytest.approx((-0.25, -0.25))]
    # one value a segment: they sum to R − V(start); a single segment is the whole rollout's
    assert found[0][0] + found[0][2] + found[0][3] == pytest.approx(1.0 - 0.25)
    masked = spo_chain(batch)
    assert masked.tolist() == pytest.approx([0.25, 0.0, -0.25, 0.75, 0.0, -0.25])
