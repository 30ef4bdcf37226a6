"""Log-probabilities and the loss's gradient in one pass over the vocabulary, chunk by chunk.

For a chunk of hidden states the logits are formed once; a closure turns the chunk's log-probs
(and entropies) into a loss and its derivatives; from those the gradients of hidden states and of
the head follow at once, in the forward. Never more than one chunk of logits exists, and the
vocabulary is multiplied three times instead of four.

Does not know advantages or rewards. Idea: gradients formed in the forward, as in Liger-Kernel's
fused linear losses; the closure form is own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.kernels import device
from tfgrpo.rl.model.grad_buffers import add_product, sum_of

Closure = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]
"""(which of the D tokens, logp, entropy or None) to (loss, ∂loss/∂logp, ∂loss/∂entropy or None).
The loss is a scalar; the derivatives have the shape of their arguments."""


def _stats(
    logits: Tensor, target: Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sum-exp, log-prob of the target, entropy on demand."""
    if device.uses_kernels(logits):
        from tfgrpo.rl.kernels.update import token_stats

        found: tuple[Tensor, Tensor, Tensor | None] = token_stats(
            logits, target, inv_temperature, with_entropy
        )
        return found
    wide = _wide(logits) * inv_temperature
    lse = wide.logsumexp(-1)
    logp = wide.gather(-1, target[:, None]).squeeze(-1) - lse
    entropy = None
    if with_entropy:
        entropy = lse - ((wide - lse[:, None]).exp() * wide).sum(-1)
    return lse, logp, entropy


def _gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    d_logp: Tensor,
    entropy: Tensor | None,
    d_entropy: Tensor | None,
    inv_temperature: float,
) -> Tensor:
    """∂loss/∂logits in the logits' own type; on CUDA written over the logits."""
    if device.uses_kernels(logits):
        from tfgrpo.rl.kernels.update import logits_gradient

        found: Tensor = logits_gradient(
            logits, lse, target, d_logp, entropy, d_entropy, inv_temperature
        )
        return found
    logp_all = _wide(logits) * inv_temperature - lse[:, None]
    slope = d_logp[:, None]
    if entropy is not None and d_entropy is not None:
        slope = slope + d_entropy[:, None] * (logp_all + entropy[:, None])
    columns = torch.arange(logits.shape[-1], device=logits.device)
    at_target = torch.where(columns == target[:, None], d_logp[:, None], 0.0)
    return ((at_target - logp_all.exp() * slope) * inv_temperature).to(logits.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(slots=True)
class Scored:
    """What a pass over the vocabulary told about D tokens."""

    logp_D: Tensor
    entropy_D: Tensor | None


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 2048,
) -> Scored:
    """Return log-probs of `target` (and entropies) without gradients.

    Args:
        hidden: D × hidden states that predict the targets.
        weight: vocabulary × hidden.
        target: D token ids.
        temperature: divides the logits; above 0.
        with_entropy: also return each distribution's entropy in nats.
        chunk: tokens whose logits exist at once.
    """
    logps, entropies = [], []
    with torch.no_grad():
        for start in range(0, len(target), chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden[part], weight)
            _, logp, entropy = _stats(logits, target[part], 1.0 / temperature, with_entropy)
            logps.append(logp)
            entropies.append(entropy)
    empty = hidden.new_zeros(0, dtype=torch.float32)
    return Scored(
        torch.cat(logps) if logps else empty,
        torch.cat(entropies) if with_entropy and entropies else None,
    )


class _OnePass(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        closure: Closure,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float32 if hidden.dtype in (torch.bfloat16, torch.float16) else hidden.dtype
        d_hidden = torch.empty_like(hidden)
        d_weight, kept = None, None
        if ctx.needs_input_grad[1]:
            kept = sum_of(weight) if device.uses_kernels(hidden) else None
            if kept is None:
                d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        logps, entropies = [], []
        for start in range(0, len(target), chunk):
            part = slice(start, min(start + chunk, len(target)))
            logits = F.linear(hidden[part], weight)
            lse, logp, entropy = _stats(logits, target[part], 1.0 / temperature, with_entropy)
            loss, d_logp, d_entropy = closure(part, logp, entropy)
            d_logits = _gradient(
                logits, lse, target[part], d_logp, entropy, d_entropy, 1.0 / temperature
            )
            torch.mm(d_logits, weight, out=d_hidden[part])
            if kept is not None:
                add_product(kept, d_logits, hidden[part])
            elif d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]
            total += loss
            logps.append(logp)
            if entropy is not None:
                entropies.append(entropy)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        logp_D = torch.cat(logps)
        entropy_D = torch.cat(entropies) if entropies else logp_D.new_zeros(0)
        ctx.mark_non_differentiable(logp_D, entropy_D)
        return total, logp_D, entropy_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        if d_weight is not None:
            d_weight = d_weight.mul_(scale).to(ctx.weight_dtype)
        return (d_hidden * scale).to(d_hidden.dtype), d_weight, None, None, None, None, None


def one_pass_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    closure: Closure,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 2048,
) -> tuple[Tensor, Scored]:
    """Return the differentiable loss and the log-probs (and entropies) it was made of.

    The closure sees each chunk once and must be a function of its arguments alone; arguments as in
    `score_tokens`. The returned log-probs carry no gradient. On CUDA the gradient of a weight whose
    sum is kept (`gradient_sums`) is added there at once, so the loss has to be differentiated as it
    is, unscaled.
    """
    loss, logp_D, entropy_D = _OnePass.apply(
        hidden, weight, target, closure, temperature, with_entropy, chunk
    )
    return loss, Scored(logp_D, entropy_D if with_entropy else None)
