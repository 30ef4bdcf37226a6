"""Losses that pull a log-ratio or a ratio to a target instead of following a score function.

A row of advantage 0 usually has a gradient here, which `every_row` declares. r = exp(log π − log
π_old). Does not know aggregation. Sources are named at each entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tfgrpo.rl.formulas.inputs import RatioFacts, TokenBatch
from tfgrpo.rl.formulas.losses.clip import log_ratio
from tfgrpo.rl.formulas.losses.score import _outside_total_variation
from tfgrpo.rl.formulas.registry import Entry, register, required

REGRESSION_LOSSES: dict[str, Entry] = {}
TESTS = "tests/rl/formulas/losses/test_regression.py::"


@register(
    REGRESSION_LOSSES,
    "gbpo",
    source="Bounded Ratio RL, GBPO (arXiv 2604.18578), abstract and summary",
    formula="|A| (r - (1 + eps sign A))^2 / (2 eps)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_gbpo_rests_at_the_bound_and_starts_as_policy_gradient",
    needs=("ratio",),
)
def gbpo(batch: TokenBatch, *, eps: float = 0.2) -> torch.Tensor:
    """Return the |A|-weighted squared distance of the ratio to its bound: D.

    Approximation: the optimum (1±eps) π_old is the paper's, the squared distance is ours. Divided
    by 2 eps, so that the first on-policy step is the policy gradient's. `eps` > 0. Centre rewards
    on the median (advantage `median_centred`).
    """
    bound_D = 1 + eps * batch.advantage_D.sign()
    return batch.advantage_D.abs() * (log_ratio(batch).exp() - bound_D) ** 2 / (2 * eps)


def _dual_ascent(
    state: Mapping[str, float], seen: RatioFacts, options: Mapping[str, Any]
) -> dict[str, float]:
    """Projected ascent of the multiplier: max(0, eta + lr (mean (r − 1)² − delta))."""
    eta = state.get("eta", options.get("eta", 1.0))
    gap = seen.variance - options.get("delta", 0.01)
    return {"eta": max(0.0, eta + options.get("lr", 1.0) * gap)}


@register(
    REGRESSION_LOSSES,
    "r2vpo",
    source="R2VPO (ratio-variance regularised policy optimisation), abstract",
    formula="-r A + eta ((r-1)^2 - delta)",
    certainty="approximation",
    checked="no released code was found; the abstract alone",
    test=TESTS + "test_r2vpo_matches_its_lagrangian_and_its_dual_step",
    needs=("every_row", "ratio"),
    after_step=_dual_ascent,
)
def r2vpo(
    batch: TokenBatch, *, eta: float = 1.0, delta: float = 0.01, lr: float = 1.0
) -> torch.Tensor:
    """Return the Lagrangian of the surrogate under a bound on the ratio's variance: D.

    Approximation: the constraint is the abstract's, the treatment of stale samples is unknown.
    `eta` >= 0 is the multiplier's start; the state `eta` moves by `lr` (mean (r−1)² − `delta`)
    after each optimiser batch.
    """
    del lr  # of `_dual_ascent`
    ratio_D = log_ratio(batch).exp()
    return -ratio_D * batch.advantage_D + eta * ((ratio_D - 1) ** 2 - delta)


@register(
    REGRESSION_LOSSES,
    "dro",
    source="DRO (arXiv 2405.19107); verl",
    formula="-(A log pi - beta/2 (log r)^2)",
    certainty="code",
    checked="run beside verl's core_algos.py on equal inputs (test_verl_peer)",
    test=TESTS + "test_dro_rests_where_the_log_ratio_is_the_scaled_advantage",
    needs=("every_row", "ratio"),
)
def dro(batch: TokenBatch, *, beta: float = 0.1) -> torch.Tensor:
    """Return the direct reward optimisation loss: D. Stationary at log r = A / beta."""
    return -(batch.advantage_D * batch.logp_D - beta / 2 * log_ratio(batch) ** 2)


@register(
    REGRESSION_LOSSES,
    "prime_default",
    source="prime-rl's default loss",
    formula="-mask r A + kappa (log r)^2, mask of dppo_tv",
    certainty="code",
    checked=(
        "read in PrimeIntellect-ai/prime-rl trainer/rl/loss.py: equal mask, 0.2, kl_tau "
        "1e-3; its ratio is to the sampler's log-probs, ours to the step's start"
    ),
    test=TESTS + "test_prime_default_adds_the_square_to_a_masked_ratio",
    needs=("every_row", "ratio"),
)
def prime_default(
    batch: TokenBatch, *, d_low: float = 0.2, d_high: float = 0.2, kappa: float = 1e-3
) -> torch.Tensor:
    """Return the masked ratio surrogate with a squared pull to π_old: D."""
    gap_D = log_ratio(batch)
    keep_D = _outside_total_variation(batch, d_low, d_high)
    return -keep_D * gap_D.exp() * batch.advantage_D + kappa * gap_D**2


@register(
    REGRESSION_LOSSES,
    "rover",
    source="ROVER (Random Policy Valuation is Enough), released code",
    formula="(rho log r - sg(A + rho next_gap))^2, next_gap: mean of next position's log r",
    certainty="code",
    checked=(
        "read in tinnerhrhe/ROVER Math/verl/workers/actor/dp_actor.py: target A + rho next gap"
    ),
    test=TESTS + "test_rover_regresses_to_the_next_states_uniform_value",
    needs=("every_row", "next_gap", "ratio"),
)
def rover(
    batch: TokenBatch, *, rho: float = 1.0, next_gap_D: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squared error of the uniform policy's value: D.

    A is the group-centred reward (`dr_grpo`). `next_gap_D` is, for each token, the mean over
    the vocabulary of log π − log π_old at the next position, 0 at a row's last token; it needs a
    pass over the old policy's whole distribution, so the caller must compute it.
    """
    gap_D = required(next_gap_D, "rover", "next_gap_D", "compute it from both policies' logits")
    target_D = (batch.advantage_D + rho * gap_D).detach()
    return (rho * log_ratio(batch) - target_D) ** 2


@register(
    REGRESSION_LOSSES,
    "sppo_square",
    source="SPPO (Self-Play Preference Optimization, arXiv 2405.00675), released code uclaml/SPPO",
    formula="(row sum of log r - eta A)^2 / row length, A = win rate - 1/2",
    certainty="code",
    checked=(
        "read in uclaml/SPPO sppo/trainer.py: eta 1000, for the best and the worst of five rows "
        "there, for every row here; the weights at the step's start are the earlier iterate"
    ),
    test=TESTS + "test_sppo_square_rests_at_the_scaled_win_rate",
    needs=("sequence", "every_row", "ratio"),
    aggregation="row_sum",
)
def sppo_square(batch: TokenBatch, *, eta: float = 1.0) -> torch.Tensor:
    """Return the squared error of a row's log-ratio against its win rate, spread on its tokens: D.

    Divided by the length, so that `row_sum` gives the mean over rows of the squared error. With a
    judge of pairs: verifier `win_rate` and advantage `dr_grpo`, since the rates of a group have the
    mean one half; without one, advantage `win_rate` reads the wins off the rewards. `eta` > 0.
    """
    gap_R = batch.row_sum(log_ratio(batch))
    advantage_R = batch.row_mean(batch.advantage_D)
    length_R = batch.row_sum(torch.ones_like(batch.logp_D.detach())).clamp_min(1)
    return ((gap_R - eta * advantage_R) ** 2 / length_R)[batch.row_D]
