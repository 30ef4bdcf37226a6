"""What every loss of the registry has in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rl.formulas.batches import slopes, tokens
from tfgrpo.rl.formulas.losses import LOSSES

POLICY_GRADIENT = sorted(
    set(LOSSES)
    - {"opmd", "asymre", "rover", "p3o", "sppo_square", "luspo", "dro"}
    - {"rpo", "inpo", "reg_grpo", "drpo", "grao", "nash_mp", "power_dl"}
)
"""Losses whose first on-policy step is the policy gradient."""

OUTSIDE = {"rover"}
"""Needs a tensor that no batch carries; tested in its own file."""


def full_batch(log_ratio: list[list[float]], advantage: list[float]) -> Any:
    n_tokens = sum(len(r) for r in log_ratio)
    n_rows = len(log_ratio)
    place = torch.arange(n_rows, dtype=torch.float64) % 2
    return tokens(
        log_ratio,
        advantage,
        behaviour_logp_D=torch.full((n_tokens,), -1.0, dtype=torch.float64),
        ref_logp_D=torch.full((n_tokens,), -1.0, dtype=torch.float64),
        entropy_D=torch.full((n_tokens,), 0.5, dtype=torch.float64),
        group_R=torch.arange(n_rows) // 2,
        reward_R=torch.arange(n_rows, dtype=torch.float64) % 2,
        columns={
            "heat": torch.zeros(n_tokens, dtype=torch.float64),
            "place": torch.repeat_interleave(place, torch.tensor([len(r) for r in log_ratio])),
            "beats_0": torch.linspace(0.5, 1.0, n_tokens, dtype=torch.float64),
            "beats_1": torch.full((n_tokens,), 0.5, dtype=torch.float64),
            "given": (torch.arange(n_tokens) == n_tokens - 1).double(),
        },
        vocabulary=8,
    )


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_on_policy_the_gradient_of_a_row_is_minus_its_advantage(name: str) -> None:
    """Whatever is clipped, at r = 1 nothing is: a row's summed gradient is −A a token."""
    batch = full_batch([[0.0, 0.0], [0.0], [0.0, 0.0, 0.0], [0.0]], [1.5, -1.5, 0.5, -0.5])
    slope = slopes(LOSSES[name].fn, batch)
    if name == "clip_cov":  # silences tokens on purpose; here no covariance reaches its bounds
        assert all(s != 0 for s in slope)
    assert slope == pytest.approx([-1.5, -1.5, 1.5, -0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OUTSIDE))
def test_a_row_of_advantage_zero_has_no_gradient_unless_declared(name: str) -> None:
    """Skipping such rows is exact only where this holds."""
    batch = full_batch([[0.3, -0.2], [0.1], [-0.4, 0.2], [0.2]], [0.0, 0.0, 0.0, 0.0])
    slope = slopes(LOSSES[name].fn, batch)
    still = any(s != 0 for s in slope)
    assert not still or {"every_row", "group"} & set(LOSSES[name].needs)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OUTSIDE))
def test_a_loss_depends_on_no_more_than_it_declares(name: str) -> None:
    """Cut as its needs allow (tokens, rows or groups), a loss has the same values."""
    log_ratio = [[0.3, -0.2], [0.1], [-0.4, 0.2, 0.0], [0.2]]
    advantage = [1.5, -1.5, 0.5, -0.5]
    whole = full_batch(log_ratio, advantage)
    expected = LOSSES[name].fn(whole).detach()
    needs = set(LOSSES[name].needs)
    if "group" in needs:
        cuts = [slice(0, 3), slice(3, 7)]
    elif "sequence" in needs:
        cuts = [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 7)]
    else:
        cuts = [slice(i, i + 1) for i in range(7)]
    found = [LOSSES[name].fn(cut_out(whole, cut, needs)).detach() for cut in cuts]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OUTSIDE))
def test_advantages_have_an_effect_unless_it_is_declared_that_rewards_have(name: str) -> None:
    log_ratio = [[0.3, -0.2], [0.1], [-0.4, 0.2], [0.2]]
    one, other = (full_batch(log_ratio, a) for a in ([1.0, -1.0, 0.5, 0.2], [-0.3, 0.8, 1.0, 0.4]))
    equal = slopes(LOSSES[name].fn, one) == slopes(LOSSES[name].fn, other)
    assert equal == ("rewards" in LOSSES[name].needs)


def cut_out(batch: Any, part: slice, needs: set[str]) -> Any:
    """As the update cuts: token chunks keep all rows' numbers, micro-batches renumber theirs."""
    row_D = batch.row_D[part]
    rows = row_D.unique()
    chunk = not needs & {"sequence", "group"}
    return type(batch)(
        logp_D=batch.logp_D[part],
        old_logp_D=batch.old_logp_D[part],
        advantage_D=batch.advantage_D[part],
        row_D=row_D if chunk else torch.searchsorted(rows, row_D),
        n_rows=batch.n_rows if chunk else len(rows),
        entropy_D=batch.entropy_D[part],
        ref_logp_D=batch.ref_logp_D[part],
        behaviour_logp_D=batch.behaviour_logp_D[part],
        group_R=batch.group_R if chunk else batch.group_R[rows],
        reward_R=batch.reward_R if chunk else batch.reward_R[rows],
        columns={name: value_D[part] for name, value_D in batch.columns.items()},
        vocabulary=batch.vocabulary,
    )
