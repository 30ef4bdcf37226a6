"""The one-pass loss against autograd on whole logits."""

from __future__ import annotations

import pytest
import torch

from tfgrpo.rl.update.logprob import one_pass_loss, score_tokens


def material(dtype: torch.dtype, n: int = 23, vocab: int = 37, width: int = 12):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype)
    target = torch.randint(0, vocab, (n,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden, weight, target, temperature):
    logits = hidden @ weight.t() / temperature
    logp_all = logits.log_softmax(-1)
    logp = logp_all.gather(-1, target[:, None]).squeeze(-1)
    return logp, -(logp_all.exp() * logp_all).sum(-1)


def squares(coefficient_D, entropy_weight):
    """A closure with loss Σ c·logp² + w·H²."""

    def closure(part, logp, entropy):
        c = coefficient_D[part]
        loss = (c * logp.square()).sum()
        if entropy is None:
            return loss, 2 * c * logp, None
        loss = loss + entropy_weight * entropy.square().sum()
        return loss, 2 * c * logp, 2 * entropy_weight * entropy

    return closure


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [5, 64])
def test_value_and_both_gradients_equal_autograd(temperature, with_entropy, chunk) -> None:
    hidden, weight, target = material(torch.float64)
    coefficient_D = torch.linspace(-1, 2, len(target), dtype=torch.float64)
    loss, scored = one_pass_loss(
        hidden,
        weight,
        target,
        squares(coefficient_D, 0.3),
        temperature=temperature,
        with_entropy=with_entropy,
        chunk=chunk,
    )
    (2 * loss).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    logp, entropy = plain(hidden, weight, target, temperature)
    expected = (coefficient_D * logp.square()).sum()
    if with_entropy:
        expected = expected + 0.3 * entropy.square().sum()
        torch.testing.assert_close(scored.entropy_D, entropy.detach())
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(scored.logp_D, logp.detach())
    torch.testing.assert_close(got, (hidden.grad, weight.grad), rtol=1e-10, atol=1e-10)


def test_bfloat16_gradients_stay_near_the_float64_reference() -> None:
    hidden, weight, target = material(torch.bfloat16, n=64)
    coefficient_D = torch.ones(64)
    loss, _ = one_pass_loss(hidden, weight, target, squares(coefficient_D, 0.0))
    loss.backward()
    wide_h, wide_w = hidden.detach().double(), weight.detach().double()
    wide_h.requires_grad_()
    wide_w.requires_grad_()
    plain(wide_h, wide_w, target, 1.0)[0].square().sum().backward()
    for got, want in ((hidden.grad, wide_h.grad), (weight.grad, wide_w.grad)):
        assert (got.double() - want).norm() / want.norm() < 1e-2


def test_a_token_without_weight_contributes_exactly_nothing() -> None:
    hidden, weight, target = material(torch.float64)
    coefficient_D = torch.zeros(len(target), dtype=torch.float64)
    coefficient_D[4] = 1.0
    loss, _ = one_pass_loss(hidden, weight, target, squares(coefficient_D, 0.0), chunk=7)
    loss.backward()
    others = [i for i in range(len(target)) if i != 4]
    assert hidden.grad[others].abs().max() == 0
    assert hidden.grad[4].abs().max() > 0


def test_scoring_alone_equals_log_softmax() -> None:
    hidden, weight, target = material(torch.float64)
    scored = score_tokens(hidden, weight, target, temperature=1.3, with_entropy=True, chunk=6)
    logp, entropy = plain(hidden, weight, target, 1.3)
    torch.testing.assert_close(scored.logp_D, logp.detach())
    torch.testing.assert_close(scored.entropy_D, entropy.detach())
