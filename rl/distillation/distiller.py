"""Distillation: what a context does to a model, trained into its weights. The loop.

`Distiller` drives any objective (`distill_objectives`, `distill_nudge`, `distill_icpo`):
optimiser, checkpoints, exact resume. A step is fixed by the weights and its number, so the state
of a run is its step number and the optimiser's tensors.

Does not know rows or what is minimised. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tfgrpo.errors import ConfigError
from tfgrpo.rl import run_state
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, write_model
from tfgrpo.rl.distillation.objectives import Objective
from tfgrpo.rl.optim.adamw import AdamSettings, AdamW, learning_rate
from tfgrpo.rl.optim.lora import LoraWeights
from tfgrpo.rl.optim.master_weights import FullWeights, Weights
from tfgrpo.runtime.canonical import digest

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How the weights move."""

    steps: int
    lr: float = 2e-5
    warmup: int = 0
    schedule: Schedule = "constant"
    weight_decay: float = 0.0
    max_norm: float = 1.0
    lora_rank: int = 0
    """0 trains every weight."""
    lora_alpha: float = 32.0
    seed: int = 0
    save_every: int = 10
    """Steps between two checkpoints."""


class Distiller:
    """Trains a model by an objective; goes on from its newest checkpoint.

    Args:
        parts: the model as it starts.
        objective: what is minimised; made from the starting weights, before `run`.
        settings: how the weights move.
        folder: where checkpoints lie.
    """

    def __init__(
        self, parts: LoadedModel, objective: Objective, settings: DistillSettings, folder: Path
    ) -> None:
        self._parts = parts
        self._objective = objective
        self._settings = s = settings
        self._folder = folder / "checkpoints"
        self.step_number = 0
        parts.decoder.requires_grad_(True)
        self._weights: Weights = (
            LoraWeights(parts.decoder, rank=s.lora_rank, alpha=s.lora_alpha, seed=s.seed)
            if s.lora_rank
            else FullWeights(parts.decoder)
        )
        self.optimiser = AdamW(
            self._weights, AdamSettings(s.lr, weight_decay=s.weight_decay, max_norm=s.max_norm)
        )

    @property
    def _identity(self) -> str:
        settings = {k: v for k, v in asdict(self._settings).items() if k != "save_every"}
        return digest([self._objective.identity, settings, "run state"], 16)

    def run(self, on_step: Callable[[int, dict[str, float]], None] | None = None) -> None:
        """Train to the last step; `on_step(step, figures)` is called after each, saves included.

        Raises:
            ConfigError: the gradient is not finite.
            StoreError: a checkpoint cannot be written or belongs to another run.
        """
        self.resume()
        while self.step_number < self._settings.steps:
            figures = self.step()
            n = self.step_number
            if n % self._settings.save_every == 0 and n < self._settings.steps:
                self.save()
            if on_step is not None:
                on_step(n, figures)

    def step(self) -> dict[str, float]:
        """Make one update and return its figures."""
        s = self._settings
        figures = self._objective.accumulate(self._parts.decoder, self.step_number)
        lr = learning_rate(
            self.step_number, peak=s.lr, warmup=s.warmup, total=s.steps, schedule=s.schedule
        )
        norm = self.optimiser.step(lr) if figures.get("tokens") else 0.0
        if not norm < float("inf"):
            raise ConfigError(
                f"distillation step {self.step_number + 1}: the gradient's norm is {norm}; the "
                "weights are unchanged. Lower the learning rate"
            )
        self.step_number += 1
        return figures | {"grad_norm": norm, "lr": lr}

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        state = {"identity": self._identity}
        return run_state.save(
            self._folder, self.step_number, self.optimiser, state, self.export, keep=1
        )

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face form into an existing folder."""
        write_model(folder, self._parts)

    def resume(self) -> bool:
        """Load the newest checkpoint, if there is one.

        Raises:
            StoreError: it is damaged or of a run with other rows or settings.
        """
        state = run_state.load(self._folder, self._identity, self._parts.decoder, self.optimiser)
        if state is None:
            return False
        self.step_number = int(state["step"])
        return True
