"""Keys and values of rows that come and go, with one write position for all.

The cache is allocated ahead, right-aligned: a prompt of length L that is written at position t
fills columns t-L to t, whatever its neighbours' lengths. To the model it is a transformers cache
whose layers write in place.

Does not know rows, prompts' tokens or when a place is free. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GROWTH = 64
"""Free columns after each move, at least."""


class SlotCache:
    """Keys and values of all places, allocated ahead: `[places, heads, columns, width]` each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.capacity = 0
        self.shifted = 0
        self.cache: Any = None
        self._layers: list[Any] = []

    def rebuild(
        self, keep: Sequence[int], places: int, first: int, room: int, *, at_least: int = 0
    ) -> None:
        """Move the kept places, from column `first` on, into a cache of `places` places with `room`
        free columns; `at_least` columns are filled or skipped before the write position."""
        import torch

        used = self.length - first
        length = max(used, at_least)
        self.shifted = length - used - first
        capacity = length + max(room, GROWTH)
        index = None if list(keep) == list(range(len(keep))) else torch.tensor(list(keep))
        for layer in self._layers:
            layer.move(index, len(keep), places, (first, self.length), length, capacity)
        self.length, self.capacity = length, capacity
        self._places = places
        if self.cache is not None:
            for layer in self._layers:
                layer.owner_length = self.length

    def write(self, slot: int, layers: Any, i: int, length: int, first: int = 0) -> None:
        """Copy one read prompt of `length` columns before the write position: of row i the `first`
        columns and, behind any padding, the last ones."""
        if self.cache is None:
            self.cache, self._layers = _slot_layers(
                layers, self._places, self.capacity, lambda: self.length
            )
        for mine, read in zip(self._layers, layers, strict=True):
            start, middle = self.length - length, self.length - length + first
            for buffer, columns in (
                (mine.key_buffer, read.keys),
                (mine.value_buffer, read.values),
            ):
                buffer[slot, :, start:middle] = columns[i, :, :first]
                buffer[slot, :, middle : self.length] = columns[i, :, first - length :]


def _slot_layers(
    like: Any, places: int, capacity: int, length: Callable[[], int]
) -> tuple[Any, list[Any]]:
    """A transformers cache whose layers write in place and hand out views."""
    import torch
    from transformers.cache_utils import Cache, DynamicLayer

    class SlotLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]
        owner_length = 0

        def allocate(self, like: torch.Tensor, places: int, capacity: int) -> torch.Tensor:
            # Zeros, not empty: a masked column times NaN garbage would still be NaN.
            return torch.zeros(
                (places, like.shape[1], capacity, like.shape[3]),
                dtype=like.dtype,
                device=like.device,
            )

        def move(
            self,
            index: torch.Tensor | None,
            kept: int,
            places: int,
            columns: tuple[int, int],
            length: int,
            capacity: int,
        ) -> None:
            first, last = columns
            for name in ("key_buffer", "value_buffer"):
                old = getattr(self, name)
                new = self.allocate(old, places, capacity)
                part = old[:kept] if index is None else old[index.to(old.device)]
                new[:kept, :, length - (last - first) : length] = part[:, :, first:last]
                setattr(self, name, new)

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            t = length()
            self.key_buffer[:, :, t : t + 1] = key_states
            self.value_buffer[:, :, t : t + 1] = value_states
            return self.key_buffer[:, :, : t + 1], self.value_buffer[:, :, : t + 1]

        def get_seq_length(self) -> int:
            return length()

    layers = []
    for read in like:
        layer = SlotLayer()
        layer.is_initialized = True
        layer.device, layer.dtype = read.keys.device, read.keys.dtype
        layer.key_buffer = layer.allocate(read.keys, places, capacity)
        layer.value_buffer = layer.allocate(read.values, places, capacity)
        layer.keys, layer.values = layer.key_buffer, layer.value_buffer
        layers.append(layer)
    return Cache(layers=layers), layers
