"""Float32 sums of gradients, to which products and norms add without a tensor in between.

A weight carries the sum that is kept for it, as Megatron's `main_grad` does. What forms a gradient
by hand adds it there (`add_product`, `hand_over`); what autograd forms follows by a hook. All sums
lie in one piece of memory, which is free for other use between an optimiser's step and `clear`.

Does not know optimisers or models. Idea: gradient accumulation fused with the product, as in
Megatron-LM.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfgrpo.errors import ConfigError
from tfgrpo.rl.kernels import device

_ALIGN = 64
"""Every sum begins at a multiple of this many numbers."""


class GradientSums:
    """The sums of some parameters, for as long as this object lives.

    A later object for the same parameters works once the earlier one is gone; two at a time are
    refused in the backward pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        places, size = {}, 0
        for name, parameter in parameters.items():
            places[name] = size
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        place = next((p.device for p in parameters.values()), None)
        self.memory = torch.zeros(size, dtype=torch.float32, device=place)
        self.by_name: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            part = self.memory[places[name] :][: parameter.numel()]
            self.by_name[name] = part.view(parameter.shape)
            self._register(parameter, self.by_name[name])

    def clear(self) -> None:
        """Begin again at 0."""
        self.memory.zero_()

    def _register(self, parameter: nn.Parameter, total: Tensor) -> None:
        live: list[Tensor] = parameter.__dict__.setdefault("live_sums", [])
        live.append(total)
        handle = parameter.register_post_accumulate_grad_hook(_follow)

        def remove() -> None:
            handle.remove()
            live[:] = [t for t in live if t is not total]

        weakref.finalize(self, remove).atexit = False


def sum_of(weight: Tensor) -> Tensor | None:
    """Return the sum that is kept for a weight, if any.

    Raises:
        ConfigError: two are.
    """
    live = getattr(weight, "live_sums", ())
    if len(live) > 1:
        raise ConfigError(
            "these weights are trained by two trainers at once: drop one of them before the other "
            "takes a step"
        )
    return live[0] if live else None


def add_product(total: Tensor, d_out: Tensor, x: Tensor) -> None:
    """Add d_outᵀ · x, from T × out and T × in, to a float32 sum, unrounded where the device can."""
    if total.is_cuda and d_out.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, d_out.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(d_out.t().to(total.dtype), x.to(total.dtype))


def embed(ids_T: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of a matrix, T × hidden; on CUDA their gradient goes into its sum."""
    if device.uses_kernels(weight) and torch.is_grad_enabled() and sum_of(weight) is not None:
        out: Tensor = _Embed.apply(ids_T, weight)
        return out
    return F.embedding(ids_T, weight)


def product_gradient(weight: Tensor, d_out: Tensor, x: Tensor) -> Tensor | None:
    """Return d_outᵀ · x for autograd to pass on; None where it went into the weight's sum."""
    total = sum_of(weight)
    if total is None:
        return d_out.t() @ x
    add_product(total, d_out, x)
    return None


def hand_over(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Return a gradient in the weight's type for autograd to pass on; None where it went into the
    weight's sum."""
    total = sum_of(weight)
    if total is None:
        return gradient.to(weight.dtype)
    _add(total, gradient)
    return None


def _follow(parameter: nn.Parameter) -> None:
    """Move a gradient that autograd formed into the parameter's sum."""
    total = sum_of(parameter)
    if total is not None and parameter.grad is not None:
        _add(total, parameter.grad)
        parameter.grad = None


def _add(total: Tensor, value: Tensor) -> None:
    if device.uses_kernels(total) and total.numel() >= 2**20 and value.is_contiguous():
        from tfgrpo.rl.kernels.update import add_to

        add_to(total, value)
    else:
        total.add_(value)


class _Embed(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ids, weight = ctx.saved_tensors
        total = sum_of(weight)
        assert total is not None
        # sorted, hence repeatable, unlike index_add; ids were checked by the forward
        torch.ops.aten._index_put_impl_(total, [ids], grads[0].to(total.dtype), True, True)
        return None, None
