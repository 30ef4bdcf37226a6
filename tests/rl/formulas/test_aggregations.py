"""Aggregations against loops over rows and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tfgrpo.rl.formulas.aggregations import AGGREGATIONS

LOSSES = [[1.0, 2.0, 3.0], [10.0], [4.0, 4.0], []]


def by_loops(name: str, losses: list[list[float]], max_tokens: int) -> float:
    everything = [x for row in losses for x in row]
    if name == "token_mean":
        return sum(everything) / len(everything)
    if name == "row_mean":
        return sum(sum(r) / len(r) for r in losses if r) / len(losses)
    if name == "row_sum":
        return sum(sum(r) for r in losses) / len(losses)
    if name == "fixed_length":
        return sum(everything) / (len(losses) * max_tokens)
    assert name == "token_sum"
    return sum(everything)


def weighted(name: str, losses: list[list[float]], max_tokens: int) -> float:
    length_R = np.array([len(r) for r in losses])
    weight_R = AGGREGATIONS[name].fn(length_R, max_tokens=max_tokens)
    return sum(w * sum(r) for w, r in zip(weight_R.tolist(), losses, strict=True))


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_every_aggregation_matches_brute_force(name: str) -> None:
    assert weighted(name, LOSSES, 8) == pytest.approx(by_loops(name, LOSSES, 8))


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_a_batch_without_tokens_gives_finite_weights(name: str) -> None:
    weights = AGGREGATIONS[name].fn(np.zeros(2, dtype=np.int64), max_tokens=4)
    assert np.isfinite(weights).all()


def test_a_masked_row_does_not_dilute_a_token_mean() -> None:
    """Two completions of 4 tokens, the second masked, all token losses 1: 1, not one half."""
    assert weighted("token_mean", [[1.0] * 4, []], 4) == pytest.approx(1.0)
