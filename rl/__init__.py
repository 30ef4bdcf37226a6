"""Compact reinforcement learning on groups: one GPU, or the CPU for tests.

`train(TrainConfig.from_toml("train.toml"))` trains a model; `Trainer` is the loop for a program of
your own. Names are loaded on first use. Does not know routes, search or the learning loop. Source:
named in each file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, load_parts
    from tfgrpo.rl.config import TrainConfig
    from tfgrpo.rl.trainer import StepReport, Trainer, TrainerParts
    from tfgrpo.rl.training import TrainResult, train

__all__ = [
    "LoadedModel",
    "StepReport",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainerParts",
    "load_parts",
    "train",
]

_HOME = {
    "LoadedModel": "checkpoints.loaded_model",
    "StepReport": "trainer",
    "TrainConfig": "config",
    "TrainResult": "training",
    "Trainer": "trainer",
    "TrainerParts": "trainer",
    "load_parts": "checkpoints.loaded_model",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tfgrpo.rl' has no attribute {name!r}")
    return getattr(import_module(f"tfgrpo.rl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
