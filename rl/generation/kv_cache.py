"""Keys and values of all decode slots, the slots' state, and the graphs captured over them.

Does not know models beyond their shape, nor how rows are scheduled. Source: own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tfgrpo.rl.generation.decode_ops import MEMBERS, Slots
from tfgrpo.rl.model.decoder import Decoder

LENGTH_STEP = 64
"""A cache's length is a multiple of this, so that a somewhat longer prompt needs no new graphs."""

LONG_PROMPT = 256
"""Tokens from which on a prompt is read once for its group."""


@dataclass(slots=True)
class Cache:
    """Keys and values of all slots, and the graphs captured over them."""

    k: list[Tensor]
    v: list[Tensor]
    slots: Slots
    angles: tuple[Tensor, Tensor]
    capacity: int
    graphs: dict[tuple[int, float, int], Any] = field(default_factory=dict)
    longest_prompt: int = 0
    """Of the prompts that rows read now."""

    @property
    def new(self) -> int:
        """Longest continuation."""
        return int(self.slots.uniform.shape[1])

    def prompt_parts(self, rows: int) -> int:
        """In how many parts a GPU reads each prompt for its group, so that some 500 programs do; 0
        where prompts are so short that each row had better read for itself."""
        if self.longest_prompt < LONG_PROMPT:
            return 0
        kv_heads = int(self.k[0].shape[1])
        programs = max(1, rows * kv_heads // MEMBERS)
        return min(16, max(2, 1 << (511 // programs).bit_length()))

    def holds(self, length: int, new: int) -> bool:
        """True when a sequence of these lengths fits in."""
        return self.capacity >= length and self.new >= new

    @classmethod
    def empty(
        cls,
        decoder: Decoder,
        rows: int,
        length: int,
        new: int,
        n_eos: int,
        memory: Tensor | None = None,
    ) -> Cache:
        """Allocate idle slots.

        Args:
            decoder: tells shape, device and number type.
            rows: slots.
            length: tokens of a sequence, rounded up to a multiple of `LENGTH_STEP`.
            new: tokens of a continuation.
            n_eos: ending tokens.
            memory: where keys and values lie as far as it goes.
        """
        shape, device = decoder.shape, decoder.embed.device
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        size = (rows, shape.kv_heads, length, shape.head_dim)
        cos, sin = decoder.angles(torch.arange(length, device=device))
        given = decoder.embed.new_empty(0) if memory is None else memory.view(decoder.embed.dtype)
        n, layers = math.prod(size), []
        for i in range(2 * shape.layers):
            part = given[i * n : (i + 1) * n]
            layers.append(part.view(size) if len(part) == n else decoder.embed.new_zeros(size))
        return cls(
            k=layers[: shape.layers],
            v=layers[shape.layers :],
            slots=Slots.empty(rows, new, n_eos, device),
            angles=(cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()),
            capacity=length,
        )

    def leave(self) -> None:
        """Move keys and values to memory of their own."""
        self.k, self.v = ([layer.clone() for layer in part] for part in (self.k, self.v))

    def take(self, old: Cache) -> None:
        """Copy all that a cache of as many slots and no larger sizes holds."""
        for own, before in ((self.k, old.k), (self.v, old.v)):
            for layer, source in zip(own, before, strict=True):
                layer[:, :, : old.capacity] = source
        for state, source in zip(self.slots.per_row(), old.slots.per_row(), strict=True):
            state[..., : source.shape[-1]] = source
        self.slots.eos.copy_(old.slots.eos)
