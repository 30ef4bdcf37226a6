"""A half step is taken, measured and taken back; the full step starts where it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.formulas.test_through_config import Duels, tasks
from tests.rl.tiny import tiny_config, tiny_parts
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update import updater as module
from tfgrpo.rl.update.between_passes import Kept


def trainer(folder: Path, **model: Any) -> Trainer:
    config = tiny_config(
        folder,
        loss={"name": "nash_mp", "kl": 0.01},
        verifier={"kind": "win_rate", "verdicts": True},
        optimiser={"lr": 1e-2, "steps": 4},
        model=model,
    )
    return Trainer(config, tiny_parts(), tasks(), Duels())


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}])
def test_both_steps_start_from_the_same_weights_and_the_second_sees_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    run = trainer(tmp_path, **model)
    decoder = run._model.decoder
    seen: list[tuple[torch.Tensor, Any]] = []
    plain = module.accumulate

    def watched(model: Any, part: Any, *rest: Any) -> Any:
        seen.append((decoder.layers[0].qkv.detach().clone(), part))
        return plain(model, part, *rest)

    monkeypatch.setattr(module, "accumulate", watched)
    run.step()
    run.step()
    (first, bare), (again, looked), (moved, _), _ = seen
    assert torch.equal(first, again) and not torch.equal(again, moved)
    assert run.updater.optimiser.steps == 2  # the half steps left no trace
    assert not any("half_gap" in r.columns for r in bare)
    gaps = [abs(x) for r in looked for x in r.columns["half_gap"]]
    assert max(gaps) > 0


def test_what_is_kept_comes_back_bit_by_bit(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.step()
    optimiser = run.updater.optimiser
    before = {name: tensor.clone() for name, tensor in optimiser.state()}
    kept = Kept(optimiser)
    run.step()
    assert any(not torch.equal(t, before[n]) for n, t in optimiser.state())
    kept.restore()
    assert all(torch.equal(t, before[n]) for n, t in optimiser.state())
    assert optimiser.steps == 1
