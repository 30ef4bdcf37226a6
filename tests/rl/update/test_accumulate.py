"""The update against naive references: finite differences, autograd on single rows, other cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.model.test_decoder import naive_logps
from tests.rl.tiny import random_rows, tiny_decoder, tiny_hf
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import Entry
from tfgrpo.rl.model.decoder import decoder_from_hf, hf_slices
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate, score_rows


def train_rows(rows: list[Row], **values) -> list[TrainRow]:
    advantage = np.linspace(-1.5, 2.0, len(rows))
    return [TrainRow(r, float(a), group=r.index // 3, **values) for r, a in zip(rows, advantage)]


def with_old(decoder, rows: list[TrainRow], shift: float) -> list[TrainRow]:
    """Rows whose old policy differs by noise of the given size."""
    logps = score_rows(decoder, [r.row for r in rows], temperature=1.0, max_tokens=10_000)
    noise = np.random.default_rng(0)
    return [
        replace(r, old_logp=tuple(p + shift * noise.normal() for p in logps[r.row.index]))
        for r in rows
    ]


def gradients(decoder) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


def run(decoder, rows, settings) -> tuple[float, dict[str, torch.Tensor]]:
    decoder.zero_grad(set_to_none=True)
    result = accumulate(decoder, rows, settings)
    return result.loss, gradients(decoder)


def test_loss_and_gradients_equal_a_row_by_row_reference() -> None:
    model = tiny_hf(dtype=torch.float64)
    decoder = decoder_from_hf(model, share=False)
    rows = with_old(decoder, train_rows(random_rows()), 0.3)
    settings = UpdateSettings(options={"eps_low": 0.2, "eps_high": 0.28}, micro_batch_tokens=40)
    loss, grads = run(decoder, rows, settings)

    total = torch.zeros((), dtype=torch.float64)
    n_tokens = sum(len(r.row.suffix_ids) for r in rows)
    for r in rows:
        ratio = (naive_logps(model, r.row) - torch.tensor(r.old_logp, dtype=torch.float64)).exp()
        clipped = ratio.clamp(0.8, 1.28)
        total = total - torch.minimum(ratio * r.advantage, clipped * r.advantage).sum() / n_tokens
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-6)
    theirs = dict(model.named_parameters())
    for name, ours, first, last in hf_slices(decoder.shape):
        torch.testing.assert_close(
            grads[ours][first:last], theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.real
def test_gradients_equal_finite_differences() -> None:
    decoder = tiny_decoder(dtype=torch.float64)
    decoder.inv_freq = decoder.inv_freq.double()
    rows = with_old(decoder, train_rows(random_rows(2, 2)), 0.1)
    settings = UpdateSettings()
    _, grads = run(decoder, rows, settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in list(decoder.named_parameters())[::4]:
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
            values.append(run(decoder, rows, settings)[0])
            with torch.no_grad():
                parameter.add_(direction, alpha=-sign * 1e-6)
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx((grads[name] * direction).sum().item(), rel=1e-3, abs=1e-6)


def test_on_policy_the_gradient_is_minus_advantage_times_the_score() -> None:
    decoder = tiny_decoder(dtype=torch.float64)
    rows = train_rows(random_rows())
    _, clipped = run(decoder, rows, UpdateSettings())

    def plain(batch, **_):
        return -batch.advantage_D * batch.logp_D

    LOSSES["plain_score"] = Entry("plain_score", plain, "own", "-A log pi", "code", "here")
    try:
        _, scored = run(decoder, rows, UpdateSettings(loss="plain_score"))
    finally:
        del LOSSES["plain_score"]
    for name, value in clipped.items():
        torch.testing.assert_close(value, scored[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_gradient_does_not_depend_on_the_cut(kl: float) -> None:
    decoder = tiny_decoder(dtype=torch.float64)
    rows = with_old(decoder, train_rows(random_rows(4, 3)), 0.2)
    rows = [replace(r, ref_logp=r.old_logp) for r in rows]
    results = []
    for tokens, chunk in ((10_000, 10_000), (30, 7), (1, 1)):
        settings = UpdateSettings(kl=kl, entropy=0.01, micro_batch_tokens=tokens, chunk=chunk)
        results.append(run(decoder, rows, settings))
    for loss, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-12)
        for name, value in grads.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["rpo", "reg_grpo", "nash_mp"])
def test_a_group_stays_whole_where_its_rows_have_prompts_of_their_own(loss: str) -> None:
    """As under hints; a further row of a group may stand behind the rows of other groups."""
    decoder = tiny_decoder(dtype=torch.float64)
    rows = with_old(decoder, train_rows(random_rows(3, 4)), 0.2)
    made = []
    for i, r in enumerate(rows):
        own = r.row if i % 4 < 2 else replace(r.row, prompt_ids=(*r.row.prompt_ids, 5 + i))
        beats = {f"beats_{j}": (float(i % 4 < j),) * own.n_loss for j in range(4)}
        columns = {"place": (float(i % 4),) * own.n_loss, **beats}
        made.append(replace(r, row=own, reward=float(i % 4), ref_logp=r.old_logp, columns=columns))
    made.append(made.pop(2))
    results = [
        run(decoder, made, UpdateSettings(loss=loss, aggregation="row_mean", micro_batch_tokens=n))
        for n in (10_000, 1)
    ]
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=1e-9, atol=1e-12)
    assert max(float(value.abs().max()) for value in results[0][1].values()) > 0


def test_skipping_rows_of_zero_advantage_changes_no_gradient() -> None:
    decoder = tiny_decoder(dtype=torch.float64)
    rows = train_rows(random_rows(4, 3))
    rows = [replace(r, advantage=0.0) if r.group in (1, 2) else r for r in rows]
    cut = UpdateSettings(micro_batch_tokens=1)  # one row a micro-batch: the sums' order is equal
    decoder.zero_grad(set_to_none=True)
    with_skip = accumulate(decoder, rows, cut)
    skipped = gradients(decoder)
    _, full = run(decoder, rows, replace(cut, skip_zero_advantage=False))
    expected = sum(r.row.n_loss for r in rows if r.group in (1, 2))
    assert with_skip.skipped_tokens == expected > 0
    for name, value in full.items():
        assert torch.equal(value, skipped[name]), name


def test_rows_are_not_skipped_where_another_term_needs_them() -> None:
    decoder = tiny_decoder()
    rows = [replace(r, advantage=0.0) for r in train_rows(random_rows(2, 2))]
    result = accumulate(decoder, rows, UpdateSettings(entropy=0.1))
    assert result.skipped_tokens == 0
    assert decoder.embed.grad.abs().max() > 0


def test_a_sequence_level_loss_equals_autograd_through_whole_rows() -> None:
    model = tiny_hf(dtype=torch.float64)
    decoder = decoder_from_hf(model, share=False)
    rows = with_old(decoder, train_rows(random_rows()), 0.3)

    def row_ratio(batch, **_):
        mean_R = batch.row_mean(batch.logp_D - batch.old_logp_D)
        return -(mean_R.exp()[batch.row_D] * batch.advantage_D)

    LOSSES["row_ratio"] = Entry(
        "row_ratio", row_ratio, "own", "-A exp(mean lr)", "code", "here", needs=("sequence",)
    )
    try:
        settings = UpdateSettings(loss="row_ratio", micro_batch_tokens=30, chunk=5)
        loss, grads = run(decoder, rows, settings)
    finally:
        del LOSSES["row_ratio"]
    total = torch.zeros((), dtype=torch.float64)
    n_tokens = sum(len(r.row.suffix_ids) for r in rows)
    for r in rows:
        gap = naive_logps(model, r.row) - torch.tensor(r.old_logp, dtype=torch.float64)
        total = total - gap.mean().exp() * r.advantage * len(gap) / n_tokens
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-6)
    theirs = dict(model.named_parameters())
    for name, ours, first, last in hf_slices(decoder.shape):
        torch.testing.assert_close(
            grads[ours][first:last], theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_a_masked_token_has_no_gradient_and_does_not_count() -> None:
    """Two completions of 4 tokens, the second fully masked: a loss of 1 a token gives 1."""
    decoder = tiny_decoder(dtype=torch.float64)
    rows = [
        TrainRow(Row(0, (5, 6), (10, 11, 12, 13)), 1.0),
        TrainRow(Row(1, (5, 6), (14, 15, 16, 17), loss_positions=()), 1.0),
    ]
    LOSSES["ones"] = Entry(
        "ones", lambda batch, **_: batch.logp_D * 0 + 1, "own", "1", "code", "here"
    )
    try:
        loss, _ = run(decoder, rows, UpdateSettings(loss="ones", skip_zero_advantage=False))
    finally:
        del LOSSES["ones"]
    assert loss == pytest.approx(1.0)


def test_a_token_mask_scores_its_own_token() -> None:
    """Only token 12 of 10, 11, 12, 13 bears a loss: its log-prob, not its neighbour's."""
    decoder = tiny_decoder(dtype=torch.float64)
    every = score_rows(decoder, [Row(0, (5,), (10, 11, 12, 13))], temperature=1.0, max_tokens=99)
    masked = TrainRow(Row(0, (5,), (10, 11, 12, 13), loss_positions=(2,)), 1.0)
    result = accumulate(decoder, [masked], UpdateSettings())
    assert result.logp[0] == pytest.approx((every[0][2],))
    assert result.trained_tokens == 1
