"""Started by torchrun: two steps on a tiny model; the first process writes weights and figures."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl import checkpoint, distributed
from tfgrpo.rl.trainer import Trainer


def train(folder: Path, sections: dict[str, dict[str, object]]) -> tuple[Trainer, list[object]]:
    """Two steps, a checkpoint after each; resumes what is there."""
    config = tiny_config(
        folder / "run",
        rollout={"tasks_per_step": 4},
        optimiser={"steps": 2, "lr": 1e-3, "micro_batch_tokens": 40},
        run={"save_every": 1},
        **sections,
    )
    trainer = Trainer(config, tiny_parts(), tiny_tasks(8), EvenTokens())
    trainer.resume()
    ids: list[object] = []
    while trainer.step_number < config.optimiser.steps:
        mine = [
            (g.task.task_id, [list(r.steps[0].token_ids or ()) for r in g.rollouts])
            for g in trainer.step().groups
        ]
        ids.append(sorted(pair for part in distributed.gather_objects(mine) for pair in part))
        trainer.save()
    return trainer, ids


def main(folder: Path, sections: dict[str, dict[str, object]]) -> None:
    """Train; then lose the last step and resume; write what both came to."""
    torch.set_num_threads(1)
    rank, processes = distributed.start()
    trainer, ids = train(folder, sections)
    bits = {n: checkpoint.bits(t) for n, t in trainer.optimiser.state().items()}
    if rank == 0:
        weights = checkpoint.model_weights(trainer._parts.decoder)
        checkpoint.write_tensors(folder / "weights.safetensors", weights)
        shutil.rmtree(folder / "run" / "checkpoints" / "step-000002")
    distributed.gather_objects(None)
    again, _ = train(folder, sections)
    same = bits == {n: checkpoint.bits(t) for n, t in again.optimiser.state().items()}
    all_same = all(distributed.gather_objects(same))
    if rank == 0:
        report = {"ids": ids, "resumed_bit_equal": all_same}
        (folder / "report.json").write_text(json.dumps(report))
    distributed.finish()
    if processes > 1:
        distributed.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
