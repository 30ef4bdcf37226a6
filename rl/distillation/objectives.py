"""What a step of distillation minimises: an objective over rows, and the two offline ones.

`Imitation` raises the likelihood of replies under the bare prompt (with rejection-sampled rows:
supervised training on verified successes). `NearTeacher` brings the bare distributions near those
of the starting weights under the context, token by token.

Does not know tasks, verifiers or libraries. Sources: rejection sampling fine-tuning
(arXiv 2308.01825); context distillation (arXiv 2112.00861).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tfgrpo.errors import ConfigError
from tfgrpo.rl.distillation.kl import (
    Direction,
    FullTeacher,
    Teacher,
    TopKTeacher,
    joined_teachers,
    one_pass_kl,
    top_k_of,
)
from tfgrpo.rl.distillation.rows import DistillRow
from tfgrpo.rl.model.decoder import Decoder
from tfgrpo.rl.model.packing import Row, micro_batches, pack
from tfgrpo.rl.update.accumulate import TrainRow, UpdateSettings, accumulate
from tfgrpo.runtime.canonical import derive_seed, digest

T = TypeVar("T")


class Objective(Protocol):
    """What a step minimises.

    Contract: `accumulate` adds to the decoder's gradients; what it adds is fixed by the weights
    and the step number, so that a resumed run is the same run. `identity` changes whenever that
    would be another run. It returns figures, among them `loss`; no rows means no `tokens`.
    """

    @property
    def identity(self) -> str:
        """Fixed by everything that the objective was made of."""
        ...

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """Add the gradients of one step."""
        ...


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How rows are cut for forward and backward."""

    temperature: float = 1.0
    """Divides the logits that are scored."""
    micro_batch_tokens: int = 4096
    chunk: int = 1024
    """Tokens whose logits exist at once."""


DEFAULT_PASSES = PassSettings()


def batch_of(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """Return the items of a step: a fresh permutation each epoch, fixed by the seed.

    Unlike drop-last, the last batch of an epoch may be smaller, so that every item is seen.
    """
    each = steps_per_epoch(len(items), size)
    epoch, position = divmod(step, each)
    order = np.random.default_rng(derive_seed(seed, "order", epoch)).permutation(len(items))
    return [items[i] for i in order[position * size : (position + 1) * size]]


def steps_per_epoch(n: int, size: int) -> int:
    """Return how many batches hold n items; at least 1."""
    return max(1, -(-n // size))


class Imitation:
    """−Σ weight · mean over tokens of log π(token | bare prompt).

    Args:
        rows: numbered and weighted (`distill_rows.balanced`).
        tasks_per_step: tasks whose rows make one update.
        seed: of the order.
        settings: how rows are cut.

    Raises:
        ConfigError: no rows.
    """

    def __init__(
        self,
        rows: Sequence[DistillRow],
        *,
        tasks_per_step: int = 8,
        seed: int = 0,
        settings: PassSettings = DEFAULT_PASSES,
    ) -> None:
        self._by_task = _by_task(rows)
        self._size = tasks_per_step
        self._seed = seed
        self._settings = settings
        self.steps_per_epoch = steps_per_epoch(len(self._by_task), tasks_per_step)

    @property
    def identity(self) -> str:
        """See `Objective`."""
        return _identity("imitation", self._by_task, self._size, self._seed, self._settings)

    def rows_of(self, step: int) -> list[DistillRow]:
        """The rows of a step; rows of a task stand next to each other."""
        chosen = batch_of(list(self._by_task), step, self._size, self._seed)
        return [row for task in chosen for row in self._by_task[task]]

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """See `Objective`."""
        rows = self.rows_of(step)
        settings = UpdateSettings(
            loss="reinforce",
            temperature=self._settings.temperature,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            chunk=self._settings.chunk,
        )
        result = accumulate(
            decoder, [TrainRow(r.row, 1.0) for r in rows], settings, _token_weights(rows)
        )
        return {"loss": result.loss, "tokens": float(result.trained_tokens)}


class NearTeacher:
    """Σ weight · mean over tokens of the divergence from the teacher's distribution.

    The teacher is the decoder as it is when this is made, under each row's context; it stays that.

    Args:
        decoder: the starting weights.
        rows: numbered and weighted; those without a context are left out.
        direction: `forward` or `reverse`, see `distill_kl.Direction`.
        top_k: the teacher's tokens kept a position; 0 keeps hidden states and is exact.
        tasks_per_step: tasks whose rows make one update.
        seed: of the order.
        settings: how rows are cut; the temperature divides both sides' logits.

    Raises:
        ConfigError: no row has a context.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: Sequence[DistillRow],
        *,
        direction: Direction = "forward",
        top_k: int = 0,
        tasks_per_step: int = 8,
        seed: int = 0,
        settings: PassSettings = DEFAULT_PASSES,
    ) -> None:
        kept = [r for r in rows if r.teacher is not None]
        self._by_task = _by_task(kept)
        self._direction: Direction = direction
        self._top_k = top_k
        self._size = tasks_per_step
        self._seed = seed
        self._settings = settings
        self.steps_per_epoch = steps_per_epoch(len(self._by_task), tasks_per_step)
        self._head = decoder.head_weight.detach().clone() if not top_k else None
        hidden = _teacher_states(decoder, [r.teacher for r in kept if r.teacher], settings)
        self._hidden: dict[int, Tensor] = {} if top_k else hidden
        self._top: dict[int, TopKTeacher] = {
            index: top_k_of(
                states,
                decoder.head_weight.detach(),
                top_k,
                temperature=settings.temperature,
                chunk=settings.chunk,
            )
            for index, states in (hidden.items() if top_k else ())
        }

    @property
    def identity(self) -> str:
        """See `Objective`."""
        kind = f"near {self._direction} {self._top_k}"
        return _identity(kind, self._by_task, self._size, self._seed, self._settings)

    def _teacher_of(self, rows: Sequence[int]) -> Teacher:
        if self._top:
            return joined_teachers([self._top[i] for i in rows])
        assert self._head is not None
        states = torch.cat([self._hidden[i] for i in rows])
        return FullTeacher(states, self._head, self._settings.temperature)

    def accumulate(self, decoder: Decoder, step: int) -> dict[str, float]:
        """See `Objective`; `loss` is the weighted divergence in nats a token."""
        chosen = batch_of(list(self._by_task), step, self._size, self._seed)
        rows = [row for task in chosen for row in self._by_task[task]]
        weight_of = {r.row.index: float(w) for r, w in zip(rows, _token_weights(rows), strict=True)}
        total, tokens = 0.0, 0
        for part in micro_batches([r.row for r in rows], self._settings.micro_batch_tokens):
            packed = pack(part, device=decoder.embed.device)
            hidden_D = decoder(packed)[packed.head_D]
            weight_D = torch.cat([torch.full((r.n_loss,), weight_of[r.index]) for r in part])
            loss, kl_D = one_pass_kl(
                hidden_D,
                decoder.head_weight,
                self._teacher_of(packed.rows),
                weight_D.to(hidden_D.device, torch.float32),
                direction=self._direction,
                temperature=self._settings.temperature,
                chunk=self._settings.chunk,
            )
            loss.backward()
            total += float(loss.detach())
            tokens += len(kl_D)
        return {"loss": total, "tokens": float(tokens)}


def _by_task(rows: Sequence[DistillRow]) -> dict[str, list[DistillRow]]:
    if not rows:
        raise ConfigError(
            "there is nothing to distil: no reply was kept. More draws a task, a library that "
            "helps, or another objective may give some"
        )
    found: dict[str, list[DistillRow]] = {}
    for row in rows:
        found.setdefault(row.task_id, []).append(row)
    return found


def _identity(
    kind: str,
    by_task: Mapping[str, Sequence[DistillRow]],
    size: int,
    seed: int,
    settings: PassSettings,
) -> str:
    rows = [
        [
            r.task_id,
            r.weight,
            r.row.prompt_ids,
            r.row.suffix_ids,
            r.teacher and r.teacher.prompt_ids,
        ]
        for mine in by_task.values()
        for r in mine
    ]
    return digest([kind, size, seed, asdict(settings), rows], 16)


def _token_weights(rows: Sequence[DistillRow]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Weight of each token of each row: R. The rows of a step add up to 1, whatever its size."""
    share_R = np.array([r.weight for r in rows])
    length_R = np.array([r.row.n_loss for r in rows], dtype=np.float64)
    weight_R: np.ndarray[Any, np.dtype[np.float64]] = share_R / share_R.sum() / length_R
    return weight_R


def _teacher_states(
    decoder: Decoder, rows: Sequence[Row], settings: PassSettings
) -> dict[int, Tensor]:
    """Return, per row number, the states that predict its tokens: tokens × H."""
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for part in micro_batches(rows, settings.micro_batch_tokens):
            packed = pack(part, device=decoder.embed.device)
            states = decoder(packed)[packed.head_D]
            cuts = states.split([r.n_loss for r in part])
            found |= {r.index: cut.clone() for r, cut in zip(part, cuts, strict=True)}
    return found
