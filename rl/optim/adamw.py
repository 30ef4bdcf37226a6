"""AdamW on float32 masters, one pass over memory a tensor; moments in float32 or bfloat16.

bfloat16 moments are rounded up or down by chance, so that they are right on average: rounded to the
nearest, a second moment would stand still, since a step moves it by a thousandth and neighbouring
numbers are four thousandths apart. The chance is a hash of step, tensor and place, so that a
resumed run rounds alike.

Does not know losses. Sources: AdamW (arXiv 1711.05101); stochastic rounding in bfloat16 training
(arXiv 2010.06192); the hash is MurmurHash3's finaliser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tfgrpo.rl.distributed import sum_over_shards
from tfgrpo.rl.kernels import device
from tfgrpo.rl.optim.master_weights import Master, Weights, join, split

_GOLDEN, _WORD = 0x9E3779B1, 0xFFFFFFFF


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
    moments: torch.dtype = torch.float32


class AdamW:
    """The optimiser; its state is two tensors a master and a step count."""

    def __init__(self, weights: Weights, settings: AdamSettings) -> None:
        self.settings = settings
        self.weights = weights
        self.steps = 0
        of = {n: m.high for n, m in weights.masters().items()}
        self.first = {n: torch.zeros_like(t, dtype=settings.moments) for n, t in of.items()}
        self.second = {n: torch.zeros_like(t, dtype=settings.moments) for n, t in of.items()}

    def step(self, lr: float) -> float:
        """Apply one update at learning rate `lr` and return the gradient's norm before clipping.

        A norm that is not finite changes nothing, nor do gradients of 0, by momentum or decay; the
        caller sees it in the returned value.
        """
        masters, gradients = self.weights.masters(), self.weights.gradients()
        norm = global_norm(list(gradients.values()), self.weights.is_sharded)
        if not 0 < norm < float("inf"):
            self.weights.clear()
            return norm
        self.steps += 1
        place = next(iter(gradients.values())).device
        constants = self._constants(lr, norm).to(place)
        salts = _salts(self.steps, len(masters), place)
        with torch.no_grad():
            for (name, master), salt in zip(masters.items(), salts, strict=True):
                if name in gradients and gradients[name].numel():  # a shard may be empty
                    state = (gradients[name], self.first[name], self.second[name])
                    _move(master, *state, constants, salt)
        self.weights.publish()
        self.weights.clear()
        return norm

    def _constants(self, lr: float, norm: float) -> Tensor:
        """What `_moved` takes, in its order."""
        s = self.settings
        values = (
            s.max_norm / norm if s.max_norm and norm > s.max_norm else 1.0,
            1 - lr * s.weight_decay,
            1 - s.beta1,
            s.beta2,
            1 - s.beta2,
            lr / (1 - s.beta1**self.steps),
            (1 - s.beta2**self.steps) ** -0.5,
            s.eps,
        )
        return torch.tensor(values, dtype=torch.float32)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Masters and moments under prefixed names, one at a time."""
        for name, master in self.weights.masters().items():
            yield f"master.{name}", master.value()
        for prefix, moments in (("first", self.first), ("second", self.second)):
            yield from ((f"{prefix}.{n}", t) for n, t in moments.items())

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore what `state` returned, bit by bit, and publish; without moments they start anew.

        The steps count anew with them: their bias is corrected by the number of updates they saw.
        """
        has_moments = any(name.startswith("first.") for name in tensors)
        with torch.no_grad():
            for name, master in self.weights.masters().items():
                master.set(tensors[f"master.{name}"])
                if has_moments:
                    self.first[name].copy_(tensors[f"first.{name}"])
                    self.second[name].copy_(tensors[f"second.{name}"])
        self.steps = steps if has_moments else 0
        self.weights.publish()


def _move(
    master: Master, grad: Tensor, first: Tensor, second: Tensor, constants: Tensor, salt: Tensor
) -> None:
    """Update a master and its moments in place."""
    high = master.high if master.low is None else master.high.view(torch.int16)
    low = None if master.low is None else master.low.view(-1)
    flat = (high.view(-1), low, grad.reshape(-1), first.view(-1), second.view(-1))
    if device.uses_kernels(grad):
        from tfgrpo.rl.kernels.update import adam

        adam(*flat, constants, salt)
    else:
        move_flat(*flat, constants, salt)


def move_flat(
    high: Tensor,
    low: Tensor | None,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    constants: Tensor,
    salt: Tensor,
) -> None:
    """One step over flat tensors in place: the torch form.

    Args:
        high: float32 values, or with `low` the bits of their upper halves, int16.
        low: the bits that are left, int16.
        grad: float32.
        first: first moments.
        second: second moments.
        constants: see `AdamW._constants`.
        salt: for the chances of bfloat16 moments, int64.
    """
    value = high if low is None else join(high, low)
    value, m, v = _moved(value, grad, first.to(value.dtype), second.to(value.dtype), constants)
    if low is None:
        high.copy_(value)
    else:
        high_bits, low_bits = split(value)
        high.copy_(high_bits)
        low.copy_(low_bits)
    if first.dtype == torch.bfloat16:
        chance = chances(len(first), salt)
        m, v = round_by(m, chance & 0xFFFF), round_by(v, chance >> 16)
    first.copy_(m)
    second.copy_(v)


def _moved(
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, constants: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's formulas: the new value and moments."""
    clip, decay, rest1, beta2, rest2, rate, unbias2, eps = constants.unbind()
    grad = grad * clip
    m = m + rest1 * (grad - m)
    v = beta2 * v + rest2 * grad * grad
    return decay * value - rate * m / (v.sqrt() * unbias2 + eps), m, v


def chances(n: int, salt: Tensor) -> Tensor:
    """Return n numbers of 32 bits, int64, a hash of their place and the salt."""
    x = (torch.arange(n, device=salt.device) * _GOLDEN + salt) & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def round_by(value: Tensor, chance: Tensor) -> Tensor:
    """Round float32 to a neighbouring bfloat16, up where the bits cut off exceed 2¹⁶ − `chance`.

    With chances even over [0, 2¹⁶) the mean of the result is the value.
    """
    bits = value.view(torch.int32) + chance.to(torch.int32)
    return ((bits >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def _salts(step: int, n: int, place: torch.device) -> Tensor:
    start = (step * 0x85EBCA77) & _WORD
    return (torch.arange(n, device=place) * 0xC2B2AE3D + start) & _WORD


def global_norm(grads: list[Tensor], is_sharded: bool = False) -> float:
    """Euclidean norm over all tensors, and over all shards where they are cut."""
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]  # no copies
    squares = torch.stack(norms).pow(2).sum()
    return math.sqrt(float(sum_over_shards(squares) if is_sharded else squares))


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
