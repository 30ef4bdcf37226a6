"""Groups that are added to within a step by the seam of budgets, in the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.cli.train import allocator_of
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Allocator, GrowingAllocator
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import Rollout, Score, Task


class Halves(EvenTokens):
    """1 where the first token is even, but tasks `t0` and `t1` always fail."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        ids = rollout.steps[-1].token_ids or (1,)
        return Score(float(ids[0] % 2 == 0 and task.task_id not in ("t0", "t1")))


def trainer_of(folder: Path, rule: Allocator | None = None, **sections: Any) -> Trainer:
    optimiser = {"lr": 1e-3, "micro_batch_tokens": 4000, **sections.pop("optimiser", {})}
    config = tiny_config(folder, optimiser=optimiser, **sections)
    allocate = rule or allocator_of(config)
    parts = TrainerParts(allocate=allocate)
    return Trainer(config, tiny_parts(), tiny_tasks(), Halves(), parts=parts)


def test_dars_never_loses_its_signal_over_fifty_steps(tmp_path: Path) -> None:
    """With weights that stand still, the share of mixed groups does not fall off."""
    options = {"allocate": "top_up_dars", "allocate_options": {"base": 2, "cap": 8}}
    trainer = trainer_of(tmp_path, curriculum=options, optimiser={"lr": 1e-9})
    shares, extras = [], 0
    for step in range(50):
        rolled = trainer._roller.roll(step)
        assert sum(len(g.rollouts) for g in rolled.made) <= 12
        for group in rolled.made:
            is_easy = sum(group.rewards_G[:2]) >= 1
            extras += len(group.rollouts) - 2
            assert len(group.rollouts) == 2 if is_easy else len(group.rollouts) > 2
            assert [r.sample_index for r in group.rollouts] == list(range(len(group.rollouts)))
        shares.append(np.mean([g.is_informative() for g in rolled.made]))
    assert extras > 50 and np.mean(shares[40:]) > 0
    assert np.mean(shares[25:]) >= np.mean(shares[:25]) - 0.15


@pytest.mark.parametrize("name", ["top_up", "top_up_dars", "top_up_xrpo"])
def test_rollouts_are_counted_exactly_and_stay_within_the_budget(name: str, tmp_path: Path) -> None:
    for step in (trainer := trainer_of(tmp_path, curriculum={"allocate": name})), trainer:
        report = step.step()
        made = sum(len(g.rollouts) for g in report.groups)
        assert report.figures["rollouts"] == made <= 12
        tokens = sum(
            len(s.token_ids or ()) for g in report.groups for r in g.rollouts for s in r.steps
        )
        assert report.figures["completion_tokens"] == tokens


def test_a_stopped_run_with_top_ups_goes_on_bit_equal(tmp_path: Path) -> None:
    def made(folder: str) -> Trainer:
        curriculum = {"allocate": "top_up", "max_resample_rounds": 2}
        return trainer_of(tmp_path / folder, curriculum=curriculum, loss={"advantage": "shrunk"})

    whole, first = made("whole"), made("cut")
    figures = [whole.step().figures for _ in range(4)]
    for _ in range(2):
        first.step()
    first.save()
    second = made("cut")
    assert second.resume()
    again = [second.step().figures for _ in range(2)]
    assert [comparable(f) for f in again] == [comparable(f) for f in figures[2:]]
    assert fingerprint(second) == fingerprint(whole)
    assert all("predicted" in g.metadata for g in whole.step().groups)


def test_what_a_task_did_at_its_last_visit_reaches_its_group_and_survives_a_stop(
    tmp_path: Path,
) -> None:
    def made(folder: str) -> Trainer:
        return trainer_of(tmp_path / folder, loss={"advantage": "adora"})

    whole, first = made("whole"), made("cut")
    seen: dict[str, float] = {}
    for _ in range(4):
        for group in whole.step().groups:
            assert group.metadata.get("past_share") == seen.get(group.task.task_id)
            seen[group.task.task_id] = float(np.mean([r > 0 for r in group.rewards_G]))
    assert len(seen) == 6
    for _ in range(3):
        first.step()
    first.save()
    second = made("cut")
    assert second.resume()
    second.step()
    assert fingerprint(second) == fingerprint(whole)


def test_rules_are_made_by_name_and_wrong_ones_are_named(tmp_path: Path) -> None:
    for name in ("top_up", "practice", "top_up_dars", "top_up_xrpo"):
        config = tiny_config(tmp_path, curriculum={"allocate": name})
        assert isinstance(allocator_of(config), GrowingAllocator)
    for curriculum, told in (
        ({"allocate": "top_ap"}, "allowed are practice, v0, top_up"),
        ({"allocate": "top_up", "allocate_options": {"bass": 2}}, "curriculum.allocate 'top_up'"),
    ):
        with pytest.raises(ConfigError, match=told):
            allocator_of(tiny_config(tmp_path, curriculum=curriculum))
