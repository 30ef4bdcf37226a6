"""The float32 tensors that are trained, how the model gets them, and where their gradients are.

At the learning rates of RL a bfloat16 weight hardly ever moves (about 2 % of them a step at 1e-6),
so masters and summed gradients are float32. A bfloat16 weight and its master take 4 bytes together:
the weight is the upper half of the master's bits, rounded, and the rest is kept beside it. Weights
in float32 are their own masters. Gradients of bfloat16 weights are added up in float32 as soon as
each micro-batch has formed them.

Does not know optimisers or losses. Sources: mixed-precision masters (arXiv 1710.03740); halves of
one float (split SGD, arXiv 2005.04680), here with rounding in place of cutting off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tfgrpo.rl import distributed
from tfgrpo.rl.distributed import local
from tfgrpo.rl.model.grad_buffers import GradientSums


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the nearest bfloat16 (ties away from 0) and what is left, both int16.

    >>> x = torch.tensor([1.0, -0.1, 3e38])
    >>> bool((join(*split(x)) == x).all())
    True
    """
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 tensor that `split` was given, bit by bit."""
    return ((high.to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Master:
    """A trained tensor; `high` is its own storage, or with `low` the bfloat16 weight's."""

    high: Tensor
    low: Tensor | None = None
    """int16: what rounding to bfloat16 left."""

    @classmethod
    def of(cls, weight: Tensor) -> Master:
        """The master of a weight, which is written whenever the master is."""
        if weight.dtype == torch.bfloat16:
            return cls(weight, torch.zeros_like(weight, dtype=torch.int16))
        return cls(weight)

    def value(self) -> Tensor:
        """The tensor in full; a copy where it is held in halves."""
        if self.low is None:
            return self.high
        return join(self.high.view(torch.int16), self.low)

    def set(self, value: Tensor) -> None:
        """Take a new value, and with it the weight."""
        if self.low is None:
            self.high.copy_(value)
            return
        high, low = split(value.to(self.low.device))
        self.high.view(torch.int16).copy_(high)
        self.low.copy_(low)


class Weights(Protocol):
    """What is trained: masters, where their gradients are, how the model gets them."""

    is_sharded: bool
    """False where this process's masters are all there are."""

    def masters(self) -> Mapping[str, Master]:
        """The trained tensors by name, this process's share."""
        ...

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients accumulated since the last `clear`, by the same names."""
        ...

    def average(self) -> None:
        """Replace the gradients by their means over all processes, each of which holds all."""
        ...

    def publish(self) -> None:
        """Bring the weights that the model runs on up to the masters."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""
        ...

    def spare(self) -> Tensor:
        """The float32 memory of the sums: whoever writes there must `clear` before the next
        gradient."""
        ...


class FullWeights:
    """Every parameter of a module is trained."""

    def __init__(self, module: nn.Module) -> None:
        self._params: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.is_sharded = distributed.is_sharded(module)
        self._masters = {n: Master.of(local(p.detach())) for n, p in self._params.items()}
        self._sums = GradientSums(
            {n: p for n, p in self._params.items() if p.dtype == torch.bfloat16}
        )

    def masters(self) -> Mapping[str, Master]:
        """All parameters."""
        return self._masters

    def gradients(self) -> Mapping[str, Tensor]:
        """Sums for bfloat16 weights, `.grad` for the others."""
        found = dict(self._sums.by_name)
        for name, parameter in self._params.items():
            if name not in found and parameter.grad is not None:
                found[name] = local(parameter.grad)
        return found

    def average(self) -> None:
        """One reduction of the sums, and one of each other parameter's gradient."""
        others = [p for n, p in self._params.items() if n not in self._sums.by_name]
        for parameter in others:
            if parameter.grad is None:  # this process had no rows
                parameter.grad = torch.zeros_like(parameter)
        distributed.average([self._sums.memory, *(p.grad for p in others if p.grad is not None)])

    def publish(self) -> None:
        """Nothing to do: a parameter is its master, or half of it."""

    def clear(self) -> None:
        """Zero the sums."""
        self._sums.clear()
        for parameter in self._params.values():
            parameter.grad = None

    def spare(self) -> Tensor:
        """Memory of the sums; empty without bfloat16 weights."""
        return self._sums.memory
