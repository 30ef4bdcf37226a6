"""Divergences by token against closed forms, torch's own and autograd in double precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tfgrpo.rl.distillation.kl import (
    FullTeacher,
    forward_kl,
    one_pass_kl,
    reverse_kl,
    top_k_forward_kl,
    top_k_of,
    top_k_reverse_kl,
)

D, V, H = 5, 11, 4


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def test_two_outcomes_match_the_closed_form() -> None:
    """p = ½, ½ and q = ¼, ¾: both directions by hand."""
    logits, logq = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.25, 0.75]]).log()
    kl, slope = forward_kl(logits, logq.double())
    assert kl.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-7)
    assert slope[0].tolist() == pytest.approx([0.25, -0.25], abs=1e-7)
    kl, slope = reverse_kl(logits, logq.double())
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert kl.item() == pytest.approx(by_hand, abs=1e-7)
    assert slope[0, 0].item() == pytest.approx(0.5 * (math.log(2) - by_hand), abs=1e-7)


def test_forward_and_reverse_are_torchs_own() -> None:
    logits, logq = drawn(D, V), drawn(D, V, seed=1).log_softmax(-1)
    logp = logits.log_softmax(-1)
    ours = forward_kl(logits, logq)[0]
    assert torch.allclose(ours, F.kl_div(logp, logq, log_target=True, reduction="none").sum(-1))
    ours = reverse_kl(logits, logq)[0]
    assert torch.allclose(ours, F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1))


def joined(logp: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of the k tokens and of the rest, by plain addition."""
    p = logp.exp()
    kept = p.gather(-1, ids)
    rest = p.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([kept, rest], -1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_is_the_divergence_of_the_joined_outcomes_and_so_is_its_slope(direction, k) -> None:
    logits = drawn(D, V).requires_grad_()
    logq = drawn(D, V, seed=1).log_softmax(-1)
    logq_k, ids = logq.topk(k, -1)
    p, q = joined(logits.log_softmax(-1), ids), joined(logq, ids)
    a, b = (q, p) if direction == "forward" else (p, q)
    brute = (a * (a.log() - b.log())).sum(-1)
    (wanted,) = torch.autograd.grad(brute.sum(), logits)
    rule = top_k_forward_kl if direction == "forward" else top_k_reverse_kl
    kl, slope = rule(logits.detach(), ids, logq_k)
    assert torch.allclose(kl, brute.detach())
    assert torch.allclose(slope, wanted)
    whole = (forward_kl if direction == "forward" else reverse_kl)(logits.detach(), logq)[0]
    assert (kl <= whole + 1e-12).all()


@pytest.mark.parametrize("pair", [(forward_kl, top_k_forward_kl), (reverse_kl, top_k_reverse_kl)])
def test_all_tokens_kept_is_the_full_divergence(pair) -> None:
    full, top = pair
    logits, logq = drawn(D, V), drawn(D, V, seed=1).log_softmax(-1)
    logq_k, ids = logq.topk(V, -1)
    for ours, theirs in zip(top(logits, ids, logq_k), full(logits, logq), strict=True):
        assert torch.allclose(ours, theirs)


def test_a_certain_teacher_gives_the_log_likelihood_and_no_nan() -> None:
    """q = 1 on token 2: KL(q ‖ p) = −log p(2), the supervised loss."""
    logits = drawn(D, V)
    logq = torch.full((D, V), float("-inf"), dtype=torch.float64)
    logq[:, 2] = 0.0
    kl, slope = forward_kl(logits, logq)
    assert torch.allclose(kl, -logits.log_softmax(-1)[:, 2])
    assert torch.allclose(slope, logits.softmax(-1) - F.one_hot(torch.tensor(2), V))
    kl_top, slope_top = top_k_forward_kl(logits, torch.full((D, 1), 2), logq[:, 2:3])
    assert torch.allclose(kl_top, kl) and torch.allclose(slope_top, slope)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("kind", ["full", "top"])
@pytest.mark.parametrize("chunk", [2, 100])
def test_one_pass_has_the_gradient_of_the_whole_computation(direction, kind, chunk) -> None:
    hidden, head = drawn(D, H).requires_grad_(), drawn(V, H, seed=1).requires_grad_()
    teacher_hidden, teacher_head = drawn(D, H, seed=2), drawn(V, H, seed=3)
    weight, temperature = drawn(D, seed=4).abs(), 0.7
    logq = (teacher_hidden @ teacher_head.t() / temperature).log_softmax(-1)
    logp = (hidden @ head.t() / temperature).log_softmax(-1)
    if kind == "full":
        teacher = FullTeacher(teacher_hidden, teacher_head, temperature)
        p, q = logp.exp(), logq.exp()
    else:
        teacher = top_k_of(teacher_hidden, teacher_head, 3, temperature=temperature, chunk=2)
        p, q = joined(logp, teacher.ids_DK), joined(logq, teacher.ids_DK)
    a, b = (q, p) if direction == "forward" else (p, q)
    brute_D = (a * (a.log() - b.log())).sum(-1)
    wanted = torch.autograd.grad(3 * (brute_D * weight).sum(), [hidden, head])
    loss, kl_D = one_pass_kl(
        hidden, head, teacher, weight, direction=direction, temperature=temperature, chunk=chunk
    )
    found = torch.autograd.grad(3 * loss, [hidden, head])
    assert torch.allclose(kl_D, brute_D.detach())
    assert loss.item() == pytest.approx((brute_D * weight).sum().item())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs)


def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient() -> None:
    hidden, head = drawn(D, H).requires_grad_(), drawn(V, H, seed=1).requires_grad_()
    teacher = FullTeacher(hidden.detach(), head.detach())
    loss, kl_D = one_pass_kl(hidden, head, teacher, torch.ones(D, dtype=torch.float64))
    loss.backward()
    assert kl_D.abs().max() < 1e-12
    assert hidden.grad.abs().max() < 1e-12 and head.grad.abs().max() < 1e-12
