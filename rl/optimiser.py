"""AdamW on float32 masters, the weights that the model runs on being copies of them.

At the learning rates of RL a bfloat16 weight hardly ever moves (about 2 % of them a step at 1e-6),
so masters, moments and accumulated gradients are float32. Weights already in float32 are their own
masters. Gradients of half-precision weights are added up in float32 as soon as each micro-batch
has formed them.

Does not know losses. Sources: AdamW (arXiv 1711.05101); mixed precision masters (arXiv 1710.03740).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tfgrpo.errors import ConfigError
from tfgrpo.rl.distributed import local, sum_over_ranks


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Constants of the optimiser."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""


class Weights(Protocol):
    """What is trained: float32 tensors, where their gradients are, how the model gets them."""

    def masters(self) -> Mapping[str, Tensor]:
        """The trained tensors by name, float32, this process's share."""
        ...

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients accumulated since the last `clear`, by the same names."""
        ...

    def publish(self) -> None:
        """Copy the trained tensors into the weights that the model runs on."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""
        ...


class FullWeights:
    """Every parameter of a module is trained."""

    def __init__(self, module: nn.Module) -> None:
        self._params: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._masters: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self._params.items():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                self._masters[name] = parameter.detach().float().clone()
                self._sums[name] = torch.zeros_like(self._masters[name])
                sum_gradients(self, parameter, self._sums[name])
            else:
                self._masters[name] = local(parameter.detach())

    def masters(self) -> Mapping[str, Tensor]:
        """All parameters."""
        return self._masters

    def gradients(self) -> Mapping[str, Tensor]:
        """Sums for half-precision weights, `.grad` for the others."""
        found = dict(self._sums)
        for name, parameter in self._params.items():
            if name not in found and parameter.grad is not None:
                found[name] = local(parameter.grad)
        return found

    def publish(self) -> None:
        """Round the masters into half-precision weights."""
        with torch.no_grad():
            for name in self._sums:
                self._params[name].copy_(self._masters[name])

    def clear(self) -> None:
        """Zero the sums."""
        for total in self._sums.values():
            total.zero_()
        for parameter in self._params.values():
            parameter.grad = None


def sum_gradients(owner: object, parameter: nn.Parameter, total: Tensor) -> None:
    """Move each fresh gradient of a parameter into a float32 sum, for as long as `owner` lives.

    A later owner of the same parameter works once the earlier one is gone; two at a time would
    share out the gradients between them, so that is refused in the backward pass.
    """

    def hook(parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            raise ConfigError(
                "these weights are trained by two trainers at once: drop one of them before the "
                "other takes a step"
            )
        total.add_(parameter.grad)
        parameter.grad = None

    handle = parameter.register_post_accumulate_grad_hook(hook)
    weakref.finalize(owner, handle.remove).atexit = False


class AdamW:
    """The optimiser; its state is two tensors a master and a step count."""

    def __init__(self, weights: Weights, settings: AdamSettings) -> None:
        self.settings = settings
        self.weights = weights
        self.steps = 0
        self.first = {n: torch.zeros_like(t) for n, t in weights.masters().items()}
        self.second = {n: torch.zeros_like(t) for n, t in weights.masters().items()}

    def step(self, lr: float) -> float:
        """Apply one update at learning rate `lr` and return the gradient's norm before clipping.

        A norm that is not finite changes nothing, nor do gradients that nothing was added to; the
        caller sees it in the returned value.
        """
        masters, gradients = self.weights.masters(), self.weights.gradients()
        names = [n for n in masters if n in gradients]
        grads = [gradients[n] for n in names]
        norm = global_norm(grads)
        if not norm < float("inf"):
            self.weights.clear()
            return norm
        if not names:
            return norm
        s = self.settings
        self.steps += 1
        with torch.no_grad():
            if s.max_norm and norm > s.max_norm:
                torch._foreach_mul_(grads, s.max_norm / norm)
            values = [masters[n] for n in names]
            first = [self.first[n] for n in names]
            second = [self.second[n] for n in names]
            if s.weight_decay:
                torch._foreach_mul_(values, 1 - lr * s.weight_decay)
            torch._foreach_lerp_(first, grads, 1 - s.beta1)
            torch._foreach_mul_(second, s.beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - s.beta2)
            for value, m, v in zip(values, first, second, strict=True):
                spread = v.sqrt().div_((1 - s.beta2**self.steps) ** 0.5).add_(s.eps)
                value.addcdiv_(m, spread, value=-lr / (1 - s.beta1**self.steps))
        self.weights.publish()
        self.weights.clear()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Masters and moments under prefixed names."""
        found = {f"master.{n}": t for n, t in self.weights.masters().items()}
        found |= {f"first.{n}": t for n, t in self.first.items()}
        return found | {f"second.{n}": t for n, t in self.second.items()}

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore what `state` returned, bit by bit, and publish."""
        with torch.no_grad():
            for name, target in self.state().items():
                target.copy_(tensors[name])
        self.steps = steps
        self.weights.publish()


def global_norm(grads: list[Tensor]) -> float:
    """Euclidean norm over all tensors and all processes."""
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]  # no copies
    squares = torch.stack(norms).pow(2).sum()
    return math.sqrt(float(sum_over_ranks(squares)))


def learning_rate(step: int, *, peak: float, warmup: int, total: int, schedule: str) -> float:
    """Return the rate of update `step` (from 0): linear warm-up, then constant, linear or cosine.

    >>> [learning_rate(s, peak=1.0, warmup=2, total=4, schedule="linear") for s in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return peak * (1 - share)
    return float(peak * 0.5 * (1 + torch.cos(torch.tensor(share * torch.pi))))
