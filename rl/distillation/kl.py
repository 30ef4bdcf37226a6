"""KL divergence between a teacher's and a student's next-token distributions, chunk by chunk.

The teacher's D × V probabilities are never held: either its D hidden states are kept and a chunk
is multiplied with its head when needed (exact), or its k likeliest tokens a position with all
others taken as one further outcome (a lower bound of the exact divergence, since joining outcomes
cannot raise it). Gradients of the student's logits are formed in the forward, from their closed
form, as in `logprob.one_pass_loss`.

Axes: D loss-bearing tokens, V vocabulary, H hidden, K kept tokens. All divergences are in nats.
Does not know rows, contexts or optimisers. Source: distillation (Hinton et al., arXiv 1503.02531);
forward and reverse by token as in GKD (arXiv 2306.13649); the joined rest is own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Direction = Literal["forward", "reverse"]
"""`forward` is KL(teacher ‖ student): cover all that the teacher says. `reverse` is
KL(student ‖ teacher): say only what the teacher says."""

_LEAST = -60.0
"""Log-probability below which a joined rest counts as absent: e^-60 is far below float32's step."""


def forward_kl(logits_DV: Tensor, teacher_logp_DV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (KL(q ‖ p) by token: D, its gradient p − q by the student's logits: D × V).

    p is the softmax of the student's logits, q the teacher's distribution.
    """
    logp_DV = logits_DV.log_softmax(-1)
    q_DV = teacher_logp_DV.exp()
    kl_D = _times(q_DV, teacher_logp_DV - logp_DV).sum(-1)
    return kl_D, logp_DV.exp() - q_DV


def reverse_kl(logits_DV: Tensor, teacher_logp_DV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (KL(p ‖ q) by token: D, its gradient p · (log p − log q − KL): D × V)."""
    logp_DV = logits_DV.log_softmax(-1)
    p_DV = logp_DV.exp()
    gap_DV = logp_DV - teacher_logp_DV
    kl_D = _times(p_DV, gap_DV).sum(-1)
    return kl_D, _times(p_DV, gap_DV - kl_D[:, None])


def top_k_forward_kl(logits_DV: Tensor, ids_DK: Tensor, logq_DK: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(q ‖ p) over the teacher's k tokens and the joined rest, and its gradient.

    Gradient: p − q on the k tokens, p · (1 − q_rest / p_rest) on the others. With k = V this is
    `forward_kl`.
    """
    logp_DV, logp_DK, rest_p_D = _joined(logits_DV, ids_DK)
    rest_q_D = _rest(logq_DK)
    has_rest_D = rest_q_D > _LEAST
    gap_D = torch.where(has_rest_D, rest_q_D - rest_p_D, 0.0)
    q_rest_D = torch.where(has_rest_D, rest_q_D.exp(), 0.0)
    q_DK = logq_DK.exp()
    kl_D = _times(q_DK, logq_DK - logp_DK).sum(-1) + q_rest_D * gap_D
    share_D = torch.where(has_rest_D, gap_D.exp(), 0.0)
    slope_DV = logp_DV.exp() * (1 - share_D[:, None])
    return kl_D, slope_DV.scatter(-1, ids_DK, logp_DK.exp() - q_DK)


def top_k_reverse_kl(logits_DV: Tensor, ids_DK: Tensor, logq_DK: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p ‖ q) over the teacher's k tokens and the joined rest, and its gradient.

    Gradient: p · (log P − log Q − KL), P and Q being the probabilities of the outcome that a token
    belongs to. With k = V this is `reverse_kl`.
    """
    logp_DV, logp_DK, rest_p_D = _joined(logits_DV, ids_DK)
    rest_q_D = _rest(logq_DK).clamp_min(_LEAST)
    has_rest_D = rest_p_D > _LEAST
    gap_DK = logp_DK - logq_DK
    rest_gap_D = torch.where(has_rest_D, rest_p_D - rest_q_D, 0.0)
    rest_D = torch.where(has_rest_D, rest_p_D.exp(), 0.0)
    kl_D = _times(logp_DK.exp(), gap_DK).sum(-1) + rest_D * rest_gap_D
    gap_DV = rest_gap_D[:, None].expand_as(logp_DV).scatter(-1, ids_DK, gap_DK)
    return kl_D, _times(logp_DV.exp(), gap_DV - kl_D[:, None])


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """weight · value with 0 · ∞ = 0, the limit of x log x."""
    return torch.where(weight > 0, weight * value, 0.0)


def _joined(logits_DV: Tensor, ids_DK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p of all tokens, of the k, and of the others together."""
    logp_DV = logits_DV.log_softmax(-1)
    others_DV = logp_DV.scatter(-1, ids_DK, float("-inf"))
    return logp_DV, logp_DV.gather(-1, ids_DK), others_DV.logsumexp(-1)


def _rest(logq_DK: Tensor) -> Tensor:
    """log(1 − Σ q), the teacher's probability beside its k tokens; −∞ where nothing is left."""
    left_D = 1 - logq_DK.exp().sum(-1)
    # Rounding leaves about the type's own step; that little is nothing.
    small = 8 * torch.finfo(logq_DK.dtype).eps
    return torch.where(left_D > small, left_D, 0.0).log()


class Teacher(Protocol):
    """The teacher's distributions of D tokens, in the order of the student's tokens."""

    def divergence(
        self, part: slice, logits_DV: Tensor, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """Return (KL by token, gradient by the student's logits) for a part of the tokens.

        The logits are float32 or wider and already divided by the temperature.
        """
        ...


@dataclass(frozen=True, slots=True)
class FullTeacher:
    """Exact: hidden states and the head they were made for."""

    hidden_DH: Tensor
    head_VH: Tensor
    temperature: float = 1.0

    def divergence(
        self, part: slice, logits_DV: Tensor, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """See `Teacher`."""
        logits = F.linear(self.hidden_DH[part], self.head_VH).to(logits_DV.dtype)
        logq_DV = (logits / self.temperature).log_softmax(-1)
        return (forward_kl if direction == "forward" else reverse_kl)(logits_DV, logq_DV)


@dataclass(frozen=True, slots=True)
class TopKTeacher:
    """The k likeliest tokens a position and their log-probabilities."""

    ids_DK: Tensor
    logq_DK: Tensor

    def divergence(
        self, part: slice, logits_DV: Tensor, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """See `Teacher`."""
        rule = top_k_forward_kl if direction == "forward" else top_k_reverse_kl
        return rule(logits_DV, self.ids_DK[part], self.logq_DK[part].to(logits_DV.dtype))


def top_k_of(
    hidden_DH: Tensor, head_VH: Tensor, k: int, *, temperature: float = 1.0, chunk: int = 1024
) -> TopKTeacher:
    """Return the k likeliest tokens of each position; k is cut to the vocabulary."""
    k = min(k, head_VH.shape[0])
    ids, logqs = [], []
    with torch.no_grad():
        for hidden in hidden_DH.split(chunk):
            logq_DV = (_wide(F.linear(hidden, head_VH)) / temperature).log_softmax(-1)
            logq_DK, ids_DK = logq_DV.topk(k, dim=-1)
            ids.append(ids_DK)
            logqs.append(logq_DK)
    return TopKTeacher(torch.cat(ids), torch.cat(logqs))


def joined_teachers(teachers: Sequence[TopKTeacher]) -> TopKTeacher:
    """Return the teachers of several rows as one, laid end to end."""
    return TopKTeacher(
        torch.cat([t.ids_DK for t in teachers]), torch.cat([t.logq_DK for t in teachers])
    )


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _OnePassKL(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Teacher,
        weight_D: Tensor,
        direction: Direction,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if hidden.dtype in (torch.bfloat16, torch.float16) else hidden.dtype
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros(head.shape, dtype=wide, device=head.device)
        parts = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, min(start + chunk, len(hidden)))
            logits_DV = _wide(F.linear(hidden[part], head)) / temperature
            kl_D, slope_DV = teacher.divergence(part, logits_DV, direction)
            slope = (slope_DV * (weight_D[part] / temperature)[:, None]).to(hidden.dtype)
            d_hidden[part] = slope @ head
            d_head += slope.t() @ hidden[part]
            parts.append(kl_D)
        kl_all_D = torch.cat(parts)
        ctx.save_for_backward(d_hidden, d_head.to(head.dtype))
        ctx.mark_non_differentiable(kl_all_D)
        return (kl_all_D * weight_D).sum(), kl_all_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0], d_head.mul_(grads[0]), None, None, None, None, None


def one_pass_kl(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    weight_D: Tensor,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return the differentiable Σ weight · KL and the KL of each token (without gradient).

    Args:
        hidden: D × H states of the student that predict the tokens.
        head: V × H.
        teacher: the distributions to come near, at the same temperature.
        weight_D: constant weight of each token.
        direction: see `Direction`.
        temperature: divides the student's logits; above 0.
        chunk: tokens whose logits exist at once; both sides need D_chunk × V numbers.
    """
    loss, kl_D = _OnePassKL.apply(hidden, head, teacher, weight_D, direction, temperature, chunk)
    return loss, kl_D
