"""Started by torchrun: two steps on a small model; the first process writes weights and figures."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from tests.rl.beside import Engine
from tests.rl.tiny import EvenTokens, big_parts, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.trainer import Trainer, TrainerParts

TOLD = ("reward_mean", "reward_std", "informative_share", "length_mean", "length_max", "loss")
"""Figures that are of all processes."""


def train(
    folder: Path, sections: dict[str, dict[str, object]]
) -> tuple[Trainer, list[object], list[float], list[list[float]]]:
    """Two steps, a checkpoint after each; resumes what is there. Returns what each step sampled
    and its figures: the gradient's norm, and those named in `TOLD`."""
    config = tiny_config(
        folder / "run",
        **{
            "rollout": {"tasks_per_step": 4},
            "optimiser": {"steps": 2, "lr": 1e-3, "micro_batch_tokens": 40},
            "run": {"save_every": 1},
            **sections,
        },
    )
    parts = big_parts() if torch.cuda.is_available() else tiny_parts()
    engine = Engine() if config.engine.max_staleness else None
    others = TrainerParts(generator=engine)
    trainer = Trainer(config, parts, tiny_tasks(8), EvenTokens(), parts=others)
    trainer.resume()
    trainer.updater.sync()
    ids: list[object] = []
    norms, told = [], []
    while trainer.step_number < config.optimiser.steps:
        report = trainer.step()
        norms.append(report.figures["grad_norm"])
        told.append([report.figures[name] for name in TOLD])
        mine = [
            (g.task.task_id, [list(r.steps[0].token_ids or ()) for r in g.rollouts])
            for g in report.groups
        ]
        ids.append(sorted(pair for part in distributed.gather_objects(mine) for pair in part))
        trainer.save()
    return trainer, ids, norms, told


def main(folder: Path, sections: dict[str, dict[str, object]]) -> None:
    """Train; then lose the last step and resume; write what both came to."""
    torch.set_num_threads(1)
    rank, processes = distributed.start()
    trainer, ids, norms, told = train(folder, sections)
    bits = {n: checkpoint.bits(t) for n, t in trainer.optimiser.state()}
    masters = {n: m.value() for n, m in trainer.optimiser.weights.masters().items()}
    if trainer.optimiser.weights.is_sharded:
        trained = trainer.updater.model.named_parameters()
        masters = {n: distributed.whole(t.detach()) for n, t in trained}
    if rank == 0:
        checkpoint.write_tensors(folder / "masters.safetensors", masters)
        weights = checkpoint.model_weights(trainer._model.decoder)
        checkpoint.write_tensors(folder / "weights.safetensors", weights)
        shutil.rmtree(folder / "run" / "checkpoints" / "step-000002")
    distributed.gather_objects(None)
    again, *_ = train(folder, sections)
    same = bits == {n: checkpoint.bits(t) for n, t in again.optimiser.state()}
    all_same = all(distributed.gather_objects(same))
    if rank == 0:
        report = {"ids": ids, "norms": norms, "told": told, "resumed_bit_equal": all_same}
        (folder / "report.json").write_text(json.dumps(report))
    distributed.finish()
    if processes > 1:
        distributed.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
