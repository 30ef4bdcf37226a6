"""What a loss's rows carry from pass to pass over a batch, and no further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update import updater as module


@pytest.mark.parametrize("parts", [1, 2])
def test_labels_move_with_each_pass_over_a_batch_and_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    config = tiny_config(
        tmp_path,
        loss={"name": "power_dl", "options": {"gamma": 0.2}},
        optimiser={"epochs_per_batch": 3, "updates_per_epoch": parts, "micro_batch_tokens": 30},
    )
    seen: list[dict[int, float]] = []
    plain = module.accumulate

    def watched(model: Any, part: Any, *rest: Any) -> Any:
        seen.append({r.row.index: r.columns.get("label", (1.0,))[0] for r in part})
        return plain(model, part, *rest)

    monkeypatch.setattr(module, "accumulate", watched)
    run = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
    run.step()
    run.step()
    assert len(seen) == 6 * parts
    for first in range(parts):
        one, two, three = seen[first : 3 * parts : parts]
        assert set(one.values()) == {1.0}
        paired = [i for i, label in two.items() if label < 1.0]
        assert 0 < len(paired) < len(one)
        assert all(0.64 <= three[i] < 1.0 and three[i] != two[i] for i in paired)
        assert all(two[i] >= 0.8 for i in paired)  # at most gamma of the way to 0
    assert set(seen[3 * parts].values()) == {1.0}
