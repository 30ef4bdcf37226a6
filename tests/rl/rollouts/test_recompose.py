"""Groups that are refilled and recomposed between steps, alone and in the real trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rl.rollouts.recompose import Recompose, RecomposeOptions
from tfgrpo.rl.rollouts.replay_buffer import refilled
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task


class Halves(EvenTokens):
    """1 where the first token is even, but tasks `t0` and `t1` always fail."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        ids = rollout.steps[-1].token_ids or (1,)
        return Score(float(ids[0] % 2 == 0 and task.task_id not in ("t0", "t1")))


def trainer_of(folder: Path, **sections: Any) -> Trainer:
    optimiser = {"lr": 1e-3, "micro_batch_tokens": 4000, **sections.pop("optimiser", {})}
    config = tiny_config(folder, optimiser=optimiser, **sections)
    return Trainer(config, tiny_parts(), tiny_tasks(), Halves())


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"curriculum": {"refill": 2}, "loss": {"name": "opmd"}}, r"curriculum\.refill with loss"),
        (
            {"curriculum": {"select": "rorecomp"}, "rollout": {"temperature": 0.7}},
            r"curriculum\.select with rollout\.temperature",
        ),
        ({"curriculum": {"select_options": {"share": 1}}}, "curriculum.select is empty"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    sections: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny_config(tmp_path, **sections)


def rolled(name: str, lengths: Sequence[int], rewards: Sequence[float]) -> RolloutGroup:
    task = Task("t", "x")
    rollouts = tuple(
        Rollout(
            f"{name}-{i}",
            "t",
            (Step(Message("assistant", "a"), (), (3,) * n, (-1.0,) * n, (5,)),),
            sample_index=i,
        ).graded(Score(r))
        for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    )
    return RolloutGroup(name, task, rollouts)


def test_recomposition_trains_short_right_and_long_wrong_now_and_the_rest_once_later() -> None:
    recompose = Recompose(RecomposeOptions(share=0.5, every=2))
    group = rolled("g", [3, 9, 5, 7], [1, 1, 0, 0])
    first = recompose.select([group], 0)
    assert [r.rollout_id for g in first.groups for r in g.rollouts] == ["g-0", "g-3"]
    second = recompose.select([rolled("h", [3, 9], [1, 1])], 1)
    ids = [r.rollout_id for g in second.groups for r in g.rollouts]
    assert ids == ["h-0", "g-1", "g-2", "h-1"] and second.replayed == {"g-1", "g-2"}
    assert second.figures["rollouts_kept"] == 0


def test_every_rollout_is_used_once_stored_or_forgotten() -> None:
    rng = np.random.default_rng(4)
    recompose = Recompose(RecomposeOptions(share=0.4, every=3, keep=10))
    made: Counter[str] = Counter()
    used: Counter[str] = Counter()
    forgotten = 0
    for step in range(11):
        groups = [
            rolled(f"{step}-{j}", rng.integers(1, 9, 5).tolist(), rng.integers(0, 2, 5).tolist())
            for j in range(3)
        ]
        made.update(r.rollout_id for g in groups for r in g.rollouts)
        found = recompose.select(groups, step)
        used.update(r.rollout_id for g in found.groups for r in g.rollouts)
        forgotten += found.figures["rollouts_forgotten"]
        again = Recompose(RecomposeOptions(share=0.4, every=3, keep=10))
        again.load_state_dict(recompose.state_dict())
        assert again.state_dict() == recompose.state_dict()
    assert max(used.values()) == 1 and set(used) <= set(made)
    assert len(made) == len(used) + found.figures["rollouts_kept"] + forgotten
    assert forgotten > 0


def test_a_whole_share_is_grpo_bit_by_bit_and_a_part_resumes(tmp_path: Path) -> None:
    def made(folder: str, share: float) -> Trainer:
        curriculum = {"select": "rorecomp", "select_options": {"share": share, "every": 2}}
        return trainer_of(tmp_path / folder, curriculum=curriculum)

    whole, plain = made("a", 1.0), trainer_of(tmp_path / "b")
    for _ in range(3):
        whole.step()
        plain.step()
    assert fingerprint(whole) == fingerprint(plain)
    parted, first = made("c", 0.5), made("d", 0.5)
    figures = [parted.step().figures for _ in range(4)]
    assert [f["rollouts_later"] > 0 for f in figures] == [False, True, False, True]
    for _ in range(3):
        first.step()
    first.save()
    second = made("d", 0.5)
    assert second.resume()
    assert comparable(second.step().figures) == comparable(figures[3])
    assert fingerprint(second) == fingerprint(parted)
    with pytest.raises(ConfigError, match="has no option 'sharing'"):
        RecomposeOptions.of({"sharing": 1})


def test_a_flat_group_is_refilled_by_the_other_outcome_and_keeps_its_size() -> None:
    flat, past = rolled("g", [1] * 4, [0] * 4), rolled("p", [1] * 3, [1, 0, 1])
    found, used = refilled(flat, past.rollouts, 2)
    assert found.rewards_G == (0, 0, 1, 1) and [r.rollout_id for r in used] == ["p-0", "p-2"]
    assert [r.sample_index for r in found.rollouts] == [0, 1, 2, 3]
    right = rolled("g", [1] * 4, [1] * 4)
    assert refilled(right, past.rollouts, 9)[0].rewards_G == (1, 1, 1, 0)
    mixed = rolled("g", [1] * 2, [1, 0])
    assert refilled(mixed, past.rollouts, 2) == (mixed, [])
    unscored = replace(flat, rollouts=tuple(r.failed("timed_out", "x") for r in flat.rollouts))
    assert refilled(unscored, past.rollouts, 2) == (unscored, [])


def test_refilled_rollouts_are_trained_over_the_log_probs_of_their_sampler(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        curriculum={"refill": 2, "replay_age": 20},
        rollout={"group_size": 2, "tasks_per_step": 6},
    )
    seen = 0
    for figures in (trainer.step().figures for _ in range(6)):
        seen += figures["rollouts_refilled"]
        assert figures["groups_replayed"] == 0
    assert seen > 0
