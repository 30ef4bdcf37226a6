"""Saves and loads a run's state, and decides whether a checkpoint continues a run.

Does not know how files are written whole (`checkpoint`) or what happens in a step. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tfgrpo.errors import StoreError
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.model.decoder import Decoder, load_hf_weights
from tfgrpo.rl.optim.adamw import AdamW
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import digest

log = logging.getLogger(__name__)

_FREE = {
    "run": (
        "folder", "save_every", "keep", "save_optimiser", "evaluate_every", "evaluate_before",
        "keep_samples", "tensorboard", "tracker", "push_to_hub", "hub_private",
    ),
    "model": ("hub_id", "licence"),
    "optimiser": ("steps",),
    "engine": ("base_urls", "max_staleness"),
    "tasks": ("path", "held_out", "groups"),
    "rollout": ("max_tokens", "max_skipped_steps", "max_unscored_share", "verifier_timeout_s"),
}  # fmt: skip
"""Settings that a resumed run may change."""


def identity_of(config: TrainConfig, tasks: Sequence[Task]) -> str:
    """Return what changes when a checkpoint of other settings would not continue the same run."""
    values = config.to_json()
    for section, names in _FREE.items():
        for name in names:
            values[section].pop(name)
    shares = [distributed.world()[1]]
    if config.model.shard and distributed.hosts() > 1:
        shares.append(distributed.hosts())  # each has all shards, so they are larger
    return digest([values, [t.to_dict() for t in tasks], *shares], 16)


def save(
    folder: Path,
    step: int,
    optimiser: AdamW,
    state: Mapping[str, Any],
    write_model: Callable[[Path], None],
    *,
    keep: int,
    moments: bool = True,
) -> Path:
    """Write a checkpoint of all processes' shares, or of the first where each holds all weights,
    and return its folder.

    Without `moments` it holds the weights alone: half the size, and a resumed run starts the
    optimiser anew.

    Raises:
        StoreError: the disk refuses; earlier checkpoints are whole.
    """
    kept = ((n, t) for n, t in optimiser.state() if moments or n.startswith("master."))
    parts: list[dict[str, Tensor]] = []
    if optimiser.weights.is_sharded:
        parts = distributed.gather_objects({n: t.cpu() for n, t in kept})
    elif distributed.world()[0] == 0:
        parts = [{n: t.cpu() for n, t in kept}]
    final = folder / f"step-{step:06d}"
    if distributed.world()[0] == 0:
        merged = {f"{i}.{n}": t for i, part in enumerate(parts) for n, t in part.items()}
        whole = {"optimiser_steps": optimiser.steps, **state}
        final = checkpoint.save(folder, step, whole, merged, write_model, keep=keep)
    distributed.gather_objects(None)  # nobody goes on before the files are whole
    return final


def load(
    folder: Path, identity: str, decoder: Decoder, optimiser: AdamW
) -> Mapping[str, Any] | None:
    """Restore weights and optimiser from the newest checkpoint; return the rest of its state.

    Raises:
        StoreError: it is damaged, or of a run with other settings.
    """
    done = checkpoint.found(folder)
    if not done:
        return None
    state, weights, tensors = checkpoint.load(done[-1])
    if state["identity"] != identity:
        raise StoreError(
            f"checkpoint {str(done[-1])!r} belongs to a run with other settings, tasks or rows, or "
            "another number of processes (or of hosts, with model.shard); choose another folder or "
            "restore the settings"
        )
    load_hf_weights(decoder, weights)
    prefix = f"{distributed.world()[0] if optimiser.weights.is_sharded else 0}."
    mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    optimiser.load(mine, state["optimiser_steps"])
    if optimiser.steps != state["optimiser_steps"]:
        log.warning(
            "checkpoint %s holds no optimiser state: the optimiser starts anew", done[-1].name
        )
    return state
