"""Advantages by entropy against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.credit.entropy import call_entropy, erpo, turn_entropy


def test_erpo_centres_each_bucket_and_without_a_gate_is_grpo() -> None:
    entropy_D = np.array([0.1, 2.0, 0.1, 0.3, 0.1, 0.2, 0.1, 0.4, 0.9, 0.5, 0.6, 0.1])
    batch = rewards([1.0, 0.0, 0.5], lengths=[4, 4, 4], entropy_D=entropy_D)
    plain = erpo(batch, gate=1.0, buckets=1)
    assert plain.tolist() == pytest.approx(np.repeat(grpo(batch), 4).tolist())
    gated = erpo(batch, gate=2.0, buckets=2).reshape(3, 2, 2)
    assert np.abs(gated.mean(axis=2).sum(axis=0)).max() < 1e-12
    # the top fifth are tokens 1, 8 and 10; row 0's second token signals 2, its first 1
    assert gated[0, 0, 1] > gated[0, 0, 0] > 0
    lifted = erpo(batch, gate=1.0, buckets=1, anchor=0.5)
    assert (
        lifted[:4] == pytest.approx(1.5 * plain[:4]) and lifted[4:].tolist() == plain[4:].tolist()
    )


def test_erpo_leaves_flat_groups_and_rows_without_tokens_alone() -> None:
    batch = rewards([1.0, 1.0], [1.0, 0.0], lengths=[2, 1, 3, 0], entropy_D=np.ones(6))
    found = erpo(batch, gate=1.0)
    assert found[:3].tolist() == [0.0] * 3 and len(found) == 6


def test_turn_entropy_keeps_the_most_uncertain_turns() -> None:
    """Half of four turns: those of mean entropy 2 and .8."""
    batch = rewards(
        [1.0, 0.0],
        lengths=[3, 3],
        step_R=[np.array([0, 0, 1]), np.array([0, 1, 1])],
        entropy_D=np.array([1.0, 3.0, 0.1, 0.5, 0.7, 0.9]),
    )
    high = float(grpo(batch)[0])
    assert turn_entropy(batch, share=0.5).tolist() == pytest.approx(
        [high, high, 0, 0, -high, -high]
    )
    assert turn_entropy(batch, share=1.0).tolist() == pytest.approx([high] * 3 + [-high] * 3)


def test_call_entropy_never_turns_a_sign_and_pays_no_broken_call() -> None:
    batch = rewards(
        [1.0, 0.0, 1.0, 0.0],
        lengths=[3, 2, 2, 2],
        step_R=[np.array([0, 0, 1]), np.zeros(2, int), np.zeros(2, int), np.zeros(2, int)],
        entropy_D=np.array([0.2, 0.4, 5.0, 9.0, 0.1, 0.5, 0.5, 0.5, 0.5]),
        extra={
            "reasoning_D": np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
            "invalid_R": np.array([0.0, 0.0, 1.0, 1.0]),
        },
    )
    a = float(grpo(batch)[0])
    found = call_entropy(batch, alpha=1.0)
    # .3 is the mean of the first turn's thought; 9 is held at |A| / 2; broken calls earn nothing
    assert found.tolist() == pytest.approx([a + 0.3, a + 0.3, a, -a / 2, -a, 0, 0, -a, -a])
    assert call_entropy(batch, alpha=0.0)[:5].tolist() == pytest.approx([a, a, a, -a, -a])
