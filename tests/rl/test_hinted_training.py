"""The schedulers in the real trainer on a tiny random model: steps, state and resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.hints import make_scheduler
from tfgrpo.rl.trainer import Trainer, TrainerParts
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

SECTIONS = [
    {"name": "sage", "max_level": 2, "success_above": 0.9},
    {"name": "sage_light", "success_above": 0.9},
    {"name": "pope", "success_above": 0.9, "max_level": 2, "instruct": False},
    {"name": "questa", "epochs": [1]},
    {"name": "sage", "max_level": 2, "success_above": 0.9, "ahead": True},
    {"name": "scaf", "success_above": 0.7},
    {"name": "adhint"},
    {"name": "stephint"},
    {"name": "bread", "success_above": 0.7},
]
MIXED = {"scaf", "adhint", "stephint"}
"""Methods whose groups hold several contexts by definition."""


def trainer_of(folder: Path, section: dict[str, object]) -> Trainer:
    tasks = [
        Task(
            f"t{i}",
            f"task {chr(97 + i)}",
            metadata={"hints": ["one", "two", "three"], "solution": "a b c d e f g h"},
        )
        for i in range(6)
    ]
    config = tiny_config(folder, optimiser={"lr": 1e-3})
    return Trainer(config, tiny_parts(), tasks, EvenTokens(), hints=make_scheduler(section))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s["name"])
def test_training_goes_on_after_a_stop_with_the_same_hints(
    tmp_path: Path, section: dict[str, object]
) -> None:
    def seen(trainer: Trainer, n: int) -> list[dict[str, object]]:
        made = []
        for _ in range(n):
            report = trainer.step()
            assert math.isfinite(report.figures["loss"])
            for group in report.groups:
                prompts = {r.steps[0].prompt_token_ids for r in group.rollouts}
                assert len(prompts) == 1 or group.metadata["hint"] == "mixed"
                assert len(prompts) == 1 or section["name"] in MIXED
                made.append(group.to_dict())
        return made

    whole = trainer_of(tmp_path / "whole", section)
    expected = seen(whole, 4)
    first = trainer_of(tmp_path / "cut", section)
    assert seen(first, 2) == expected[:6]
    first.save()
    second = trainer_of(tmp_path / "cut", section)
    assert second.resume()
    assert seen(second, 2) == expected[6:]
    assert second._hints is not None
    assert whole._hints is not None
    assert second._hints.state_dict() == whole._hints.state_dict()
    assert "'prefix_tokens':" in str(expected) or "'label':" in str(expected), "nothing was hinted"


class Knowing(EvenTokens):
    """Only replies to prompts that a hint made longer are right."""

    def __init__(self, bare_tokens: int) -> None:
        self.bare_tokens = bare_tokens

    async def score(self, rollout: Rollout, task: Task) -> Score:
        helped = len(rollout.steps[0].prompt_token_ids or ()) > self.bare_tokens
        return Score(float(helped and (rollout.seed or 0) % 2))


@pytest.mark.parametrize("name", ["sage", "scaf"])
def test_help_is_not_taken_for_what_a_task_is_like_without_it(tmp_path: Path, name: str) -> None:
    """An allocator that saw rewards under hints would think that the task is being solved."""
    seen: list[RolloutGroup] = []

    def allocate(tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int) -> list[int]:
        seen[:] = history
        return [budget // len(tasks)] * len(tasks)

    made = trainer_of(tmp_path, {"name": name, "success_above": 0.5})
    bare = len(made.step().groups[0].rollouts[0].steps[0].prompt_token_ids or ())
    tasks = list(made._tasks)
    config = tiny_config(tmp_path / "again", optimiser={"lr": 1e-3})
    hints = make_scheduler({"name": name, "success_above": 0.5})
    trainer = Trainer(
        config,
        tiny_parts(),
        tasks,
        Knowing(bare),
        hints=hints,
        parts=TrainerParts(allocate=allocate),
    )
    groups = [g for _ in range(3) for g in trainer.step().groups]
    assert any(g.spread for g in groups), "no hint helped"
    outcomes = trainer.curriculum.history
    assert len(outcomes) == len(groups)
    assert not any(reward for o in outcomes for reward in o.rewards)
    assert all(g.rollouts for g in seen)
    assert not any(reward for g in seen for reward in g.rewards_G)


def test_a_generator_that_another_trainer_used_makes_the_same_groups(tmp_path: Path) -> None:
    parts = tiny_parts()
    config = tiny_config(tmp_path, optimiser={"lr": 0.01})
    first = Trainer(config, parts, tiny_tasks(), EvenTokens())
    used = first.generator
    first._roller.roll(3)  # its cache and state are no longer fresh
    del first
    again = Trainer(config, parts, tiny_tasks(), EvenTokens(), parts=TrainerParts(sampler=used))
    assert again.generator is used
    fresh = Trainer(config, tiny_parts(), tiny_tasks(), EvenTokens())
    for _ in range(2):
        want, got = fresh.step(), again.step()
        assert [g.to_dict() for g in got.groups] == [g.to_dict() for g in want.groups]
